"""Vision-language tasks: samples with images and answers, a prompt, a scorer, and a resumable evaluation loop.

A task is data and two functions. `generate(image, question) -> text` is the caller's model (for samples with several
images it gets a list).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visspec.eval.metrics import text_scores
from visspec.eval.metrics.detection import digest
from visspec.eval.metrics.results import ResultFile, with_progress
from visspec.io.images import open_image

Score = Callable[["Sample", str], float | None]


@dataclass(frozen=True)
class Sample:
    """One question about one image, or several; `image` is a file, a function that renders it, or a tuple of files.

    With a tuple, `<image 1>`, `<image 2>`, ... in question and choices mark the place of each image.
    """

    id: str
    image: Path | Callable[[], Image.Image] | tuple[Path, ...]
    question: str
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    extra: dict = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        """Its image files, in order; empty if the image is rendered."""
        if isinstance(self.image, tuple):
            return self.image
        return () if callable(self.image) else (Path(self.image),)

    def open(self) -> Any:
        """The image, RGB; a list if the sample has a tuple."""
        if isinstance(self.image, tuple):
            return [open_image(path) for path in self.image]
        return self.image() if callable(self.image) else open_image(self.image)


@dataclass(frozen=True)
class Task:
    """`score` gives 0..1 for one answer, or None if only `aggregate` can score it.

    `aggregate` maps (samples, texts) to named numbers; without it the mean score is reported. `problems` lists the
    samples skipped by the reader.
    """

    name: str
    samples: tuple[Sample, ...]
    max_new_tokens: int
    score: Score
    aggregate: Callable[[Sequence[Sample], Sequence[str]], dict[str, float]] | None = None
    suffix: str = ""  # appended to the question
    problems: tuple[str, ...] = ()

    def prompt(self, sample: Sample) -> str:
        """The whole text of a sample: question, choices, suffix."""
        text = sample.question
        if sample.choices:
            text += "".join(f"\n{chr(65 + i)}. {choice}" for i, choice in enumerate(sample.choices))
        return text + self.suffix


def subset(task: Task, count: int, seed: int = 0) -> Task:
    """The same task on `count` samples drawn with a fixed seed, in the original order."""
    if not 0 < count <= len(task.samples):
        raise ValueError(f"count must lie in 1..{len(task.samples)}, not {count}")
    chosen = np.sort(np.random.RandomState(seed).permutation(len(task.samples))[:count])
    return replace(task, samples=tuple(task.samples[i] for i in chosen))


def run(task: Task, generate: Callable[[Any, str], str], results: str | Path | None, model: str) -> dict:
    """Answer every sample, appending a row to the JSONL file `results` as each is finished; returns the summary.

    Rows of an earlier run of the same task and `model` are kept, one per id, so the files of several processes can be
    concatenated; repeats of a padding sampler are dropped. A broken image scores 0 and is listed as a problem.
    """
    if not task.samples:
        raise ValueError(f"the task {task.name} has no sample")
    done = ResultFile(results, digest(task.name, model, task.suffix, task.max_new_tokens))
    asked = with_progress(task.samples, "question")
    rows = [done.get(sample.id, partial(_answer, task, sample, generate)) for sample in asked]
    return _summary(task, model, rows)


def _answer(task: Task, sample: Sample, generate: Callable) -> dict:
    row: dict = {"id": sample.id, "question": sample.question}
    try:
        image = sample.open()
    except (ValueError, FileNotFoundError) as error:
        return row | {"text": "", "score": 0.0, "problem": str(error)}
    text = generate(image, task.prompt(sample))
    return row | {"text": text, "score": task.score(sample, text)}


def _summary(task: Task, model: str, rows: list[dict]) -> dict:
    scores = [row["score"] for row in rows if row["score"] is not None]
    out: dict = {"task": task.name, "model": model, "n": len(rows)}
    out["score"] = sum(scores) / len(scores) if len(scores) == len(rows) else None
    if task.aggregate:
        out |= task.aggregate(task.samples, [row["text"] for row in rows])
    out["problems"] = [*task.problems, *(row["problem"] for row in rows if "problem" in row)]
    return out


def exact(sample: Sample, text: str) -> float:
    """1 when the normalised text is one of the answers."""
    return float(text_scores.normalise_answer(text) in {text_scores.normalise_answer(a) for a in sample.answers})


def vqa(sample: Sample, text: str) -> float:
    return text_scores.vqa_accuracy(text, sample.answers)


def multiple_choice(sample: Sample, text: str) -> float:
    """1 when the stated letter is the answer; without choices, exact match."""
    if not sample.choices:
        return exact(sample, text)
    return float(text_scores.letter(text, sample.choices) == sample.answers[0])


def yes_or_no(sample: Sample, text: str) -> float:
    """1 when the first yes or no is the answer."""
    return float(text_scores.yes_no(text) == sample.answers[0].lower())


def caption_scores(samples: Sequence[Sample], texts: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU-4, mean ROUGE-L and mean CIDEr-D. METEOR and SPICE are not supported: see `text_scores`."""
    truths = [sample.answers for sample in samples]
    rouge = float(np.mean([text_scores.rouge_l(text, truth) for text, truth in zip(texts, truths)]))
    cider = float(np.mean(text_scores.cider_d(texts, truths)))
    return {"bleu4": text_scores.bleu(texts, truths), "rouge_l": rouge, "cider_d": cider}


def mme_scores(samples: Sequence[Sample], texts: Sequence[str]) -> dict[str, float]:
    """MME's points by category, 100 accuracy + 100 accuracy+ (both questions of an image right), and their sum."""
    right: dict[str, dict[str, list[float]]] = {}
    for sample, text in zip(samples, texts):
        images = right.setdefault(sample.extra["category"], {})
        images.setdefault(sample.extra["image"], []).append(yes_or_no(sample, text))
    points = {}
    for category, images in right.items():
        every = [v for values in images.values() for v in values]
        points[category] = 100 * float(np.mean(every)) + 100 * float(np.mean([min(v) for v in images.values()]))
    return {f"mme/{category}": value for category, value in points.items()} | {"mme": sum(points.values())}
