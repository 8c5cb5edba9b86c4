"""`visspec generate`: writes images as they are finished, a grid, maps, and a record of how each was drawn.

With --ray several processes draw, and FOLDER/images.jsonl lists the images.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visspec.cli.arguments import DrawingOptions, RayOptions, is_picture
from visspec.io import included
from visspec.io.files import Journal, atomic_write, write_json
from visspec.io.options import Positive, option

if TYPE_CHECKING:
    from PIL import Image

    from visspec.api.images.pipeline import ImageOutput, ImagePipeline
    from visspec.api.sources import Record

CHOSEN = ("drafter", "acceptance", "order")
SAMPLING = ("guidance_scale", "temperature", "top_k", "top_p", "height", "width")
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
    from visspec.api import sources

    if not arguments.prompt and arguments.prompts is None:
        raise ValueError("prompt: got none, expected at least one.")
    if arguments.prompts is not None:
        sources.prompts(arguments.prompts)  # raises if the file does not exist
    if arguments.ray:
        return with_ray(arguments)
    draw(arguments)
    return None


def draw(arguments: Options) -> None:
    """Draw the images in this process, numbered after those of the folder."""
    from visspec.api import sources
    from visspec.api.grid import grid
    from visspec.io.provenance import provenance

    if arguments.retry_failed:
        raise ValueError("--retry-failed: got it without --ray. Pass both.")
    texts = [*arguments.prompt, *([] if arguments.prompts is None else sources.texts(arguments.prompts))]
    pipe = pipeline(arguments)
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty())
    stream = pipe.stream(texts, num_images_per_prompt=arguments.n, seed=arguments.seed, **settings(arguments))
    images: list[Image.Image] = []
    about = {name: getattr(pipe, name) for name in CHOSEN} | {"provenance": provenance(pipe.model)}
    single = is_picture(arguments.out)
    if single and len(texts) * arguments.n > 1:
        raise ValueError(f"--out: got {arguments.out} for {len(texts) * arguments.n} pictures, expected a folder.")
    first = 0 if single else first_number(arguments.out)
    results: list[dict[str, Any]] = []
    complete = False
    try:
        for part in stream:
            if first and not images:
                print(f"visspec: {arguments.out} has images up to number {first - 1}; continuing", file=sys.stderr)
            for i, image in enumerate(part.images):
                path = arguments.out if single else arguments.out / f"{first + len(images):05d}.png"
                picture = beside(image, part, i) if arguments.maps else image
                save(picture, path)
                images.append(picture)
                passes = int(part.passes[i].max()) + 1
                row = {"path": str(path), "prompt": part.prompts[i], "seed": part.seeds[i], "nfe": passes}
                results.append(row | {name: getattr(part.stats[0], name) for name in MEASURED})
                line = f"seed {part.seeds[i]}, {passes} passes for {part.tokens[i].numel()} tokens"
                print(f"{path}: {part.prompts[i]} ({line})", flush=True)
            if arguments.stats:
                print(part.stats[0])
        complete = True
    finally:
        if images:
            write_json(arguments.json, {"results": results, "complete": complete, **about})
        if images and arguments.grid:
            save(grid(images, [row["prompt"] for row in results]), arguments.grid)
            print(f"{arguments.grid}: all {len(images)}")


def pipeline(arguments: Options) -> ImagePipeline:
    from visspec.api.images.pipeline import ImagePipeline

    names = (*CHOSEN, "preset", "batch_invariant")
    options = {name: value for name in names if (value := getattr(arguments, name))}
    return ImagePipeline.from_pretrained(arguments.model, **options, **arguments.hardware)


def settings(arguments: Options) -> dict[str, Any]:
    """Return the arguments of a pipeline call except prompts, seeds and the method."""
    return {name: getattr(arguments, name) for name in (*SAMPLING, "batch_size")}


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
    with atomic_write(path) as draft:
        image.save(draft, format="JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG")


def with_ray(arguments: Options) -> int:
    """Draw the images that don't exist yet in several processes, and return the exit code."""
    from visspec.api import sources
    from visspec.cli.records import RecordRun

    for name in ("json", "grid", "maps", "stats"):
        if getattr(arguments, name):
            raise ValueError(f"--{name}: got it with --ray. Leave one of them out.")
    if is_picture(arguments.out):
        raise ValueError(f"--out: got {arguments.out} with --ray, expected a folder.")
    sources.need("ray", "--ray", "ray")
    about: dict[str, Any] = {"model": arguments.model or included.image_model()}
    about |= {name: getattr(arguments, name) for name in ("preset", "seed", *CHOSEN, *SAMPLING)}
    about |= {"batch_invariant": True} if arguments.batch_invariant else {}
    reader = partial(image_records, arguments.prompt, arguments.prompts, arguments.n)
    lines = arguments.out / "images.jsonl"
    with Journal(lines, about, retry=arguments.retry_failed) as journal:
        run = RecordRun(journal)
        results = run.with_ray(reader, partial(RecordImages, arguments), arguments, group=arguments.batch_size)
        for row in run.with_bar(results):
            if (file := row["image"]) is not None:  # named after its id, so that drawing it again replaces it
                row["image"] = f"{hashlib.blake2b(repr(row['id']).encode(), digest_size=8).hexdigest()}.png"
                with atomic_write(arguments.out / row["image"]) as draft:
                    draft.write_bytes(file)
            run.add(row)
    return run.end(lines)


def image_records(texts: list[str], file: Path | None, n: int) -> Iterator[Record]:
    """Yield a record for each image; those of a prompt are ID#0, ID#1, ..."""
    from visspec.api.sources import Record, prompts

    entries = chain((Record(text, prompt=text) for text in texts), () if file is None else prompts(file))
    for record in entries:
        yield from (replace(record, id=f"{record.id}#{k}") for k in range(n)) if n > 1 else [record]


class RecordImages:
    """Loads the model and draws PNG files of records, each with its own seed. If a record can't be drawn, its row has
    an error.
    """

    def __init__(self, arguments: Options):
        self.pipe, self.options, self.seed = pipeline(arguments), settings(arguments), arguments.seed
        self.pipe.set_progress_bar_config(disable=True)

    def __call__(self, records: Iterable[Record]) -> Iterator[dict[str, Any]]:
        records = list(records)
        yield from (self._row(record, error=record.error) for record in records if record.error is not None)
        if whole := [record for record in records if record.error is None]:
            yield from self._tried(whole)

    def _tried(self, records: list[Record]) -> list[dict[str, Any]]:
        """Return the rows; if several records fail together, draw each alone to find the faulty one."""
        try:
            return list(self._drawn(records))
        except (ValueError, RuntimeError) as error:
            if len(records) == 1:
                return [self._row(records[0], error=f"{records[0].id}: {str(error).splitlines()[0]}")]
            return [row for record in records for row in self._tried([record])]

    def _drawn(self, records: list[Record]) -> Iterator[dict[str, Any]]:
        from visspec.io.images import png_bytes

        rows = [self._row(record) for record in records]
        texts, seeds = [str(record.prompt) for record in records], [row["seed"] for row in rows]
        remaining = iter(rows)
        for part in self.pipe.stream(texts, seed=seeds, **self.options):
            measured = {name: getattr(part.stats[0], name) for name in MEASURED}
            for i, image in enumerate(part.images):
                counts = {"tokens": part.tokens[i].numel(), "rounds": int(part.passes[i].max())}
                yield next(remaining) | {"image": png_bytes(image), **counts, **measured}

    def _row(self, record: Record, error: str | None = None) -> dict[str, Any]:
        from visspec.api.sources import seed_of

        row = {"id": record.id, "prompt": record.prompt, "seed": seed_of(self.seed, record.id), "image": None}
        return row | {"tokens": 0, "rounds": 0, **dict.fromkeys(MEASURED), "error": error}
