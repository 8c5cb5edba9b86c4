"""Inputs that drafters on the target's features queue per request until they process them.

Shapes: B rows, T elements, D accepted nodes, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from visspec.cache import gather_rows, to_device
from visspec.types import Draft, Outcome, Scores, Verdict


class PendingInputs:
    """Base class of a request's memory for drafters on the target's features: queued elements, in blocks of (tokens
    (B, T) or vectors, features (B, T, F), counts), with counts[b] in row b, padded on the right.
    """

    def __init__(self) -> None:
        self.pending_inputs: list[tuple[Tensor, Tensor, list[int]]] = []

    def pop_pending(self) -> tuple[Tensor, Tensor, list[int]]:
        """Remove and return all queued elements as one block, each row packed to the left."""
        blocks, self.pending_inputs = self.pending_inputs, []
        if len(blocks) == 1:
            return blocks[0]
        token, feature = (
            torch.cat([block[0] for block in blocks], dim=1),
            torch.cat([block[1] for block in blocks], dim=1),
        )
        widths = [block[0].shape[1] for block in blocks]
        parts = [block[2] for block in blocks]
        totals = [sum(c[b] for c in parts) for b in range(token.shape[0])]
        if all(min(c) == width for c, width in zip(parts, widths)):
            return token, feature, totals
        starts = [sum(widths[:i]) for i in range(len(widths))]
        kept = [[s + j for s, c in zip(starts, parts) for j in range(c[b])] for b in range(token.shape[0])]
        longest = max(totals)
        index = to_device([k + [0] * (longest - len(k)) for k in kept], token.device)
        rows = torch.arange(token.shape[0], device=token.device)[:, None]
        return token[rows, index], feature[rows, index], totals

    def select_pending(self, keep: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.pending_inputs = [(t[keep], f[keep], [c[b] for b in keep]) for t, f, c in self.pending_inputs]

    def join_pending(self, other: PendingInputs, take: list[int]) -> None:
        """Add rows of another request."""
        self.pending_inputs, other.pending_inputs = [self.pop_pending()], [other.pop_pending()]
        (token, feature, counts), (new_token, new_feature, new_counts) = self.pending_inputs[0], other.pending_inputs[0]
        width = max(token.shape[1], new_token.shape[1])
        tokens = torch.cat([_pad(t, width) for t in (token, new_token[take])])
        features = torch.cat([_pad(f, width) for f in (feature, new_feature[take])])
        self.pending_inputs = [(tokens, features, counts + [new_counts[b] for b in take])]


def prompt_first(token_BT: Tensor, feature_BTF: Tensor, real_BT: Tensor | None) -> tuple[Tensor, Tensor, list[int]]:
    """Move a prompt's padding (where `real_BT` is false) behind its elements. None means that there is no padding."""
    if real_BT is None:
        return token_BT, feature_BTF, [token_BT.shape[1]] * len(token_BT)
    order = (~real_BT).long().argsort(dim=1, stable=True)
    return token_BT.gather(1, order), gather_rows(feature_BTF, order), real_BT.sum(dim=1).tolist()


def accepted_nodes(scores: Scores, verdict: Verdict, outcome: Outcome) -> tuple[Tensor, Tensor, list[int]]:
    """Return a round's accepted nodes: indices (B, D), the target's features (B, D, F), and each row's count."""
    assert scores.features is not None
    counts = [len(path) for path in outcome.path]
    path_BD = verdict.path[:, : max(counts)].clamp(min=0)
    return path_BD, gather_rows(scores.features, path_BD), counts


def next_tokens(draft: Draft, path_BD: Tensor, verdict: Verdict) -> Tensor:
    """Return the token after each node of a round's accepted paths, (B, D)."""
    shifted_BD = torch.cat([path_BD[:, 1:], path_BD[:, -1:]], dim=1)
    return draft.value.gather(1, shifted_BD).scatter(1, verdict.length[:, None] - 1, verdict.next[:, None])


def _pad(x: Tensor, width: int) -> Tensor:
    """Pad (B, T, ...) with zeros on the right, to `width` elements."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - x.shape[1]))
