"""Options of commands as dataclasses, and options that several commands share. Imports nothing heavy."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from visspec.io import included
from visspec.io.files import unwritable
from visspec.io.options import HardwareOptions, Positive, Seed, Temperature, option, sampling_arguments


def read_options(arguments: argparse.Namespace, record: type) -> Any:
    """Convert parsed arguments to a command's dataclass. Raises ValueError for unusable paths and models."""
    options = record(**{one.name: getattr(arguments, one.name) for one in fields(record)})
    for one in fields(record):
        if one.name in ("model", "target", "image_model") and getattr(options, one.name):
            included.check_model(getattr(options, one.name))
        path, writes = getattr(options, one.name), one.metadata.get("writes")
        folder = writes == "folder" or (writes == "picture" and not is_picture(path))
        if writes and path is not None and (why := unwritable(path, folder)) is not None:
            raise ValueError(f"--{one.name}: {why}")
    return options


def is_picture(path: Path) -> bool:
    """Return whether a path of --out is a single picture, not a folder, by its suffix."""
    return path.suffix.lower() in (".png", ".jpg", ".jpeg")


@dataclass
class NoOptions:
    """Options of a command without options."""


@dataclass(kw_only=True)
class JsonOption:
    json: Path | None = option("write the results to this file", None, writes="file")


@dataclass(kw_only=True)
class TargetOptions(HardwareOptions):
    model: str | None = option("folder or hub id of a vision-language model (default: an included one)", None)


@dataclass(kw_only=True)
class ModelOptions(TargetOptions):
    """A captioning model, its drafter and rule."""

    drafter: str = option("drafter: name with options, or folder; auto: the model's own, else context", "auto")
    acceptance: str = option("acceptance rule with options, e.g. typical:epsilon=0.1", "exact")
    batch_invariant: bool = option("make tokens independent of drafts and batch, in half precision too", False)
    preset: str | None = option("published method (visspec list presets), or file of visspec tune", None)


@dataclass(kw_only=True)
class SamplingOptions:
    """Sampling of texts."""

    max_new_tokens: Positive = option("maximum number of tokens of an answer", 128)
    temperature: Temperature = option("sampling temperature; 0 is greedy", 0.0)
    seed: Seed = option("random seed", 0)

    @property
    def generation(self) -> dict[str, Any]:
        """Keyword arguments of `generate` without the seed, to sample from the full distribution."""
        return {"max_new_tokens": self.max_new_tokens, **sampling_arguments(self.temperature)}


@dataclass(kw_only=True)
class DrawingOptions(JsonOption, HardwareOptions):
    guidance_scale: float | None = option("classifier-free guidance scale (default: the model's own)", None)
    temperature: Temperature | None = option("sampling temperature; 0 is greedy (default: the model's own)", None)
    seed: Seed = option("random seed", 0)


@dataclass(kw_only=True)
class RayOptions:
    """Work in several processes, with Ray Data."""

    ray: bool = option(
        "use --workers processes, each with its own model, on the machines of RAY_ADDRESS or on this one"
        " (pip install 'visspec[ray]')",
        False,
    )
    threads: Positive = option("number of threads of each process, with --ray", 1)
    retry_failed: bool = option("remove failed records from --out and make them again", False)


def load(options: ModelOptions, needs_pictures: bool = False) -> tuple[Any, Any]:
    """Load (accelerated model, processor or tokenizer) as in the options, see `loading.load`."""
    from visspec.api import loading
    from visspec.api.captions import tokenizer_of
    from visspec.api.text.accelerate import accelerate

    model, processor = loading.load(options.model, needs_pictures=needs_pictures, **options.hardware)
    how = {name: getattr(options, name) for name in ("acceptance", "preset", "batch_invariant")}
    return accelerate(model, options.drafter, tokenizer=tokenizer_of(processor), **how), processor
