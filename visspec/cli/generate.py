"""`visspec generate`: writes images as they are finished, a grid, maps, and a record of how each was drawn."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visspec.cli.arguments import DrawingOptions, RayOptions, is_picture
from visspec.io.files import replacing, write_json
from visspec.io.options import Positive, option

if TYPE_CHECKING:
    from PIL import Image

    from visspec.api.images.pipeline import ImageOutput, ImagePipeline

CHOSEN = ("drafter", "acceptance", "order")
MEASURED = ("guarantee", "drift_per_token")  # figures of the batch of an image


@dataclass(kw_only=True)
class Options(RayOptions, DrawingOptions):
    prompt: list[str] = option("what to draw; quote each of several prompts", positional=True, nargs="*")
    prompts: Path | None = option("file of prompts, one per line, or .jsonl of {prompt, id}", None)
    n: Positive = option("number of images of each prompt", 1)
    out: Path = option("folder for PNG files, or a single picture", Path("out/images"), short="-o", writes="picture")
    grid: Path | None = option("also write a grid of all images to this file", None, writes="file")
    maps: bool = option("show the origin of its tokens next to each image", False)
    model: str | None = option("included name, folder or hub id of an image model (default: an included one)", None)
    top_k: int | None = option("sample from this many most likely codes (default: the model's own)", None)
    top_p: float | None = option("sample from the codes of this total probability (default: the model's own)", None)
    height: int | None = option("height in pixels (default: the model's own)", None)
    width: int | None = option("width in pixels (default: the model's own)", None)
    preset: str | None = option("published method (visspec list presets), or file of visspec tune", None)
    drafter: str | None = option("drafter: name with options, or folder (default: jacobi; none for vectors)", None)
    order: str | None = option("order of decoding; halton, spread or raster for any-order models", None)
    batch_invariant: bool = option("make codes independent of the batch, in half precision too", False)
    acceptance: str | None = option(
        "acceptance rule, e.g. lantern:k=100,delta=0.1 (default: exact; coupled for vectors)", None
    )
    batch_size: Positive = option("number of images drawn together", 8)
    stats: bool = option("print passes, tau and times of each batch", False)
    json: Path | None = option("write seeds, passes, guarantee and drift to this file", None, writes="file")
    workers: Positive = option("number of processes, with --ray", 2)

    def __post_init__(self) -> None:
        if not all(text.strip() for text in self.prompt):
            raise ValueError("prompt: got an empty prompt. Describe what to draw.")
        if len(self.prompt) > 1 and not any(" " in text for text in self.prompt):
            self.prompt = [" ".join(self.prompt)]  # a prompt without quotes


def run(arguments: Options) -> int | None:
    """Draw the images. Finished images are kept if the run is interrupted."""
    if arguments.ray:
        from visspec.cli.generate_ray import run_ray

        return run_ray(arguments)
    if arguments.retry_failed:
        raise ValueError("--retry-failed: got it without --ray. Pass both.")
    from visspec.api.grid import grid
    from visspec.io.provenance import provenance

    texts = read_prompts(arguments)
    pipe = pipeline(arguments)
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty())
    stream = pipe.stream(texts, num_images_per_prompt=arguments.n, seed=arguments.seed, **settings(arguments))
    shown: list[Image.Image] = []
    captions: list[str] = []
    about = {name: getattr(pipe, name) for name in CHOSEN} | {"provenance": provenance(pipe.model)}
    single = is_picture(arguments.out)
    if single and len(texts) * arguments.n > 1:
        raise ValueError(f"--out: got {arguments.out} for {len(texts) * arguments.n} pictures, expected a folder.")
    first = 0 if single else first_number(arguments.out)
    results: list[dict[str, Any]] = []
    complete = False
    try:
        for part in stream:
            if first and not shown:
                print(f"visspec: {arguments.out} has images up to number {first - 1}; continuing", file=sys.stderr)
            for i, image in enumerate(part.images):
                path = arguments.out if single else arguments.out / f"{first + len(shown):05d}.png"
                picture = beside(image, part, i) if arguments.maps else image
                save(picture, path)
                shown.append(picture)
                captions.append(part.prompts[i])
                passes = int(part.passes[i].max()) + 1
                row = {"path": str(path), "prompt": part.prompts[i], "seed": part.seeds[i], "nfe": passes}
                results.append(row | {name: getattr(part.stats[0], name) for name in MEASURED})
                line = f"seed {part.seeds[i]}, {passes} passes for {part.tokens[i].numel()} tokens"
                print(f"{path}: {part.prompts[i]} ({line})", flush=True)
            if arguments.stats:
                print(part.stats[0])
        complete = True
    finally:
        if shown:
            write_json(arguments.json, {"results": results, "complete": complete, **about})
        if shown and arguments.grid:
            save(grid(shown, captions), arguments.grid)
            print(f"{arguments.grid}: all {len(shown)}")
    return None


def read_prompts(arguments: Options) -> list[str]:
    """Return the prompts. Raises ValueError if there is none, or a line has none."""
    from visspec.api import sources

    prompts = [*arguments.prompt, *([] if arguments.prompts is None else sources.texts(arguments.prompts))]
    if not prompts:
        raise ValueError("prompt: got none, expected at least one.")
    return prompts


def pipeline(arguments: Options) -> ImagePipeline:
    from visspec.api.images.pipeline import ImagePipeline

    chosen = {name: value for name in CHOSEN if (value := getattr(arguments, name)) is not None}
    chosen |= {name: value for name in ("preset", "batch_invariant") if (value := getattr(arguments, name))}
    return ImagePipeline.from_pretrained(arguments.model, **chosen, **arguments.hardware)


def settings(arguments: Options) -> dict[str, Any]:
    """Return the arguments of a pipeline call except prompts, seeds and the method."""
    names = ("guidance_scale", "temperature", "top_k", "top_p", "height", "width", "batch_size")
    return {name: getattr(arguments, name) for name in names}


def first_number(folder: Path) -> int:
    """Return the number after the highest of the folder's images, so that no image of an earlier run is overwritten."""
    numbers = [int(path.stem) for path in folder.glob("*.png") if path.stem.isdecimal()]
    return max(numbers, default=-1) + 1


def beside(image: Image.Image, part: ImageOutput, i: int) -> Image.Image:
    """Return the image with the map of its token origins on the right."""
    from visspec.api.grid import grid, origin_image

    return grid([image, origin_image(part.maps[i], image.width)], columns=2)


def save(image: Image.Image, path: Path) -> None:
    """Write an image as PNG, or as JPEG if the suffix says so."""
    with replacing(path) as draft:
        image.save(draft, format="JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG")
