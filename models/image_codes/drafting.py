"""Shared parts of image-code drafters: the target's embeddings, and the base class of those with a network."""

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

    config: Any
    warned = False  # of another guidance scale
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

    def check_request(self, request: Request) -> None:
        """Check that a request is like the drafter's training: raise ValueError for another image size, and warn once
        of another guidance scale.
        """
        config, grid, scale = self.config, request.grid, request.sampling.guidance
        actual = None if grid is None else (grid[0], request.max_new_tokens // grid[0])
        if actual != (config.rows, config.columns):
            raise ValueError(
                f"grid: got {actual}, expected {(config.rows, config.columns)}, the drafter's training size."
            )
        if not self.warned and not config.guidance / OTHER_SCALE <= scale <= config.guidance * OTHER_SCALE:
            self.warned = True
            warnings.warn(
                f"guidance: got {scale}, but the drafter was trained with {config.guidance}, so fewer of its drafts"
                " will be accepted.",
                RuntimeWarning,
                stacklevel=3,
            )
