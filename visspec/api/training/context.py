"""Preparation of the default drafter for a model, for `visspec train drafter --preset context`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visspec.api import loading
from visspec.api.captions import prepare
from visspec.api.text import requests
from visspec.api.text.accelerate import accelerate
from visspec.api.training.drafter import check_out
from visspec.io.provenance import provenance
from visspec.models.lookup.context import ContextDrafter
from visspec.models.lookup.successors import successors
from visspec.presets import target_sizes

PROMPT = "Hello."  # the table is about words of answers, so the prompt hardly matters


def run(target: str | Path, out: Path, overwrite: bool = False, seed: int = 0, **hardware: Any) -> ContextDrafter:
    """Write a drafter with the table of a model that generates text (`models.lookup.successors`) to a folder.
    `overwrite` replaces an existing drafter. The seed is only recorded in provenance.json, since nothing is sampled.
    Raises ValueError if the folder holds something else, or the model can't verify trees.
    """
    check_out(out, resume=False, overwrite=overwrite)
    model, processor = loading.load(str(target), **hardware)
    ids_1L = prepare(processor, [[]], PROMPT, model)["input_ids"]
    inputs = {"input_ids": ids_1L[:, :-1], "attention_mask": ids_1L.new_ones(1, ids_1L.shape[1] - 1)}
    request = requests.of_generate(model, inputs, do_sample=False, max_new_tokens=1)
    table_VK = successors(accelerate(model, None).target, request, int(ids_1L[0, -1]))
    drafter = ContextDrafter(successors=table_VK.cpu())
    drafter.save_pretrained(
        out, provenance(model, seed=seed, target=str(target), recipe="train_context", target_sizes=target_sizes(model))
    )
    return drafter
