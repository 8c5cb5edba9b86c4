"""`visspec report`: one self-contained HTML page from result files. No network, no script, everything escaped.

First what is looked at: speed-up by method, speed against quality (`overview`), pictures of the same prompt by every
method, and captions beside their picture. Then a table, one line a method. The rest is folded: paired ratios, the gap
to the ideal, acceptance by depth and over the token grid, all figures with intervals and n, costs behind long prompts,
failures, and provenance.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from visspec.eval.bench.paired import in_words, suspicion
from visspec.eval.report import figures, kernels, overview
from visspec.eval.report import images as pictures
from visspec.eval.report.data import KINDS, QUALITY, Method, interval, methods_of, number, pairs_of, positive, read
from visspec.eval.report.records import RecordImage
from visspec.eval.report.rendering import write_page
from visspec.loop.stats import COLOURS

MOST_PICTURES = 600  # images on the page; figures use all images
MOST_TEXTS = 8  # coloured texts per method
OPEN_CASES, OPEN_TEXTS = 2, 3  # prompts that are not folded, captions of a method that are not
SECTIONS: dict[str, tuple[str, type]] = {
    "kernels": ("Kernels", kernels.Table),
}
TERMS = (
    ("tau", "tau, bonus included"),
    ("after_verify", "verification costs more than one token"),
    ("after_draft", "drafting"),
    ("after_host", "accept, commit = ideal"),
)


def build(paths: Sequence[str | Path], out: str | Path = "report.html") -> Path:
    """Write the page for some result files of `visspec bench`. Returns its path.

    Raises FileNotFoundError or ValueError for a missing or malformed file, and for image paths outside the folder
    of their JSON. An unreadable image is listed as a failure.
    """
    out = Path(out)
    if not paths:
        raise ValueError("report: got no result file, expected at least one")
    if out.is_dir():
        raise ValueError(f"report: --out: {out} is a folder, expected a file")
    together: dict[tuple[str, str], list[Method]] = {}
    methods: list[Method] = []
    sections: dict[str, list] = {bench: [] for bench in SECTIONS}
    others: list[dict] = []
    for path in map(Path, paths):
        record = read(path)
        if record["bench"] in SECTIONS:
            sections[record["bench"]].append(SECTIONS[record["bench"]][1](record, path.name))
        elif record["bench"] not in KINDS:
            others.append(kernels.scalar_fields(record, path.name))
        for method in methods_of(record, path) if record["bench"] in KINDS else []:
            methods.append(method)
            method.index = len(methods)
            together.setdefault((method.kind, str(method.record.get("target") or "")), []).append(method)
    groups = [MethodGroup(kind, target, found) for (kind, target), found in together.items()]
    shown = {"groups": groups, "methods": [summary(m) for m in methods], "sections": sections, "others": others}
    shown["failures"] = [failure for group in groups for failure in group.failures]
    named = [(SECTIONS[bench][0], section) for bench, found in sections.items() for section in found]
    where = [(f"{title} of {section.source}", section.provenance) for title, section in named if section.provenance]
    relative = overview.distance_of(methods) == "fd_ratio"
    shown |= {"provenance": where + provenance(methods), "relative": relative, "few": figures.FEW}
    shown |= {"guarantees": overview.GUARANTEES}
    shown |= {"open_cases": OPEN_CASES, "open_texts": OPEN_TEXTS}
    shown["shades"] = figures.shade(1.0), figures.shade(0.0), pictures.NOT_DRAFTED
    write_page(out, "report", shown)
    return out


class MethodGroup:
    """The methods of one bench and target on the page: figures as markup, images as rows of cells."""

    def __init__(self, kind: str, target: str, methods: list[Method]):
        local = target.startswith(("/", ".", "~"))  # don't publish local paths, only the name
        self.kind, self.target, self.methods = kind, Path(target).name if local else target, methods
        self.sources = ", ".join(dict.fromkeys(m.source for m in methods))
        self.failures = [f"{m.source}: {m.label}: {f}" for m in methods for f in m.record.get("failures") or []]
        self.headline, self.bars = overview.headline(methods), overview.methods(methods)
        self.frontiers = overview.frontiers(methods)
        self.kinds = [kind for kind in overview.GUARANTEES if kind in {overview.kind_of(m.record) for m in methods}]
        self.cases, self.left_out = cases(methods, self.failures)
        self.mapped = any(image.acceptance for m in methods for image in m.images)
        self.strip = strip(methods)
        self.waterfalls = [(m.label, figure) for m in methods if (figure := waterfall(m.record))]
        self.paretos = [figure for quality in QUALITY if (figure := overview.pareto(methods, quality))]
        rates = [(m, [number(rate) or 0.0 for rate in m.record.get("acceptance_by_depth") or []]) for m in methods]
        self.depths = [(m.label, figures.depth_bars(r, m.record.get("reached_by_depth"))) for m, r in rates if r]
        self.heats = [figure for m in methods for figure in heats(m)]
        self.texts = [(m.label, texts(m, self.failures)) for m in methods if m.record.get("texts")]
        self.baselines = [row for m in methods for row in baselines(m)]


def summary(method: Method) -> dict[str, Any]:
    """What the tables say of a method beside its numbers: text that is generated, not taken from the file."""
    record, ties = method.record, near_ties(method.record)
    identical, compared = method.value("identical"), int(method.value("compared") or 0)
    by_law = method.exact and record.get("promises_tokens") is False
    quality = [measure for field in QUALITY if field != "drift_per_token" and (measure := method.quality(field))]
    same = None if identical is None or not compared else int(identical)
    found = {"method": method, "kind_of": overview.kind_of(record), "words": warning(method), "quality": quality}
    found |= {
        "guarantee": str(record.get("guarantee") or "not stated"),
        "unmetered": str(record.get("unmetered") or ""),
    }
    found |= {"identical": same, "compared": compared, "other_tokens": by_law, "near_ties": ties}
    found["identical_to"] = str(record.get("identical_to") or "plain decoding").replace("_", " ")
    found["owes_identity"] = method.exact and not by_law and not ties
    return found | {"equality": "" if by_law else equality(record)}


def warning(method: Method) -> str:
    """Warnings for a slowdown and for a ratio over our own plain loop above tau; empty if there is none."""
    slow = in_words(method.speed) if method.speed is not None and method.speed < 1 else ""
    spread = interval(method.record.get("over_plain_ci95"))
    return "; ".join(filter(None, (slow, suspicion(method.value("over_plain"), spread, method.value("tau") or 0.0))))


def near_ties(record: Mapping[str, Any]) -> bool:
    """Whether differences to plain decoding in low precision were analysed and found to be near ties."""
    found = record.get("equality") or {}
    return found.get("tier") == "teacher-forced" and found.get("benign") is True


def equality(record: Mapping[str, Any]) -> str:
    """Text for the low-precision tier; empty if it was not measured."""
    found = record.get("equality") or {}
    gap = found.get("gap")
    if not isinstance(gap, dict) or number(gap.get("max")) is None:
        return ""
    identical, compared = (int(number(found.get(k)) or 0) for k in ("identical", "compared"))
    differ = f"{identical} of {compared} as plain"
    if identical != compared and found.get("benign") is not None:
        differ += ", the others near ties" if found["benign"] is True else ", others NOT near ties"
    entries = found.get("first_divergences")
    entries = entries if isinstance(entries, list) else []
    widest = [m for e in entries if isinstance(e, dict) and (m := number(e.get("margin"))) is not None]
    margins = f"; widest margin {max(widest):.2g}" if widest else ""
    return f"{found.get('dtype')}: {differ}; pass shapes move logits by {number(gap['max']):.2g}{margins}"


def baselines(method: Method) -> list[dict[str, Any]]:
    found = []
    for name, row in (method.record.get("baselines") or {}).items():
        seconds, faster = number(row.get("seconds_per_prompt")), number(row.get("ours_is_faster_by"))
        shown = {"ms": None if seconds is None else 1e3 * seconds, "faster": faster, "ci": interval(row.get("ci95"))}
        about = {"name": name.replace("_", " "), "identical": row.get("identical")}
        found.append({"number": method.index, "n": method.n, **about, **shown})
    return found


def strip(methods: Sequence[Method]) -> Markup | None:
    entries = []
    for m in methods:
        ratios = [r for r in map(number, m.record.get("ratios") or []) if r is not None and r > 0]
        if ratios and m.speed:
            entries.append((f"{m.index}: {m.label}", ratios, m.speed, positive(m.speed_interval)))
    return figures.strip(entries) if entries else None


def waterfall(record: Mapping[str, Any]) -> Markup | None:
    """From tau to the measured speed-up: the terms of the ideal, then the unexplained rest."""
    gap = record.get("gap") or {}
    steps = [(words, number(gap.get(term))) for term, words in TERMS]
    steps.append(("not explained = decode only, measured", number(record.get("speedup_decode_only"))))
    steps.append(("prefill, vision, preparation = end to end", number(record.get("speedup"))))
    known = [(words, value) for words, value in steps if value is not None]
    return figures.waterfall(known) if len(known) == len(steps) else None


def heats(method: Method) -> list[tuple[str, Markup]]:
    """The mean acceptance map of a method: from the record, or from its images, one for each grid size."""
    record = method.record
    if given := record.get("acceptance_map"):
        known = record.get("acceptance_map_n") or [[method.n] * len(row) for row in given]
        count = [[0 if value is None else int(n or 0) for value, n in zip(*rows)] for rows in zip(given, known)]
        total = [[n * (value or 0.0) for value, n in zip(*rows)] for rows in zip(given, count)]
        return [(heat_title(method, known), figures.heat(total, count))]
    grids: dict[tuple[int, ...], list[np.ndarray]] = {}
    for image in method.images:
        if image.acceptance:
            grid = np.array(image.acceptance, float)  # NaN where nothing was drafted
            grids.setdefault(grid.shape, []).append(grid)
    found = []
    for stack in map(np.stack, grids.values()):
        count = (~np.isnan(stack)).sum(axis=0).tolist()
        found.append((heat_title(method, count), figures.heat(np.nansum(stack, axis=0).tolist(), count)))
    return found


def heat_title(method: Method, count: Sequence[Sequence[int]]) -> str:
    fewest, most = min(map(min, count)), max(map(max, count))
    n = f"n={most}" if fewest == most else f"n={fewest} to {most}"
    return f"{method.index}: {method.label}, {len(count)} x {len(count[0])} tokens, {n} a cell"


def cases(methods: Sequence[Method], failures: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The same prompt and seed in every method, side by side; the first method is the baseline of the differences.

    Returns the cases shown and how many were left out. Unreadable pictures are appended to `failures`.
    """
    keyed = [{(str(i.prompt), str(i.seed)): i for i in m.images} for m in methods]
    keys = list(dict.fromkeys(key for images in keyed for key in images))
    for m, images in zip(methods, keyed):
        for entry in m.images:  # all are checked, also those not shown
            if entry.path:
                pictures.inside(m.folder, entry.path, f"report: {m.source}")
        missing = [key for key in keys if images and key not in images]
        failures += [f"{m.source}: {m.label}: no image of seed {seed}: {prompt}" for prompt, seed in missing]
    limit = max(MOST_PICTURES // max(sum(map(bool, keyed)), 1), 1)
    shown_cases = []
    for prompt, seed in keys[:limit]:
        base, cells = None, []
        for m, images in zip(methods, keyed):
            if not images:
                continue
            image = images.get((prompt, seed))
            opened = None if image is None else _open(image, m, f"seed {seed}", failures)
            cells.append(cell(m, image, opened, base))
            base = opened if len(cells) == 1 else base
        shown_cases.append({"prompt": prompt, "seed": seed, "cells": cells})
    return shown_cases, len(keys) - len(shown_cases)


def _open(image: RecordImage, method: Method, which: str, failures: list[str]) -> Image.Image | None:
    try:
        return pictures.picture(image, method.folder, f"{method.source}: {method.label}: {which}")
    except (ValueError, OSError) as error:
        failures.append(str(error))
        return None


def cell(method: Method, image: RecordImage | None, opened, base) -> dict[str, Any]:
    """One picture of a case: thumbnail, verdict, difference to the baseline, acceptance map."""
    image = image or RecordImage()
    right, reason = image.judged
    apart = pictures.difference(opened, base) if opened is not None and base is not None else None
    found = {"number": method.index, "label": method.label, "right": right, "reason": "; ".join(reason.splitlines())}
    found |= {"uri": None if opened is None else pictures.thumbnail(opened), "difference": apart}
    return found | {"acceptance": pictures.acceptance_map(image.acceptance) if image.acceptance else None}


def texts(method: Method, failures: list[str]) -> list[tuple[str | None, list[tuple[str, str]]]]:
    """(picture as a data URI, pieces of text with their origin); an unknown origin counts as plain."""
    rows = method.record["texts"][:MOST_TEXTS]
    found = []
    for k, (row, png) in enumerate(zip(rows, method.record.get("thumbnails") or [None] * len(rows))):
        opened = _open(RecordImage(png=png), method, f"picture {k + 1}", failures) if png else None
        pieces = [(piece, origin if origin in COLOURS else "plain") for piece, origin in row]
        found.append((None if opened is None else pictures.thumbnail(opened), pieces))
    return found


def provenance(methods: Sequence[Method]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(methods, its rows) for every different environment."""
    found: dict[tuple, list[str]] = {}
    for m in methods:
        found.setdefault(tuple(pairs_of(m.record)), []).append(str(m.index))
    return [(f"Methods {', '.join(numbers)}", list(rows)) for rows, numbers in found.items()]
