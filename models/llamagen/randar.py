"""RandAR (Pang et al., arXiv 2412.01827): LlamaGen's transformer over codes in any order, each queried by its place.

The condition is followed by pairs of a query and a code. The query of a place is one learned vector, rotated as a key
at that place would be, and its output gives the distribution of the code at the place. Everything attends to what comes
before it, so one causal pass over all pairs gives the distribution of every code given the earlier ones in the order
(`forward`), and a query appended to any prefix gives the distribution of its place given that prefix. Parameters have
the names of the published checkpoints: LlamaGen's, and `pos_instruct_embeddings`.

Shapes: B rows, N new positions, P prefix, T places, H heads, E head size, d hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visspec.models.layers import rotate
from visspec.models.llamagen.network import LlamaGen, LlamaGenConfig


class RandAR(LlamaGen):
    """LlamaGen with queries. A code and its query have the same position id, P + place."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__(config)
        self.pos_instruct_embeddings = nn.Parameter(torch.randn(1, config.hidden_size) * 0.02)

    def query(self, places: Tensor) -> Tensor:
        """Return inputs (B, N, d) that query places (B, N), each below twice their number."""
        turn_BNC = self.rope_table(places.device)[self.config.prefix + places]
        query_HE = self.pos_instruct_embeddings.view(self.config.heads, -1)
        return rotate(query_HE.expand(*places.shape, -1, -1), turn_BNC).flatten(2)

    def paired(self, codes: Tensor, places: Tensor) -> Tensor:
        """Interleave codes and their places (B, N) as inputs (B, 2 N, d): a query, its code, the next query, ..."""
        return torch.stack([self.query(places), self.embed(codes)], dim=2).flatten(1, 2)
