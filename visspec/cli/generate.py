"""`visspec generate`: images to files as they are finished, a grid, maps, and a record of how each was drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from PIL import Image

from visspec.api import zoo
from visspec.api.grid import grid, origin_image
from visspec.api.images import ImageOutput, ImagePipeline
from visspec.files import Results, replacing
from visspec.provenance import provenance

MEASURED = ("guarantee", "drift_per_token", "displacement_per_token")  # of the batch an image was drawn in


def run(arguments) -> int:
    """The command. Finished images stay when it is interrupted. Returns the exit code."""
    chosen = method(arguments)
    pipe = ImagePipeline.from_pretrained(
        arguments.model, device=arguments.device, dtype=arguments.dtype, **chosen,
        trust_remote_code=arguments.trust_remote_code,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty())
    stream = pipe.stream(
        arguments.prompt, num_images_per_prompt=arguments.n, guidance_scale=arguments.guidance_scale,
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, height=arguments.height,
        width=arguments.width, seed=arguments.seed, batch_size=arguments.batch_size,
    )  # fmt: skip
    shown: list[Image.Image] = []
    captions: list[str] = []
    about = {**chosen, "provenance": provenance(pipe.model)}
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
    return 0


def first_number(folder: Path) -> int:
    """The number behind the highest of the folder's images, so that none of an earlier run is written over."""
    numbers = [int(path.stem) for path in folder.glob("*.png") if path.stem.isdecimal()]
    return max(numbers, default=-1) + 1


def method(arguments) -> dict[str, Any]:
    """Drafter, rule and order from --preset, or from their own options."""
    own = {name: getattr(arguments, name) for name in ("drafter", "acceptance", "order")}
    if arguments.preset is None:
        return {
            "drafter": own["drafter"] or "jacobi",
            "acceptance": own["acceptance"] or "exact",
            "order": own["order"],
        }
    for name, value in own.items():
        if value is not None:
            raise ValueError(f"--{name}: got {value} beside --preset, expected one of the two")
    return zoo.method(str(zoo.preset(arguments.preset)))


def beside(image: Image.Image, part: ImageOutput, i: int) -> Image.Image:
    """The image with the map of its tokens' origins to the right."""
    return grid([image, origin_image(part.maps[i], image.width)], columns=2)


def save(image: Image.Image, path: Path) -> None:
    """Write an image as PNG, or as JPEG where the name says so."""
    with replacing(path) as draft:
        image.save(draft, format="PNG" if path.suffix.lower() != ".jpg" else "JPEG")
