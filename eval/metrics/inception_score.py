"""Inception score (Salimans et al. 2016, arXiv 1606.03498): exp of the mean KL of p(y|x) from p(y), over splits.

The published score uses the bias-free logits of the 2015-12-05 Inception; any classifier's logits are accepted.
Computed by torch-fidelity.
"""

from pathlib import Path

import torch

from visspec.eval.metrics.features import FeatureExtractor, table

SPLITS = 10
SEED = 2020


def from_logits(
    logits: torch.Tensor, splits: int = SPLITS, shuffle: bool = True, seed: int = SEED
) -> tuple[float, float]:
    """Mean and standard deviation of the score over splits of logits (n, classes)."""
    n = len(logits)
    if n < splits:
        raise ValueError(f"{splits} splits need at least {splits} images, not {n}")
    from torch_fidelity.metric_isc import isc_features_to_metric

    found = isc_features_to_metric(logits.double(), splits, shuffle, seed)
    return found["inception_score_mean"], found["inception_score_std"]


def from_folder(folder: str | Path, classifier: FeatureExtractor, splits: int = SPLITS) -> dict:
    """The result row of an image folder; `classifier` is an extractor whose features are logits."""
    logits, met = table(folder, classifier)
    mean, std = from_logits(logits, splits)
    found = {"name": f"IS[{classifier.name}]", "value": mean, "std": std, "n": met.n, "extractor": classifier.name}
    return found | {"fingerprint": classifier.fingerprint, "problems": list(met.problems)}
