"""Detector of the emoji world: matched filters for every picture of the atlas, then analysis by synthesis.

1. The image is scaled so that pictures of each side of LADDER become GLIMPSE pixels wide. At every place, every picture
   at two turns is compared with the pixels under it, over a ground of the best-fitting colour (closed form).
2. At the place where this explains most, the best RIVALS pictures are fitted over place, side and turn at a finer
   resolution, over a ground with a slope. The one with the smallest residual is detected. Its score is the share of the
   pixels' variance that it explains, without noise.
3. A picture with an intermediate fit is also fitted with softer tiles, because compressed or halved images have lost
   detail.
4. The place is removed, and the next best one follows, until nothing is left to explain.

Shapes: P places, T templates, K rivals, R = FINE pixels a side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from visspec.eval.metrics.detection import Detection, DetectionResult, digest
from visspec.toys.world.detector import WorldDetector, pixels_of
from visspec.toys.world.emoji.atlas import DIGEST, names, premultiplied_tiles
from visspec.toys.world.emoji.render import stamp_on

GLIMPSE, WINDOW = 10, 12  # side in pixels of a tile, and of the compared window, in the first step
TURNS = (-7.5, 7.5)
LADDER = tuple(0.185 * 1.2**i for i in range(8))  # sides of tiles as fractions of the image's
KEPT = 96  # principal directions of windows in the first step, for colours; a third of them for coverage
GREY = 128.0
FAINT = 40.0  # windows with less variance, summed over channels in grey levels squared, are ground
RIVALS = 48
FINE, AROUND = 28, 1.24  # side of the compared window in the second step, in pixels and in tile sides
STEPS = 9
SOFT, SHARP = (1, 3), 0.92  # pictures with a lower score are also fitted with softer tiles
LEAST_SOFT = 0.78  # minimum score of those
EDGE = 4  # transparent pixels around the tiles of the second step
MOST = 8  # maximum number of pictures in an image
TRIES = 16


@dataclass(frozen=True)
class Bank:
    """Templates of the first step: colours and coverage of their windows, projected on a few directions. `colour`
    (kept, T) has the basis (3 W W, kept); `cover` (kept, T), of 1 - coverage, has the basis (W W, kept). `energy` (T)
    is that of the colours, `ground` (3, T) their product with 1 - coverage, `room` (T) the energy of 1 - coverage.
    """

    colour_basis: torch.Tensor
    colour: torch.Tensor
    cover_basis: torch.Tensor
    cover: torch.Tensor
    energy: torch.Tensor
    ground: torch.Tensor
    room: torch.Tensor


def _windows() -> np.ndarray:
    out = np.zeros((len(names()) * len(TURNS), WINDOW, WINDOW, 4), np.float32)
    for window, (name, turn) in zip(out, product(names(), TURNS)):
        part, there = stamp_on(WINDOW, name, WINDOW / 2, WINDOW / 2, GLIMPSE, turn)
        window[there] = part
    return out


def _basis(vectors: torch.Tensor, count: int) -> torch.Tensor:
    return torch.linalg.eigh(vectors.T @ vectors)[1][:, -count:].contiguous()


@cache
def bank() -> Bank:
    """Return the package's own templates, computed once."""
    windows = torch.from_numpy(_windows())
    cover = 1 - windows[..., 3].flatten(1)
    colour = (windows[..., :3] - GREY * windows[..., 3:]).permute(0, 3, 1, 2).flatten(2)  # (T, 3, W W)
    flat = colour.flatten(1)
    of_colour, of_cover = _basis(flat, KEPT), _basis(cover, KEPT // 3)
    return Bank(
        colour_basis=of_colour,
        colour=(flat @ of_colour).T.contiguous(),
        cover_basis=of_cover,
        cover=(cover @ of_cover).T.contiguous(),
        energy=flat.square().sum(1),
        ground=(colour * cover[:, None]).sum(-1).T.contiguous(),
        room=cover.square().sum(1),
    )


@cache
def fine_tiles(soft: int = 0) -> torch.Tensor:
    """Return all premultiplied tiles at half size, minus GREY, (pictures, 4, side, side), smoothed `soft` times."""
    small = F.pad(F.avg_pool2d(torch.from_numpy(premultiplied_tiles()).permute(0, 3, 1, 2), 2), (EDGE,) * 4)
    small = torch.cat([small[:, :3] - GREY * small[:, 3:], small[:, 3:]], 1)
    line = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    for _ in range(soft):
        for kernel in (line.view(1, 1, 1, 5), line.view(1, 1, 5, 1)):
            small = F.conv2d(small.flatten(0, 1)[:, None], kernel, padding="same")[:, 0].view(small.shape)
    return small


@dataclass(frozen=True)
class DetectedEmoji:
    """A detected picture: its name, score up to 1, centre, tile side in pixels, and turn in degrees."""

    name: str
    score: float
    x: float
    y: float
    side: float
    turn: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """(x0, y0, x1, y1) of the tile without its turn."""
        half = self.side / 2
        return self.x - half, self.y - half, self.x + half, self.y + half


class Places(NamedTuple):
    """Results of the first step at P places of all scales: centre and side in pixels, and explained energy."""

    x: torch.Tensor
    y: torch.Tensor
    side: torch.Tensor
    whole: torch.Tensor  # total energy, in the image's own pixels
    gain: torch.Tensor  # (P, pictures) explained energy


def noise_of(pixels: torch.Tensor) -> float:
    """Estimate the standard deviation of noise in an image (3, height, width) from diagonal differences."""
    high = pixels[:, :-1, :-1] - pixels[:, :-1, 1:] - pixels[:, 1:, :-1] + pixels[:, 1:, 1:]
    return float(high.abs().median()) / 0.6745 / 2


def _glimpse(pixels: torch.Tensor, side: float) -> Places | None:
    b, scale = bank(), GLIMPSE / side
    height, width = (round(n * scale) for n in pixels.shape[1:])
    small = F.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True, align_corners=False)
    edge = WINDOW // 2 - GLIMPSE // 2
    small = F.pad(small, (edge,) * 4, mode="replicate")
    if min(small.shape[2:]) < WINDOW:
        return None
    patches = F.unfold(small, WINDOW)[0].T.unflatten(1, (3, -1))  # (P, 3, W W)
    area = WINDOW * WINDOW
    mean = patches.sum(-1)
    alone = patches.square().sum((1, 2)) - mean.square().sum(1) / area
    at = (alone > FAINT * area).nonzero()[:, 0]
    if not len(at):
        return None
    patches, columns = patches[at], small.shape[3] - WINDOW + 1
    cover = (patches @ b.cover_basis).flatten(0, 1) @ b.cover  # (3 P, T): product with 1 - coverage
    ground = (cover.view(len(at), 3, -1) - b.ground).square_().sum(1).div_(b.room)
    gain = (patches.flatten(1) @ b.colour_basis) @ b.colour
    gain.mul_(2).sub_(b.energy).add_(ground)  # minus the patch's energy, this is the negative residual
    gain.sub_((mean[at].square().sum(1) / area)[:, None])
    best = gain.unflatten(1, (-1, len(TURNS))).amax(-1) / scale**2
    x, y = ((n.float() + GLIMPSE / 2) / scale for n in (at % columns, at // columns))
    return Places(x, y, torch.full_like(x, side), alone[at] / scale**2, best)


def _around(places: Places, at: int) -> torch.Tensor:
    """Return which places (P) are close to one of them, including their side."""
    reach = 0.3 * places.side[at]
    close = ((places.x - places.x[at]).abs() < reach) & ((places.y - places.y[at]).abs() < reach)
    return close & ((places.side / places.side[at]).log().abs() < 0.5)


def _first(pixels: torch.Tensor, sides: Sequence[float]) -> Places | None:
    parts = [part for side in sides if (part := _glimpse(pixels, side)) is not None]
    if not parts:
        return None
    return Places(*map(torch.cat, zip(*parts)))


class _PoseFit:
    """The second step: fits pictures to one place of an image. Poses (K, 4) are x, y, log side, and turn. x and y are
    offsets from the place in units of its side, the side is relative to it, turns are radians.
    """

    def __init__(self, pixels: torch.Tensor, x: float, y: float, side: float):
        height, width = pixels.shape[1:]
        axis = (torch.arange(FINE) + 0.5) / FINE * AROUND - AROUND / 2
        self.v, self.u = torch.meshgrid(axis, axis, indexing="ij")
        grid = torch.stack([(x + self.u * side) * 2 / width - 1, (y + self.v * side) * 2 / height - 1], -1)
        scale = FINE / AROUND / side
        if scale < 1:  # reduces the image to the compared resolution
            pixels = F.interpolate(pixels[None], scale_factor=scale, mode="bilinear", antialias=True)[0]
        self.window = F.grid_sample(pixels[None], grid[None], padding_mode="border", align_corners=False)[0]
        self.inside = (grid.abs() <= 1).all(-1).float()
        self.slope = torch.stack([torch.ones_like(self.u), self.u, self.v]) * self.inside  # (3, R, R)
        self.window = self.window * self.inside
        self.alone = self._left(self.window[None], self.slope[None])[0]
        self.soft = 0

    @staticmethod
    def _left(pixels: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
        """Return the energy (K) of pixels (K, 3, R, R) that no mixture of the basis (K, n, R, R) explains."""
        flat, spans = pixels.flatten(2), basis.flatten(2)
        gram = spans @ spans.mT + 1e-3 * torch.eye(spans.shape[1])
        product = spans @ flat.mT
        return flat.square().sum((1, 2)) - (product * torch.linalg.solve(gram, product)).sum((1, 2))

    def left(self, tiles: torch.Tensor, poses: torch.Tensor) -> torch.Tensor:
        """Return the energy (K, n) left by tiles (K, 4, side, side) in their poses (K, n, 4), over a sloped ground."""
        count, each = poses.shape[:2]
        pose = poses.flatten(0, 1)
        scale = torch.exp(-pose[:, 2])[:, None, None] * 2 * (1 - 2 * EDGE / tiles.shape[-1])
        c, s = (f(pose[:, 3])[:, None, None] for f in (torch.cos, torch.sin))
        du, dv = self.u - pose[:, 0, None, None], self.v - pose[:, 1, None, None]
        grid = torch.stack([(c * du + s * dv) * scale, (c * dv - s * du) * scale], -1)  # (K n, R, R, 2)
        sample = F.grid_sample(tiles, grid.view(count, each * FINE, FINE, 2), align_corners=False)
        sample = sample.unflatten(2, (each, FINE)).transpose(1, 2).flatten(0, 1) * self.inside
        return self._left(self.window - sample[:, :3], self.slope * (1 - sample[:, 3:])).view(count, each)

    def best(self, picture: torch.Tensor, pose: torch.Tensor) -> tuple[int, torch.Tensor, float]:
        """Return (picture, pose, energy left) of the best of K rivals, each fitted by steps of decreasing size."""
        moves = torch.cat([torch.eye(4), -torch.eye(4)])
        width = torch.tensor([0.06, 0.06, 0.1, 0.13]).expand(len(picture), 4)
        tiles = fine_tiles(self.soft)[picture]
        energy = self.left(tiles, pose[:, None])[:, 0]
        for step in range(STEPS):
            tried = pose[:, None] + moves * width[:, None]
            least, choice = self.left(tiles, tried).min(1)
            better = (least < energy)[:, None]
            pose = torch.where(better, tried[torch.arange(len(picture)), choice], pose)
            energy, width = torch.minimum(least, energy), torch.where(better, width, width / 2)
            if step in (2, 4):
                best = energy.topk(min(len(energy), 10 if step == 2 else 4), largest=False).indices
                picture, tiles, pose, width, energy = (part[best] for part in (picture, tiles, pose, width, energy))
        first = int(energy.argmin())
        return int(picture[first]), pose[first], float(energy[first])


class EmojiDetector(WorldDetector):
    """Finds pictures of the atlas, for GenEval. `score` is the minimum share of explained variance. `sides` are the
    smallest and the largest tile side, as fractions of the image's shorter side.
    """

    name = "emoji"

    def __init__(self, score: float = 0.6, sides: tuple[float, float] = (LADDER[0], LADDER[-1])):
        self.score, self.sides = score, sides
        self.fingerprint = digest("emoji-1", DIGEST, score, sides)

    @torch.inference_mode()
    def analyse(self, image: np.ndarray | Image.Image) -> tuple[DetectedEmoji, ...]:
        """Return the pictures of an image (`pixels_of`), best first."""
        rgb = pixels_of(image)
        pixels = torch.from_numpy(np.ascontiguousarray(rgb.transpose(2, 0, 1))) - GREY
        side, least, most = min(rgb.shape[:2]), *self.sides
        places = _first(pixels, [part * side for part in LADDER if least / 1.1 <= part <= most * 1.1])
        out: list[DetectedEmoji] = []
        noise = noise_of(pixels)
        for _ in range(TRIES):
            if places is None or not len(places.x) or len(out) == MOST:
                break
            at = int(places.gain.amax(1).argmax())
            emoji = self._fitted(pixels, places, at, noise)
            if emoji.score >= self.score:
                out.append(emoji)
                reach = 0.36 * (places.side + emoji.side)
                far = ((places.x - emoji.x).abs() > reach) | ((places.y - emoji.y).abs() > reach)
            else:
                far = ~_around(places, at)
            places = Places(*(part[far] for part in places))
        return tuple(sorted(out, key=lambda one: -one.score))

    def _fitted(self, pixels: torch.Tensor, places: Places, at: int, noise: float) -> DetectedEmoji:
        x, y, side = (float(v[at]) for v in (places.x, places.y, places.side))
        index = _around(places, at).nonzero()[:, 0]
        candidates, places_of = [], []
        gain = places.gain[index]
        for worth in (gain, gain / places.whole[index, None]):  # the share of a small picture is high
            most, where = worth.max(0)
            candidates.append(most.topk(RIVALS // 2).indices)
            places_of.append(index[where[candidates[-1]]])
        picture, start = torch.cat(candidates), torch.cat(places_of)
        place = ((places.x[start] - x) / side, (places.y[start] - y) / side, (places.side[start] / side).log())
        pose = torch.stack([*place, torch.zeros(len(start))], 1)
        fit = _PoseFit(pixels, x, y, side)
        room = float(fit.inside.sum())
        floor = 3 * noise**2 * room * min(1.0, FINE / AROUND / side) ** 2
        there = max(float(fit.alone) - floor, floor / 2, FAINT * room)
        name_index, best, energy = fit.best(picture, pose)
        if 1 - SHARP < (float(fit.alone) - energy) / there < SHARP:
            for fit.soft in SOFT:
                other = fit.best(picture, pose)
                # smooth tiles partly fit the ground between pictures
                if other[2] < energy and float(fit.alone) - other[2] > LEAST_SOFT * there:
                    name_index, best, energy = other
        score, scale, turn = (float(fit.alone) - energy) / there, float(best[2].exp()), float(torch.rad2deg(best[3]))
        centre = x + float(best[0]) * side, y + float(best[1]) * side
        return DetectedEmoji(names()[name_index], score, *centre, side * scale, turn)

    def detect(self, image: Image.Image) -> DetectionResult:
        """Return all pictures of the image, which is never refused."""
        return DetectionResult(
            tuple(Detection(emoji.name, emoji.score, emoji.box, None, None) for emoji in self.analyse(image))
        )


def animal_detector() -> EmojiDetector:
    """Return a detector of one large picture."""
    return EmojiDetector(sides=(0.5, 0.8))
