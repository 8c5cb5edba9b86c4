"""Exact detector of rendered shapes by analysis by synthesis: blobs are matched to rendered templates.

1. Noise is estimated from colour differences (grounds are grey) and smoothed away if it is strong.
2. Pixels nearer to a palette colour than to the grey ground, in Lab, form 8-connected components. A component with two
   frequent colours is split.
3. A component's soft coverage is the projection of its pixels on the line from canvas to colour. Every class is fitted
   over centre and radius with the renderer's own anti-aliased templates; the score is the soft intersection over union.
   If it is intermediate, templates of lower resolution are tried as well, for images that lost resolution.
4. Pixels that no accepted template explains are counted; an image with too many of them is refused.

"Exact" is a tested claim about clean renders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import ceil, floor

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from visspec.eval.metrics.detection import UNKNOWN, Detection, DetectionResult, digest
from visspec.toys.world.palette import CANVAS_RGB, CLASSES, NAMES, PALETTE_RGB, lab, to_palette
from visspec.toys.world.render import coverage, inside

STEPS = 4  # templates are fitted on a grid of a quarter of a pixel, in centre and in radius
TEXTURE = 30  # maximum difference between ground and canvas in grey values
OFF_PALETTE = 22.0  # colours with a larger Lab distance are none of the ten
FOREIGN = 30.0  # pixels with a larger Lab distance from the background are foreground
BLUR = ((6.0, 0.0), (20.0, 0.6), (np.inf, 0.9))  # noise below x grey levels: smooth by sigma y pixels
SHARP, HOPELESS = 0.85, 0.45  # components with scores between these are tried with blurred templates
SOFT = (0.7, 1.1)  # sigmas of the blurred templates in pixels, for example for JPEG's chroma subsampling


@dataclass(frozen=True)
class Shapelike:
    """One detected shape: class, colour, score 0..1, box (x0, y0, x1, y1), centre and radius in pixels."""

    label: str
    colour: str
    score: float
    box: tuple[float, float, float, float]
    x: float
    y: float
    radius: float
    off_palette: float  # Lab distance of the measured colour from its palette colour


@dataclass(frozen=True)
class Analysis:
    """Analysis of one image; `unexplained` is the share of pixels explained by neither a shape nor the background."""

    shapes: tuple[Shapelike, ...]
    unexplained: float
    coverage: np.ndarray = field(repr=False, compare=False)  # (n, height, width) float32, template of each shape


@cache
def _moments(kind: str) -> tuple[float, float, tuple[float, float, float, float]]:
    """Measure area, centroid's y and bounding box (x0, y0, x1, y1) of a class's unit template on a fine grid."""
    axis = (np.arange(1200) + 0.5) / 500 - 1.2
    mask = inside(kind, axis[None, :], axis[:, None])
    rows, columns = np.nonzero(mask)
    left, right = float(axis[columns.min()]), float(axis[columns.max()])
    top, bottom = float(axis[rows.min()]), float(axis[rows.max()])
    return float(mask.sum() / 500**2), float(axis[rows].mean()), (left, top, right, bottom)


def gaussian_blur(image: np.ndarray, sigma: float) -> np.ndarray:
    """Blur an array (height, width, ...) with edge padding; sigma is in pixels, 0 returns the input."""
    if sigma <= 0:
        return image
    reach = max(1, ceil(3 * sigma))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2).astype(np.float32)
    weights /= weights.sum()
    for axis in (0, 1):
        pad = [(0, 0)] * image.ndim
        pad[axis] = (reach, reach)
        wide = np.pad(image, pad, mode="edge")
        n = image.shape[axis]
        image = sum(w * np.take(wide, range(i, i + n), axis=axis) for i, w in enumerate(weights))
    return image


def _largest(values: np.ndarray) -> np.ndarray:
    return F.max_pool2d(torch.from_numpy(values.astype(float))[None], 3, 1, 1)[0].numpy()


def components(mask: np.ndarray) -> tuple[np.ndarray, int]:
    """Return labels int32 (height, width) of 8-connected components, 0 outside, 1..n by first pixel, and n."""
    mark = np.where(mask, np.arange(mask.size, 0, -1.0).reshape(mask.shape), 0)  # the first pixel has the largest value
    while not np.array_equal(spread := np.where(mask, _largest(mark), 0), mark):
        mark = spread
    firsts = np.unique(-mark[mask])
    return np.where(mask, np.searchsorted(firsts, -mark) + 1, 0).astype(np.int32), len(firsts)


def grow(mask: np.ndarray) -> np.ndarray:
    """Dilate a mask by one pixel in eight directions."""
    return _largest(mask) > 0


def shrink(mask: np.ndarray) -> np.ndarray:
    """Erode a mask by one pixel in eight directions; outside the image counts as outside the mask."""
    return ~_largest(np.pad(~mask, 1, constant_values=True))[1:-1, 1:-1].astype(bool)


def _core(mask: np.ndarray) -> np.ndarray:
    inner = shrink(mask)
    return inner if inner.sum() >= 6 else mask


@lru_cache(maxsize=8192)
def _template(kind: str, fx: int, fy: int, radius: int, sigma: float) -> np.ndarray:
    """Return coverage (2h+1, 2h+1) around an integer pixel; fx, fy and `radius` are in quarter pixels."""
    h = ceil(radius / STEPS) + 1 + ceil(2 * sigma)
    out = coverage(kind, h + fx / STEPS, h + fy / STEPS, radius / STEPS, 2 * h + 1, 2 * h + 1)
    out = gaussian_blur(out, sigma)
    out.flags.writeable = False
    return out


class _TemplateFit:
    """Soft coverage of one padded component, and the search for the best matching template."""

    def __init__(self, alpha: np.ndarray, sigma: float, radii: tuple[int, int]):
        self.margin = ceil(radii[1] / STEPS) + 4 + ceil(2 * sigma)
        self.alpha = np.pad(alpha, self.margin)
        self.sigma, self.radii = sigma, radii
        self.total = float(alpha.sum())
        rows, columns = np.indices(self.alpha.shape, dtype=np.float32)
        self.x = float((self.alpha * columns).sum()) / self.total + 0.5
        self.y = float((self.alpha * rows).sum()) / self.total + 0.5
        self.seen: dict[tuple[str, int, int, int], float] = {}

    def start(self, kind: str) -> tuple[int, int, int]:
        """Estimate centre and radius, in quarter pixels of the padded window, from area and centroid."""
        area, cy, _ = _moments(kind)
        radius = (self.total / area) ** 0.5
        q = min(max(round(radius * STEPS), self.radii[0]), self.radii[1])
        return round(self.x * STEPS), round((self.y - cy * radius) * STEPS), q

    def score(self, kind: str, x: int, y: int, radius: int) -> float:
        """Return the soft intersection over union of component and template; 0 if it leaves the window."""
        key = (kind, x, y, radius)
        if key in self.seen:
            return self.seen[key]
        value = 0.0
        column, row = floor(x / STEPS), floor(y / STEPS)
        if self.radii[0] <= radius <= self.radii[1]:
            t = _template(kind, x - column * STEPS, y - row * STEPS, radius, self.sigma)
            h = t.shape[0] // 2
            if row >= h and column >= h:
                window = self.alpha[row - h : row + h + 1, column - h : column + h + 1]
                if window.shape == t.shape:
                    shared = float(np.minimum(window, t).sum())
                    value = shared / (self.total + float(t.sum()) - shared)
        self.seen[key] = value
        return value

    def refine(self, kind: str, at: tuple[int, int, int], stride: int) -> tuple[int, int, int]:
        """Climb the score over 3x3x3 neighbourhoods of the given stride (quarter pixels) until it stops rising."""
        for _ in range(8):
            x, y, r = at
            candidates = [
                (x + i * stride, y + j * stride, r + k * stride)
                for i in (-1, 0, 1)
                for j in (-1, 0, 1)
                for k in (-1, 0, 1)
            ]
            best = max(candidates, key=lambda c: self.score(kind, *c))
            if self.score(kind, *best) <= self.score(kind, *at):
                return at
            at = best
        return at

    def best(self) -> tuple[float, str, tuple[int, int, int]]:
        """Return (score, class, position) of the best template: coarse for all classes, fine for the best three."""
        coarse = []
        for kind in CLASSES:
            at = self.refine(kind, self.start(kind), 2)
            coarse.append((self.score(kind, *at), kind, at))
        coarse.sort(reverse=True)
        fine = []
        for _, kind, at in coarse[:3]:
            at = self.refine(kind, at, 1)
            fine.append((self.score(kind, *at), kind, at))
        return max(fine)


def noise_level(rgb: np.ndarray) -> float:
    """Estimate the standard deviation of pixel noise in grey levels, from diagonal differences of R-G and G-B. A grey
    background cancels, and the median over the image ignores the edges of shapes.
    """
    chroma = np.stack([rgb[..., 0] - rgb[..., 1], rgb[..., 1] - rgb[..., 2]])
    high = chroma[:, :-1, :-1] - chroma[:, :-1, 1:] - chroma[:, 1:, :-1] + chroma[:, 1:, 1:]
    return float(np.median(np.abs(high)) / 0.6745 / np.sqrt(8))  # four pixels of two channels each


class WorldDetector:
    """Base class of the detectors of both worlds for GenEval. They find and score everything themselves."""

    name: str
    original = False

    def threshold(self, tag: str) -> float:
        """Return the same value for all tasks, since the minimum score has already been applied."""
        return 0.0


def pixels_of(image: np.ndarray | Image.Image) -> np.ndarray:
    """Return float32 (height, width, 3) of an RGB image (PIL, uint8 or float 0..255), else raise ValueError."""
    rgb = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image, np.float32)
    if rgb.ndim != 3 or rgb.shape[2] != 3 or min(rgb.shape[:2]) < 32:
        raise ValueError(f"image: got shape {rgb.shape}, expected (height, width, 3) with sides of at least 32.")
    return rgb


class ShapeDetector(WorldDetector):
    """Finds the shapes of a square image. Radii are fractions of its side, as in the renderer. `score` is the minimum
    intersection over union, `max_unexplained` the share of unexplained pixels above which `detect` refuses the image.
    The default radii are those of the suite's scenes; caption scenes have (0.07, 0.135).
    """

    name = "shapes"

    def __init__(
        self, min_radius: float = 0.11, max_radius: float = 0.16, score: float = 0.65, max_unexplained: float = 0.04
    ):
        self.min_radius, self.max_radius = min_radius, max_radius
        self.score, self.max_unexplained = score, max_unexplained
        self.fingerprint = digest("shapes-1", min_radius, max_radius, score, max_unexplained)

    def detect(self, image: Image.Image) -> DetectionResult:
        """Return all shapes of the image, of any class; refused if too many pixels are unexplained."""
        result = self.analyse(image)
        detections = tuple(
            Detection(s.label, s.score, s.box, mask > 0.5, s.colour if s.off_palette < OFF_PALETTE else UNKNOWN)
            for s, mask in zip(result.shapes, result.coverage)
        )
        if result.unexplained <= self.max_unexplained:
            return DetectionResult(detections)
        reason = f"{result.unexplained:.1%} of the pixels are unexplained, more than {self.max_unexplained:.1%}"
        return DetectionResult(detections, reason)

    def analyse(self, image: np.ndarray | Image.Image) -> Analysis:
        """Return the shapes and the unexplained share of an image (`pixels_of`)."""
        rgb = pixels_of(image)
        noise = noise_level(rgb)
        sigma = next(s for limit, s in BLUR if noise < limit)
        rgb = gaussian_blur(rgb, sigma)
        pixels = lab(rgb)
        distance = to_palette(pixels)
        from_ground = self._ground_distance(pixels)
        front = distance.min(-1) < from_ground
        side = min(rgb.shape[:2])
        explained = (
            self._explain(rgb, mask, colour, sigma, side) for mask, colour in self._parts(front, distance, side)
        )
        pairs = [(self._coloured(*one, pixels), one[1]) for one in explained if one is not None]
        pairs.sort(key=lambda pair: -pair[0].score)
        shapes = tuple(shape for shape, _ in pairs)
        stack = np.stack([template for _, template in pairs]) if pairs else np.zeros((0, *front.shape), np.float32)
        return Analysis(shapes, self._unexplained(front | (from_ground > FOREIGN), distance, shapes, stack), stack)

    @staticmethod
    def _ground_distance(pixels: np.ndarray) -> np.ndarray:
        ends = lab(np.stack([CANVAS_RGB - TEXTURE, CANVAS_RGB + TEXTURE]))[:, 0]
        lightness = pixels[..., 0]
        excess = np.maximum(ends[0] - lightness, 0) + np.maximum(lightness - ends[1], 0)
        return np.sqrt(excess**2 + pixels[..., 1] ** 2 + pixels[..., 2] ** 2)

    def _parts(self, front: np.ndarray, distance: np.ndarray, side: int) -> list[tuple[np.ndarray, int]]:
        least = 0.25 * min(_moments(kind)[0] for kind in CLASSES) * (self.min_radius * side) ** 2
        nearest_colour = distance.argmin(-1)
        labels, n = components(front)
        sizes = np.bincount(labels.ravel(), minlength=n + 1)
        out = []
        for i in range(1, n + 1):
            if sizes[i] < least:
                continue
            mask = labels == i
            votes = np.bincount(nearest_colour[_core(mask)], minlength=len(NAMES))
            first, second = np.argsort(votes)[::-1][:2]
            if votes[second] < 0.25 * votes.sum():
                out.append((mask, int(first)))
                continue
            nearer = distance[..., first] <= distance[..., second]
            for colour, half in ((first, mask & nearer), (second, mask & ~nearer)):
                pieces, m = components(half)
                counts = np.bincount(pieces.ravel(), minlength=m + 1)
                out += [(pieces == j, int(colour)) for j in range(1, m + 1) if counts[j] >= least]
        return out

    def _explain(
        self, rgb: np.ndarray, mask: np.ndarray, colour: int, sigma: float, side: int
    ) -> tuple[Shapelike, np.ndarray] | None:
        wide = grow(mask)
        rows, columns = np.nonzero(wide)
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        if max(bottom - top, right - left) > 3 * self.max_radius * side + 4:
            return None
        line = PALETTE_RGB[colour] - CANVAS_RGB
        # The texture of the background varies along the grey axis, so that direction has less weight.
        grey = np.ones(3, np.float32) / np.sqrt(3)
        weighted = line - grey * float(line @ grey) * 0.75
        box = rgb[top:bottom, left:right] - CANVAS_RGB
        alpha = np.clip(box @ weighted / float(line @ weighted), 0, 1) * wide[top:bottom, left:right]
        if alpha.sum() < 1:  # opposite to its nearest colour, relative to the canvas
            return None
        radii = (ceil(0.6 * self.min_radius * side * STEPS), floor(1.5 * self.max_radius * side * STEPS))
        alpha = alpha.astype(np.float32)
        fit = _TemplateFit(alpha, sigma, radii)
        score, kind, (x, y, radius) = fit.best()
        if HOPELESS < score < SHARP:
            for soft in SOFT:
                blunt = _TemplateFit(alpha, float(np.hypot(sigma, soft)), radii)
                best = blunt.best()
                if best[0] > score:
                    fit, (score, kind, (x, y, radius)) = blunt, best
        if score < self.score:
            return None
        px, py, r = x / STEPS - fit.margin + left, y / STEPS - fit.margin + top, radius / STEPS
        x0, y0, x1, y1 = _moments(kind)[2]
        box_xyxy = (float(px + r * x0), float(py + r * y0), float(px + r * x1), float(py + r * y1))
        shape = Shapelike(kind, NAMES[colour], score, box_xyxy, float(px), float(py), r, 0.0)
        return shape, coverage(kind, float(px), float(py), r, *mask.shape)

    @staticmethod
    def _coloured(shape: Shapelike, template: np.ndarray, pixels: np.ndarray) -> Shapelike:
        core = _core(template > 0.999)
        if not core.any():
            return shape
        distance = to_palette(np.median(pixels[core], axis=0))
        index = int(distance.argmin())
        return replace(shape, colour=NAMES[index], off_palette=float(distance[index]))

    @staticmethod
    def _unexplained(
        front: np.ndarray, distance: np.ndarray, shapes: Sequence[Shapelike], templates: np.ndarray
    ) -> float:
        wrong = front.copy()
        for template in templates:
            wrong &= ~grow(template > 0.01)
        for shape, template in zip(shapes, templates):
            inner = shrink(template > 0.999)
            wrong |= inner & (distance[..., NAMES.index(shape.colour)] > 40)
        return float(wrong.mean())
