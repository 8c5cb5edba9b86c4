"""Robustness table of the shape detector: the share of correct verdicts after damage that doesn't change the content.

`python -m visspec.toys.world.robustness` prints the table as Markdown; a verdict is correct if the damaged image
still passes its own prompt.
"""

import argparse
import io
import json
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

from visspec.eval.metrics.detection import DetectedColours
from visspec.eval.metrics.geneval import judge, kept
from visspec.toys.judges import ShapeWorldDetector
from visspec.toys.world import lattice
from visspec.toys.world.detector import blurred
from visspec.toys.world.palette import GROUNDS
from visspec.toys.world.render import render
from visspec.toys.world.suite import Metadata, free_scene, suite

Damage = Callable[[np.ndarray, np.random.Generator], np.ndarray]
TIERS = (("lattice", 64), ("free plain", 64), ("free", 64), ("free", 96), ("free", 128))


def _clipped(image: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def noise(sigma: float) -> Damage:
    """Independent Gaussian noise of `sigma` grey levels on every channel."""
    return lambda image, rng: _clipped(image + rng.normal(0, sigma, image.shape))


def blur(sigma: float) -> Damage:
    """Gaussian blur of `sigma` pixels."""
    return lambda image, rng: _clipped(blurred(image.astype(np.float32), sigma))


def jpeg(quality: int) -> Damage:
    """JPEG compression by Pillow with its default chroma subsampling."""

    def damage(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=quality)
        return np.asarray(Image.open(buffer, formats=["JPEG"]).convert("RGB"))

    return damage


def halved(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Halve the resolution and double it again, both bilinear."""
    side = image.shape[0]
    small = Image.fromarray(image).resize((side // 2, side // 2), Image.Resampling.BILINEAR)
    return np.asarray(small.resize((side, side), Image.Resampling.BILINEAR))


def wrong_tokens(count: int) -> Damage:
    """Replace `count` of the 64 lattice tokens by uniform ones; this changes the content of some images."""

    def damage(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        tokens = lattice.encode(image)
        where = rng.choice(lattice.TOKENS, size=count, replace=False)
        tokens[where] = rng.integers(lattice.vocabulary_size(), size=count)
        return lattice.decode(tokens)

    return damage


def kmeans(patches: np.ndarray, k: int, rng: np.random.Generator, rounds: int = 10) -> np.ndarray:
    """Centres float32 (k, d) of Lloyd's algorithm on patches (n, d), started at random distinct patches."""
    patches = np.unique(patches.astype(np.float32), axis=0)
    centres = patches[rng.choice(len(patches), size=min(k, len(patches)), replace=False)]
    for _ in range(rounds):
        owner = assign(patches, centres)
        sums = np.zeros_like(centres)
        np.add.at(sums, owner, patches)
        counts = np.bincount(owner, minlength=len(centres))[:, None]
        centres = np.where(counts > 0, sums / np.maximum(counts, 1), centres)
    return centres


def assign(patches: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Index of the nearest centre of every patch."""
    half = (centres**2).sum(1) / 2
    return np.concatenate(
        [(half - part @ centres.T).argmin(1) for part in np.array_split(patches, 1 + len(patches) // 4096)]
    )


def _patches(image: np.ndarray, size: int) -> np.ndarray:
    n = image.shape[0] // size
    return image.reshape(n, size, n, size, 3).swapaxes(1, 2).reshape(n * n, size * size * 3).astype(np.float32)


def vector_quantised(training: list[np.ndarray], k: int = 512, size: int = 4, seed: int = 0) -> Damage:
    """Replace every `size` x `size` patch by the nearest of k k-means centres learned on other images."""
    rng = np.random.default_rng(seed)
    centres = kmeans(np.concatenate([_patches(image, size) for image in training]), k, rng)

    def damage(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        side, n = image.shape[0], image.shape[0] // size
        coded = centres[assign(_patches(image, size), centres)]
        return _clipped(coded.reshape(n, n, size, size, 3).swapaxes(1, 2).reshape(side, side, 3))

    return damage


def pictures(tier: str, side: int, rows: list[Metadata], seed: int) -> list[np.ndarray]:
    """One clean render per prompt; the tier "free plain" has no ground texture."""
    rng = np.random.default_rng(seed)
    if tier == "lattice":
        return [lattice.picture(lattice.sample_scene(row, rng)) for row in rows]
    grounds = ("plain",) if tier == "free plain" else GROUNDS
    return [render(free_scene(row, rng, grounds), side) for row in rows]


def damages(tier: str, training: list[np.ndarray]) -> dict[str, Damage]:
    """The columns of the table."""
    out: dict[str, Damage] = {"clean": lambda image, rng: image}
    out |= {f"noise {s}": noise(s) for s in (8, 16, 32)}
    out |= {f"blur {s}": blur(s) for s in (0.8, 1.2)}
    out |= {f"JPEG {q}": jpeg(q) for q in (75, 40)}
    out |= {"half size": halved, "VQ 512": vector_quantised(training)}
    if tier == "lattice":
        out |= {f"{n} wrong": wrong_tokens(n) for n in (1, 2, 4, 8)}
    return out


def table(count: int = 368, detector: ShapeWorldDetector | None = None, seed: int = 0) -> list[dict]:
    """One dictionary per tier: correct verdicts by damage, results for pure noise, processor milliseconds (clean)."""
    detector, colours = detector or ShapeWorldDetector(), DetectedColours()
    rows = suite()[:: max(1, 368 // count)][:count]
    out = []
    for tier, side in TIERS:
        clean = pictures(tier, side, rows, seed)
        line: dict = {"tier": tier, "side": side, "n": len(rows), "right": {}}
        for name, damage in damages(tier, pictures(tier, side, suite(), seed + 1)).items():
            rng, right = np.random.default_rng(seed + 2), 0
            start = time.process_time()
            for image, row in zip(clean, rows):
                found = detector.detect(Image.fromarray(damage(image, rng)))
                right += not found.refused and judge(None, kept(found, 0.0), row, colours)[0]
            line["right"][name] = right / len(rows)
            line.setdefault("ms", (time.process_time() - start) / len(rows) * 1e3)  # for the clean column
        rng = np.random.default_rng(seed + 3)
        answers = [
            detector.detect(Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))) for _ in range(100)
        ]
        line["pure_noise"] = {
            "refused": sum(bool(a.refused) for a in answers) / 100,
            "with_detections": sum(bool(a.detections) for a in answers) / 100,
        }
        out.append(line)
    return out


def markdown(lines: list[dict]) -> str:
    """The table as Markdown."""
    names = list(dict.fromkeys(name for line in lines for name in line["right"]))
    head = ["tier", "px", "n", *names, "pure noise refused", "ms"]
    body = [
        [line["tier"], str(line["side"]), str(line["n"])]
        + [f"{line['right'][name]:.3f}" if name in line["right"] else "–" for name in names]
        + [f"{line['pure_noise']['refused']:.2f}", f"{line['ms']:.1f}"]
        for line in lines
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


def main() -> None:
    """Command line: print the table, optionally write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=368, help="prompts of the suite to render, at most 368")
    parser.add_argument("--json", help="file for the table as JSON")
    args = parser.parse_args()
    lines = table(args.count)
    print(markdown(lines))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
