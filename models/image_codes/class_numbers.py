"""Prompts of class-conditional models."""

from __future__ import annotations

import torch
from torch import Tensor


def class_numbers(texts: list[str], classes: int, name: str) -> Tensor:
    """(B,) int64. Raises ValueError for a text that is no number of a class; `name` is the argument's."""
    wrong = [text for text in texts if not (text.strip().isdecimal() and int(text) < classes)]
    if wrong:
        raise ValueError(f"{name}: got {wrong[0]!r}, expected a class number 0..{classes - 1}")
    return torch.tensor([int(text) for text in texts])
