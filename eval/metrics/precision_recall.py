"""Precision and recall of generated images (Kynkaanniemi et al. 2019, arXiv 1904.06991) on any features.

Precision: share of generated features inside the reference's manifold, the union of balls around reference features
with the distance to their k-th nearest neighbour as radius. Recall: the same with the roles exchanged.
"""

from pathlib import Path

import torch

from visspec.eval.metrics.features import FeatureExtractor, pair
from visspec.eval.metrics.results import Progress

NEIGHBOURS = 3


def radii(features: torch.Tensor, k: int = NEIGHBOURS, rows: int = 1024) -> torch.Tensor:
    """Distance of every row of (n, d) to its k-th nearest other row, float64 (n,)."""
    if len(features) <= k:
        raise ValueError(f"{k} neighbours need more than {k} images, not {len(features)}")
    x = features.double()
    return torch.cat([_distances(part, x).kthvalue(k + 1, dim=1).values for part in x.split(rows)])


def inside(queries: torch.Tensor, centres: torch.Tensor, reach: torch.Tensor, rows: int = 1024) -> float:
    """Share of queries (n, d) within `reach` (m,) of some centre (m, d)."""
    hits = [(_distances(part, centres.double()) <= reach).any(1) for part in queries.double().split(rows)]
    return float(torch.cat(hits).double().mean())


def _distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def from_features(generated: torch.Tensor, reference: torch.Tensor, k: int = NEIGHBOURS) -> dict[str, float]:
    """`precision`, `recall` and their harmonic mean `f_score` of two feature tables (n, d), (m, d)."""
    precision = inside(generated, reference, radii(reference, k))
    recall = inside(reference, generated, radii(generated, k))
    total = precision + recall
    return {"precision": precision, "recall": recall, "f_score": 2 * precision * recall / total if total else 0.0}


def from_folders(
    generated: str | Path,
    reference: str | Path,
    extractor: FeatureExtractor,
    batch_size: int = 32,
    progress: Progress | None = None,
    k: int = NEIGHBOURS,
) -> dict:
    """The result row of two image folders; its value is the F score."""
    tables = pair(generated, reference, extractor, batch_size, progress)
    values = from_features(tables.generated, tables.reference, k)
    named = {"value": values["f_score"]} | values | {"k": k}
    return tables.result(f"precision-recall[{extractor.name}]", extractor, named)
