"""CLIPScore (Hessel et al. 2021, arXiv 2104.08718) and its variants: cosine of CLIP's image and text embeddings.

Published numbers differ in four choices: model, prompt prefix, scale and truncation. All four are recorded in every
result; PRESETS contains the common ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image

from visspec.eval.metrics.detection import digest, file_digest
from visspec.eval.metrics.features import pixels, weights_hash
from visspec.eval.metrics.results import ResultFile, with_progress
from visspec.io.images import image_files, open_image

if TYPE_CHECKING:
    from transformers import CLIPModel

Scorer = Callable[[Sequence[Image.Image], Sequence[str]], np.ndarray]  # (images, texts) -> cosines


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

    def of_images(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Embeddings (n, d), not normalised."""
        return self.model.get_image_features(pixel_values=pixels(self.model, self.processor, images)).pooler_output

    def of_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Embeddings (n, d), not normalised."""
        options = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": self.length}
        tokens = self.processor(text=list(texts), **options)
        keys = {key: tokens[key].to(self.model.device) for key in ("input_ids", "attention_mask")}
        return self.model.get_text_features(**keys).pooler_output

    @torch.inference_mode()
    def cosines(self, images: Sequence[Image.Image], texts: Sequence[str]) -> np.ndarray:
        """Cosine of each pair, float64 (n,)."""
        if len(images) != len(texts):
            raise ValueError(f"different counts: {len(images)} images and {len(texts)} texts")
        u, v = self.of_images(images).double(), self.of_texts(texts).double()
        return torch.nn.functional.cosine_similarity(u, v).cpu().numpy()


class ScoredPair(NamedTuple):
    """An image file and its text; `row` is what its result row says of it beside the cosine, `id` among it."""

    path: Path
    text: str
    row: dict


def resumed_cosines(
    pairs: Sequence[ScoredPair], score: Scorer, done: ResultFile, batch_size: int
) -> tuple[dict[int, float], dict[int, Exception]]:
    """Cosines by the place of their pair, and why the others have none: files that can't be read.

    Cosines are added to `done`; pairs that are in it are not scored again.
    """
    found: dict[int, float] = {}
    broken: dict[int, Exception] = {}
    for start in with_progress(range(0, len(pairs), batch_size), "batch"):
        images: dict[int, Image.Image] = {}
        for i, pair in enumerate(pairs[start : start + batch_size], start):
            if pair.row["id"] in done.rows:
                found[i] = done.rows[pair.row["id"]]["cosine"]
                continue
            try:
                images[i] = open_image(pair.path)
            except (ValueError, FileNotFoundError) as error:
                broken[i] = error
        if images:
            cosines = np.asarray(score(list(images.values()), [pairs[i].text for i in images]), float)
            for i, cosine in zip(images, cosines.tolist()):
                found[i] = done.add(pairs[i].row | {"cosine": cosine})["cosine"]
    return dict(sorted(found.items())), broken


def scores(cosines: np.ndarray, dialect: Dialect) -> np.ndarray:
    return dialect.scale * (np.maximum(cosines, 0) if dialect.clip_at_zero else cosines)


def from_folder(
    folder: str | Path,
    captions: Mapping[str, str],
    scorer: ClipScorer,
    dialect: Dialect = PRESETS["torchmetrics"],
    batch_size: int = 32,
    results: str | Path | None = None,
) -> dict:
    """Mean score of a folder's images with captions keyed by file name; broken or unpaired files are problems.

    Cosines are appended to the JSONL file `results`; pairs already in it with unchanged bytes are not scored again.
    """
    named, problems = pair_captions(image_files(folder), captions)
    if not named:
        raise ValueError(f"captions: no image of {folder} has a caption, expected one by each file's name")
    pairs = []
    for path, caption in named:
        text = dialect.prefix + caption
        row = {"id": digest(path.name, text, file_digest(path)), "image": path.name, "text": text}
        pairs.append(ScoredPair(path, text, row))
    done = ResultFile(results, digest(scorer.fingerprint, dialect.prefix))
    cosines, broken = resumed_cosines(pairs, scorer.cosines, done, batch_size)
    problems += map(str, broken.values())
    if not cosines:
        raise ValueError(f"no image of {folder} can be read; the first problem: {problems[0]}")
    values = scores(np.array(list(cosines.values())), dialect)
    error = float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    found = {"name": f"CLIPScore[{scorer.name}]", "value": float(values.mean()), "n": len(values)}
    found |= {"standard_error": error, "model": scorer.name, "fingerprint": scorer.fingerprint}
    return found | asdict(dialect) | {"text_length": scorer.length, "problems": problems}


def pair_captions(files: Sequence[Path], captions: Mapping[str, str]) -> tuple[list[tuple[Path, str]], list[str]]:
    """(file, caption) pairs, by name, and what has no partner."""
    names = {path.name for path in files}
    problems = [f"{path.name} has no caption" for path in files if path.name not in captions]
    problems += [f"there is no image {name} for its caption" for name in captions if name not in names]
    return [(path, captions[path.name]) for path in files if path.name in captions], problems
