"""CLIPScore: 100 times the mean cosine of CLIP's image and text embeddings, as defined by torchmetrics.

The paper (Hessel et al. 2021, arXiv 2104.08718) scales by 2.5, sets negative cosines to 0 and begins every text with "A
photo depicts ", so its values are not comparable. The model and its text length are part of every result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from visspec.eval.metrics.detection import digest, file_digest, with_progress
from visspec.eval.metrics.features import pixels, weights_hash
from visspec.io.files import Journal
from visspec.io.images import image_files, open_image

if TYPE_CHECKING:
    from transformers import CLIPModel

BATCH = 32  # images


class ClipScorer:
    """Computes cosines of images and texts with a transformers CLIP model and processor. Long texts are truncated."""

    def __init__(self, model: CLIPModel, processor: Callable, name: str):
        self.model, self.processor, self.name = model.eval(), processor, name
        self.length: int = model.config.get_text_config().max_position_embeddings
        self.fingerprint = digest(name, weights_hash(model), self.length)

    def of_images(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Return embeddings (n, d), not normalised."""
        return self.model.get_image_features(pixel_values=pixels(self.model, self.processor, images)).pooler_output

    def of_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Return embeddings (n, d), not normalised."""
        options = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": self.length}
        tokens = self.processor(text=list(texts), **options)
        keys = {key: tokens[key].to(self.model.device) for key in ("input_ids", "attention_mask")}
        return self.model.get_text_features(**keys).pooler_output

    @torch.inference_mode()
    def cosines(self, images: Sequence[Image.Image], texts: Sequence[str]) -> np.ndarray:
        """Return the cosine of each pair, float64 (n,)."""
        if len(images) != len(texts):  # cosine_similarity would broadcast one of them
            raise ValueError(f"different counts: {len(images)} images and {len(texts)} texts.")
        u, v = self.of_images(images).double(), self.of_texts(texts).double()
        return torch.nn.functional.cosine_similarity(u, v).cpu().numpy()


def from_folder(folder: str | Path, captions: Mapping[str, str], scorer: ClipScorer, results: str | Path) -> dict:
    """Return the mean score of a folder's images with captions by file name. Broken or unpaired files are problems.
    Cosines are appended to the JSONL file `results`. Pairs in it with unchanged bytes are not scored again.
    """
    pairs, problems = pair_captions(image_files(folder), captions)
    if not pairs:
        raise ValueError(f"captions: no image of {folder} has a caption, expected captions by file name.")
    return of_pairs(pairs, scorer, results, problems)


def of_pairs(pairs: Sequence[tuple[Path, str]], scorer: ClipScorer, results: str | Path, problems: list[str]) -> dict:
    """Return the mean score of (file, caption) pairs; unreadable files are added to `problems`. Raises ValueError if no
    file can be read.
    """
    keys = [digest(path.name, caption, file_digest(path)) for path, caption in pairs]
    with Journal(results, {"scorer": [scorer.name, scorer.fingerprint]}) as journal:
        missing = [(key, *pair) for key, pair in zip(keys, pairs) if key not in journal.done]
        for start in with_progress(range(0, len(missing), BATCH), "batch"):
            problems += _score(missing[start : start + BATCH], scorer, journal)
        scores = {row["id"]: row["cosine"] for row in journal}
    cosines = np.array([scores[key] for key in keys if key in scores])
    if not len(cosines):
        raise ValueError(f"no image can be read; the first problem: {problems[0]}.")
    values = 100 * cosines
    error = float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    result = {"name": f"CLIPScore[{scorer.name}]", "value": float(values.mean()), "n": len(values)}
    result |= {"standard_error": error, "model": scorer.name, "fingerprint": scorer.fingerprint}
    return result | {"text_length": scorer.length, "problems": problems}


def _score(batch: Sequence[tuple[str, Path, str]], scorer: ClipScorer, journal: Journal) -> list[str]:
    rows, problems = [], []
    for key, path, caption in batch:
        try:
            rows.append((key, path, caption, open_image(path)))
        except (ValueError, FileNotFoundError) as error:
            problems.append(str(error))
    if rows:
        cosines = scorer.cosines([image for *_, image in rows], [caption for _, _, caption, _ in rows])
        for (key, path, caption, _), cosine in zip(rows, cosines.tolist()):
            journal.add({"id": key, "image": path.name, "text": caption, "cosine": cosine})
    return problems


def pair_captions(files: Sequence[Path], captions: Mapping[str, str]) -> tuple[list[tuple[Path, str]], list[str]]:
    """Return (file, caption) pairs, by name, and the problems with the rest."""
    names = {path.name for path in files}
    problems = [f"{path.name} has no caption" for path in files if path.name not in captions]
    problems += [f"there is no image {name} for its caption" for name in captions if name not in names]
    return [(path, captions[path.name]) for path in files if path.name in captions], problems
