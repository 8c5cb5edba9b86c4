"""Estimates the memory and time of a training run from a few of its steps, with a target of fewer layers.

The target is built from its configuration, on the device of the run, with random weights and a few of its layers.
Everything except the number of layers has its real size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from visspec.accept.exact import Exact
from visspec.api import loading
from visspec.eval.bench.clock import peak_above, seconds_of, waiter
from visspec.models.decoder.target import HFDecoder
from visspec.train.loop import Trainer
from visspec.train.options import TrainingOptions
from visspec.types import Request, TrainedDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS, PRESET_LAYERS = 2, 8  # layers of the target; presets read features of several
STEPS = 5
BYTES = 16  # bytes of a trained weight: float32, its gradient, two moments
GB = 1e9


def shallow(spec: str, layers: int, *, device: str, dtype: str | torch.dtype) -> tuple[PreTrainedModel, Any, dict]:
    """Build a target of few layers (`loading.without_weights`). Returns (model, processor, facts about the whole
    model).
    """
    whole = loading.without_weights(spec)
    where, local = loading.located(spec)
    config = whole.config
    text = config.get_text_config()
    depth, text.num_hidden_layers = text.num_hidden_layers, min(layers, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    if dtype == "auto":
        dtype = torch.float32 if device == "cpu" else config.dtype or torch.bfloat16
    precision = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device(device):
        model = type(whole)._from_config(config, dtype=precision).eval()
    model.generation_config = whole.generation_config
    processor = transformers.AutoProcessor.from_pretrained(where, local_files_only=local)
    size = sum(p.numel() for p in whole.parameters()) * precision.itemsize
    return model, processor, {"depth": depth, "layers": text.num_hidden_layers, "target_bytes": size}


def measure(
    model: PreTrainedModel,
    drafter: TrainedDrafter,
    prompts: Callable[[int], Request],
    options: TrainingOptions,
    requests: int,
    whole: dict[str, int],
) -> dict[str, Any]:
    """Measure bytes and seconds of a run.

    Args:
        model: The shallow target.
        drafter: The drafter.
        prompts: Requests by number.
        options: The training options.
        requests: Number of requests to the target in the whole run.
        whole: Facts about the whole model, from `shallow`.

    Returns:
        "target_bytes", "drafter_bytes" (with gradients and optimiser), "group_bytes" (recorded answers), "step_bytes"
            (the additional peak of a step; None if unknown), "step_s", "answers_s" of a request to the shallow target,
            and "run_s", an upper bound that scales all of `answers_s` with the layers.
    """
    target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True, states=True)
    trainer = Trainer(target, drafter, Exact(), prompts, replace(options, group=1), "unused", {})
    wait = waiter(model.device)
    answers_s, lessons = seconds_of(lambda: trainer.lessons(0), wait)
    count = sum(p.numel() for p in drafter.head.parameters() if p.requires_grad)
    recorded = sum(value.nbytes for value in vars(lessons[0]).values() if isinstance(value, Tensor)) * trainer.parts

    def steps() -> None:
        for _ in range(STEPS):
            trainer.update(lessons)

    with trainer.training():
        trainer.update(lessons)  # creates the optimiser's state
        step_bytes, step_s = peak_above(model.device, lambda: seconds_of(steps, wait)[0] / STEPS)
    run_s = options.steps * step_s + requests * answers_s * whole["depth"] / whole["layers"]
    found = {"parameters": count, "drafter_bytes": count * BYTES, "group_bytes": recorded * options.group}
    return whole | found | {"step_bytes": step_bytes, "step_s": step_s, "answers_s": answers_s, "run_s": run_s}


def describe(figures: dict[str, Any], options: TrainingOptions, device: str) -> str:
    """Format the figures of `measure` as text."""
    parts = {
        "target": f"weights of {figures['depth']} layers",
        "drafter": f"{figures['parameters'] / 1e6:,.1f} M parameters, gradients, optimiser",
        "group": "recorded answers of a group",
        "step": f"the peak of a step, {options.rows} answers, above these",
    }
    sizes = {name: figures[f"{name}_bytes"] for name in parts}
    lines = [f"{name:8}{_gb(sizes[name])}  {about}" for name, about in parts.items()]
    total = None if None in sizes.values() else sum(sizes.values())
    return "\n".join(
        [
            *lines,
            f"in all  {_gb(total)}",
            f"a step {figures['step_s']:.2f} s, answers to a batch {figures['answers_s']:.2f} s with"
            f" {figures['layers']} of {figures['depth']} layers on {device};"
            f" {options.steps:,} steps {figures['run_s'] / 3600:,.1f} h at most",
        ]
    )


def _gb(size: int | None) -> str:
    return "not known" if size is None else f"{size / GB:9.3f} GB"
