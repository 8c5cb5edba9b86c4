"""Recorded answers on disk, so that a target answers once for many training runs.

A safetensors file holds the answers to one request and is written in one move. An interrupted run continues with the
complete files. Answers are read bit for bit as they were recorded.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from visspec.io.files import atomic_write, same_settings
from visspec.train.batches import TrainingBatch
from visspec.train.capture import identity

SETTINGS = "store.json"
NUMBERS = ("prompt_length", "lengths", "width", "reach")  # fields of a batch that are not tensors


class Store:
    """Answers in a folder, by the number of their request. Raises ValueError for a folder with other content. They
    depend on everything in `settings`. `law` returns the target's `TrainingBatch.law` for these requests.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: dict[str, Any],
        law: Callable[[], Callable[[Tensor], Tensor] | None],
        device: torch.device,
    ):
        self.folder, self.device, self._law = Path(folder), device, functools.cache(law)
        there = any(self.folder.glob("[!.]*"))  # hidden files are being written by another process
        if there and not (self.folder / SETTINGS).is_file():
            raise ValueError(f"store: {folder} has other content. Choose another folder.")
        same_settings(self.folder / SETTINGS, f"store: {folder}", settings)

    def path(self, number: int) -> Path:
        return self.folder / f"answers-{number:08d}.safetensors"

    def answers(self, number: int, record: Callable[[], TrainingBatch]) -> TrainingBatch:
        """Return the stored answers to a request, or those that `record` returns, which are then stored."""
        path = self.path(number)
        if not path.is_file():
            batch = record()
            _write(path, batch)
            return batch
        with safe_open(path, framework="pt", device=str(self.device)) as file:
            numbers = json.loads(file.metadata()["batch"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        law = identity if numbers.pop("distributions") else self._law()
        assert law is not None  # existed when the states were recorded
        hosts = {f"host_{name}": tensors[name].cpu() if name in tensors else None for name in ("ids", "attention")}
        absent = dict.fromkeys(("attention", "embeddings"))
        return TrainingBatch(**{**absent, **tensors, **hosts, **numbers, "law": law})

    def check_space(self, requests: int, rows: int) -> str:
        """Return a sentence on the size of all answers, given the first. Raises ValueError if the disk is too full."""
        size = self.path(0).stat().st_size
        there = sum(1 for _ in self.folder.glob("answers-*.safetensors"))
        free = shutil.disk_usage(self.folder).free
        if (size_needed := size * max(requests - there, 0)) > free:
            raise ValueError(f"store: {size_needed / 1e9:,.1f} GB are needed, but only {free / 1e9:,.1f} are free.")
        return (
            f"{self.folder} keeps {size / rows / 1e6:,.2f} MB per answer, {size * requests / 1e9:,.2f} GB for"
            f" {requests * rows:,} answers in all"
        )


def _write(path: Path, batch: TrainingBatch) -> None:
    values = {f.name: getattr(batch, f.name) for f in fields(batch) if not f.name.startswith("host_")}
    tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: values[name] for name in NUMBERS} | {"distributions": batch.law is identity}
    with atomic_write(path) as draft:
        save_file(tensors, draft, metadata={"batch": json.dumps(numbers)})
