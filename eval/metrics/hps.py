"""HPSv2 (Wu et al. 2023, arXiv 2306.09341): human preference score of generated images over four prompt styles.

The scorer is the caller's function `(images, prompts) -> cosines`, for example `clipscore.ClipScorer.cosines` with the
preference-tuned CLIP-H. Scores of v2.0 and v2.1 weights are not comparable, so `version` is required and printed.
Images are `<style>/<index:05d>.jpg`, in the order of the prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from visspec.eval.metrics.detection import digest
from visspec.eval.metrics.results import Progress, Rows
from visspec.io.images import MAX_PIXELS, SUFFIXES, open_image

GROUP = 80  # prompts; the published standard deviation is over groups
VERSIONS = ("v2.0", "v2.1")

Scorer = Callable[[Sequence[Image.Image], Sequence[str]], np.ndarray]


def evaluate(
    root: str | Path,
    prompts: Mapping[str, Sequence[str]],
    scorer: Scorer,
    version: str,
    compat: bool = False,
    batch_size: int = 16,
    max_pixels: int = MAX_PIXELS,
    results: str | Path | None = None,
    model: str = "",
    progress: Progress | None = None,
) -> dict:
    """100 x mean cosine by style with the spread over groups of 80 prompts, and the mean of the styles.

    A missing or broken image is listed as a problem and its pair is skipped. `compat=True` reproduces the published
    script: only `.jpg` names, and the first unreadable file raises. Cosines are appended to the JSONL file `results`
    and read from it for the same `model` and unchanged images.
    """
    if version not in VERSIONS:
        raise ValueError(f"version must be one of {VERSIONS}, not {version!r}: their scores are not comparable")
    if not prompts:
        raise ValueError("prompts must name at least one style")
    styles, problems = {}, []
    done = Rows(results, digest("hps", version, model))
    for style, texts in prompts.items():
        values: dict[int, float] = {}
        for start in range(0, len(texts), batch_size):
            images, indices, keys = [], [], {}
            for i in range(start, min(start + batch_size, len(texts))):
                path = _file(Path(root) / style, i, compat)
                keys[i] = digest(style, i, texts[i], path.read_bytes() if path.is_file() else b"")
                if keys[i] in done.rows:
                    values[i] = 100 * done.rows[keys[i]]["cosine"]
                    continue
                try:
                    images.append(open_image(path, max_pixels))
                    indices.append(i)
                except (ValueError, FileNotFoundError) as error:
                    if compat:
                        raise
                    problems.append(f"{style}/{i:05d}: {error}")
            if images:
                found = np.asarray(scorer(images, [texts[i] for i in indices]), float)
                values |= dict(zip(indices, 100 * found))
                for i, cosine in zip(indices, found.tolist()):
                    done.add({"id": keys[i], "style": style, "index": i, "cosine": cosine})
            if progress:
                progress(min(start + batch_size, len(texts)), len(texts))
        if not values:
            raise ValueError(f"no image of {Path(root) / style} can be read")
        groups: dict[int, list[float]] = {}
        for i, value in values.items():
            groups.setdefault(i // GROUP, []).append(value)
        means = [float(np.mean(group)) for group in groups.values()]
        styles[style] = {"value": float(np.mean(means)), "spread": float(np.std(means)), "n": len(values)}
    value = float(np.mean([style["value"] for style in styles.values()]))
    n = sum(style["n"] for style in styles.values())
    return {
        "name": f"HPS {version}",
        "version": version,
        "value": value,
        "n": n,
        "styles": styles,
        "problems": problems,
    }


def _file(folder: Path, index: int, compat: bool) -> Path:
    names = [folder / f"{index:05d}{suffix}" for suffix in ((".jpg",) if compat else (".jpg", *SUFFIXES))]
    return next((path for path in names if path.is_file()), names[0])
