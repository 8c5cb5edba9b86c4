"""`visspec convert`: a folder of published weights in a layout of their own, for every command that takes a model."""

import re
from dataclasses import dataclass
from pathlib import Path

from visspec.entries import TABLES
from visspec.io.options import Positive, option

SIDES = re.compile(r"(?<!\d)(256|384|512|1024)(?!\d)")  # in names of files: t2i_XL_stage1_256.pt


@dataclass(kw_only=True)
class Options:
    layout: str = option(
        "whose weights (visspec list layouts); lantern: a drafter; anole: one in transformers' form, and its codec;"
        " safetensors: any pickled weights, whose names stay",
        positional=True, choices=[*TABLES["layout"], "lantern", "anole", "safetensors"],
    )  # fmt: skip
    weights: Path = option("the published file, or a folder; of anole also a hub id", positional=True)
    vq: Path | None = option("published codec of the model's images", None, short="--vae")
    text: str | None = option("folder or hub id of the text encoder, for LlamaGen and Infinity", None)
    size: Positive | None = option("pixels along a side of an image (default: as the name of the file says)", None)
    heads: Positive | None = option("of the attention, only for sizes that were not published", None)
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
    made = {"lantern": "drafter", "safetensors": "weights"}
    print(f"{out}: {made.get(layout, f'visspec generate PROMPT --model {out}')}")
