"""Robustness table of the emoji detector, as that of the shapes: correct verdicts after harmless damage.

`python -m visspec.toys.world.emoji.robustness` prints the table as Markdown, and how many of the clean renders pass a
prompt that they do not show.
"""

import argparse
import json
import time

import numpy as np
from PIL import Image

from visspec.eval.metrics.detection import DetectedColours, Detector
from visspec.eval.metrics.geneval import judge, kept
from visspec.toys.world.emoji.detector import EmojiDetector
from visspec.toys.world.emoji.render import render
from visspec.toys.world.emoji.scene import held_out_scenes
from visspec.toys.world.emoji.suite import Metadata, free_scene, suite, wanted
from visspec.toys.world.robustness import Damage, blur, halved, jpeg, noise

TIERS = (("prompts", 96), ("prompts", 128), ("captions", 120))


def damages() -> dict[str, Damage]:
    """The columns of the table."""
    out: dict[str, Damage] = {"clean": lambda image, rng: image}
    out |= {f"noise {s}": noise(s) for s in (8, 16)} | {"blur 0.8": blur(0.8)}
    return out | {f"JPEG {q}": jpeg(q) for q in (90, 75)} | {"half size": halved}


def _pictures(tier: str, side: int, count: int, seed: int) -> list[tuple[np.ndarray, list[str], Metadata | None]]:
    """Clean renders, the names they show, and their prompts if they have one."""
    if tier == "captions":
        scenes = held_out_scenes(count)
        return [(render(scene, side), [p.name for p in scene.pictures], None) for scene in scenes]
    rng, rows = np.random.default_rng(seed), suite()[:: max(1, 360 // count)][:count]
    return [(render(free_scene(row, rng), side), wanted(row), row) for row in rows]


def table(count: int = 360, detector: Detector | None = None, seed: int = 0) -> list[dict]:
    """A dictionary a tier: shares of right verdicts by damage (its prompt passes; of captioned scenes, which have none,
    exactly its pictures are found), of pictures found, and the processor's milliseconds (clean).
    """
    detector, colours = detector or EmojiDetector(), DetectedColours()
    out = []
    for tier, side in TIERS:
        clean = _pictures(tier, side, count, seed)
        line: dict = {"tier": tier, "side": side, "right": {}, "found": {}}
        for name, damage in damages().items():
            rng, begun = np.random.default_rng(seed), time.process_time()
            right = held = shown = 0
            for image, names, row in clean:
                seen = detector.detect(Image.fromarray(damage(image, rng)), names)
                said = [d.label for d in seen.detections]
                passed = judge(None, kept(seen, 0.0), row, colours)[0] if row else sorted(said) == sorted(names)
                right, shown = right + passed, shown + len(names)
                held += sum(min(names.count(each), said.count(each)) for each in set(names))
            line["right"][name], line["found"][name] = right / len(clean), held / shown
            if name == "clean":
                line["ms"] = 1000 * (time.process_time() - begun) / len(clean)
        out.append(line | {"n": len(clean)})
    return out


def wrong_passes(count: int, detector: Detector | None = None, side: int = 96, seed: int = 0) -> tuple[int, int]:
    """Of `count` clean renders of the suite's prompts, those that pass their own and those that pass another prompt,
    whose pictures are none of theirs.
    """
    detector, colours, rows = detector or EmojiDetector(), DetectedColours(), suite()
    rng, right, wrong = np.random.default_rng(seed), 0, 0
    for i in range(count):
        row = rows[int(rng.integers(len(rows)))] if count != len(rows) else rows[i]
        objects = kept(detector.detect(Image.fromarray(render(free_scene(row, rng), side)), wanted(row)), 0.0)
        right += judge(None, objects, row, colours)[0]
        others = [other for other in rows if not set(wanted(other)) <= set(wanted(row))]
        wrong += judge(None, objects, others[int(rng.integers(len(others)))], colours)[0]
    return right, wrong


def markdown(lines: list[dict]) -> str:
    """The table as Markdown: verdicts, and pictures found in brackets."""
    names = list(lines[0]["right"])
    body = [
        [f"{line['tier']}, {line['side']} px", str(line["n"])]
        + [f"{line['right'][name]:.3f} ({line['found'][name]:.3f})" for name in names]
        + [f"{line['ms']:.0f}"]
        for line in lines
    ]
    head = ["pictures", "n", *names, "ms"]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


def main() -> None:
    """Command line: print the table and the wrong passes, optionally write both as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=360, help="renders a tier, at most 360")
    parser.add_argument("--wrong", type=int, default=1000, help="renders that are judged by another prompt")
    parser.add_argument("--json", help="file for the figures as JSON")
    args = parser.parse_args()
    right, wrong = wrong_passes(args.wrong)
    print(f"{right} of {args.wrong} clean renders pass their own prompt, {wrong} pass another", flush=True)
    lines = table(args.count)
    print(markdown(lines))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"own": right, "other": wrong, "renders": args.wrong, "table": lines}, file, indent=1)


if __name__ == "__main__":
    main()
