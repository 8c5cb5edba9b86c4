"""`visspec generate`: images to files as they are finished, a grid, maps, and a record of how each was drawn."""

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

    from visspec.api.images import ImageOutput, ImagePipeline

CHOSEN = ("drafter", "acceptance", "order")
MEASURED = ("guarantee", "drift_per_token")  # of the batch an image was drawn in


@dataclass(kw_only=True)
class Options(RayOptions, DrawingOptions):
    prompt: list[str] = option("what to draw; several prompts are quoted", positional=True, nargs="*")
    prompts: Path | None = option("file of prompts, one a line, or .jsonl of {prompt, id}", None)
    n: Positive = option("images of each prompt", 1)
    out: Path = option("folder of the PNG files, or one picture", Path("out/images"), short="-o", writes="picture")
    grid: Path | None = option("also write one picture of all images", None, writes="file")
    maps: bool = option("beside each image, where its tokens came from", False)
    model: str | None = option("included name, folder or hub id of an image model (default: an included one)", None)
    top_k: int | None = option("default: the model's own", None)
    top_p: float | None = option("default: the model's own", None)
    height: int | None = option("pixels; default: the model's own", None)
    width: int | None = option("pixels; default: the model's own", None)
    preset: str | None = option("a published method by name (visspec list presets), or a file of visspec tune", None)
    drafter: str | None = option("name with options, or folder (default: jacobi; none for vectors)", None)
    order: str | None = option("order of decoding, of any-order models halton, spread or raster", None)
    batch_invariant: bool = option("the same codes in half precision, whatever drafts and shares the batch", False)
    acceptance: str | None = option("rule and options, e.g. lantern:k=100,delta=0.1 (default: exact, coupled)", None)
    batch_size: Positive = option("images drawn together", 8)
    stats: bool = option("print passes, tau and times of each batch", False)
    json: Path | None = option("write seeds, passes, guarantee and drift to this file", None, writes="file")
    workers: Positive = option("processes, with --ray", 2)

    def __post_init__(self) -> None:
        if not all(text.strip() for text in self.prompt):
            raise ValueError("prompt: got an empty one. Say what to draw.")
        if len(self.prompt) > 1 and not any(" " in text for text in self.prompt):
            self.prompt = [" ".join(self.prompt)]  # a prompt without quotes


def run(arguments: Options) -> int | None:
    """Finished images stay when it is interrupted."""
    if arguments.ray:
        from visspec.cli.generate_ray import run_ray

        return run_ray(arguments)
    if arguments.retry_failed:
        raise ValueError("--retry-failed: got it without --ray, expected both")
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
        raise ValueError(f"--out: got {arguments.out} for {len(texts) * arguments.n} pictures, expected a folder")
    first = 0 if single else first_number(arguments.out)
    results: list[dict[str, Any]] = []
    complete = False
    try:
        for part in stream:
            if first and not shown:
                print(f"visspec: {arguments.out} has images up to number {first - 1}, going on", file=sys.stderr)
            for i, image in enumerate(part.images):
                path = arguments.out if single else arguments.out / f"{first + len(shown):05d}.png"
                picture = beside(image, part, i) if arguments.maps else image
                save(picture, path)
                shown.append(picture)
                captions.append(part.prompts[i])
                passes = int(part.passes[i].max()) + 1
                row = {"path": str(path), "prompt": part.prompts[i], "seed": part.seeds[i], "nfe": passes}
                results.append(row | {name: getattr(part.stats[0], name) for name in MEASURED})
                found = f"seed {part.seeds[i]}, {passes} passes for {part.tokens[i].numel()} tokens"
                print(f"{path}: {part.prompts[i]} ({found})", flush=True)
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
    """The prompts. Raises ValueError if there is none, or for a line without one."""
    from visspec.api import sources

    found = [*arguments.prompt, *([] if arguments.prompts is None else sources.texts(arguments.prompts))]
    if not found:
        raise ValueError("prompt: got none, expected at least one")
    return found


def pipeline(arguments: Options) -> ImagePipeline:
    from visspec.api.images import ImagePipeline

    chosen = {name: value for name in CHOSEN if (value := getattr(arguments, name)) is not None}
    chosen |= {name: value for name in ("preset", "batch_invariant") if (value := getattr(arguments, name))}
    return ImagePipeline.from_pretrained(arguments.model, **chosen, **arguments.hardware)


def settings(arguments: Options) -> dict[str, Any]:
    """How a pipeline is called, apart from prompts, seeds and the method."""
    names = ("guidance_scale", "temperature", "top_k", "top_p", "height", "width", "batch_size")
    return {name: getattr(arguments, name) for name in names}


def first_number(folder: Path) -> int:
    """The number behind the highest of the folder's images, so that none of an earlier run is written over."""
    numbers = [int(path.stem) for path in folder.glob("*.png") if path.stem.isdecimal()]
    return max(numbers, default=-1) + 1


def beside(image: Image.Image, part: ImageOutput, i: int) -> Image.Image:
    """The image with the map of its tokens' origins to the right."""
    from visspec.api.grid import grid, origin_image

    return grid([image, origin_image(part.maps[i], image.width)], columns=2)


def save(image: Image.Image, path: Path) -> None:
    """Write an image as PNG, or as JPEG where the name says so."""
    with replacing(path) as draft:
        image.save(draft, format="JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG")
