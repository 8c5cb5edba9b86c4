"""What drafters of image codes share: the target's embeddings and grid, and guidance other than in training."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from visspec.models.drafting import checkpoint
from visspec.models.image_codes.target import Family
from visspec.types import Request

OTHER_SCALE = 1.5  # warn if the guidance differs by more than this factor from training


IMPOSSIBLE = -1e4  # logit of grammar ids, which are never drafted: probability 0 in float32


@torch.no_grad()
def embedding(family: Family, vocab: int) -> nn.Embedding:
    """Embedding table of a family's ids."""
    ids = torch.arange(vocab, device=next(family.decoder.parameters()).device)
    return nn.Embedding.from_pretrained(family.embed(ids).detach())


def check_target(config: Any, family: Family) -> None:
    """Raises ValueError if the drafter was made for another model."""
    decoder, vocab = family.decoder.config, family.codes + family.grammar
    layers = decoder.num_hidden_layers
    checkpoint.check_target(
        config, family=family.name, hidden=decoder.hidden_size, codes=family.codes, vocab=vocab, target_layers=layers
    )


def check_grid(config: Any, request: Request) -> None:
    """Raises ValueError for images of another size than a drafter, with `rows` and `columns`, was trained on."""
    grid = request.grid
    stride = None if grid is None else request.max_new_tokens // grid[0]
    if grid is None or (grid[0], stride) != (config.rows, config.columns):
        found = None if grid is None else (grid[0], stride)
        raise ValueError(f"grid: got {found}, expected {(config.rows, config.columns)}, which it was trained on")


def warn_of_guidance(config: Any, scale: float) -> bool:
    """Warn of a guidance scale far from that of a drafter's training; returns whether it did."""
    taught = config.guidance
    if taught / OTHER_SCALE <= scale <= taught * OTHER_SCALE:
        return False
    warnings.warn(
        f"guidance: got {scale}, the drafter was trained with {taught}; fewer of its drafts will be accepted",
        RuntimeWarning,
        stacklevel=3,
    )
    return True
