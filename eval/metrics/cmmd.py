"""CMMD (Jayasumana et al. 2024, arXiv 2401.09603): MMD^2 of normalised CLIP embeddings with a Gaussian kernel, x 1000.

The paper uses CLIP ViT-L/14 at 336 pixels; values of other extractors are not comparable to the paper's.
"""

import torch

from visspec.eval.metrics.features import Pair

SIGMA = 10.0
SCALE = 1000.0
ORIGINAL = "openai/clip-vit-large-patch14-336"


def _mean_kernel(x: torch.Tensor, y: torch.Tensor, rows: int = 2048) -> float:
    """Mean of exp(-|a - b|^2 / (2 sigma^2)) over all pairs, in blocks of rows."""
    total = 0.0
    for part in x.split(rows):
        squares = part.square().sum(1)[:, None] + y.square().sum(1)[None] - 2 * part @ y.T
        total += float(torch.exp(-squares.clamp_min(0) / (2 * SIGMA**2)).sum())
    return total / (len(x) * len(y))


def from_features(first: torch.Tensor, second: torch.Tensor) -> float:
    """CMMD of two embedding tables (n, d), (m, d); rows are normalised; the biased estimate, as in the paper."""
    if not len(first) or not len(second):
        raise ValueError(f"CMMD needs images on both sides, not {len(first)} and {len(second)}")
    x, y = (torch.nn.functional.normalize(t.double(), dim=1) for t in (first, second))
    return SCALE * (_mean_kernel(x, x) + _mean_kernel(y, y) - 2 * _mean_kernel(x, y))


def from_pair(tables: Pair) -> dict:
    """The result row of two image folders; called CMMD without brackets only for an extractor named ORIGINAL."""
    name = "CMMD" if tables.extractor.name == ORIGINAL else f"CMMD[{tables.extractor.name}]"
    return tables.result(name, {"value": from_features(tables.generated, tables.reference)})
