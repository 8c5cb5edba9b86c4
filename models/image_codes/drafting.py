"""Shared parts of image-code drafters: the target's embeddings, the grid check, and the guidance warning."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from visspec.models.drafting import checkpoint
from visspec.models.image_codes.family import Family, family_of
from visspec.types import Request

OTHER_SCALE = 1.5  # warn if the guidance differs by more than this factor from training


IMPOSSIBLE = -1e4  # logit of grammar ids, which are never drafted: probability 0 in float32


@torch.no_grad()
def embedding(family: Family, vocab: int) -> nn.Embedding:
    """Build the embedding table of a family's ids."""
    ids = torch.arange(vocab, device=next(family.decoder.parameters()).device)
    return nn.Embedding.from_pretrained(family.embed(ids).detach())


class ImageNetworkDrafter(checkpoint.NetworkDrafter[Family]):
    """A drafter around a network that was trained for one family, image size and guidance scale."""

    of_family = True  # `from_pretrained` also takes a family, which knows the model's processor and parts

    @classmethod
    def subject(cls, target: nn.Module | Family) -> Family:
        return target if isinstance(target, Family) else family_of(target, None)

    @classmethod
    def sizes(cls, target: Family) -> dict[str, Any]:
        decoder = target.decoder.config
        return {
            "family": target.name,
            "hidden": decoder.hidden_size,
            "codes": target.codes,
            "vocab": target.codes + target.grammar,
            "target_layers": decoder.num_hidden_layers,
        }

    @classmethod
    def defaults(cls, target: Family, options: dict[str, Any]) -> dict[str, Any]:
        decoder, layout = target.decoder.config, target.layout()
        rows = layout.grid[0]
        return {
            "heads": decoder.num_attention_heads,
            "intermediate": decoder.intermediate_size,
            "rows": rows,
            "columns": layout.positions // rows,
            "guidance": target.default_guidance,
        }


def check_grid(rows: int, columns: int, request: Request) -> None:
    """Raise ValueError if the image size differs from the one that a drafter was trained on."""
    grid = request.grid
    stride = None if grid is None else request.max_new_tokens // grid[0]
    if grid is None or (grid[0], stride) != (rows, columns):
        actual = None if grid is None else (grid[0], stride)
        raise ValueError(f"grid: got {actual}, expected {(rows, columns)}, the drafter's training size.")


def warn_of_guidance(taught: float, scale: float) -> bool:
    """Warn if the guidance scale is far from the drafter's training. Returns whether it warned."""
    if taught / OTHER_SCALE <= scale <= taught * OTHER_SCALE:
        return False
    warnings.warn(
        f"guidance: got {scale}, but the drafter was trained with {taught}, so fewer of its drafts will be accepted.",
        RuntimeWarning,
        stacklevel=3,
    )
    return True
