"""What the report says of a method: its speed-up and its quality measures, each with interval and n."""

from __future__ import annotations

from dataclasses import dataclass

from visspec.eval.metrics.intervals import wilson
from visspec.eval.report.data import Method, interval, number
from visspec.eval.report.records import METHOD

QUALITY = {  # field -> (name, higher is better)
    "geneval": ("GenEval score", True),
    "strict": ("strict score", True),
    "right": ("share of right pictures", True),
    "fd": ("Fréchet distance", False),
    "fd_ratio": ("FD over plain", False),
    "latent_displacement": ("latent displacement", False),
    "drift_per_token": ("drift per token", False),
}
JUDGED = (
    "geneval",
    "strict",
    "right",
    "fd",
    "fd_ratio",
)  # measured on the images of the quality part, not of the speed runs


def speed_of(method: Method) -> float | None:
    """A method's speed-up if it is a positive number, else None."""
    found = number(method.record.get("speedup"))
    return found if found and found > 0 else None


def positive(pair: tuple[float, float] | None) -> tuple[float, float] | None:
    return pair if pair and min(pair) > 0 else None


@dataclass(frozen=True)
class Quality:
    """A method's value of a quality measure with interval, n and a note."""

    name: str
    value: float
    interval: tuple[float, float] | None
    n: int
    words: str = ""


def quality_of(method: Method, field: str) -> Quality | None:
    """The measure of that name in `QUALITY`; None if it was not measured."""
    record, name = method.record, QUALITY[field][0]
    drawn = number(record.get("quality_n")) if field in JUDGED else None
    value, n = number(record.get(field)), int(drawn or method.n)
    if field == "right":
        judged = [right for right in (image.judged[0] for image in method.images) if right is not None]
        if value is None and judged:  # no share over all images: use the images of the record
            value, n = sum(judged) / len(judged), len(judged)
        return None if value is None else Quality(name, value, wilson(value * n, n) if n else None, n)
    if value is None:
        return None
    floor = number(record.get("fd_noise_floor")) if field == "fd" else None
    words = "" if floor is None else f"noise floor about {floor:.3g} at this n"
    spread = interval(record.get(f"{field}_ci95")) if f"{field}_ci95" in METHOD else None
    return Quality(name, value, spread, n, words)
