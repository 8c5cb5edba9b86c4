"""`visspec eval METRIC`: the metrics of `visspec.eval.metrics` for folders of images, printed and as JSON.

The extractor, detector or model is an option, and its name is part of the metric's. Metrics that evaluate image by
image append rows to a file next to the images (`--results`) and continue from it.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visspec.cli.arguments import JsonOption
from visspec.io import included
from visspec.io.files import write_json
from visspec.io.options import Positive, option

Row = dict[str, Any]  # name, value, n, and further fields of the metric

FOLDER = "folder of images"
LEAST = {"fid": 4, "kid": 2}  # minimum number of images on each side


@dataclass(kw_only=True)
class MetricOptions(JsonOption):
    what: str = option(command=True)
    device: str = option("torch device; auto: the GPU if there is one", "auto")
    generated: Path = option(FOLDER, positional=True)


@dataclass(kw_only=True)
class FoldersOptions(MetricOptions):
    """Two folders, compared by an extractor's features."""

    reference: Path = option(FOLDER, positional=True)
    extractor: str = option("feature extractor: random-conv (included), inception[:FILE], or a model", "random-conv")
    batch_size: Positive = option("batch size", 32)


@dataclass(kw_only=True)
class FidOptions(FoldersOptions):
    cache: Path | None = option("folder in which to cache features of references", None)


@dataclass(kw_only=True)
class KidOptions(FoldersOptions):
    subsets: Positive = option("number of random subsets to average over", 100)
    subset_size: Positive | None = option("images per subset (default: 1000, or all if there are fewer)", None)


@dataclass(kw_only=True)
class JudgedOptions(MetricOptions):
    """Images that are evaluated one by one."""

    results: Path | None = option("file for rows of finished images (default: next to the folder)", None)

    @property
    def rows(self) -> Path:
        """The file for rows of finished images."""
        return self.results or self.generated.with_name(f"{self.generated.name}.{self.what}.jsonl")


@dataclass(kw_only=True)
class ClipScoreOptions(JudgedOptions):
    model: str = option("folder or hub id of a CLIP model")
    prompts: Path = option("JSONL of {image, prompt}, or JSON of visspec generate")


@dataclass(kw_only=True)
class GenEvalOptions(JudgedOptions):
    prompts: Path | None = option("JSONL of {image, prompt, ...}, or JSON of visspec generate", None)
    detector: str | None = option("mask2former:MODEL, mmdet:CONFIG:CHECKPOINT, or an included one (default)", None)
    colours: str = option("colour classifier: detected, or a CLIP model", "detected")


def run(arguments: MetricOptions) -> int:
    """Measure, print the figures, and write the JSON with provenance. Returns the exit code."""
    import torch

    from visspec.api.loading import resolve_device
    from visspec.api.sources import need
    from visspec.io.provenance import provenance

    if arguments.what == "kid":
        need("torch_fidelity", "kid", "eval")
    for name in ("generated", "reference"):
        if hasattr(arguments, name):
            check_images(name, getattr(arguments, name), LEAST.get(arguments.what, 1))
    arguments.device = resolve_device(arguments.device)
    result = METRICS[arguments.what][1](arguments)
    row = {"metric": result.pop("name"), "value": result.pop("value"), "n": result.pop("n")}
    row |= {"n_reference": result.pop("n_reference")} | result if "n_reference" in result else result
    for name, value in row.items():
        if name not in ("problems", "extractor", "fingerprint"):
            for key, text in value.items() if isinstance(value, dict) else [("", value)]:
                print(f"{f'{name} {key}':24} {f'{text:.6g}' if isinstance(text, float) else text}")
    for problem in row.get("problems", ()):
        print(f"visspec: {problem}", file=sys.stderr)
    write_json(arguments.json, row | {"provenance": provenance(device=torch.device(arguments.device))})
    return 1 if row.get("problems") else 0


def two_folders(arguments: FoldersOptions) -> Row:
    """Compute fid or kid."""
    from visspec.eval.metrics import features, fid, kid, named

    extractor, size = named.extractor(arguments.extractor, arguments.device), arguments.batch_size
    cache = arguments.cache if isinstance(arguments, FidOptions) else None
    generated = features.read_features(arguments.generated, extractor, size)
    reference = features.read_features(arguments.reference, extractor, size, cache)
    if isinstance(arguments, KidOptions):
        return kid.compare(generated, reference, extractor, arguments.subsets, arguments.subset_size)
    return fid.compare(generated, reference, extractor)


def clip_score(arguments: ClipScoreOptions) -> Row:
    from visspec.eval.metrics import clipscore, named

    texts = {row["image"]: row["prompt"] for row in read_prompts(arguments.prompts)}
    scorer = named.clip(arguments.model, arguments.device)
    return clipscore.from_folder(arguments.generated, texts, scorer, arguments.rows)


def gen_eval(arguments: GenEvalOptions) -> Row:
    from visspec.eval.metrics import geneval, named

    folder, prompts = arguments.generated, arguments.prompts
    where = folder if prompts is None else geneval.read_flat(folder, metadata_of(prompts))
    spec, colours = arguments.detector, named.colours(arguments.colours)
    detector = included.detector() if spec is None else named.detector(spec, arguments.device)
    report = geneval.evaluate(where, arguments.rows, detector, colours)
    s = report.summary
    row = {"name": report.name, "value": s["overall"], "n": s["images"], "prompts": s["prompts"], "strict": s["strict"]}
    row["tasks"] = {name: task["score"] for name, task in s["tasks"].items()}
    return row | {"detector": detector.name, "problems": report.problems}


def metadata_of(prompts: Path) -> list[Row]:
    """Return the rows of --prompts. Rows without GenEval's metadata are parsed as prompts of an included world."""
    rows = read_prompts(prompts)
    try:
        return [r if "include" in r else included.parse(r["prompt"]) | {"image": r["image"]} for r in rows]
    except ValueError as error:
        why = f"--prompts: {error}, expected GenEval's metadata or a prompt of an included world"
        raise ValueError(why) from None


def check_images(argument: str, folder: Path, least: int) -> int:
    """Return the number of images in a folder. Raises ValueError with the argument's name if there are fewer."""
    from visspec.io.images import image_files

    try:
        count = len(image_files(folder))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{argument}: got {folder}, expected a {FOLDER} ({error}).") from None
    if count < least:
        raise ValueError(f"{argument}: got {folder} of {count} images, expected at least {least}.")
    return count


def read_prompts(path: Path) -> list[Row]:
    """Return rows of {image, prompt, ...} from JSONL, or from the JSON of `visspec generate` without failed images."""
    try:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        entries = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--prompts: got {path}, expected a readable JSON or JSONL file ({error}).") from None
    if path.suffix != ".jsonl":
        (entries,) = entries or [[]]
        entries = entries.get("results", []) if isinstance(entries, dict) else entries
    good = isinstance(entries, list) and all(isinstance(row, dict) for row in entries)
    named = [(row, Path(str(row.get("image") or row.get("path") or "")).name) for row in entries] if good else []
    rows = [row | {"image": name} for row, name in named if not row.get("error")]
    if not rows or not all(row["image"] and isinstance(row.get("prompt"), str) for row in rows):
        raise ValueError(f"--prompts: got {path}, expected rows of {{image, prompt}}.")
    return [{k: v for k, v in row.items() if k not in ("path", "seed", "nfe")} for row in rows]


METRICS: dict[str, tuple[type[MetricOptions], Callable[[Any], Row]]] = {
    "fid": (FidOptions, two_folders),
    "kid": (KidOptions, two_folders),
    "clipscore": (ClipScoreOptions, clip_score),
    "geneval": (GenEvalOptions, gen_eval),
}
OPTIONS = {f"eval {name}": kind for name, (kind, _) in METRICS.items()}
