"""Speculative decoding for vision-language models and autoregressive image models. Public names are imported lazily."""

import logging
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from visspec.io.version import VERSION as __version__

# In a checkout, models, kernels and eval are siblings of ./visspec. When Python finds that folder before the installed
# package, they are missing or belong to another clone; use the siblings.
_root, _models = Path(__file__).resolve().parent.parent, find_spec(f"{__name__}.models")
if _models is None or ((_root / "models" / "zoo").is_dir() and Path(str(_models.origin)).resolve().parents[1] != _root):
    __path__.append(str(_root))

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent until the application configures logging
_PUBLIC = {
    "accelerate": "visspec.api.text.accelerate",
    "speculative": "visspec.api.text.accelerate",
    "Accelerated": "visspec.api.text.accelerate",
    "Exact": "visspec.accept.exact",
    "Rejection": "visspec.accept.rejection",
    "Typical": "visspec.accept.typical",
    "Lantern": "visspec.accept.lantern",
    "LanternPlus": "visspec.accept.lantern",
    "Grouped": "visspec.accept.grouped",
    "Cool": "visspec.accept.cool",
    "Local": "visspec.accept.local",
    "Captions": "visspec.api.captions",
    "ImagePipeline": "visspec.api.images.pipeline",
    "register": "visspec.registry",
    "Preset": "visspec.presets",
    "Acceptance": "visspec.types",
    "Drafter": "visspec.types",
    "Sampling": "visspec.types",
    "Stats": "visspec.loop.stats",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("registry", "testing"):
        return import_module(f"visspec.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'visspec' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
