"""DPG-Bench (Hu et al. 2024, arXiv 2403.05135): dense prompts broken into yes/no questions with dependencies.

The questions are the published CSV; the answering model is the caller's function `(image, question) -> text` (the
original uses mPLUG-large). A question passes if the answer is exactly "yes" and no question it depends on failed.
Images are `<item_id>.png`, one picture or a 2 x 2 grid of four samples.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from visspec.eval.metrics.detection import digest
from visspec.eval.metrics.results import ResultFile, with_progress
from visspec.io.images import open_image

Answer = Callable[[Image.Image, str], str]


@dataclass(frozen=True)
class Question:
    """One proposition of a prompt: its number, the question, its parents' numbers, its broad category."""

    number: int
    text: str
    parents: tuple[int, ...]
    category: str


@dataclass(frozen=True)
class DPGPrompt:
    id: str
    prompt: str
    questions: tuple[Question, ...] = field(default_factory=tuple)


def read_items(path: str | Path, compat: bool = False) -> list[DPGPrompt]:
    """Items of `dpg_bench.csv`; `compat=True` skips the first row, as the published script does."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    prompts: dict[str, str] = {}
    questions: dict[str, list[Question]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for i, row in enumerate(csv.DictReader(file), 2):
            if compat and i == 2:
                continue
            try:
                parents = tuple(int(p) for p in row["dependency"].split(",") if p.strip() and int(p))
                category = row["tuple"].split("(")[0].split("-")[0].strip()
                question = Question(int(row["proposition_id"]), row["question_natural_language"], parents, category)
                key = row["item_id"]
                prompts.setdefault(key, row["text"])
            except (KeyError, ValueError, AttributeError) as error:
                raise ValueError(f"line {i} of {path} is no DPG-Bench row: {type(error).__name__} {error}") from None
            questions.setdefault(key, []).append(question)
    if not prompts:
        raise ValueError(f"{path} holds no question")
    return [DPGPrompt(key, prompt, tuple(questions[key])) for key, prompt in prompts.items()]


def apply_dependencies(item: DPGPrompt, answers: dict[int, bool]) -> dict[int, bool]:
    """Answers after dependencies: a question with a failed parent fails, in the order of the questions.

    Parents that are not asked are ignored.
    """
    out = dict(answers)
    for q in item.questions:
        out[q.number] = out[q.number] and all(out.get(p, True) for p in q.parents)
    return out


def crops(image: Image.Image, resolution: int | None) -> list[Image.Image]:
    """The four samples of a 2 x 2 grid of `resolution` pixels each, or the image itself; ValueError if neither."""
    if resolution is None or image.size == (resolution, resolution):
        return [image]
    if image.size != (2 * resolution, 2 * resolution):
        raise ValueError(f"an image must have {resolution} or {2 * resolution} pixels a side, not {image.size}")
    corners = [(x, y) for y in (0, resolution) for x in (0, resolution)]
    return [image.crop((x, y, x + resolution, y + resolution)) for x, y in corners]


def _require_parents(item: DPGPrompt) -> None:
    asked = {q.number for q in item.questions}
    lost = sorted({p for q in item.questions for p in q.parents} - asked)
    if lost:
        raise ValueError(f"the parent question {lost[0]} is not asked")


def evaluate(
    items: list[DPGPrompt],
    folder: str | Path,
    answer: Answer,
    model: str,
    resolution: int | None = None,
    compat: bool = False,
    results: str | Path | None = None,
) -> dict:
    """Mean score in per cent over items (each the mean over its crops and questions), and by category.

    An unreadable image scores 0 and is listed as a problem. `compat=True` reproduces the published script: such items
    are excluded from the mean, as are items with a parent that is not asked, and categories use the answers of the last
    crop without propagation. Answers are appended to the JSONL file `results` and reused.
    """
    scores: list[float] = []
    categories: dict[str, list[float]] = {}
    problems: list[str] = []
    done = ResultFile(results, digest("dpg", model, resolution))
    for item in with_progress(items, "prompt"):
        try:
            if compat:
                _require_parents(item)
            pictures = crops(open_image(Path(folder) / f"{item.id}.png"), resolution)
        except (ValueError, FileNotFoundError) as error:
            problems.append(f"{item.id}: {error}")
            if not compat:
                scores.append(0.0)
                for q in item.questions:
                    categories.setdefault(q.category, []).append(0.0)
            continue
        if item.id not in done.rows:
            said = [[answer(picture, q.text) for q in item.questions] for picture in pictures]
            done.add({"id": item.id, "prompt": item.prompt, "answers": said})
        said = done.rows[item.id]["answers"]
        said = said if compat else [[text.strip().lower().rstrip(".") for text in texts] for texts in said]
        raw = [{q.number: text == "yes" for q, text in zip(item.questions, texts)} for texts in said]
        final = [apply_dependencies(item, answers) for answers in raw]
        scores.append(float(np.mean([np.mean(list(answers.values())) for answers in final])))
        for answers in [raw[-1]] if compat else final:
            for q in item.questions:
                categories.setdefault(q.category, []).append(float(answers[q.number]))
    if len(problems) == len(items):
        raise ValueError(f"no image of {folder} can be read; the first problem: {problems[0]}")
    name = f"DPG-Bench[{model}]" + (" (compat)" if compat else "")
    shares = {kind: 100 * float(np.mean(values)) for kind, values in sorted(categories.items())}
    found = {"name": name, "value": 100 * float(np.mean(scores)), "n": len(scores)}
    return found | {"categories": shares, "problems": problems}
