"""`visspec report`: one self-contained HTML page from result files. No network, no script, everything escaped.

The most important parts come first: speed-up by method, speed against quality, pictures of the same prompt by every
method, and captions with their picture, then a table of all methods. The rest is folded: the gap to the ideal,
acceptance by depth, baselines. Sizes and kernels have bars and a table each.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from visspec.eval.bench.paired import in_words, suspicion
from visspec.eval.report import figures
from visspec.eval.report import images as pictures
from visspec.eval.report.data import GUARANTEES, Method, RecordImage, interval, methods_of, number, read, rows_of
from visspec.eval.report.figures import Bar, Point
from visspec.eval.report.rendering import write_page
from visspec.loop.stats import COLOURS

MOST_PICTURES = 600  # images on the page; figures use all images
OPEN_CASES, OPEN_TEXTS = 2, 3  # number of unfolded prompts, and of unfolded captions of a method
QUALITY = {  # field -> (name, whether lower is better)
    "fd_ratio": ("FD over plain", True),
    "fd": ("Fréchet distance", True),
    "geneval": ("GenEval score", False),
    "clipscore": ("CLIPScore", False),
    "strict": ("strict score", False),
    "right": ("share of right pictures", False),
}
TERMS = {"tau": "tau", "after_verify": "after verification", "after_draft": "after drafting", "after_host": "ideal"}
SIZES = ("size", "batch_size", "arm", "tau", "speedup", "ideal_speedup", "length_share", "identical")
HALF = ("bfloat16", "float16")  # in which passes of different shapes round differently
KERNELS = ("kernel", "shape", "dtype", "device", "time_us", "ratio_to_eager")


def build(paths: Sequence[str | Path], out: str | Path = "report.html") -> Path:
    """Write the page for some result files of `visspec bench`. Returns its path. Raises FileNotFoundError or ValueError
    for a missing or malformed file. An unreadable image is listed as a failure.
    """
    out = Path(out)
    methods: list[Method] = []
    sections: list[dict[str, Any]] = []
    provenance: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for path in map(Path, paths):
        record = read(path)
        if record["bench"] in ("sizes", "kernels"):
            sections.append(section(record, path.name))
        else:
            methods += methods_of(record, path)
        where = tuple((str(key), str(value)) for key, value in (record.get("provenance") or {}).items())
        provenance.setdefault(where, []).append(path.name)
    together: dict[tuple[str, str], list[Method]] = {}
    for number_, method in enumerate(methods, start=1):
        method.index = number_
        together.setdefault((method.kind, method.target), []).append(method)
    groups = [MethodGroup(kind, target, members) for (kind, target), members in together.items()]
    values = {"groups": groups, "methods": [summary(m) for m in methods], "sections": sections}
    values |= {"failures": [failure for group in groups for failure in group.failures], "few": figures.FEW}
    values |= {"provenance": [(", ".join(names), rows) for rows, names in provenance.items()], "guarantees": GUARANTEES}
    values |= {"open_cases": OPEN_CASES, "open_texts": OPEN_TEXTS}
    write_page(out, "report", values)
    return out


class MethodGroup:
    """The methods of one bench and target on the page: figures as markup, images as rows of cells."""

    def __init__(self, kind: str, target: str, methods: list[Method]):
        self.kind, self.target = kind, target
        self.sources = ", ".join(dict.fromkeys(m.source for m in methods))
        self.failures = [f"{m.source}: {m.label}: {f}" for m in methods for f in m.record.get("failures") or []]
        timed = [m for m in methods if m.speed]
        entries = [(m, m.speed or 0.0, figures.COLOUR[m.guarantee], GUARANTEES[m.guarantee][0]) for m in timed]
        speeds = [Bar(m.label, s, m.interval("speedup"), m.n, colour, sign) for m, s, colour, sign in entries]
        speeds.sort(key=lambda bar: -bar.value)
        self.bars = figures.bars(speeds, "times faster, 95 % intervals") if speeds else None
        self.against = [figure for field in (*QUALITY, "drift_per_token") if (figure := against(timed, field))]
        self.cases, self.left_out = cases(methods, self.failures)
        self.texts = [(m.label, texts(m, self.failures)) for m in methods if m.record.get("texts")]
        self.waterfalls = [(m.label, figure) for m in methods if (figure := waterfall(m))]
        rates = [(m, [number(rate) or 0.0 for rate in m.record.get("acceptance_by_depth") or []]) for m in methods]
        self.depths = [(m.label, figures.depth_bars(r, m.record.get("reached_by_depth"))) for m, r in rates if r]
        self.baselines = [row for m in methods for row in baselines(m)]


def summary(method: Method) -> dict[str, Any]:
    """Return what the table shows of a method besides its numbers."""
    record, identical, compared = method.record, method.value("identical"), method.value("compared")
    quality = [
        (QUALITY[field][0], value, method.interval(field))
        for field in QUALITY
        if (value := method.value(field)) is not None
    ]
    slow = in_words(method.speed) if method.speed is not None and method.speed < 1 else ""
    spread = interval(record.get("over_plain_ci95"))
    doubt = suspicion(method.value("over_plain"), spread, method.value("tau") or 0.0)
    same = "not compared"
    if identical is not None and compared:
        dtype = (record.get("provenance") or {}).get("dtype")
        wrong = method.guarantee == "tokens" and identical < compared and dtype not in HALF
        sign = "✓ " if identical == compared else "✗ " if wrong else ""
        same = f"{sign}{identical:.0f} of {compared:.0f}" + (f" in {dtype}" if dtype in HALF else "")
    entry = {"words": "; ".join(filter(None, (slow, doubt))), "same": same, "quality": quality}
    drift = method.value("drift_per_token")
    entry["drift"] = "not measured" if drift is None else f"{drift:.4f}"
    return {"method": method, "guarantee": str(record.get("guarantee") or "not stated"), **entry}


def against(methods: Sequence[Method], field: str) -> Markup | None:
    """Draw speed against a quality measure; None if no two methods differ in it."""
    name, lower = QUALITY.get(field, ("drift per token", True))
    points = [
        Point(m.index, m.label, m.guarantee, m.speed or 0.0, value, m.interval("speedup"), m.interval(field), m.n)
        for m in methods
        if (value := m.value(field)) is not None
    ]
    return figures.scatter(points, name, lower) if len({p.y for p in points}) > 1 else None


def baselines(method: Method) -> list[dict[str, Any]]:
    rows = []
    for name, row in (method.record.get("baselines") or {}).items():
        seconds, faster = number(row.get("seconds_per_prompt")), number(row.get("ours_is_faster_by"))
        entry = {"ms": None if seconds is None else 1e3 * seconds, "faster": faster, "ci": interval(row.get("ci95"))}
        rows.append({"method": method, "name": name.replace("_", " "), "identical": row.get("identical"), **entry})
    return rows


def waterfall(method: Method) -> Markup | None:
    """Draw the steps from tau to the measured speed-up: the terms of the ideal, then the unexplained rest."""
    gap = method.record.get("gap") or {}
    steps = [(words, number(gap.get(term))) for term, words in TERMS.items()]
    steps += [("decode only", method.value("speedup_decode_only")), ("end to end", method.speed)]
    bars = [Bar(words, value, None, method.n, figures.BLUE) for words, value in steps if value is not None]
    return figures.bars(bars, "tokens per pass; times faster") if len(bars) == len(steps) else None


def section(record: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a bench of sizes or kernels: its rows as a table, and bars of their ratios."""
    bench, rows = record["bench"], rows_of(record, source)
    heads, entries = (KERNELS if bench == "kernels" else SIZES), []
    for row in rows:
        named = [row.get(name) for name in (("kernel",) if bench == "kernels" else ("size", "batch_size", "arm"))]
        ratio, spread = number(row.get("ratio_to_eager" if bench == "kernels" else "speedup")), None
        if bench == "sizes":
            spread = interval(row.get("speedup_ci95"))
        if ratio and ratio > 0:
            colour = figures.BLUE if ratio >= 1 else figures.ORANGE
            entries.append(Bar(" ".join(map(str, named)), ratio, spread, figures.FEW, colour))
    entries.sort(key=lambda bar: -bar.value)
    words = "times eager torch, log scale" if bench == "kernels" else "times transformers' generate"
    table = [[cell_text(row.get(head)) for head in heads] for row in rows]
    entry = {"title": bench, "source": source, "heads": [head.replace("_", " ") for head in heads], "rows": table}
    return entry | {"bars": figures.bars(entries, words, bench == "kernels") if entries else None}


def cell_text(value: object) -> str:
    return "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def cases(methods: Sequence[Method], failures: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the same prompt and seed in every method, side by side, and the number of cases left out. The first method
    is the baseline of the differences. Unreadable pictures are appended to `failures`.
    """
    keyed = [(m, {(str(i.prompt), str(i.seed)): i for i in m.images}) for m in methods if m.images]
    keys = list(dict.fromkeys(key for _, images in keyed for key in images))
    entries = []
    for prompt, seed in keys[: max(MOST_PICTURES // max(len(keyed), 1), 1)]:
        base, cells = None, []
        for m, images in keyed:
            image = images.get((prompt, seed), RecordImage())
            opened = _open(image.png, m, f"seed {seed}", failures)
            cells.append(cell(m, image, opened, base))
            base = opened if len(cells) == 1 else base
        entries.append({"prompt": prompt, "seed": seed, "cells": cells})
    return entries, len(keys) - len(entries)


def _open(png: str | None, method: Method, which: str, failures: list[str]) -> Image.Image | None:
    try:
        return None if png is None else pictures.picture(png, f"{method.source}: {method.label}: {which}")
    except ValueError as error:
        failures.append(str(error))
        return None


def cell(method: Method, image: RecordImage, opened: Image.Image | None, base: Image.Image | None) -> dict[str, Any]:
    """Return one picture of a case: thumbnail, verdict, difference to the baseline, map of token origins."""
    verdict = image.verdict or {}
    apart = pictures.difference(opened, base) if opened is not None and base is not None else None
    entry = {"method": method, "right": verdict.get("correct"), "reason": str(verdict.get("reason") or "")}
    entry |= {"uri": None if opened is None else pictures.thumbnail(opened), "difference": apart}
    origins = None if image.origins is None else pictures.origin_image(np.asarray(image.origins, np.uint8))
    return entry | {"origins": None if origins is None else pictures.data_uri(origins, lossless=True)}


def texts(method: Method, failures: list[str]) -> list[tuple[str | None, list[tuple[str, str]]]]:
    """Return (picture as a data URI, pieces of text with their origin). An unknown origin counts as plain."""
    rows, entries = method.record["texts"], []
    for k, (row, png) in enumerate(zip(rows, method.record.get("thumbnails") or [None] * len(rows))):
        opened = _open(png, method, f"picture {k + 1}", failures)
        pieces = [(piece, origin if origin in COLOURS else "plain") for piece, origin in row]
        entries.append((None if opened is None else pictures.thumbnail(opened), pieces))
    return entries
