"""HPSv2 (Wu et al. 2023, arXiv 2306.09341): human preference score of generated images over four prompt styles.

The scorer is the caller's function `(images, prompts) -> cosines`, for example `clipscore.ClipScorer.cosines` with the
preference-tuned CLIP-H. Scores of v2.0 and v2.1 weights are not comparable, so `version` is required and printed.
Images are `<style>/<index:05d>.jpg`, in the order of the prompts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from visspec.eval.metrics.clipscore import ScoredPair, Scorer, resumed_cosines
from visspec.eval.metrics.detection import digest
from visspec.eval.metrics.results import ResultFile
from visspec.io.images import SUFFIXES

GROUP = 80  # prompts; the published standard deviation is over groups
VERSIONS = ("v2.0", "v2.1")


def evaluate(
    root: str | Path,
    prompts: Mapping[str, Sequence[str]],
    scorer: Scorer,
    version: str,
    batch_size: int = 16,
    results: str | Path | None = None,
    model: str = "",
) -> dict:
    """100 x mean cosine by style with the spread over groups of 80 prompts, and the mean of the styles.

    A missing or broken image is listed as a problem and its pair is skipped. Cosines are appended to the JSONL file
    `results` and read from it for the same `model` and unchanged images.
    """
    if version not in VERSIONS:
        raise ValueError(f"version must be one of {VERSIONS}, not {version!r}: their scores are not comparable")
    if not prompts:
        raise ValueError("prompts must name at least one style")
    styles: dict[str, dict[str, float]] = {}
    problems: list[str] = []
    done = ResultFile(results, digest("hps", version, model))
    for style, texts in prompts.items():
        pairs = []
        for i, text in enumerate(texts):
            names = [Path(root) / style / f"{i:05d}{suffix}" for suffix in (".jpg", *SUFFIXES)]
            path = next(filter(Path.is_file, names), names[0])
            key = digest(style, i, text, path.read_bytes() if path.is_file() else b"")
            pairs.append(ScoredPair(path, text, {"id": key, "style": style, "index": i}))
        values, broken = resumed_cosines(pairs, scorer, done, batch_size)
        problems += [f"{style}/{i:05d}: {error}" for i, error in broken.items()]
        if not values:
            raise ValueError(f"no image of {Path(root) / style} can be read")
        groups: dict[int, list[float]] = {}
        for i, cosine in values.items():
            groups.setdefault(i // GROUP, []).append(100 * cosine)
        means = [float(np.mean(group)) for group in groups.values()]
        styles[style] = {"value": float(np.mean(means)), "spread": float(np.std(means)), "n": len(values)}
    value, n = float(np.mean([style["value"] for style in styles.values()])), sum(s["n"] for s in styles.values())
    found = {"name": f"HPS {version}", "version": version, "value": value, "n": n}
    return found | {"styles": styles, "problems": problems}
