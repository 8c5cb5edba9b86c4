"""MAR: an autoencoder over masked tokens, and a diffusion head for each token. (Li et al., arXiv 2406.11838)

Parameters have their published names. Shapes: B rows, T tokens of an image, d size of a token, D width, K maximum
number of known tokens over the rows, S slots of a sequence: those of the class, then tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visspec.models.layers import GeluMLP, Network
from visspec.models.vectors.diffusion_head import EPSILON, DiffusionHead

UNCONDITIONAL = -1  # class number of rows without a class

GUIDANCE = {768: 2.9, 1024: 3.0, 1280: 3.2}  # by width, from the published commands


@dataclass(frozen=True)
class MARConfig:
    """Sizes. depth: blocks of the encoder, and of the decoder. buffer: slots of the class before the tokens."""

    width: int
    depth: int
    heads: int
    head_width: int
    head_depth: int
    size: int = 16
    tokens: int = 256
    buffer: int = 64
    classes: int = 1000
    hidden: int | None = None  # width of the blocks' MLPs; default 4 width


SIZES = {  # published sizes, with diffusion heads as in the authors' evaluation commands
    "B": MARConfig(768, 12, 12, head_width=1024, head_depth=6),
    "L": MARConfig(1024, 16, 16, head_width=1280, head_depth=8),
    "H": MARConfig(1280, 20, 16, head_width=1536, head_depth=12),
}


class MARAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x_BSD: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x_BSD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class MARBlock(nn.Module):
    """A vision transformer block. mask: (B, 1, 1, S) bool, false at padding, or None."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPSILON)
        self.attn = MARAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=EPSILON)
        self.mlp = GeluMLP(width, hidden, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class MAR(Network):
    """Predicts the diffusion head's (`head`) conditions for every token, given the known tokens."""

    def __init__(self, config: MARConfig):
        super().__init__()
        self.config = config
        width, slots = config.width, config.buffer + config.tokens
        hidden = config.hidden or 4 * width

        def blocks() -> nn.ModuleList:
            return nn.ModuleList(MARBlock(width, config.heads, hidden) for _ in range(config.depth))

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * 0.02)

        self.class_emb = nn.Embedding(config.classes, width)
        self.fake_latent = table(1, width)
        self.z_proj = nn.Linear(config.size, width)
        self.z_proj_ln = nn.LayerNorm(width, eps=EPSILON)
        self.encoder_pos_embed_learned = table(1, slots, width)
        self.encoder_blocks = blocks()
        self.encoder_norm = nn.LayerNorm(width, eps=EPSILON)
        self.decoder_embed = nn.Linear(width, width)
        self.mask_token = table(1, 1, width)
        self.decoder_pos_embed_learned = table(1, slots, width)
        self.decoder_blocks = blocks()
        self.decoder_norm = nn.LayerNorm(width, eps=EPSILON)
        self.diffusion_pos_embed_learned = table(1, config.tokens, width)
        head = DiffusionHead(config.size, width, config.head_width, config.head_depth, learned=True)
        self.diffloss = nn.ModuleDict({"net": head})

    @property
    def head(self) -> DiffusionHead:
        head = self.diffloss["net"]
        assert isinstance(head, DiffusionHead)
        return head

    def forward(self, known_BKd: Tensor, place_BK: Tensor, seen_BK: Tensor | None, class_B: Tensor) -> Tensor:
        """Return conditions (B, T, D) from known tokens and their positions in the image, in any order.

        seen: false at padding, or None without padding. The positions within a row must differ, including padding's.
        """
        buffer, mask = self.config.buffer, None
        if seen_BK is not None:
            known_BKd = known_BKd.where(seen_BK[..., None], 0.0)  # masked slots have zero weight, but NaN would spread
            mask = F.pad(seen_BK, (buffer, 0), value=True)[:, None, None]
        class_BD = self.class_emb(class_B.clamp(min=0)).where(class_B[:, None] >= 0, self.fake_latent)
        position = self.encoder_pos_embed_learned[0]
        first = class_BD[:, None] + position[:buffer]
        x = torch.cat([first, self.z_proj(known_BKd) + position[buffer:][place_BK]], dim=1)
        x = self.z_proj_ln(x)
        for block in self.encoder_blocks:
            x = block(x, mask)
        first, known_BKD = self.decoder_embed(self.encoder_norm(x)).split([buffer, place_BK.shape[1]], dim=1)
        if seen_BK is not None:
            known_BKD = known_BKD.where(seen_BK[..., None], self.mask_token)
        tokens_BTD = self.mask_token.repeat(len(first), self.config.tokens, 1)
        tokens_BTD = tokens_BTD.scatter(1, place_BK[..., None].expand_as(known_BKD), known_BKD)
        x = torch.cat([first, tokens_BTD], dim=1) + self.decoder_pos_embed_learned
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, buffer:] + self.diffusion_pos_embed_learned
