"""`visspec eval METRIC`: every metric of `visspec.eval.metrics` on folders and files, as a table and as JSON.

The extractor, detector or model is a flag, and its name stands in the metric's. Metrics that judge item by item append
their rows to a file beside the images (`--results`) and continue from it.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from visspec.cli.arguments import JsonOption, Positive
from visspec.io import included
from visspec.io.files import write_json
from visspec.io.options import option

if TYPE_CHECKING:
    from PIL.Image import Image

    Answerer = Callable[[Image | list[Image], str], str]  # (image or images, question) -> text

Row = dict[str, Any]  # name, value, n, and what the metric says beside them

FOLDER = "folder of PNG, JPEG or WEBP images"
LEAST = {"fid": 4, "kid": 2, "cmmd": 1, "precision-recall": 4, "inception-score": 2}  # images a side
PACKAGES: dict[str, tuple[str, ...]] = {  # of the extra `eval`, by metric or task
    **dict.fromkeys(("kid", "precision-recall", "inception-score"), ("torch_fidelity",)),
    **dict.fromkeys(("captions", "coco-captions"), ("sacrebleu", "pycocoevalcap")),
}
TASKS = {  # reader of `eval.metrics.readers`: the flags it takes, in order
    "coco-captions": ("questions", "images"),
    "textvqa": ("questions", "images"),
    "vqav2": ("questions", "annotations", "images"),
    "gqa": ("questions", "images"),
    "scienceqa": ("questions", "images"),
    "mmmu": ("questions", "images"),
    "mme": ("images",),
}


@dataclass(kw_only=True)
class MetricOptions(JsonOption):
    what: str = option(command=True)
    device: str = option(default="cpu")
    json: Path | None = option("write the result to this file", None, writes="file")


@dataclass(kw_only=True)
class FolderOptions(MetricOptions):
    generated: Path = option(FOLDER, positional=True)


@dataclass(kw_only=True)
class FoldersOptions(FolderOptions):
    """Two folders, compared by an extractor's features."""

    reference: Path = option(FOLDER, positional=True)
    extractor: str = option("random-conv (embedded), inception[:FILE], timm:NAME, or a model", "random-conv")
    batch_size: Positive = option(default=32)


@dataclass(kw_only=True)
class FidOptions(FoldersOptions):
    cache: Path | None = option("folder that keeps the statistics of references", None)


@dataclass(kw_only=True)
class KidOptions(FoldersOptions):
    subsets: Positive = option(default=100)
    subset_size: Positive | None = option("images a subset (default: 1000, or all there are)", None)


@dataclass(kw_only=True)
class InceptionScoreOptions(FolderOptions):
    model: str = option("an image classifier of transformers: folder or hub id")
    splits: Positive = option(default=10)


@dataclass(kw_only=True)
class JudgedOptions(FolderOptions):
    """Images that are judged one by one."""

    results: Path | None = option("rows of finished images (default: beside the folder)", None)

    @property
    def rows(self) -> Path:
        """Where rows of finished images go."""
        return self.results or self.generated.with_name(f"{self.generated.name}.{self.what}.jsonl")


@dataclass(kw_only=True)
class ClipScoreOptions(JudgedOptions):
    model: str = option("a CLIP model: folder or hub id")
    prompts: Path = option("JSONL of {image, prompt}, or JSON of visspec generate")
    dialect: Literal["torchmetrics", "paper", "lantern"] = option(default="torchmetrics")


@dataclass(kw_only=True)
class HpsOptions(JudgedOptions):
    model: str = option("the preference-tuned CLIP model: folder or hub id")
    prompts: Path = option("JSON of {style: [prompts]}, or a folder of style.json")
    version: Literal["v2.0", "v2.1"] = option()


@dataclass(kw_only=True)
class GenEvalOptions(JudgedOptions):
    prompts: Path | None = option("JSONL of {image, prompt, ...}, or JSON of visspec generate", None)
    detector: str | None = option("mask2former:MODEL, owlv2:MODEL, ..., or an included one (default)", None)
    colours: str = option("detected, or a CLIP model", "detected")


@dataclass(kw_only=True)
class DpgOptions(JudgedOptions):
    model: str | None = option("a vision-language model that answers (default: an included one)", None)
    questions: Path = option("dpg_bench.csv")
    resolution: Positive | None = option("pixels of one of four samples in a 2 x 2 grid", None)


@dataclass(kw_only=True)
class CaptionScoresOptions(MetricOptions):
    generated: Path = option("JSON of visspec caption, or JSONL of {image, caption}", positional=True)
    references: Path = option("JSONL of {image, captions}, or COCO's JSON")


@dataclass(kw_only=True)
class VqaOptions(MetricOptions):
    task: str = option(positional=True, choices=[*included.table().tasks, *TASKS])
    model: str | None = option("folder or hub id (default: an included one)", None)
    drafter: str | None = option("as in visspec caption", None)
    questions: Path | None = option("file of the benchmark", None)
    annotations: Path | None = option("file of the benchmark", None)
    images: Path | None = option("folder of the benchmark", None)
    n: Positive | None = option("this many samples, drawn with a fixed seed", None)
    results: Path | None = option("rows of finished answers (default: TASK.jsonl)", None)


def run(arguments: MetricOptions) -> int:
    """The command: measure, print a table, write the JSON with provenance. Returns the exit code."""
    import torch
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from visspec.api.sources import need
    from visspec.io.provenance import provenance

    for name in (arguments.what, getattr(arguments, "task", "")):
        for package in PACKAGES.get(name, ()):
            need(package, name, "eval")
    least = max(LEAST.get(arguments.what, 1), getattr(arguments, "splits", 1))
    for name in ("generated", "reference") if isinstance(arguments, FolderOptions) else ():
        if hasattr(arguments, name):
            check_images(name, getattr(arguments, name), least)
    found = METRICS[arguments.what][1](arguments)
    row = {"metric": found.pop("name"), "value": found.pop("value"), "n": found.pop("n")}
    row |= {"n_reference": found.pop("n_reference")} | found if "n_reference" in found else found
    view = Table("", "", show_header=False)
    for name, value in row.items():
        if name not in ("problems", "extractor", "fingerprint"):
            for key, text in value.items() if isinstance(value, dict) else [("", value)]:
                shown = f"{text:.6g}" if isinstance(text, float) else escape(str(text))
                view.add_row(escape(f"{name} {key}".strip()), shown)
    Console().print(view)
    for problem in row.get("problems", ()):
        print(f"visspec: {problem}", file=sys.stderr)
    write_json(arguments.json, row | {"provenance": provenance(device=torch.device(arguments.device))})
    return 1 if row.get("problems") else 0


def two_folders(arguments: FoldersOptions) -> Row:
    """fid, kid, cmmd, precision-recall."""
    from visspec.eval.metrics import cmmd, features, fid, kid, named, precision_recall, references

    folders, size = (arguments.generated, arguments.reference), arguments.batch_size
    extractor = named.extractor(arguments.extractor, arguments.device)
    if isinstance(arguments, FidOptions):
        reference = references.from_folder(folders[1], extractor, arguments.cache, size)
        found = asdict(fid.from_folder(folders[0], reference, extractor, size))
        return found | {"problems": [*reference.problems, *found["problems"]]}
    tables = features.pair(*folders, extractor, size)
    if isinstance(arguments, KidOptions):
        return kid.from_pair(tables, arguments.subsets, arguments.subset_size)
    return (cmmd if arguments.what == "cmmd" else precision_recall).from_pair(tables)


def inception_score(arguments: InceptionScoreOptions) -> Row:
    from visspec.eval.metrics import inception_score as score
    from visspec.eval.metrics import named

    model = named.classifier(arguments.model, arguments.device)
    return score.from_folder(arguments.generated, model, arguments.splits)


def clip_score(arguments: ClipScoreOptions) -> Row:
    from visspec.eval.metrics import clipscore, named

    texts = {row["image"]: row["prompt"] for row in rows_with("prompt", arguments.prompts, "--prompts")}
    scorer, dialect = named.clip(arguments.model, arguments.device), clipscore.PRESETS[arguments.dialect]
    return clipscore.from_folder(arguments.generated, texts, scorer, dialect, results=arguments.rows)


def human_preference(arguments: HpsOptions) -> Row:
    from visspec.eval.metrics import hps, named

    if arguments.prompts.is_dir():
        prompts = {path.stem: json_of(path) for path in sorted(arguments.prompts.glob("*.json"))}
    else:
        prompts = json_of(arguments.prompts)
    if not isinstance(prompts, dict) or not prompts or not all(_texts(texts) for texts in prompts.values()):
        raise ValueError(f"--prompts: got {arguments.prompts}, expected JSON of {{style: [prompts]}}")
    scorer = named.clip(arguments.model, arguments.device)
    scored = arguments.generated, prompts, scorer.cosines, arguments.version
    found = hps.evaluate(*scored, results=arguments.rows, model=scorer.fingerprint)
    return found | {"name": f"{found['name']}[{scorer.name}]", "model": scorer.name}


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
    """Rows of --prompts, those without GenEval's metadata read as prompts of an included world."""
    rows = rows_with("prompt", prompts, "--prompts")
    try:
        return [r if "include" in r else included.parse(r["prompt"]) | {"image": r["image"]} for r in rows]
    except ValueError as error:
        why = f"--prompts: {error}, expected GenEval's metadata or a prompt of an included world"
        raise ValueError(why) from None


def dense_prompts(arguments: DpgOptions) -> Row:
    from visspec.eval.metrics import dpg

    items = dpg.read_items(arguments.questions)
    answer, name = answerer(arguments, max_new_tokens=8)
    return dpg.evaluate(items, arguments.generated, answer, name, arguments.resolution, results=arguments.rows)


def caption_scores(arguments: CaptionScoresOptions) -> Row:
    from visspec.eval.metrics import tasks

    captions = {row["image"]: row["caption"] for row in rows_with("caption", arguments.generated, "generated")}
    references = reference_texts(arguments.references)
    shared = [name for name in captions if name in references]
    problems = [f"{name} has no reference" for name in captions if name not in references]
    problems += [f"there is no caption of {name}" for name in references if name not in captions]
    if not shared:
        wanted = f"references of the images in {arguments.generated}"
        raise ValueError(f"--references: got {arguments.references}, expected {wanted}")
    samples = [tasks.Sample(name, Path(name), "", tuple(references[name])) for name in shared]
    found = tasks.caption_scores(samples, [captions[name] for name in shared])
    counts = {"n": len(shared), "n_reference": sum(len(references[name]) for name in shared)}
    return {"name": "CIDEr-D", "value": found["cider_d"]} | counts | found | {"problems": problems}


def answer_row(arguments: VqaOptions) -> Row:
    from visspec.eval.metrics import readers, tasks

    if made := included.table().tasks.get(arguments.task):  # they need no files
        task = included.load(made)(arguments.n or 100)
    else:
        given = {flag: getattr(arguments, flag) for flag in TASKS[arguments.task]}
        for flag, value in given.items():
            if value is None:
                raise ValueError(f"--{flag}: got none, expected the {flag} of {arguments.task}")
        task = getattr(readers, arguments.task.replace("-", "_"))(*given.values())
        if arguments.n is not None:
            task = tasks.subset(task, min(arguments.n, len(task.samples)))
    answer, name = answerer(arguments, task.max_new_tokens)
    found = tasks.run(task, answer, arguments.results or Path(f"{task.name}.jsonl"), name)
    named = {k: v for k, v in found.items() if k not in ("task", "model", "n", "score", "problems")}
    value = found["score"] if found["score"] is not None else named.get("mme", named.get("cider_d"))
    row = {"name": f"{task.name}[{name}]", "value": value, "n": found["n"], "model": name}
    return row | named | {"problems": found["problems"]}


def answerer(arguments: DpgOptions | VqaOptions, max_new_tokens: int) -> tuple["Answerer", str]:
    """(image, question) -> text by an accelerated model, greedily, and its name."""
    from visspec.api import loading
    from visspec.api.accelerate import accelerate
    from visspec.api.captions import prepare

    model, processor = loading.load(arguments.model, device=arguments.device)
    fast = accelerate(model, getattr(arguments, "drafter", None) or "auto", tokenizer=processor.tokenizer)

    def answer(image: "Image | list[Image]", question: str) -> str:
        if isinstance(image, list):
            raise ValueError(f"task: got a question on {len(image)} images, expected one image a question")
        inputs = prepare(processor, [image], question, model)
        ids = fast.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()

    return answer, arguments.model or included.text_model()


def check_images(argument: str, folder: Path, least: int) -> None:
    """Raises ValueError that names the argument for a folder with fewer images."""
    from visspec.io.images import image_files

    try:
        count = len(image_files(folder))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{argument}: got {folder}, expected a {FOLDER} ({error})") from None
    if count < least:
        raise ValueError(f"{argument}: got {folder} of {count} images, expected at least {least}")


def rows_with(field: str, path: Path, argument: str) -> list[Row]:
    """Rows of {image, field, ...}: JSONL, or the JSON that `visspec generate` and `visspec caption` write, less the
    files that failed.
    """
    rows = [row | {"image": _image(row)} for row in _rows(path, argument) if not row.get("error")]
    if not rows or not all(row["image"] and isinstance(row.get(field), str) for row in rows):
        raise ValueError(f"{argument}: got {path}, expected rows of {{image, {field}}}")
    return [{k: v for k, v in row.items() if k not in ("path", "seed", "nfe")} for row in rows]


def reference_texts(path: Path) -> dict[str, list[str]]:
    """{image: captions} from JSONL of {image, captions} or {image, caption}, or from COCO's annotations."""
    found = json_of(path) if path.suffix == ".json" else None
    texts: dict[str, list[str]] = {}
    if isinstance(found, dict) and "annotations" in found:
        names = {row["id"]: row["file_name"] for row in found.get("images", [])}
        for row in found["annotations"]:
            texts.setdefault(str(names.get(row["image_id"], row["image_id"])), []).append(row["caption"])
        return texts
    for row in _rows(path, "--references"):
        name, several = _image(row), row.get("captions") or [row.get("caption")]
        if not name or not _texts(several):
            raise ValueError(f"--references: got {path}, expected rows of {{image, captions}}")
        texts.setdefault(name, []).extend(several)
    return texts


def _image(row: Row) -> str:
    return Path(str(row.get("image") or row.get("path") or "")).name


def _rows(path: Path, argument: str) -> list[Row]:
    found = json_of(path, argument)
    rows = found.get("results", []) if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{argument}: got {path}, expected JSON rows")
    return rows


def json_of(path: Path, argument: str = "--prompts") -> Any:
    """The value of a JSON file, or the list of a JSONL file's. Raises ValueError that names the argument."""
    from visspec.eval.metrics.readers import read_json

    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument}: got {path}, expected a readable JSON or JSONL file ({error})") from None


def _texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


METRICS: dict[str, tuple[type[MetricOptions], Callable[[Any], Row]]] = {
    "fid": (FidOptions, two_folders),
    "kid": (KidOptions, two_folders),
    "cmmd": (FoldersOptions, two_folders),
    "precision-recall": (FoldersOptions, two_folders),
    "inception-score": (InceptionScoreOptions, inception_score),
    "clipscore": (ClipScoreOptions, clip_score),
    "hps": (HpsOptions, human_preference),
    "geneval": (GenEvalOptions, gen_eval),
    "dpg": (DpgOptions, dense_prompts),
    "captions": (CaptionScoresOptions, caption_scores),
    "vqa": (VqaOptions, answer_row),
}
OPTIONS = {f"eval {name}": kind for name, (kind, _) in METRICS.items()}
