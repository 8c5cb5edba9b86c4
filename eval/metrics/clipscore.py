"""CLIPScore (Hessel et al. 2021, arXiv 2104.08718) and its variants: cosine of CLIP's image and text embeddings.

Published numbers differ in four choices: model, prompt prefix, scale and truncation. All four are recorded in every
result; PRESETS contains the common ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from visspec.eval.metrics.detection import digest, file_digest
from visspec.eval.metrics.features import weights_hash
from visspec.eval.metrics.results import Progress, Rows
from visspec.io.images import MAX_PIXELS, image_files, open_image

if TYPE_CHECKING:
    from transformers import CLIPModel


@dataclass(frozen=True)
class Dialect:
    """`scale` times the cosine; `clip_at_zero` per pair, as in the paper; `prefix` before every caption."""

    scale: float = 100.0
    prefix: str = ""
    clip_at_zero: bool = False


PRESETS = {
    "torchmetrics": Dialect(),
    "paper": Dialect(2.5, "A photo depicts ", True),
    "lantern": Dialect(1.0, "A photo depicts "),
}


class ClipScorer:
    """Cosines of images and texts by a transformers CLIP model and its processor; texts are truncated to its length."""

    def __init__(self, model: CLIPModel, processor: Callable, name: str):
        self.model, self.processor, self.name = model.eval(), processor, name
        self.length: int = model.config.get_text_config().max_position_embeddings
        self.fingerprint = digest(name, weights_hash(model), self.length)

    @torch.inference_mode()
    def cosines(self, images: Sequence[Image.Image], texts: Sequence[str]) -> np.ndarray:
        """Cosine of each pair, float64 (n,)."""
        if len(images) != len(texts):
            raise ValueError(f"different counts: {len(images)} images and {len(texts)} texts")
        parameter = next(self.model.parameters())
        pixels = self.processor(images=list(images), return_tensors="pt")["pixel_values"]
        tokens = self.processor(
            text=list(texts), return_tensors="pt", padding=True, truncation=True, max_length=self.length
        )
        u = self.model.get_image_features(pixel_values=pixels.to(parameter.device, parameter.dtype))
        keys = {key: tokens[key].to(parameter.device) for key in ("input_ids", "attention_mask")}
        v = self.model.get_text_features(**keys)
        u, v = (t if isinstance(t, torch.Tensor) else t.pooler_output for t in (u, v))
        return torch.nn.functional.cosine_similarity(u.double(), v.double()).cpu().numpy()


def scores(cosines: np.ndarray, dialect: Dialect) -> np.ndarray:
    """Scores of single pairs."""
    return dialect.scale * (np.maximum(cosines, 0) if dialect.clip_at_zero else cosines)


def from_folder(
    folder: str | Path,
    captions: Mapping[str, str] | Sequence[str],
    scorer: ClipScorer,
    dialect: Dialect = PRESETS["torchmetrics"],
    batch_size: int = 32,
    compat: bool = False,
    max_pixels: int = MAX_PIXELS,
    results: str | Path | None = None,
    progress: Progress | None = None,
) -> dict:
    """Mean score of a folder's images with captions keyed by file name; broken or unpaired files are problems.

    `compat=True` takes a sequence and pairs it with the naturally sorted files by position, as some published scripts
    do. A missing image would shift all later pairs, so different counts raise ValueError. Cosines are appended to the
    JSONL file `results`; pairs already in it with unchanged bytes are not scored again.
    """
    files = image_files(folder)
    problems: list[str] = []
    if compat:
        if isinstance(captions, Mapping) or len(captions) != len(files):
            found = "a mapping" if isinstance(captions, Mapping) else f"{len(captions)} captions"
            raise ValueError(f"compat=True needs one caption for each of the {len(files)} images in order, not {found}")
        pairs = list(zip(files, captions))
    else:
        if not isinstance(captions, Mapping):
            raise ValueError("captions must be a mapping from file name to caption; by position only with compat=True")
        pairs = [(path, captions[path.name]) for path in files if path.name in captions]
        names = {path.name for path in files}
        problems += [f"{path.name} has no caption" for path in files if path.name not in captions]
        problems += [f"there is no image {name} for its caption" for name in captions if name not in names]
    if not pairs:
        raise ValueError(f"captions: no image of {folder} has a caption, expected one by each file's name")
    done = Rows(results, digest(scorer.fingerprint, dialect.prefix))
    cosines: list[float] = []
    for start in range(0, len(pairs), batch_size):
        fresh, images = [], []
        batch = [(path, dialect.prefix + text) for path, text in pairs[start : start + batch_size]]
        keys = {path: digest(path.name, text, file_digest(path)) for path, text in batch}
        for path, text in batch:
            if keys[path] in done.rows:
                continue
            try:
                images.append(open_image(path, max_pixels))
                fresh.append((path, text))
            except ValueError as error:
                problems.append(str(error))
        found = scorer.cosines(images, [text for _, text in fresh]).tolist() if fresh else []
        for (path, text), cosine in zip(fresh, found):
            done.add({"id": keys[path], "image": path.name, "text": text, "cosine": cosine})
        cosines += [done.rows[keys[path]]["cosine"] for path, _ in batch if keys[path] in done.rows]
        if progress:
            progress(min(start + batch_size, len(pairs)), len(pairs))
    if not cosines:
        raise ValueError(f"no image of {folder} can be read; the first problem: {problems[0]}")
    values = scores(np.array(cosines), dialect)
    return {
        "name": f"CLIPScore[{scorer.name}]",
        "value": float(values.mean()),
        "n": len(values),
        "standard_error": float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None,
        "model": scorer.name,
        "fingerprint": scorer.fingerprint,
        "prefix": dialect.prefix,
        "scale": dialect.scale,
        "clip_at_zero": dialect.clip_at_zero,
        "text_length": scorer.length,
        "problems": problems,
    }
