"""The one table of names: drafters, acceptance rules, shipped checkpoints. Lazy: imports nothing before its use."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

ACCEPTANCE = {
    "exact": ("visspec.accept.exact:Exact", "greedy and sampling, chains and trees; token-identical to plain decoding"),
    "rejection": (
        "visspec.accept.rejection:Rejection",
        "exact, with coins of its own: for drafts sampled from a reported law",
    ),
    "typical": ("visspec.accept.typical:Typical", "keeps what the target finds plausible; drift is measured"),
}
DRAFTERS = {
    "none": (None, "plain decoding in our loop"),
    "ngram": ("visspec.models.drafters.ngram:NGram", "prompt and history lookup; every target, nothing to train"),
}
CHECKPOINTS = Path(__file__).parent.parent / "models" / "zoo"


def load(reference: str) -> Any:
    """The object behind "module:name"."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """ "lantern:k=100,delta=0.1" -> ("lantern", {"k": 100, "delta": 0.1}). Numbers become numbers."""
    name, _, tail = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{name}: got option {item!r}, expected key=value")
        options[key] = _number(value)
    return name, options


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def _pick(table: dict, what: str, name: str):
    if name not in table:
        raise ValueError(f"{what}: got {name!r}, expected one of {', '.join(table)}")
    return table[name]


def acceptance(text: str) -> Any:
    """A rule by name and options, "typical:epsilon=0.3". Raises ValueError for an unknown name or option."""
    name, options = parse(text)
    reference, _ = _pick(ACCEPTANCE, "acceptance", name)
    try:
        return load(reference)(**options)
    except TypeError as error:
        raise ValueError(f"acceptance: {name} does not take {options}, {error}") from None


def drafter(spec: Any, model: nn.Module) -> tuple[Any, str]:
    """A drafter for a target, and its name. `spec` is as in `visspec.accelerate`."""
    if spec is None or spec == "none":
        return None, "none"
    if isinstance(spec, nn.Module) and not hasattr(spec, "propose"):
        return load("visspec.models.drafters.small_model:SmallModel")(spec, model), type(spec).__name__
    if not isinstance(spec, (str, Path)):
        return spec, type(spec).__name__
    name, options = parse(str(spec))
    if name in DRAFTERS:
        return load(DRAFTERS[name][0])(**options), name
    raise ValueError(f"drafter: got {str(spec)!r}, expected one of {', '.join(DRAFTERS)} or a checkpoint folder")
