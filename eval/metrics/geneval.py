"""GenEval (Ghosh et al. 2023, arXiv 2310.11513): six tasks checked with an object detector and a colour classifier.

Rules, thresholds, folder layout, result rows and summary are those of the authors' repository (djghosh13/geneval). The
code is ours, and detector and colour classifier are arguments. `strict` is our addition: exactly the requested objects
and no others.

Layout: `<root>/00000/metadata.jsonl` (one JSON object) and `<root>/00000/samples/0000.png` ...; unknown metadata fields
are kept and ignored. Rows are appended to a JSONL file one by one, so an interrupted run can be resumed.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from visspec.eval.metrics.detection import (
    ColourClassifier,
    DetectedColours,
    Detection,
    DetectionResult,
    Detector,
    with_progress,
)
from visspec.io import included
from visspec.io.files import Journal
from visspec.io.images import inside, open_image

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
THRESHOLD = 0.3
COUNTING_THRESHOLD = 0.9
MAX_OBJECTS = 16  # per class
POSITION_SHRINK = 0.1
POSITION_LEAST = 0.5
ORIGINAL_PROMPTS = "5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13"  # sha256 of the 553 JSON lines
ORIGINAL_SAMPLES = 4
FIELDS = ("tag", "include", "exclude", "prompt")


def relations(subject: Sequence[float], reference: Sequence[float]) -> set[str]:
    """Return the relations that hold between two boxes; two may hold at once. The offset of the centres is shrunk on
    each axis by a tenth of the summed sizes and divided by its original length. A relation holds above one half.
    """
    a, b = np.asarray(subject, float).reshape(2, 2), np.asarray(reference, float).reshape(2, 2)
    offset = a.mean(0) - b.mean(0)
    sizes = np.abs(a[1] - a[0]) + np.abs(b[1] - b[0])
    shrunk = np.sign(offset) * np.maximum(np.abs(offset) - POSITION_SHRINK * sizes, 0)
    if (np.abs(shrunk) < 1e-3).all():
        return set()
    dx, dy = shrunk / np.linalg.norm(offset)
    tests = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}
    return {name for name, value in tests.items() if value > POSITION_LEAST}


def select_detections(result: DetectionResult, threshold: float) -> dict[str, list[Detection]]:
    """Return detections above a threshold by class, best first, at most MAX_OBJECTS per class."""
    out: dict[str, list[Detection]] = {}
    for d in sorted(result.detections, key=lambda d: -d.score):
        if d.score > threshold and len(best := out.setdefault(d.label, [])) < MAX_OBJECTS:
            best.append(d)
    return out


def _include(image, item: dict, objects: dict, groups: list, colours: ColourClassifier) -> tuple[list | None, str]:
    label, count = item["class"], item["count"]
    matches = objects.get(label, [])[:count]
    if len(matches) < count:
        return None, f"expected {label}>={count}, found {len(matches)}"
    if "color" in item:
        colour_names = colours.classify(image, matches, label)
        if colour_names.count(item["color"]) < count:
            listed = ", ".join(f"{colour_names.count(c)} {c}" for c in dict.fromkeys(colour_names))
            return None, f"expected {item['color']} {label}>={count}, found {listed}"
    if "position" in item:
        relation, target = item["position"]
        if groups[target] is None:
            return None, f"no target for {label} to be {relation}"
        for a in matches:
            for b in groups[target]:
                if relation not in (holding := relations(a.box, b.box)):
                    return None, f"expected {label} {relation} target, found {' and '.join(sorted(holding)) or 'none'}"
    return matches, ""


def judge(image, objects: dict[str, list[Detection]], metadata: dict, colours: ColourClassifier) -> tuple[bool, str]:
    """Return whether an image satisfies all clauses of a prompt's metadata, and the reasons if not."""
    groups: list[list[Detection] | None] = []
    reasons = []
    for item in metadata.get("include", []):
        group, reason = _include(image, item, objects, groups, colours)
        groups.append(group)
        if group is None:
            reasons.append(reason)
    for item in metadata.get("exclude", []):
        n = len(objects.get(item["class"], []))
        if n >= item["count"]:
            reasons.append(f"expected {item['class']}<{item['count']}, found {n}")
    return not reasons, "\n".join(reasons)


def strictly(objects: dict[str, list[Detection]], metadata: dict) -> bool:
    """Return whether the detected classes and counts are exactly the requested ones."""
    want: dict[str, int] = {}
    for item in metadata.get("include", []):
        want[item["class"]] = want.get(item["class"], 0) + item["count"]
    return want == {label: len(objects_found) for label, objects_found in objects.items()}


def check_metadata(metadata: object) -> dict:
    """Return the metadata if its known fields have GenEval's form, else raise ValueError."""
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata must be a JSON object, not {type(metadata).__name__}")
    for key, kind in (("tag", str), ("prompt", str), ("include", list)):
        if not isinstance(metadata.get(key), kind):
            raise ValueError(f"metadata has no {key!r} of type {kind.__name__}")
    for key in ("include", "exclude"):
        for i, item in enumerate(metadata.get(key, [])):
            if not isinstance(item, dict) or not isinstance(item.get("class"), str):
                raise ValueError(f"metadata's {key}[{i}] has no 'class'")
            if not isinstance(item.get("count"), int) or item["count"] < 1:
                raise ValueError(f"metadata's {key}[{i}] has no positive 'count'")
            if "position" in item:
                _check_position(item["position"], i, key)
    return metadata


def _check_position(position: object, i: int, key: str) -> None:
    allowed = ("left of", "right of", "above", "below")
    pair = position if isinstance(position, list) and len(position) == 2 else [None, None]
    if pair[0] not in allowed or not isinstance(pair[1], int) or not 0 <= pair[1] < i:
        raise ValueError(f"metadata's {key}[{i}] needs 'position' [one of {allowed}, index of an earlier object]")


def write_prompt(root: str | Path, index: int, metadata: dict) -> Path:
    """Create `<root>/<index>/` with its metadata file. Returns the `samples` folder for images `0000.png` ..."""
    folder = Path(root) / f"{index:05d}"
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    (folder / "metadata.jsonl").write_text(json.dumps(metadata) + "\n")
    return folder / "samples"


@dataclass(frozen=True)
class PromptFolder:
    """One prompt folder: its name, metadata, image files in order, and the `problem` if it can't be used."""

    name: str
    metadata: dict
    files: tuple[Path, ...]
    problem: str = ""


def read_prompts(root: str | Path) -> list[PromptFolder]:
    """Return every numbered folder under `root`, in order. Raises ValueError if there is none or none has an image."""
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    numbered = [p for p in root.iterdir() if p.is_dir() and p.name.isdecimal()]
    folders = sorted(numbered, key=lambda p: (int(p.name), p.name))
    if not folders:
        raise ValueError(f"the folder {root} holds no numbered prompt folder such as 00000")
    out = []
    for folder in folders:
        try:
            metadata = check_metadata(json.loads((folder / "metadata.jsonl").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            out.append(PromptFolder(folder.name, {}, (), f"{folder.name}/metadata.jsonl: {_sentence(error)}"))
            continue
        samples = folder / "samples"
        names = [p for p in (samples.iterdir() if samples.is_dir() else ()) if re.match(r"\d+\.png", p.name)]
        files = sorted(names, key=lambda p: (int(p.name.split(".")[0]), p.name))
        problem = "" if files else f"{folder.name}/samples holds no image such as 0000.png"
        out.append(PromptFolder(folder.name, metadata, tuple(files), problem))
    if not any(prompt.files for prompt in out):
        raise ValueError(f"the folder {root} holds no image; the first problem: {out[0].problem}")
    return out


def read_flat(folder: str | Path, rows: Sequence[dict]) -> list[PromptFolder]:
    """Return prompts of images in a single folder. Each row is GenEval's metadata with the image's file name as
    "image". Images of one prompt are counted together. Raises ValueError for other metadata or if no image exists.
    """
    folder = Path(folder)
    groups: dict[str, list[Path]] = {}
    for i, row in enumerate(rows, 1):
        try:
            metadata = check_metadata({k: v for k, v in row.items() if k != "image"})
        except ValueError as error:
            raise ValueError(f"prompts: row {i}: {error}") from None
        groups.setdefault(json.dumps(metadata, sort_keys=True), []).append(inside(folder, str(row["image"])))
    out = []
    for i, (described, files) in enumerate(groups.items()):
        there = tuple(path for path in files if path.is_file())
        lost = [f"there is no image {path.name}" for path in files if not path.is_file()]
        out.append(PromptFolder(f"{i:05d}", json.loads(described), there, "".join(lost[:1])))
    if not any(prompt.files for prompt in out):
        raise ValueError(f"prompts: {folder} holds none of the {len(rows)} images, expected some.")
    return out


def _sentence(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg}, line {error.lineno})"
    return "there is no such file" if isinstance(error, FileNotFoundError) else str(error)


@dataclass
class Report:
    """Rows of all images, problems of folders and files, and the summary of `summarise`."""

    name: str
    rows: list[dict]
    problems: list[str]
    summary: dict = field(default_factory=dict)


def evaluate_image(path: Path, filename: str, metadata: dict, detector: Detector, colours: ColourClassifier):
    """Return a result row in GenEval's form, plus `strict`."""
    row = {"filename": filename, "tag": metadata["tag"], "prompt": metadata["prompt"]}
    row["metadata"] = json.dumps(metadata)
    try:
        image = open_image(path)
        correct, strict, reason, objects = judge_image(image, metadata, detector, colours)
    except (ValueError, FileNotFoundError) as error:
        return row | {"correct": False, "strict": False, "reason": str(error), "details": "{}", "broken": True}
    details = {label: [[*map(float, d.box), float(d.score)] for d in group] for label, group in objects.items()}
    return row | {"correct": correct, "strict": strict, "reason": reason, "details": json.dumps(details)}


def judge_image(
    image, metadata: dict, detector: Detector, colours: ColourClassifier
) -> tuple[bool, bool, str, dict[str, list[Detection]]]:
    """Return (correct, strict, reasons, objects) of an image."""
    detected = detector.detect(image)
    objects = select_detections(detected, detector.threshold(metadata["tag"]))
    correct, reason = judge(image, objects, metadata, colours)
    if detected.refused:
        correct, reason = False, f"refused: {detected.refused}"
    return correct, bool(correct and strictly(objects, metadata)), reason, objects


def evaluate(
    root: str | Path | Sequence[PromptFolder],
    results: str | Path,
    detector: Detector | None = None,
    colours: ColourClassifier | None = None,
) -> Report:
    """Score every image under `root`, or of the given prompts, and append each row to the JSONL file `results`. Images
    in `results` with unchanged bytes are not scored again. A broken image counts as incorrect and as a problem, and so
    does a folder without usable metadata or images. Detector and colours are by default the included ones.
    """
    detector, colours = detector or included.detector(), colours or DetectedColours()
    prompts = read_prompts(root) if isinstance(root, (str, Path)) else list(root)
    about = {"detector": [detector.name, detector.fingerprint], "colours": [colours.name, colours.fingerprint]}
    jobs = [(prompt, path) for prompt in prompts for path in prompt.files]
    rows = []
    with Journal(results, about) as journal:
        scored = {row["id"]: row for row in journal}
        for prompt, path in with_progress(jobs):
            filename, image = f"{prompt.name}/samples/{path.name}", _image_key(path, prompt.metadata)
            row = scored.get(filename)
            if row is None or row["image"] != image:
                entry = evaluate_image(path, filename, prompt.metadata, detector, colours)
                row = entry | {"id": filename, "image": image}
                journal.add(row)
            rows.append(row)
    problems = [prompt.problem for prompt in prompts if prompt.problem]
    problems += [f"{row['filename']}: {row['reason']}" for row in rows if row.get("broken")]
    problems += _uneven(prompts)
    report = Report(_name(prompts, detector, colours), rows, problems)
    report.summary = summarise(rows) | {"name": report.name, "problems": len(problems)}
    return report


def _image_key(path: Path, metadata: dict) -> str:
    try:
        return sha256(path.read_bytes() + json.dumps(metadata, sort_keys=True).encode()).hexdigest()[:16]
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _uneven(prompts: list[PromptFolder]) -> list[str]:
    counts = [len(prompt.files) for prompt in prompts if prompt.files]
    usual = max(set(counts), key=lambda n: (counts.count(n), n))
    odd = [p for p in prompts if p.files and len(p.files) != usual]
    return [f"{p.name}/samples holds {len(p.files)} images, most folders {usual}" for p in odd]


def _name(prompts: list[PromptFolder], detector: Detector, colours: ColourClassifier) -> str:
    """Return `GenEval` for the original's prompts, four images each, detector and colours; else add brackets."""
    lines = [json.dumps({k: v for k, v in p.metadata.items() if k in FIELDS}) + "\n" for p in prompts]
    same = sha256("".join(lines).encode()).hexdigest() == ORIGINAL_PROMPTS
    complete = all(len(p.files) == ORIGINAL_SAMPLES for p in prompts)
    if same and complete and detector.original and colours.original:
        return "GenEval"
    return f"GenEval[{detector.name}]"


def summarise(rows: Iterable[dict]) -> dict:
    """Return counts and shares in GenEval's terms. `overall` and `strict` are unweighted means of the tasks present."""
    rows = list(rows)
    if not rows:
        raise ValueError("there is no result row to summarise")
    tags = [tag for tag in TASKS if any(r["tag"] == tag for r in rows)]
    tags += [tag for tag in dict.fromkeys(r["tag"] for r in rows) if tag not in TASKS]
    prompts: dict[str, bool] = {}
    for row in rows:
        prompts[row["metadata"]] = prompts.get(row["metadata"], False) or bool(row["correct"])
    tasks: dict[str, dict[str, Any]] = {}
    for tag in tags:
        own = [row for row in rows if row["tag"] == tag]
        right, exact = (sum(bool(row[name]) for row in own) for name in ("correct", "strict"))
        tasks[tag] = {"correct": right, "images": len(own), "score": right / len(own), "strict": exact / len(own)}
    summary: dict[str, Any] = {
        "images": len(rows),
        "prompts": len(prompts),
        "broken": sum(bool(row.get("broken")) for row in rows),
    }
    summary |= {"correct_images": sum(bool(row["correct"]) for row in rows) / len(rows), "tasks": tasks}
    summary |= {"correct_prompts": sum(prompts.values()) / len(prompts)}
    means = {"overall": "score", "strict": "strict"}
    return summary | {name: float(np.mean([task[field] for task in tasks.values()])) for name, field in means.items()}
