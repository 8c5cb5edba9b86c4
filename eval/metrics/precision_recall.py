"""Precision and recall of generated images (Kynkaanniemi et al. 2019, arXiv 1904.06991) on any features.

Precision: share of generated features inside the reference's manifold, the union of balls around reference features
with the distance to their k-th nearest neighbour as radius. Recall: the same with the roles exchanged.
Computed by torch-fidelity.
"""

import torch

from visspec.eval.metrics.features import Pair

NEIGHBOURS = 3


def from_features(generated: torch.Tensor, reference: torch.Tensor, k: int = NEIGHBOURS) -> dict[str, float]:
    """`precision`, `recall` and their harmonic mean `f_score` of two feature tables (n, d), (m, d)."""
    if min(len(generated), len(reference)) <= k:
        raise ValueError(f"{k} neighbours need more than {k} images, not {min(len(generated), len(reference))}")
    from torch_fidelity.metric_prc import prc_features_to_metric

    settings = {"prc_neighborhood": k, "prc_batch_size": 1024, "save_cpu_ram": True, "verbose": False}
    return prc_features_to_metric(generated.double(), reference.double(), **settings)


def from_pair(tables: Pair, k: int = NEIGHBOURS) -> dict:
    """The result row of two image folders; its value is the F score."""
    values = from_features(tables.generated, tables.reference, k)
    return tables.result(f"precision-recall[{tables.extractor.name}]", {"value": values["f_score"], **values, "k": k})
