"""Options of a command line as the fields of a dataclass, from which a parser is built. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


def number(kind: Callable[[str], Any], fits: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """Return an argparse type for numbers that fit. It raises ArgumentTypeError, which names the option."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"got {text}, expected {expected}")
        return value

    return read


Positive = Annotated[int, number(int, lambda value: value >= 1, "a whole number of at least 1")]
Count = Annotated[int, number(int, lambda value: value >= 0, "a whole number of at least 0")]
Seed = Annotated[int, number(int, lambda value: 0 <= value < 1 << 62, "a whole number from 0 to 2**62 - 1")]
Share = Annotated[float, number(float, lambda value: 0 < value < float("inf"), "a number above 0")]
Temperature = Annotated[float, number(float, lambda value: 0 <= value < float("inf"), "0 (greedy) or more")]
Probability = Annotated[float, number(float, lambda value: 0 <= value <= 1, "a probability")]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the three names closest to a misspelled one."""
    return ", ".join(get_close_matches(name, list(names), 3, 0.0))


def option(help: str = "", default: object = MISSING, **more: object) -> Any:
    """Declare a field of a dataclass of options. A field without a default is required.

    `more` has choices, metavar and nargs of argparse; `short` ("-o"); `positional`; `repeat`, for a list given item by
    item; `writes`, for a path that is checked before work: "file", "folder" or "picture" (a file or folder, by its
    ending); `command`, for the field that holds the command's last word.
    """
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **more})
    return field(default=default, metadata={"help": help, **more})


def add_options(parser: argparse.ArgumentParser, record: type) -> None:
    """Add the fields of a dataclass to a parser. A bool becomes a flag; an annotated type parses its own text."""
    hints = get_type_hints(record, include_extras=True)
    for one in fields(record):
        more = dict(one.metadata)
        if more.pop("command", False):
            continue
        short, positional, repeat = (more.pop(name, None) for name in ("short", "positional", "repeat"))
        more.pop("writes", None)
        kind = hints[one.name]
        if get_origin(kind) in (Union, UnionType):
            kind = next(part for part in get_args(kind) if part is not type(None))
        if get_origin(kind) is list:
            (kind,) = get_args(kind)
            more |= {"action": "append"} if repeat else {"nargs": more.get("nargs", "+")}
        if kind is bool:
            more["action"] = "store_true"
        elif get_origin(kind) is Literal:
            more["choices"] = get_args(kind)
        else:
            more["type"] = get_args(kind)[1] if get_origin(kind) is Annotated else kind
        if positional:
            parser.add_argument(one.name, **more)
            continue
        default = one.default if one.default_factory is MISSING else one.default_factory()
        more |= {"required": True} if default is MISSING else {"default": default}
        name = f"--{one.name.replace('_', '-')}" if len(one.name) > 1 else f"-{one.name}"
        names = [name, short] if short else [name]
        parser.add_argument(*names, dest=one.name, **more)


def sampling_arguments(temperature: float) -> dict[str, Any]:
    """Return arguments of `generate` that sample from the full distribution at a temperature; 0 is greedy."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": float(temperature), "top_k": 0, "top_p": 1.0}


@dataclass(kw_only=True)
class HardwareOptions:
    """The device and dtype of a model."""

    device: str = option(
        "torch device; auto: the GPU if there is one; balanced: layers over all devices; tp: over torchrun's processes",
        "auto",
    )
    dtype: Dtype = option("dtype of the weights; auto: float32 on a CPU, else the checkpoint's", "auto")
    trust_remote_code: bool = option("run code that comes with the model", False)

    @property
    def hardware(self) -> dict[str, Any]:
        """Keyword arguments for functions that load a model."""
        return {"device": self.device, "dtype": self.dtype, "trust_remote_code": self.trust_remote_code}
