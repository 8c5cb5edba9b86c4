"""Readers of locally stored benchmarks: COCO captions, TextVQA, VQAv2, GQA, ScienceQA, MME, MMMU.

Nothing is downloaded. Files must have the published format. A sample with a missing image is listed in the task's
`problems`. Unknown fields are ignored; a missing one raises ValueError with the name of the file.
"""

import ast
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from visspec.eval.metrics import tasks
from visspec.eval.metrics.tasks import Sample, Task
from visspec.io.images import SUFFIXES, inside, natural_key

Paths = ParamSpec("Paths")

MAX_BYTES = 1_000_000_000
SHORT = "\nAnswer the question using a single word or phrase."
MMMU_IMAGES = 7  # maximum per question
LETTER = "\nAnswer with the option's letter from the given choices directly."


def read_json(path: str | Path) -> Any:
    """The value of a JSON file, the list of a JSONL file's. ValueError for other content or more than MAX_BYTES."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than the limit of {MAX_BYTES}")
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None


def reader(
    name: str,
    max_new_tokens: int,
    score: tasks.Score,
    suffix: str = "",
    aggregate: Callable[[Sequence[Sample], Sequence[str]], dict[str, float]] | None = None,
) -> Callable[[Callable[Paths, Iterable[Sample]]], Callable[Paths, Task]]:
    """Makes a function that yields samples one that returns their task; the first of its arguments is the file that is
    named in errors. Raises ValueError for a missing field; samples without an image file are left out.
    """

    def decorate(samples: Callable[Paths, Iterable[Sample]]) -> Callable[Paths, Task]:
        @wraps(samples)
        def read(*paths: Paths.args, **named: Paths.kwargs) -> Task:
            try:
                found = list(samples(*paths, **named))
            except (KeyError, TypeError, AttributeError, IndexError, SyntaxError) as error:
                raise ValueError(f"{paths[0]} is not a {name} file: {type(error).__name__} {error}") from None
            missing = [next((path for path in sample.files if not path.is_file()), None) for sample in found]
            there = tuple(sample for sample, lost in zip(found, missing) if lost is None)
            lost = ((sample.id, path) for sample, path in zip(found, missing) if path)
            problems = tuple(f"{id}: there is no image file {path}" for id, path in lost)
            if not there:
                first = f"; the first problem: {problems[0]}" if found else ""
                raise ValueError(f"{paths[0]} has no sample whose image exists{first}")
            return Task(name, there, max_new_tokens, score, aggregate, suffix, problems)

        return read

    return decorate


@reader("coco-captions", 64, lambda sample, text: None, aggregate=tasks.caption_scores)
def coco_captions(annotations: str | Path, images: str | Path) -> Iterator[Sample]:
    """`captions_val2017.json` and its image folder."""
    data = read_json(annotations)
    texts: dict[int, list[str]] = {}
    for row in data["annotations"]:
        texts.setdefault(row["image_id"], []).append(row["caption"])
    for row in data["images"]:
        if row["id"] in texts:
            path = inside(images, row["file_name"])
            yield Sample(str(row["id"]), path, "Describe the image briefly.", tuple(texts[row["id"]]))


@reader("textvqa", 16, tasks.vqa, suffix=SHORT)
def textvqa(questions: str | Path, images: str | Path) -> Iterator[Sample]:
    """`TextVQA_0.5.1_val.json` and `train_images/` (names are `<image_id>.jpg`)."""
    for row in read_json(questions)["data"]:
        path = inside(images, f"{row['image_id']}.jpg")
        yield Sample(str(row["question_id"]), path, row["question"], tuple(row["answers"]))


@reader("vqav2", 16, tasks.vqa, suffix=SHORT)
def vqav2(
    questions: str | Path, annotations: str | Path, images: str | Path, prefix: str = "COCO_val2014_"
) -> Iterator[Sample]:
    """`v2_OpenEnded_mscoco_val2014_questions.json`, `v2_mscoco_val2014_annotations.json` and the image folder."""
    asked, answered = read_json(questions), read_json(annotations)
    answers = {row["question_id"]: tuple(a["answer"] for a in row["answers"]) for row in answered["annotations"]}
    for row in asked["questions"]:
        path = inside(images, f"{prefix}{int(row['image_id']):012d}.jpg")
        yield Sample(str(row["question_id"]), path, row["question"], answers[row["question_id"]])


@reader("gqa", 16, tasks.exact, suffix=SHORT)
def gqa(questions: str | Path, images: str | Path) -> Iterator[Sample]:
    """`testdev_balanced_questions.json` and its image folder; the score is exact match."""
    for key, row in read_json(questions).items():
        yield Sample(str(key), inside(images, f"{row['imageId']}.jpg"), row["question"], (row["answer"],))


@reader("scienceqa", 16, tasks.multiple_choice, suffix=LETTER)
def scienceqa(problems: str | Path, images: str | Path, split: str = "test") -> Iterator[Sample]:
    """`problems.json` and the folder with `<split>/<id>/image.png`; questions without an image are not used."""
    for key, row in read_json(problems).items():
        if row["split"] == split and row["image"]:
            text = f"{row['hint']}\n{row['question']}" if row.get("hint") else row["question"]
            path = inside(images, f"{split}/{key}/{row['image']}")
            yield Sample(str(key), path, text, (chr(65 + row["answer"]),), tuple(row["choices"]))


@reader("mme", 16, tasks.yes_or_no, aggregate=tasks.mme_scores)
def mme(root: str | Path) -> Iterator[Sample]:
    """The benchmark's folders: `<category>/<name>.txt` with `question TAB Yes|No` lines beside `<name>.png|jpg`.

    Categories with folders `questions_answers_YN/` and `images/` are supported too.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    for category in sorted(p for p in root.iterdir() if p.is_dir()):
        nested = (category / "questions_answers_YN").is_dir()
        texts = category / "questions_answers_YN" if nested else category
        pictures = category / "images" if nested else category
        for file in sorted(texts.glob("*.txt"), key=natural_key):
            files = [pictures / (file.stem + suffix) for suffix in SUFFIXES]
            image, name = next(filter(Path.is_file, files), files[0]), f"{category.name}/{file.stem}"
            for i, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
                if line.strip():
                    question, tab, answer = line.rpartition("\t")
                    if not tab:
                        raise ValueError(f"{file} has a line without a tab between question and answer")
                    extra = {"category": category.name, "image": name}
                    yield Sample(f"{name}/{i}", image, question, (answer.strip(),), (), extra)


@reader("mmmu", 16, tasks.multiple_choice, suffix=LETTER)
def mmmu(rows: str | Path, images: str | Path) -> Iterator[Sample]:
    """MMMU rows as JSON or JSONL (`id`, `question`, `options`, `answer`, `image_1` to `image_7` file names).

    A question with one image has a single file as its image, one with several a tuple, in the order of the fields.
    """
    for row in read_json(rows):
        options = row.get("options") or []
        options = ast.literal_eval(options) if isinstance(options, str) else options  # a Python literal
        more = [row[name] for name in (f"image_{i}" for i in range(2, MMMU_IMAGES + 1)) if row.get(name)]
        paths = tuple(inside(images, name) for name in [row["image_1"], *more])
        image = paths if more else paths[0]
        yield Sample(str(row["id"]), image, row["question"], (row["answer"],), tuple(map(str, options)))
