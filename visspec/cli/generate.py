"""`visspec generate`: images to files as they are finished, a grid, maps, and a record of how each was drawn."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visspec.cli.arguments import add_drawing, positive
from visspec.files import Results, replacing

if TYPE_CHECKING:
    from PIL import Image

    from visspec.api.images import ImageOutput, ImagePipeline

CHOSEN = ("drafter", "acceptance", "order")
MEASURED = ("guarantee", "drift_per_token", "displacement_per_token")  # of the batch an image was drawn in


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="+", help="what to draw")
    parser.add_argument("-n", type=positive, default=1, help="images of each prompt")
    parser.add_argument("-o", "--out", type=Path, default=Path("out/images"), help="folder of the PNG files")
    parser.add_argument("--grid", type=Path, help="also write one picture of all images")
    parser.add_argument("--maps", action="store_true", help="beside each image, where its tokens came from")
    parser.add_argument("--model", default="painter", help="shipped name, folder or hub id of an image model")
    add_drawing(parser)
    parser.add_argument("--top-k", type=int, help="default: the model's own")
    parser.add_argument("--top-p", type=float, help="default: the model's own")
    parser.add_argument("--height", type=int, help="pixels; default: the model's own")
    parser.add_argument("--width", type=int, help="pixels; default: the model's own")
    parser.add_argument("--preset", help="a published method by name, see visspec list")
    parser.add_argument("--drafter", help="name with options, or folder (default: jacobi; none for vectors)")
    parser.add_argument("--order", help="order of decoding, with options: zipar:window=4 (default: raster)")
    parser.add_argument("--acceptance", help="rule and options, e.g. lantern:k=100,delta=0.1 (default: exact, coupled)")
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--stats", action="store_true", help="print passes, tau and times of each batch")
    parser.add_argument("--json", type=Path, help="write seeds, passes, guarantee, drift and displacement to this file")


def run(arguments: argparse.Namespace) -> None:
    """Finished images stay when it is interrupted."""
    from visspec.api.grid import grid
    from visspec.api.images import ImagePipeline
    from visspec.provenance import provenance

    check_method(arguments)
    pipe = ImagePipeline.from_pretrained(
        arguments.model, device=arguments.device, dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )  # fmt: skip
    chosen = method(arguments, pipe)
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty())
    stream = pipe.stream(
        arguments.prompt, num_images_per_prompt=arguments.n, guidance_scale=arguments.guidance_scale,
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, height=arguments.height,
        width=arguments.width, seed=arguments.seed, batch_size=arguments.batch_size, **chosen,
    )  # fmt: skip
    shown: list[Image.Image] = []
    captions: list[str] = []
    about = {name: getattr(pipe, name) for name in CHOSEN} | chosen | {"provenance": provenance(pipe.model)}
    first = first_number(arguments.out)
    with Results(arguments.json, about) as results:
        try:
            for part in stream:
                if first and not shown:
                    print(f"visspec: {arguments.out} has images up to number {first - 1}, going on", file=sys.stderr)
                measured = {name: getattr(part.stats[0], name) for name in MEASURED}
                for i, image in enumerate(part.images):
                    path = arguments.out / f"{first + len(shown):05d}.png"
                    picture = beside(image, part, i) if arguments.maps else image
                    save(picture, path)
                    shown.append(picture)
                    captions.append(part.prompts[i])
                    passes = int(part.passes[i].max()) + 1
                    row = {"path": str(path), "prompt": part.prompts[i], "seed": part.seeds[i], "nfe": passes}
                    results.add(row | measured)
                    found = f"seed {part.seeds[i]}, {passes} passes for {part.tokens[i].numel()} tokens"
                    print(f"{path}: {part.prompts[i]} ({found})", flush=True)
                if arguments.stats:
                    print(part.stats[0])
        finally:
            if shown and arguments.grid:
                save(grid(shown, captions), arguments.grid)
                print(f"{arguments.grid}: all {len(shown)}")


def first_number(folder: Path) -> int:
    """The number behind the highest of the folder's images, so that none of an earlier run is written over."""
    numbers = [int(path.stem) for path in folder.glob("*.png") if path.stem.isdecimal()]
    return max(numbers, default=-1) + 1


def check_method(arguments: argparse.Namespace) -> None:
    """Raises ValueError for a preset that is not known, or that has options beside it."""
    from visspec.api import zoo

    if arguments.preset is None:
        return
    if arguments.preset not in zoo.VECTOR_PRESETS:  # which one it is, the model tells
        zoo.preset(arguments.preset)
    for name in CHOSEN:
        if (value := getattr(arguments, name)) is not None:
            raise ValueError(f"--{name}: got {value} beside --preset, expected one of the two")


def method(arguments: argparse.Namespace, pipe: ImagePipeline) -> dict[str, Any]:
    """Drafter, rule and order from --preset, or from their own options; those not given are the pipeline's."""
    from visspec.api import zoo

    if arguments.preset is not None:
        return zoo.method(str(zoo.preset(arguments.preset, pipe.family.vectors, zoo.kind_of(pipe.model))))
    return {name: value for name in CHOSEN if (value := getattr(arguments, name)) is not None}


def beside(image: Image.Image, part: ImageOutput, i: int) -> Image.Image:
    """The image with the map of its tokens' origins to the right."""
    from visspec.api.grid import grid, origin_image

    return grid([image, origin_image(part.maps[i], image.width)], columns=2)


def save(image: Image.Image, path: Path) -> None:
    """Write an image as PNG, or as JPEG where the name says so."""
    with replacing(path) as draft:
        image.save(draft, format="PNG" if path.suffix.lower() != ".jpg" else "JPEG")
