"""Small heads that make a block's distributions depend on the tokens drafted before a place: DSpark's Markov head with
its confidence head (arXiv 2607.05147), Domino's recurrent one (arXiv 2605.29707), and DFlash 2's candidate selector.

Shapes: B rows, K places, W tokens above a place (1 in chains), C candidates, d hidden size, V vocabulary, r rank or
size of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec.io.checkpoint import check_whole, shorten
from visspec.models.layers import over_vocabulary

Below = Callable[[int, Tensor], Tensor]
KINDS = ("vanilla", "gated", "rnn")
SELECTOR = {"selector_rank": 256, "selector_top_k": 16}  # published values
PUBLISHED = {  # attributes of `Spark` and `CandidateSelector` -> published module names
    "": "candidate_selector",
    "hidden_projection": "candidate_selector.hidden_projection",
    "markov.down": "markov_head.markov_w1",
    "markov.up": "markov_head.markov_w2",
    "markov.gate": "markov_head.gate_proj",
    "markov.joint": "markov_head.joint_proj",
    "confidence.linear": "confidence_head.proj",
}


class Markov(nn.Module):
    """Logits that a token adds to those of the next place, as the product of two matrices; (..., V).

    Args:
        kind: "gated" weights the token's vector (..., r) by the place's hidden state (..., d); "rnn" carries a state
            (..., r) from place to place.
        few: Number of ids that get logits, if not all.
    """

    def __init__(self, vocab: int, rank: int, kind: str = "vanilla", hidden: int = 0, few: int = 0):
        super().__init__()
        self.kind, self.rank = kind, rank
        self.down, self.up = nn.Embedding(vocab, rank), nn.Linear(rank, few or vocab, bias=False)
        nn.init.zeros_(self.up.weight)
        if kind == "gated":
            self.gate = nn.Linear(hidden + rank, rank)
        if kind == "rnn":
            self.joint = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, hidden: Tensor, token: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return what tokens (...) add, and the state.

        Args:
            hidden: (..., d), the same for all tokens of a tree level.
        """
        embedding = self.down(token)
        if self.kind == "vanilla":
            return self.up(embedding), None
        hidden = hidden.to(embedding).expand(*embedding.shape[:-1], -1)
        if self.kind == "gated":
            return self.up(self.gate(torch.cat([hidden, embedding], dim=-1)).sigmoid() * embedding), None
        memory = torch.zeros_like(embedding) if memory is None else memory
        gate, new, out = self.joint(torch.cat([memory, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        return self.up(out.tanh()), torch.lerp(new.tanh(), memory, gate.sigmoid())


class Confidence(nn.Module):
    """Predicts the logit (...) of a place's acceptance rate from its hidden state (..., d) and, if r > 0, a vector
    (..., r) of the token before it.
    """

    def __init__(self, hidden: int, rank: int):
        super().__init__()
        self.rank = rank
        self.linear = nn.Linear(hidden + rank, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor, embedding: Tensor | None) -> Tensor:
        return self.linear(hidden if embedding is None else torch.cat([hidden, embedding], dim=-1))[..., 0]


class Sequential(nn.Module):
    """Base class of heads that process a block's places one after another."""

    remembers = False  # a place's distribution depends on more than the token before it, which rules out trees
    candidates = 0  # number of tokens kept per place; 0: all
    # (logits (B, K, V) and hidden states (B, K, d) of a pass): a function to be called for the places in turn, from a
    # place's index and the tokens above it (B, W) to the logits of its distributions, (B, W, V)
    logits_function: Callable[[Tensor, Tensor], Below]

    def likeliest(self, logits_BKV: Tensor, hidden_BKd: Tensor, token_B: Tensor) -> Tensor | None:
        """Return the chain (B, K) of each place's likeliest token, if that is possible without a sequential walk."""
        return None

    def expected(self, hidden: Tensor, token: Tensor) -> Tensor | None:
        """Return logits (...) of the acceptance rates of places with hidden states (..., d) after tokens (...), or
        None. Gradients do not reach the states.
        """
        return None


class Spark(Sequential):
    """DSpark's two heads, either of which may be missing.

    Args:
        ids: Target ids of a drafter's own vocabulary.
    """

    def __init__(self, markov: Markov | None, confidence: Confidence | None, ids: Tensor | None = None):
        super().__init__()
        self.markov, self.confidence, self.ids = markov, confidence, ids
        self.remembers = markov is not None and markov.kind == "rnn"

    def logits_function(self, logits_BKV: Tensor, hidden_BKd: Tensor) -> Below:
        memory: Tensor | None = None

        def below(place: int, token_BW: Tensor) -> Tensor:
            nonlocal memory
            logits_B1V = logits_BKV[:, place, None]
            if self.markov is None:
                return logits_B1V
            more_BWD, memory = self.markov(hidden_BKd[:, place, None], token_BW, memory)
            return logits_B1V + over_vocabulary(more_BWD, self.ids, logits_BKV.shape[-1])

        return below

    def expected(self, hidden: Tensor, token: Tensor) -> Tensor | None:
        if self.confidence is None:
            return None
        embedding = self.markov.down(token).detach() if self.markov is not None and self.confidence.rank else None
        return self.confidence(hidden.detach(), embedding)


class Domino(Sequential):
    """Domino's head: a GRU reads the target's embeddings `table` (V, d) of the tokens so far; its state (r) and the
    place's hidden state give what is added to the logits.

    Args:
        prefix: Number of first places without an addition.
    """

    remembers = True

    def __init__(self, vocab: int, table: Tensor, state: int, middle: int, prefix: int):
        super().__init__()
        hidden = table.shape[1]
        self.table, self.prefix = (table,), prefix  # in a tuple, so that it is not registered as a parameter
        self.prefix_gru = nn.GRU(hidden, state, batch_first=True, bias=False)
        first, last = nn.Linear(hidden + state, middle, bias=False), nn.Linear(middle, vocab, bias=False)
        self.embed_proj = nn.Sequential(first, nn.SiLU(), last)

    def logits_function(self, logits_BKV: Tensor, hidden_BKd: Tensor) -> Below:
        memory: Tensor | None = None

        def below(place: int, token_B1: Tensor) -> Tensor:
            nonlocal memory
            out_B1r, memory = self.prefix_gru(F.embedding(token_B1, self.table[0]), memory)
            logits_B1V, hidden_B1d = logits_BKV[:, place, None], hidden_BKd[:, place, None]
            if place < self.prefix:
                return logits_B1V
            return logits_B1V + self.embed_proj(torch.cat([hidden_B1d, out_B1r], dim=-1))

        return below


class CandidateSelector(Sequential):
    """DFlash 2's head: scores the likeliest tokens of a place given the token before it, edge(p -> c) = <A[p] *
    project(h), B[c]> + unary[c], with h the place's hidden state. A new head adds nothing.
    """

    def __init__(self, vocab: int, hidden: int, rank: int, candidates: int):
        super().__init__()
        self.candidates = candidates
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=0.02)

    def _rows(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return vectors (..., C, r) of candidates (..., C), to be multiplied with those of the tokens before them."""
        return self.successor_codebook[ids] * self.hidden_projection(hidden)[..., None, :]

    def scores(self, logits: Tensor, hidden: Tensor, previous: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of candidates and their ids, each (..., C), for places (..., V) after tokens (...). The true
        next token (...) is always a candidate: if it is not one of the likeliest, it replaces the last.
        """
        ids = logits.topk(self.candidates, dim=-1).indices
        missing = ~(ids == target[..., None]).any(dim=-1)
        ids[..., -1] = torch.where(missing, target, ids[..., -1])
        edges = self._rows(hidden, ids) @ self.predecessor_codebook[previous][..., None]
        return logits.gather(-1, ids) + edges[..., 0].to(logits.dtype), ids

    def logits_function(self, logits_BKV: Tensor, hidden_BKd: Tensor) -> Below:
        unary_BKC, ids_BKC = logits_BKV.topk(self.candidates, dim=-1)
        rows_BKrC = self._rows(hidden_BKd, ids_BKC).mT
        nothing_V = torch.full_like(logits_BKV[0, 0], float("-inf"))

        def below(place: int, token_BW: Tensor) -> Tensor:
            edges_BWC = F.embedding(token_BW, self.predecessor_codebook) @ rows_BKrC[:, place]
            scores_BWC = unary_BKC[:, place, None] + edges_BWC.to(logits_BKV.dtype)
            ids_BWC = ids_BKC[:, place, None].expand_as(scores_BWC)
            return nothing_V.expand(*token_BW.shape, -1).scatter(-1, ids_BWC, scores_BWC)

        return below

    def likeliest(self, logits_BKV: Tensor, hidden_BKd: Tensor, token_B: Tensor) -> Tensor:
        """Find every candidate's likeliest successor at once; pointer doubling then composes the steps."""
        unary_BKC, ids_BKC = logits_BKV.topk(self.candidates, dim=-1)
        above_BKC = torch.cat([token_B[:, None, None].expand_as(ids_BKC[:, :1]), ids_BKC[:, :-1]], dim=1)
        edges_BKCC = self.predecessor_codebook[above_BKC] @ self._rows(hidden_BKd, ids_BKC).mT
        next_BKC, steps = (unary_BKC[:, :, None] + edges_BKCC.to(unary_BKC.dtype)).argmax(dim=-1), 1
        while steps < next_BKC.shape[1]:
            next_BKC = torch.cat([next_BKC[:, :steps], next_BKC[:, steps:].gather(-1, next_BKC[:, :-steps])], dim=1)
            steps *= 2
        return ids_BKC.gather(-1, next_BKC[..., :1])[..., 0]


# --- published configurations -----------------------------------------------------------------------------------------


def sequential_of(folder: Path, kind: str, fields: dict, vocab: int, few: int, table: Tensor) -> Sequential | None:
    """Build the head of a checkpoint, without weights, from its configuration; None if it has none.

    Raises ValueError if it is unsupported.

    Args:
        kind: "dflash", "dflash2", "dspark", "deepspec" or "domino".
        few: Size of its own vocabulary, 0: all ids.
        table: The target's embeddings, at least (V, d).
    """
    hidden, nested = table.shape[1], "speculators_model_type" in fields
    if kind == "dflash":
        return None
    if kind == "dflash2":
        sizes: list[Any] = [fields.get(name, default if nested else None) for name, default in SELECTOR.items()]
        for name, size in zip(SELECTOR, sizes):
            check_whole(name, size, 1, vocab)
        return CandidateSelector(vocab, hidden, *sizes)
    if kind == "domino":
        prefix = fields.get("pure_draft_prefix_len", 0)
        return Domino(vocab, table, fields["gru_hidden_dim"], fields["emb_dim"], prefix)
    rank, named = fields.get("markov_rank", 256 if nested else 0) or 0, fields.get("markov_head_type", KINDS[0])
    if rank and named not in KINDS:
        raise ValueError(f"drafter: markov_head_type of {folder} is {shorten(named)}, expected {', '.join(KINDS)}.")
    has = fields.get("enable_confidence_head", nested or bool(fields.get("confidence_head_alpha")))
    with_markov = fields.get("confidence_head_with_markov", nested)
    if has and with_markov and not rank:
        raise ValueError(f"drafter: markov_rank of {folder} is 0, expected a positive one for its confidence head.")
    if not (rank or has):
        return None
    markov = Markov(vocab, rank, named, hidden, few) if rank else None
    return Spark(markov, Confidence(hidden, rank if with_markov else 0) if has else None)


def entries(head: Sequential | None, anchor: bool) -> dict[str, Any]:
    """Return a head's entries in a published configuration.

    Args:
        anchor: Whether the pending token's place predicts.
    """
    if isinstance(head, Domino):
        first = head.embed_proj[0]
        sizes = {
            "gru_hidden_dim": head.prefix_gru.hidden_size,
            "emb_dim": first.out_features,
            "pure_draft_prefix_len": head.prefix,
        }
        return {"projector_type": "domino", **sizes, "shift_label": anchor}
    if isinstance(head, CandidateSelector):
        return dict(zip(SELECTOR, (head.successor_codebook.shape[1], head.candidates)))
    if not isinstance(head, Spark):
        return {}
    return {
        "markov_rank": head.markov.rank if head.markov else 0,
        "markov_head_type": head.markov.kind if head.markov else KINDS[0],
        "enable_confidence_head": head.confidence is not None,
        "confidence_head_with_markov": bool(head.confidence and head.confidence.rank),
    }


def published_name(name: str) -> str:
    """Return the published name of a head's tensor."""
    module, _, tensor = name.rpartition(".")
    return f"{PUBLISHED.get(module, module)}.{tensor}"
