"""`visspec convert`: writes a folder of published weights that every command can load."""

import re
from dataclasses import dataclass
from pathlib import Path

from visspec.entries import TABLES
from visspec.io.options import Positive, option

SIDES = re.compile(r"(?<!\d)(256|384|512|1024)(?!\d)")  # sizes in file names: t2i_XL_stage1_256.pt


@dataclass(kw_only=True)
class Options:
    layout: str = option(
        "layout of the weights (visspec list layouts); lantern: a drafter; anole: a model in transformers' form, to add"
        " its codec; safetensors: any pickled weights",
        positional=True, choices=[*TABLES["layout"], "lantern", "anole", "safetensors"],
    )  # fmt: skip
    weights: Path = option("published file or folder; for anole also a hub id", positional=True)
    vq: Path | None = option("published codec of the model's images", None, short="--vae")
    text: str | None = option("folder or hub id of the text encoder, for LlamaGen and Infinity", None)
    size: Positive | None = option("side of an image in pixels (default: from the file name)", None)
    heads: Positive | None = option("number of attention heads, for unpublished sizes", None)
    drafter: Path | None = option("folder of a trained drafter for the model, such as LANTERN's", None)
    out: Path = option("new folder", writes="folder")


def run(arguments: Options) -> None:
    from visspec.api.convert import convert

    options = dict(vars(arguments))
    layout, weights, out = (options.pop(name) for name in ("layout", "weights", "out"))
    sides = SIDES.findall(weights.name)
    if arguments.size is None and sides and layout in ("llamagen", "randar", "infinity"):
        options["size"] = int(sides[0])
    convert(layout, weights, out, **options)
    uses = {"lantern": "drafter", "safetensors": "weights"}
    print(f"{out}: {uses.get(layout, f'visspec generate PROMPT --model {out}')}")
