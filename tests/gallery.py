"""Draws docs/gallery.png, one accelerated picture of each family: `python -P tests/gallery.py docs/gallery.png`."""

import sys

from PIL import Image, ImageDraw

import visspec
from visspec.api.grid import font_of, wrap_text

SIDE, MARGIN, FOOT = 224, 16, 150  # pixels of a picture, between pictures and of the text below
PAPER, INK, FAINT = "#14161a", "#e8e8e6", "#a3a6ab"  # the report's dark palette
ROWS = (  # painter, preset, seed, prompt, and how many times faster docs/results.md says it is
    ("painter", "gumbel", 1, "a photo of a cross left of a ring", "3.86"),
    ("painter-emoji", "gumbel", 1, "a photo of a parrot on a grainy pink ground", "1.99"),
    ("painter-any-order", "assd-raster", 0, "a photo of a penguin on a smooth blue ground", "2.09"),
    ("painter-mar", "denoise", 1, "a photo of a fox face on a cloudy green ground", "2.04"),
    ("painter-var", "code", 0, "a photo of a penguin on a smooth blue ground", "1.35"),
)


def main(path: str) -> None:
    sheet = Image.new("RGB", (len(ROWS) * (SIDE + MARGIN) + MARGIN, SIDE + FOOT + MARGIN), PAPER)
    pen, font, small = ImageDraw.Draw(sheet), font_of(24), font_of(20)
    for i, (painter, preset, seed, prompt, times) in enumerate(ROWS):
        pipe = visspec.ImagePipeline.from_pretrained(painter, preset=preset)
        pipe.set_progress_bar_config(disable=True)
        image, left = pipe(prompt, seed=seed).images[0], MARGIN + i * (SIDE + MARGIN)
        sheet.paste(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS), (left, MARGIN))
        top = MARGIN + SIDE + 6
        pen.text((left, top), f"{times} times faster", fill=INK, font=font)
        for n, text in enumerate(wrap_text(f"{painter}, {preset}", small, SIDE) + wrap_text(prompt, small, SIDE)):
            pen.text((left, top + 32 + 25 * n), text, fill=FAINT, font=small)
    sheet.save(path, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
