"""From logits to laws, and from laws to tokens.

Shapes: B rows, N nodes, T positions, V vocabulary. Laws are float32.

**Noise is indexed by position.** Token t of a row is argmax(log p_t + G_t) with G_t a vector of Gumbel numbers that
depends on the row's generator and on t alone; that is a draw from p_t (Gumbel-max), whatever was drafted, in whatever
batch. A drafter that ranks with the same G_t is coupled to the target and agrees with it with probability at least
(1 - TV) / (1 + TV) (Daliri, Musco, Suresh, "Coupling without communication", 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from visspec import kernels
from visspec import tree as trees
from visspec.types import Draft, Sampling, State

CHUNK = 16  # positions drawn at a time: a constant, so that a row's stream does not depend on how it is consumed


class Noise:
    """Random numbers of a batch, one stream a row, addressed by the position of the token they decide.

    kind "gumbel" gives `width` Gumbel numbers a position; kind "uniform" gives `width` numbers in [0, 1).
    """

    def __init__(self, generators: Sequence[torch.Generator], width: int, kind: str = "gumbel"):
        self.generators, self.width, self.kind = list(generators), width, kind
        self.ahead = [self._chunk(g) for g in self.generators]  # (T, width), starting at each row's next position

    def _chunk(self, generator: torch.Generator) -> Tensor:
        u = torch.rand(CHUNK, self.width, generator=generator, device=generator.device)
        if self.kind == "uniform":
            return u
        tiny = torch.finfo(u.dtype).tiny
        return -torch.log((-torch.log(u.clamp_(min=tiny))).clamp_(min=tiny))

    def window(self, positions: int) -> Tensor:
        """(B, positions, width): the numbers of each row's next positions. Peeking does not consume them."""
        for b, generator in enumerate(self.generators):
            while self.ahead[b].shape[0] < positions:
                self.ahead[b] = torch.cat([self.ahead[b], self._chunk(generator)])
        return torch.stack([a[:positions] for a in self.ahead])

    def advance(self, counts: Sequence[int]) -> None:
        """Consume positions: counts[b] tokens of row b are now final."""
        self.window(max(counts))
        self.ahead = [a[n:] for a, n in zip(self.ahead, counts)]

    def select(self, keep: Sequence[int]) -> None:
        self.generators = [self.generators[i] for i in keep]
        self.ahead = [self.ahead[i] for i in keep]


def derived(parent: torch.Generator) -> torch.Generator:
    """A generator seeded by the next number of `parent`, on its device: for numbers that are not the rule's."""
    seed = torch.randint(2**62, (), generator=parent, device=parent.device)
    return torch.Generator(parent.device).manual_seed(int(seed))


def warp(logits: Tensor, sampling: Sampling, uncond: Tensor | None = None) -> Tensor:
    """Guidance (with `uncond`), temperature, top-k, top-p, as `kernels.guided_warp` says. (..., V) -> (..., V) float32.

    Cut entries become -inf. Greedy sampling mixes alone: of the logits only their argmax counts. Not for autograd.
    """
    if uncond is None and (sampling.greedy or not (0 < sampling.top_k < logits.shape[-1] or sampling.top_p < 1.0)):
        logits = logits.float()  # nothing to fuse
        return logits if sampling.greedy or sampling.temperature == 1.0 else logits / sampling.temperature
    width = logits.shape[-1]
    z_RV = kernels.guided_warp(
        logits.reshape(-1, width),
        None if uncond is None else uncond.reshape(-1, width),
        sampling.guidance, sampling.temperature, sampling.top_k, sampling.top_p, scores=True,
    )  # fmt: skip
    return z_RV.view_as(logits)


def process(logits_BNV: Tensor, draft: Draft, state: State, uncond_BNV: Tensor | None = None) -> Tensor:
    """Mix, run the request's processors at every node, each with its real prefix (prompt, emitted tokens, path), warp.

    Processors may look at the history, and nodes of one draft have different ones, so each node is handed over alone;
    this is the slow, general road and costs one more synchronisation.
    """
    sampling = state.request.sampling
    if not sampling.processors:
        return warp(logits_BNV, sampling, uncond_BNV)
    logits_BNV = warp(logits_BNV, replace(sampling, temperature=0.0), uncond_BNV).clone()
    rows, batch = len(state.rows), state.request.prompt.shape[0]
    path = trees.paths(draft.tree).expand(rows, -1, -1).tolist()
    for b, row in enumerate(state.rows):
        prefix = state.ids(b)[0]  # ends with the pending token, node 0 of every path; empty below an embedded prompt
        for n in range(draft.tree.size):
            steps = draft.tokens[b, [i for i in path[b][n][1:] if i >= 0]].clamp(min=0)
            ids = torch.cat([prefix, steps]).expand(batch, -1)  # a setting may differ between the rows of a batch
            scores = logits_BNV[b, n].expand(batch, -1).clone()
            for processor in sampling.processors:
                scores = processor(ids, scores)
            logits_BNV[b, n] = scores[row]
    return warp(logits_BNV, sampling)


def choose(logits_BNV: Tensor, depth_N: Tensor, noise: Noise | None, levels: int) -> Tensor:
    """The token that each node's law yields under its position's noise: (B, N). Without noise: the argmax.

    depth_N (1|B, N) says which position after the pending token a node decides.
    """
    if noise is None:
        return logits_BNV.argmax(dim=-1)
    window_BTV = noise.window(levels + 1)
    rows, size, vocab = logits_BNV.shape
    if depth_N.shape[0] == 1:
        perturbed = logits_BNV + window_BTV[:, depth_N[0]]
    else:
        perturbed = logits_BNV + window_BTV.gather(1, depth_N[..., None].expand(rows, size, vocab))
    return perturbed.argmax(dim=-1)


def propose(logits_BV: Tensor, state: State, level: int) -> tuple[Tensor, Tensor | None]:
    """One drafted token a row, in the form that the request's rule can judge: (tokens (B,), q (B, V) or None).

    Greedy: the argmax. A coupled rule: the argmax under the very noise of that position (level 0 is the position after
    the pending token), a point mass. A rule with coins of its own: a real draw, and the law it came from.
    """
    law = warp(logits_BV, state.request.sampling)
    if state.noise is None:
        return law.argmax(dim=-1), None
    window = state.noise.window(level + 1)[:, level]
    if state.noise.kind == "gumbel":
        return (law + window[:, : law.shape[-1]]).argmax(dim=-1), None
    q = law.softmax(dim=-1)
    return draw(q, window[:, -1]), q


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw from a law p (..., V) with a uniform number u (...): never an id of zero probability."""
    total = p.cumsum(dim=-1)
    pick = torch.searchsorted(total, (u * total[..., -1])[..., None].contiguous(), right=True)[..., 0]
    last = (p > 0).long().mul(torch.arange(p.shape[-1], device=p.device)).amax(dim=-1)
    return torch.minimum(pick, last)


def residual(p: Tensor, qf: Tensor) -> Tensor:
    """The law after a rejection, proportional to [p - q f]+; p itself where nothing is left (p = q f)."""
    rest = (p - qf).clamp_(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)
