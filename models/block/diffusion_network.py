"""A small masked diffusion language model to be trained for a target, between its embedding and its head (DEER, arXiv
2512.15176, which starts from a pretrained one). The network is transformers' ModernBERT with full attention.

Shapes: B rows, L places, d hidden size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import ModernBertConfig, ModernBertModel

from visspec.io.checkpoint import check_positive, check_whole, shorten
from visspec.models.layers import MOST_LAYERS
from visspec.types import MAX_NODES


@dataclass(frozen=True)
class DiffusionConfig:
    """Configuration of the network and of its target. mask: the id of places to be predicted, whose vector is the
    network's own. block: most places of a pass.
    """

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    mask: int
    block: int = 15
    eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self):
        if not isinstance(self.family, str):
            raise ValueError(f"family: got {shorten(self.family)}, expected a name")
        for name in ("vocab", "hidden", "heads", "intermediate"):
            check_whole(name, getattr(self, name))
        for name, low, high in (
            ("layers", 1, MOST_LAYERS),
            ("mask", 0, self.vocab - 1),
            ("block", 1, MAX_NODES - 1),
        ):
            check_whole(name, getattr(self, name), low, high)
        for name in ("eps", "rope_theta"):
            check_positive(name, getattr(self, name))
        if self.hidden % (2 * self.heads):
            raise ValueError(f"heads: got {self.heads}, expected a divisor of half of the hidden size {self.hidden}")

    @property
    def levels(self) -> int:
        return self.block

    def to_dict(self) -> dict:
        return asdict(self)

    def modern_bert(self) -> ModernBertConfig:
        """transformers' configuration of the network."""
        turns = {"rope_type": "default", "rope_theta": self.rope_theta}
        return ModernBertConfig(
            vocab_size=1,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            norm_eps=self.eps,
            layer_types=["full_attention"] * self.layers,
            rope_parameters={"full_attention": turns, "sliding_attention": turns},
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            cls_token_id=None,
            sep_token_id=None,
        )


class DiffusionLMLayers(nn.Module):
    """Trainable weights of a diffusion language model: its layers, and the vector of a mask."""

    kind: ClassVar[str] = "diffusion_lm"  # identifies its checkpoints
    config_class: ClassVar[type[DiffusionConfig]] = DiffusionConfig

    def __init__(self, config: DiffusionConfig):
        super().__init__()
        self.config = config
        self.model = ModernBertModel(config.modern_bert())

    def forward(self, embeds_BLd: Tensor, masked_BL: Tensor, real_BL: Tensor) -> Tensor:
        """Hidden states (B, L, d) of places with these embeddings, or with a mask."""
        mask_d = self.model.get_input_embeddings().weight[0]
        embeds_BLd = torch.where(masked_BL[..., None], mask_d, embeds_BLd.to(mask_d))
        return self.model(inputs_embeds=embeds_BLd, attention_mask=real_BL.long()).last_hidden_state
