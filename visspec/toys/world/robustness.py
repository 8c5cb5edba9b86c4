"""Robustness of the worlds' detectors: shares of correct verdicts after damage that doesn't change the content.

`python -m visspec.toys.world.robustness [--world emoji]` prints a table as Markdown, and with --wrong how many of so
many clean renders pass a prompt that they do not show. A verdict is correct if the damaged image still passes its own
prompt; of a captioned scene, which has none, if exactly its things are found.
"""

import argparse
import io
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

from visspec.eval.metrics.detection import DetectedColours, Detector
from visspec.eval.metrics.geneval import judge, select_detections
from visspec.toys.world.detector import gaussian_blur
from visspec.toys.world.suite import Metadata, required_objects
from visspec.toys.world.worlds import WORLDS, World, world

Damage = Callable[[np.ndarray, np.random.Generator], np.ndarray]
TIERS = {
    "shapes": (("free plain", 64), ("free", 64), ("free", 96), ("free", 128)),
    "emoji": (("prompts", 96), ("prompts", 128), ("captions", 120)),
}
# Strengths of a world's columns.
NOISE = {"shapes": (8, 16, 32), "emoji": (8, 16)}
BLUR = {"shapes": (0.8, 1.2), "emoji": (0.8,)}
JPEG = {"shapes": (75, 40), "emoji": (90, 75)}
BLANKS = {"shapes": 100, "emoji": 10}  # images of pure noise; the emoji's detector takes a second for one


def _clip(image: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def noise(sigma: float) -> Damage:
    """Independent Gaussian noise of `sigma` grey levels on every channel."""
    return lambda image, rng: _clip(image + rng.normal(0, sigma, image.shape))


def blur(sigma: float) -> Damage:
    """Gaussian blur of `sigma` pixels."""
    return lambda image, rng: _clip(gaussian_blur(image.astype(np.float32), sigma))


def jpeg(quality: int) -> Damage:
    """JPEG compression by Pillow with its default chroma subsampling."""

    def damage(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=quality)
        return np.asarray(Image.open(buffer, formats=["JPEG"]).convert("RGB"))

    return damage


def halve(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Halve the resolution and double it again, both bilinear."""
    side = image.shape[0]
    small = Image.fromarray(image).resize((side // 2, side // 2), Image.Resampling.BILINEAR)
    return np.asarray(small.resize((side, side), Image.Resampling.BILINEAR))


class Render(NamedTuple):
    """A clean picture: its pixels, the names it shows, and its prompt if it has one."""

    pixels: np.ndarray
    names: list[str]
    row: Metadata | None


def renders(place: World, tier: str, side: int, count: int, seed: int) -> list[Render]:
    """So many clean pictures of a tier; "free plain" has no ground texture."""
    if tier == "captions":
        named = place.captions.named
        return [Render(place.draw(s, side), [getattr(t, named) for t in s.things], None) for s in place.scenes(count)]
    rows, rng = place.suite.suite(), np.random.default_rng(seed)
    rows = rows[:: max(1, len(rows) // count)][:count]
    grounds = {"grounds": ("plain",)} if tier == "free plain" else {}
    scenes = [place.suite.free_scene(row, rng, **grounds) for row in rows]
    return [
        Render(place.draw(s, side), [kind for kind, _ in required_objects(row)], row) for s, row in zip(scenes, rows)
    ]


def damages(name: str) -> dict[str, Damage]:
    """The columns of the table of a world."""
    out: dict[str, Damage] = {"clean": lambda image, rng: image}
    out |= {f"noise {s}": noise(s) for s in NOISE[name]} | {f"blur {s}": blur(s) for s in BLUR[name]}
    return out | {f"JPEG {q}": jpeg(q) for q in JPEG[name]} | {"half size": halve}


def table(count: int = 368, detector: Detector | None = None, seed: int = 0, place: World | None = None) -> list[dict]:
    """One dictionary per tier: correct verdicts by damage, share of things found, results for pure noise, processor
    milliseconds (clean).
    """
    place = place or world("shapes")
    detector, colours = detector or place.detector(), DetectedColours()
    out = []
    for tier, side in TIERS[place.name]:
        clean = renders(place, tier, side, count, seed)
        line: dict = {"tier": tier, "side": side, "n": len(clean), "right": {}, "found": {}}
        for name, damage in damages(place.name).items():
            rng, start = np.random.default_rng(seed + 2), time.process_time()
            right = held = shown = 0
            for image, names, row in clean:
                seen = detector.detect(Image.fromarray(damage(image, rng)), names)
                labels = [d.label for d in seen.detections]
                passed = (
                    judge(None, select_detections(seen, 0.0), row, colours)[0]
                    if row
                    else sorted(labels) == sorted(names)
                )
                right, shown = right + (passed and not seen.refused), shown + len(names)
                held += sum(min(names.count(each), labels.count(each)) for each in set(names))
            line["right"][name], line["found"][name] = right / len(clean), held / shown
            line.setdefault("ms", (time.process_time() - start) / len(clean) * 1e3)  # for the clean column
        rng = np.random.default_rng(seed + 3)
        n = BLANKS[place.name]
        blanks = (Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(n))
        answers = [detector.detect(blank, ()) for blank in blanks]
        line["pure_noise"] = {
            "refused": sum(bool(a.refused) for a in answers) / n,
            "with_detections": sum(bool(a.detections) for a in answers) / n,
        }
        out.append(line)
    return out


def wrong_passes(
    place: World, count: int, detector: Detector | None = None, side: int = 96, seed: int = 0
) -> tuple[int, int]:
    """Of `count` clean renders of the suite's prompts, those that pass their own and those that pass another prompt,
    whose things are none of theirs.
    """
    detector, colours, rows = detector or place.detector(), DetectedColours(), place.suite.suite()
    rng, right, wrong = np.random.default_rng(seed), 0, 0
    for i in range(count):
        row = rows[int(rng.integers(len(rows)))] if count != len(rows) else rows[i]
        names = [kind for kind, _ in required_objects(row)]
        image = Image.fromarray(place.draw(place.suite.free_scene(row, rng), side))
        objects = select_detections(detector.detect(image, names), 0.0)
        right += judge(None, objects, row, colours)[0]
        others = [other for other in rows if not {kind for kind, _ in required_objects(other)} <= set(names)]
        wrong += judge(None, objects, others[int(rng.integers(len(others)))], colours)[0]
    return right, wrong


def markdown(lines: list[dict]) -> str:
    """The table as Markdown: verdicts, and things found in brackets."""
    names = list(lines[0]["right"])
    head = ["tier", "px", "n", *names, "pure noise refused", "ms"]
    body = [
        [line["tier"], str(line["side"]), str(line["n"])]
        + [f"{line['right'][name]:.3f} ({line['found'][name]:.3f})" for name in names]
        + [f"{line['pure_noise']['refused']:.2f}", f"{line['ms']:.1f}"]
        for line in lines
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


def main() -> None:
    """Command line: print the table and the wrong passes, optionally write both as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", choices=WORLDS, default="shapes", help="whose detector")
    parser.add_argument("--count", type=int, default=368, help="renders a tier, at most the prompts of the suite")
    parser.add_argument("--wrong", type=int, default=0, help="renders that are judged by another prompt")
    parser.add_argument("--json", help="file for the figures as JSON")
    args = parser.parse_args()
    place, found = world(args.world), {}
    if args.wrong:
        right, wrong = wrong_passes(place, args.wrong)
        print(f"{right} of {args.wrong} clean renders pass their own prompt, {wrong} pass another", flush=True)
        found = {"own": right, "other": wrong, "renders": args.wrong}
    lines = table(args.count, place=place)
    print(markdown(lines))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found | {"table": lines}, file, indent=1)


if __name__ == "__main__":
    main()
