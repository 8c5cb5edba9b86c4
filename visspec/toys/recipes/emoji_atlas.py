"""Make the atlas of the emoji world from the font file: one tile a picture, their names, the digest of both.

python -m visspec.toys emoji-atlas --font NotoColorEmoji.ttf

The font is the one of the Debian package fonts-noto-color-emoji 2.042 (SIL Open Font License 1.1), drawn by Pillow at
its only strike, 109 pixels. Names are Unicode's, in lower case without hyphens.
"""

import argparse
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from visspec.io.files import write_json
from visspec.io.options import option
from visspec.toys.recipes.recipe import Recipe
from visspec.toys.world.emoji.atlas import COLUMNS, FOLDER, IMAGE, NAMES, TILE, digest

STRIKE = 109
MARGIN = 1  # transparent pixels around a tile's picture
POINTS = range(0x1F300, 0x1FB00)
LONGEST = 4  # words of a name
# Letters, signs, parts of other pictures; clocks and arrows, which differ in a direction alone; words of size and place
LEFT_OUT = {"symbol", "sign", "modifier", "component", "letter", "keycap", "button", "clock", "arrow", "arrows"}
LEFT_OUT |= {"left", "right", "leftwards", "rightwards", "up", "down", "lower", "pointing", "facing", "large", "small"}
ALIKE = 0.1  # share of its energy by which a picture must differ, at CODED pixels a side, from every one before it
CODED = 20


def draw_emoji(point: int, font: ImageFont.FreeTypeFont) -> Image.Image | None:
    """The picture of a code point, its longer side filling a square tile; None where the font has none."""
    page = Image.new("RGBA", (136, 128), (0, 0, 0, 0))
    ImageDraw.Draw(page).text((0, 0), chr(point), font=font, embedded_color=True)
    box = page.getbbox()
    if box is None:
        return None
    side = max(box[2] - box[0], box[3] - box[1])
    square = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    square.paste(page.crop(box), ((side - box[2] + box[0]) // 2, (side - box[3] + box[1]) // 2))
    tile = Image.new("RGBA", (TILE, TILE), (0, 0, 0, 0))
    inner = TILE - 2 * MARGIN
    tile.paste(square.resize((inner, inner), Image.Resampling.LANCZOS), (MARGIN, MARGIN))
    return tile


def name_of(point: int) -> str | None:
    """The name in words, or None where the code point has none that is wanted."""
    name = unicodedata.name(chr(point), "").lower().replace("-", " ")
    words = name.split()
    return name if 0 < len(words) <= LONGEST and not LEFT_OUT & set(words) else None


def choose_tiles(font: ImageFont.FreeTypeFont) -> dict[str, Image.Image]:
    """Tiles by name, in the order of the code points; none looks like one before it."""
    out: dict[str, Image.Image] = {}
    seen = np.zeros((0, CODED * CODED * 4), np.float32)
    for point in POINTS:
        name = name_of(point)
        tile = draw_emoji(point, font) if name else None
        if name is None or tile is None:
            continue
        code = np.asarray(tile.convert("RGBa").resize((CODED, CODED), Image.Resampling.BOX), np.float32).reshape(1, -1)
        if len(seen) and (((seen - code) ** 2).sum(1) / (code**2).sum()).min() < ALIKE:
            continue
        seen, out[name] = np.concatenate([seen, code]), tile
    return out


@dataclass
class AtlasOptions:
    font: Path = field(metadata={"help": "NotoColorEmoji.ttf"})
    out: Path = option("folder of the atlas", FOLDER)


def write(options: argparse.Namespace) -> None:
    """Draw the tiles, and write the page and the names."""
    tiles = choose_tiles(ImageFont.truetype(options.font, STRIKE, layout_engine=ImageFont.Layout.BASIC))
    page = Image.new("RGBA", (COLUMNS * TILE, -(-len(tiles) // COLUMNS) * TILE), (0, 0, 0, 0))
    for i, tile in enumerate(tiles.values()):
        page.paste(tile, (i % COLUMNS * TILE, i // COLUMNS * TILE))
    page.save(options.out / IMAGE, lossless=True, quality=100, method=6)
    write_json(options.out / NAMES, {"names": list(tiles), "digest": digest(options.out / IMAGE, list(tiles))})
    print(len(tiles), "pictures,", (options.out / IMAGE).stat().st_size, "bytes")


ATLAS = Recipe("emoji-atlas", "Make the atlas of the emoji world.", AtlasOptions, {"atlas": write})
