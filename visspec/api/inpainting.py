"""Inpainting with the conventions of diffusers: a picture, and a mask that is white where it is drawn again.

A code is drawn again if any of its pixels is white. The other codes are those of the whole picture, including what is
under the mask, and come before all drawn codes in the order. Black pixels of the result are those of the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from visspec.models.image_codes.target import Family, ImageLayout
from visspec.types import FREE

Picture = Image.Image | np.ndarray | Tensor  # or a tensor of its codes
Pictures = Picture | list[Picture] | tuple[Picture, ...]
WHITE = 0.5  # white from here on, as in diffusers
FROM = "a PIL image, an array (height, width, 3) in 0..1 or 0..255 of uint8, a tensor (3, height, width) in 0..1, codes"


@dataclass(frozen=True)
class InpaintingStart:
    """The known part of n images, on the CPU. `codes` (n, rows * columns) int64 are FREE where they will be drawn,
    `pixels` are (n, 3, height, width) in 0..1, `white` is (n, 1, height, width) bool.
    """

    codes: Tensor
    pixels: Tensor
    white: Tensor

    def of(self, rows: slice) -> InpaintingStart:
        """Return the start of some of the images."""
        return InpaintingStart(self.codes[rows], self.pixels[rows], self.white[rows])

    @property
    def drawn(self) -> list[int]:
        """Return the number of codes to draw, by image."""
        return (self.codes == FREE).sum(dim=1).tolist()

    def put(self, pixels: Tensor, images: list[int]) -> Tensor:
        """Replace pixels outside of the mask by the picture's own, in drawn pixels (B, 3, height, width)."""
        return torch.where(self.white[images], pixels.float(), self.pixels[images])


def picture_of(
    image: Pictures | None,
    mask: Pictures | None,
    family: Family,
    layout: ImageLayout,
    prompts: int,
    copies: int,
    device: torch.device,
) -> InpaintingStart | None:
    """Check and encode the picture of a call with this many prompts, and images for each; None without a picture.
    Raises ValueError, before any pass, if it does not fit the model.
    """
    for name, given, other in (("image", image, mask), ("mask_image", mask, image)):
        if given is not None and family.draws != "any order":
            kind = type(given).__name__
            raise ValueError(f"{name}: got one ({kind}), but {family.name} only draws from texts.")
        if given is not None and other is None:
            missing = "mask_image" if name == "image" else "image"
            raise ValueError(f"{missing}: got None. Inpainting needs both a picture and a mask.")
    if image is None or mask is None:
        return None
    height, width = family.pixel_size()
    each = [_pixels(item, (height, width), layout, family) for item in _items(image, _one_image)]
    masks = [_white(item, (height, width)) for item in _items(mask, _one_mask)]
    for name, found in (("image", len(each)), ("mask_image", len(masks))):
        if found not in (1, prompts):
            raise ValueError(f"{name}: got {found}, expected one or {prompts}, one for each prompt.")
    white = torch.stack(masks)
    rows, columns = layout.grid
    again = F.max_pool2d(white.float(), (height // rows, width // columns)).flatten(1) > 0
    if not bool(again.any(dim=1).all()):
        raise ValueError(
            "mask_image: The mask is black everywhere. Make it white where the picture is to be drawn again."
        )
    codes = [item if item.dim() == 1 else None for item in each]
    with torch.inference_mode():
        pixels = torch.stack(
            [
                item if item.dim() == 3 else family.pixels(item[None].to(device), layout)[0].float().cpu()
                for item in each
            ]
        )
        own = [family.encode(p[None].to(device))[0].cpu() if c is None else c for c, p in zip(codes, pixels)]
    codes_BT, pixels, white, again = (
        (part.expand(prompts, *part.shape[1:]) if len(part) == 1 else part).repeat_interleave(copies, dim=0)
        for part in (torch.stack(own), pixels, white, again)
    )
    return InpaintingStart(torch.where(again, FREE, codes_BT), pixels, white)


def _items(given: Pictures, one: Callable[[np.ndarray | Tensor], bool]) -> list[Picture]:
    if isinstance(given, (list, tuple)) or (isinstance(given, (np.ndarray, Tensor)) and not one(given)):
        return list(given)
    return [given]


def _one_image(given: np.ndarray | Tensor) -> bool:
    return given.ndim <= 2 or (given.ndim == 3 and given.dtype != torch.long)


def _one_mask(given: np.ndarray | Tensor) -> bool:
    return given.ndim <= 2 or (given.ndim == 3 and 1 in (given.shape[0], given.shape[-1]))


def _pixels(item: Picture, size: tuple[int, int], layout: ImageLayout, family: Family) -> Tensor:
    if isinstance(item, Image.Image):
        item = np.asarray(item.convert("RGB"))
    if isinstance(item, Tensor) and item.dtype == torch.long:
        codes = item.detach().cpu().flatten()
        if len(codes) != layout.grid[0] * layout.grid[1] or not bool(((codes >= 0) & (codes < family.codes)).all()):
            raise ValueError(f"image: got codes {tuple(item.shape)}, expected {layout.grid} below {family.codes}.")
        return codes
    pixels = _tensor("image", item)
    if isinstance(item, np.ndarray) and pixels.dim() == 3:
        pixels = pixels.permute(2, 0, 1)
    if pixels.dim() != 3 or pixels.shape[0] != 3:
        raise ValueError(f"image: got shape {tuple(item.shape)} of {item.dtype}, expected {FROM}.")
    if tuple(pixels.shape[1:]) != size:
        expected = f"{size[0]} x {size[1]}, that of the model's images"
        raise ValueError(f"image: got a size of {pixels.shape[1]} x {pixels.shape[2]}, expected {expected}.")
    if not 0 <= float(pixels.min()) <= float(pixels.max()) <= 1:
        raise ValueError(f"image: got numbers from {pixels.min():.3g} to {pixels.max():.3g}, expected 0 to 1.")
    return pixels


def _tensor(name: str, item: Picture) -> Tensor:
    if not isinstance(item, (np.ndarray, Tensor)):
        raise ValueError(f"{name}: got a {type(item).__name__}, expected {FROM}.")
    values = torch.from_numpy(np.array(item)) if isinstance(item, np.ndarray) else item.detach().cpu()
    return values / 255 if values.dtype == torch.uint8 else values.float()


def _white(item: Picture, size: tuple[int, int]) -> Tensor:
    if isinstance(item, Image.Image):
        item = np.asarray(item.convert("L"))
    values = _tensor("mask_image", item)
    if values.dim() == 3 and 1 in (values.shape[0], values.shape[-1]):
        values = values.squeeze(0 if values.shape[0] == 1 else -1)
    if tuple(values.shape) != size:
        expected = f"{size[0]} x {size[1]}, that of the image"
        raise ValueError(f"mask_image: got a size of {' x '.join(map(str, values.shape))}, expected {expected}.")
    return (values >= WHITE)[None]
