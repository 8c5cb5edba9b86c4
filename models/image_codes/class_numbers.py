"""Prompts of class-conditional models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def class_numbers(texts: list[str], classes: int, name: str, labels: Sequence[str] = ()) -> Tensor:
    """Parse class numbers, or names if there are labels, into (B,) int64. Raises ValueError for any other text, with
    `name` as the argument's name.
    """
    named = {label: str(number) for number, label in enumerate(labels)}
    for text in texts:
        if named and text not in named and not text.strip().isdecimal():
            some = ", ".join(map(repr, list(named)[:2]))
            raise ValueError(f"{name}: got {text!r}, expected one of the {len(named)} classes ({some}, ...).")
    numbers = [named.get(text, text) for text in texts]
    for number in numbers:
        if not (number.strip().isdecimal() and int(number) < classes):
            raise ValueError(f"{name}: got {number!r}, expected a class number 0..{classes - 1}.")
    return torch.tensor([int(number) for number in numbers])
