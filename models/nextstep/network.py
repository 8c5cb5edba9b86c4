"""NextStep-1: a stock Qwen2 decoder, projections of continuous tokens, and a flow-matching head. (arXiv 2508.10711)

The decoder's text head is not used for images. Shapes: B rows, N tokens, d size of a token, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2Model

from visspec.models.layers import Network
from visspec.models.published_tensors import stock
from visspec.models.vectors.diffusion_head import EPSILON, DiffusionHead

GUIDANCE = 7.5  # from the authors' examples


@dataclass(frozen=True)
class NextStepConfig:
    """Sizes other than the decoder's.

    Args:
        patch: Latents along one side of a token.
        image_start: Id before an image's tokens.
        positions: Rows of the table that is added to hidden states of an image's tokens; 0 without a table.
    """

    size: int
    patch: int
    head_width: int
    head_depth: int
    image_start: int
    positions: int = 0


class NextStep(Network):
    """normalised: whether drawn tokens are normalized to mean 0 and variance 1, as in the authors' examples for the
    first release (`use_norm`), but not in those for version 1.1.
    """

    gen_pos_embed: Tensor

    def __init__(
        self, config: NextStepConfig, decoder: Qwen2Config, normalised: bool, dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        self.config, self.normalised = config, normalised
        self.model: Qwen2Model = stock(Qwen2Model, decoder, dtype)
        hidden = decoder.hidden_size
        self.image_in_projector = nn.Linear(config.size, hidden, dtype=dtype)
        self.image_out_projector = nn.Linear(hidden, hidden, dtype=dtype)
        head = DiffusionHead(config.size, hidden, config.head_width, config.head_depth).to(dtype)
        self.image_head = nn.ModuleDict({"net": head})
        if config.positions:
            self.register_buffer("gen_pos_embed", torch.zeros(1, config.positions, hidden, dtype=dtype))

    @property
    def head(self) -> DiffusionHead:
        head = self.image_head["net"]
        assert isinstance(head, DiffusionHead)
        return head

    def as_values(self, values: Tensor) -> Tensor:
        """Convert values (..., d) of the head's chains to the image's values."""
        return F.layer_norm(values, values.shape[-1:], eps=EPSILON) if self.normalised else values

    def embed(self, values: Tensor) -> Tensor:
        """Return inputs of the decoder (..., D) for values (..., d) of the head's chains."""
        return self.image_in_projector(self.as_values(values).to(self.dtype))

    def conditions(self, hidden_BND: Tensor, index_BN: Tensor) -> Tensor:
        """Return the head's conditions (B, N, D) for tokens `index` of an image, from the hidden states before them."""
        if self.config.positions:
            hidden_BND = hidden_BND + self.gen_pos_embed[0, index_BN.clamp(max=self.config.positions - 1)]
        return self.image_out_projector(hidden_BND)
