"""Configuration entries that several published drafter formats share: strict reading, and writing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from visspec.io.checkpoint import Value, read_tensors, shorten, unwrap_names
from visspec.models.layers import OPTIONAL_FACTORS, ROPE_SCALINGS, depth

EntryT = TypeVar("EntryT", int, dict, list)
VERSION = "0.9.0"  # version of speculators whose layout is written


def strip_prefix(tensors: Mapping[str, Value], folder: Path) -> dict[str, Value]:
    """Return a drafter's tensors, or their shapes, without the prefixes of wrappers, without `model.` and without the
    `logit_head.` of early files of SpecForge. Raises ValueError if two get the same name.
    """
    stripped = {name.removeprefix("logit_head."): value for name, value in unwrap_names(tensors, folder).items()}
    if "model.fc.weight" not in stripped:
        return stripped
    bare = {name.removeprefix("model."): value for name, value in stripped.items()}
    if len(bare) < len(stripped):
        raise ValueError(f"checkpoint: {folder} holds tensors with and without 'model.', expected one set of weights.")
    return bare


def read_stripped(folder: Path) -> dict[str, Tensor]:
    """Read a drafter's tensors, named by `strip_prefix`."""
    return strip_prefix(read_tensors(folder), folder)


def entry(folder: Path, data: dict, name: str, kind: type[EntryT]) -> EntryT:
    if type(data.get(name)) is not kind:
        words = {int: "a whole number", dict: "an object", list: "a list"}[kind]
        raise ValueError(f"drafter: {name} of {folder} is {shorten(data.get(name))}, expected {words}")
    return data[name]


def check_entries(folder: Path, entries: Mapping[str, Any], expected: Mapping[str, object]) -> None:
    """Raise ValueError if an entry is present with another value than expected."""
    for name, value in expected.items():
        if (found := entries.get(name)) is not None and found != value:
            raise ValueError(f"drafter: {name} of {folder} is {shorten(found)}, expected {value!r}.")


def object_of(value: object) -> dict:
    """Return a JSON object, or an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def list_of(value: object) -> list:
    """Return a JSON list, or an empty one in place of anything else."""
    return value if isinstance(value, list) else []


def check_verifier(folder: Path, data: dict, model: PreTrainedModel) -> None:
    """Raise ValueError if a checkpoint names a target of another class or with another number of layers."""
    named = list_of(object_of(object_of(data.get("speculators_config")).get("verifier")).get("architectures"))
    text = model.config.get_text_config()
    kind, layers = data.get("target_model_type"), data.get("num_target_layers")
    for name, allowed, *actual in (
        ("class", named, type(model).__name__),
        ("model_type", [kind] if kind else [], model.config.model_type, text.model_type),
        ("number of layers", [layers] if layers else [], depth(model)),
    ):
        if allowed and not any(one in allowed for one in actual):
            got = actual[0]
            raise ValueError(
                f"drafter: {folder} is made for a target of the {name} {shorten(allowed[0])}, got {got!r}."
            )


def check_ids(folder: Path, ids: Tensor, marked: Tensor, vocab: int) -> None:
    """Raise ValueError unless d2t lists ascending ids of the target's vocabulary and t2d marks the same ones."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or not bool((ids.diff() > 0).all()):
        raise ValueError(f"drafter: d2t of {folder} names ids out of order or beyond {vocab}, expected ascending ones.")
    if not torch.equal(marked.nonzero()[:, 0], ids):
        raise ValueError(f"drafter: t2d of {folder} marks {int(marked.sum())} ids, expected those that d2t names.")


def rope_of(folder: Path, layer: dict) -> tuple[float, dict | None, tuple[int, ...], bool, float]:
    """Return theta, scaling, M-RoPE sections, whether they are interleaved, and the share of rotated channels, from
    both generations of configurations.
    """
    entries = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    entries = {name: value for name, value in entries.items() if value is not None}
    theta = entries.pop("rope_theta", layer.get("rope_theta", 10000.0))
    old = entries.pop("type", "default")
    kind = entries.pop("rope_type", old)
    section, interleaved = entries.pop("mrope_section", ()), bool(entries.pop("mrope_interleaved", False))
    kind = "default" if kind == "mrope" else kind
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        raise ValueError(f"drafter: rope_scaling of {folder} is {shorten(kind)}, expected {', '.join(ROPE_SCALINGS)}.")
    if missing := sorted(name for name in ROPE_SCALINGS[kind] if name not in entries):
        raise ValueError(f"drafter: rope_scaling of {folder} has no {missing[0]!r}, expected it for {kind!r}.")
    factors = [*ROPE_SCALINGS[kind], *(name for name in OPTIONAL_FACTORS.get(kind, ()) if name in entries)]
    scaling = None if kind == "default" else {"rope_type": kind, **{name: entries.get(name) for name in factors}}
    if entries.get("truncate", True) is not True:
        raise ValueError(f"drafter: truncate of {folder} is {shorten(entries['truncate'])}, expected true.")
    theta = float(theta) if isinstance(theta, int) else theta
    partial = entries.get("partial_rotary_factor", layer.get("partial_rotary_factor"))
    partial = 1.0 if partial is None else float(partial) if type(partial) is int else partial
    return theta, scaling, tuple(section), interleaved, partial


def check_verifier_named(model: PreTrainedModel, form: str, verifier: str | None) -> None:
    """Raise ValueError if other engines could not find the target, from which they load embeddings and head."""
    if form in ("speculators", "dspark") and not (verifier or model.config.name_or_path):
        raise ValueError("verifier: got None, expected the name or the path of the target, from which it is loaded.")


def speculators_config(algorithm: str, tokens: int, model: PreTrainedModel, verifier: str | None) -> dict[str, Any]:
    """Return the entries by which speculators and vLLM find the algorithm and its target."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}],
        "verifier": {
            "name_or_path": verifier or model.config.name_or_path or None,
            "architectures": [type(model).__name__],
        },
    }
