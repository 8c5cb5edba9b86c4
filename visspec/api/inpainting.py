"""Inpainting in diffusers' convention: a picture, and a mask that is white where it is to be drawn again.

A code is drawn again if any pixel that it stands for is white. The other codes are those of the whole picture, also of
what is under the mask, and come before all drawn ones in the order; black pixels of the result are the picture's own.
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

Picture = Image.Image | np.ndarray | Tensor  # or its codes, as a tensor
Pictures = Picture | list[Picture] | tuple[Picture, ...]
WHITE = 0.5  # and more, as diffusers binarises masks
FROM = "a PIL image, an array (height, width, 3) in 0..1 or 0..255 of uint8, a tensor (3, height, width) in 0..1, codes"


@dataclass(frozen=True)
class InpaintingStart:
    """What a call starts from, for n images: codes (n, rows * columns) int64, FREE where they are to be drawn; pixels
    (n, 3, height, width) in 0..1; white (n, 1, height, width) bool. All on the CPU.
    """

    codes: Tensor
    pixels: Tensor
    white: Tensor

    def of(self, rows: slice) -> InpaintingStart:
        """Some of the images."""
        return InpaintingStart(self.codes[rows], self.pixels[rows], self.white[rows])

    @property
    def drawn(self) -> list[int]:
        """Number of codes to draw, by image."""
        return (self.codes == FREE).sum(dim=1).tolist()

    def put(self, pixels: Tensor, images: list[int]) -> Tensor:
        """Drawn pixels (B, 3, height, width) of some images with the picture's own outside of the mask."""
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
    """The checked picture of a call with so many prompts, and so many images of each; None without one. Raises
    ValueError in one sentence, before any pass of the model; pictures are encoded here.
    """
    for name, given, other in (("image", image, mask), ("mask_image", mask, image)):
        if given is not None and family.draws != "any order":
            kind = type(given).__name__
            raise ValueError(f"{name}: got one ({kind}), expected none: {family.name} draws from texts alone")
        if given is not None and other is None:
            missing = "mask_image" if name == "image" else "image"
            raise ValueError(f"{missing}: got None beside {name}, expected both: a picture, and white where to draw")
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
        raise ValueError("mask_image: got one that is black everywhere, expected white where to draw")
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
    """Images of an argument: a list of them, one, or an array or tensor of several."""
    if isinstance(given, (list, tuple)) or (isinstance(given, (np.ndarray, Tensor)) and not one(given)):
        return list(given)
    return [given]


def _one_image(given: np.ndarray | Tensor) -> bool:
    """Whether an array or tensor is one picture, or the codes of one."""
    return given.ndim <= 2 or (given.ndim == 3 and given.dtype != torch.long)


def _one_mask(given: np.ndarray | Tensor) -> bool:
    return given.ndim <= 2 or (given.ndim == 3 and 1 in (given.shape[0], given.shape[-1]))


def _pixels(item: Picture, size: tuple[int, int], layout: ImageLayout, family: Family) -> Tensor:
    """Pixels (3, height, width) of one picture, or its codes (rows * columns,)."""
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
    """A picture's numbers on the CPU, those of bytes in 0..1."""
    if not isinstance(item, (np.ndarray, Tensor)):
        raise ValueError(f"{name}: got a {type(item).__name__}, expected {FROM}")
    found = torch.from_numpy(np.array(item)) if isinstance(item, np.ndarray) else item.detach().cpu()
    return found / 255 if found.dtype == torch.uint8 else found.float()


def _white(item: Picture, size: tuple[int, int]) -> Tensor:
    """(1, height, width) bool: where a mask is white."""
    if isinstance(item, Image.Image):
        item = np.asarray(item.convert("L"))
    found = _tensor("mask_image", item)
    if found.dim() == 3 and 1 in (found.shape[0], found.shape[-1]):
        found = found.squeeze(0 if found.shape[0] == 1 else -1)
    if tuple(found.shape) != size:
        wanted = f"{size[0]} x {size[1]}, that of the image"
        raise ValueError(f"mask_image: got a size of {' x '.join(map(str, found.shape))}, expected {wanted}")
    return (found >= WHITE)[None]
