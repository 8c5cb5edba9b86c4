"""Options of commands as dataclasses: the parser is made of their fields. Options that several commands take, their
types, the model they name, and what a run of records ends with. Imports nothing heavy.
"""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from visspec.io import included
from visspec.io.files import unwritable
from visspec.io.options import HardwareOptions, Positive, Seed, Temperature, option


def read_options(found: argparse.Namespace, record: type) -> Any:
    """The dataclass of what a parser has read. Raises ValueError, before any work, for a file or folder that can't be
    written, and for a model that is nowhere.
    """
    options = record(**{one.name: getattr(found, one.name) for one in fields(record)})
    for one in fields(record):
        if one.name in ("model", "target", "image_model") and getattr(options, one.name):
            included.check_model(getattr(options, one.name))
        path, writes = getattr(options, one.name), one.metadata.get("writes")
        folder = writes == "folder" or (writes == "picture" and not is_picture(path))
        if writes and path is not None and (why := unwritable(path, folder)) is not None:
            raise ValueError(f"--{one.name}: {why}")
    return options


def is_picture(path: Path) -> bool:
    """Whether a path of --out is one picture rather than a folder of them, by its ending."""
    return path.suffix.lower() in (".png", ".jpg", ".jpeg")


@dataclass
class NoOptions:
    """Of a command that takes none."""


@dataclass(kw_only=True)
class JsonOption:
    json: Path | None = option("write the results to this file", None, writes="file")


@dataclass(kw_only=True)
class TargetOptions(HardwareOptions):
    model: str | None = option("folder or hub id of a vision-language model (default: an included one)", None)


@dataclass(kw_only=True)
class ModelOptions(TargetOptions):
    """The model that captions, its drafter and rule."""

    drafter: str = option("name with options, or folder; auto: the model's own, else context", "auto")
    acceptance: str = option("rule and options, e.g. typical:epsilon=0.1", "exact")
    batch_invariant: bool = option("the same tokens in half precision, whatever drafts and shares the batch", False)
    preset: str | None = option("a published method by name (visspec list presets), or a file of visspec tune", None)


@dataclass(kw_only=True)
class SamplingOptions:
    """How texts are decoded."""

    max_new_tokens: Positive = option("most tokens of an answer", 128)
    temperature: Temperature = option("0 is greedy", 0.0)
    seed: Seed = option("of the random numbers", 0)

    @property
    def generation(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, seed aside: the whole distribution is drawn from."""
        return sampling(self.max_new_tokens, self.temperature)


@dataclass(kw_only=True)
class DrawingOptions(JsonOption, HardwareOptions):
    guidance_scale: float | None = option("default: the model's own", None)
    temperature: Temperature | None = option("0 is greedy; default: the model's own", None)
    seed: Seed = option("of the random numbers", 0)


@dataclass(kw_only=True)
class RayOptions:
    """Work in several processes, with Ray Data."""

    ray: bool = option(
        "--workers processes, each with its own model, on the machines of RAY_ADDRESS or on this one"
        " (pip install 'visspec[ray]')",
        False,
    )
    threads: Positive = option("of each process, with --ray", 1)
    retry_failed: bool = option("take the records that failed out of --out, to make them again", False)


def sampling(max_new_tokens: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> dict[str, Any]:
    """Keyword arguments of `generate`; temperature 0 is greedy."""
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature > 0 else {}
    return {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, **drawn}


def load(options: ModelOptions, needs_pictures: bool = False) -> tuple[Any, Any]:
    """(accelerated model, processor or tokenizer) of the model that `options` name, as `loading.load`."""
    from visspec.api import loading
    from visspec.api.accelerate import accelerate
    from visspec.api.captions import tokenizer_of

    model, processor = loading.load(options.model, needs_pictures=needs_pictures, **options.hardware)
    how = {name: getattr(options, name) for name in ("acceptance", "preset", "batch_invariant")}
    return accelerate(model, options.drafter, tokenizer=tokenizer_of(processor), **how), processor
