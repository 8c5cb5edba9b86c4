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
    """Check and encode the picture of a call, given its number of prompts and of images for each. None if there is no
    picture.

    Raises:
        ValueError: If it does not fit the model, before any pass.
    """
    for name, given, other in (("image", image, mask), ("mask_image", mask, image)):
        if given is not None and family.draws != "any order":
            kind = type(given).__name__
            raise ValueError(f"{name}: got one ({kind}), but {family.name} only draws from texts")
        if given is not None and other is None:
            missing = "mask_image" if name == "image" else "image"
            raise ValueError(f"{missing}: got None. Inpainting needs both a picture and a mask")
    if image is None or mask is None:
        return None
    height, width = family.pixel_size()
    each = [_pixels(item, (height, width), layout, family) for item in _items(image, _one_image)]
    masks = [_white(item, (height, width)) for item in _items(mask, _one_mask)]
    for name, found in (("image", len(each)), ("mask_image", len(masks))):
        if found not in (1, prompts):
            raise ValueError(f"{name}: got {found}, expected one or {prompts}, one for each prompt")
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
    """Return the images of an argument: a list of images, one image, or an array or tensor of several."""
    if isinstance(given, (list, tuple)) or (isinstance(given, (np.ndarray, Tensor)) and not one(given)):
        return list(given)
    return [given]


def _one_image(given: np.ndarray | Tensor) -> bool:
    """Return whether an array or tensor is one picture, or the codes of one."""
    return given.ndim <= 2 or (given.ndim == 3 and given.dtype != torch.long)


def _one_mask(given: np.ndarray | Tensor) -> bool:
    return given.ndim <= 2 or (given.ndim == 3 and 1 in (given.shape[0], given.shape[-1]))


def _pixels(item: Picture, size: tuple[int, int], layout: ImageLayout, family: Family) -> Tensor:
    """Return the pixels (3, height, width) of one picture, or its codes (rows * columns,)."""
    if isinstance(item, Image.Image):
        item = np.asarray(item.convert("RGB"))
    if isinstance(item, Tensor) and item.dtype == torch.long:
        codes = item.detach().cpu().flatten()
        if len(codes) != layout.grid[0] * layout.grid[1] or not bool(((codes >= 0) & (codes < family.codes)).all()):
            raise ValueError(f"image: got codes {tuple(item.shape)}, expected {layout.grid} below {family.codes}")
        return codes
    found = _tensor("image", item)
    if isinstance(item, np.ndarray) and found.dim() == 3:
        found = found.permute(2, 0, 1)
    if found.dim() != 3 or found.shape[0] != 3:
        raise ValueError(f"image: got shape {tuple(item.shape)} of {item.dtype}, expected {FROM}")
    if tuple(found.shape[1:]) != size:
        wanted = f"{size[0]} x {size[1]}, that of the model's images"
        raise ValueError(f"image: got a size of {found.shape[1]} x {found.shape[2]}, expected {wanted}")
    if not 0 <= float(found.min()) <= float(found.max()) <= 1:
        raise ValueError(f"image: got numbers from {found.min():.3g} to {found.max():.3g}, expected 0 to 1")
    return found


def _tensor(name: str, item: Picture) -> Tensor:
    """Return a picture's numbers on the CPU; bytes are scaled to 0..1."""
    if not isinstance(item, (np.ndarray, Tensor)):
        raise ValueError(f"{name}: got a {type(item).__name__}, expected {FROM}")
    found = torch.from_numpy(np.array(item)) if isinstance(item, np.ndarray) else item.detach().cpu()
    return found / 255 if found.dtype == torch.uint8 else found.float()


def _white(item: Picture, size: tuple[int, int]) -> Tensor:
    """Return where a mask is white, (1, height, width) bool."""
    if isinstance(item, Image.Image):
        item = np.asarray(item.convert("L"))
    found = _tensor("mask_image", item)
    if found.dim() == 3 and 1 in (found.shape[0], found.shape[-1]):
        found = found.squeeze(0 if found.shape[0] == 1 else -1)
    if tuple(found.shape) != size:
        wanted = f"{size[0]} x {size[1]}, that of the image"
        raise ValueError(f"mask_image: got a size of {' x '.join(map(str, found.shape))}, expected {wanted}")
    return (found >= WHITE)[None]
