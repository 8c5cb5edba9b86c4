"""Warping of logits, and the random numbers that turn distributions into samples.

Shapes: B rows, N nodes, T positions, V vocabulary, U numbers per position. Distributions are float32.

`Gumbel` numbers belong to positions. Token t of a row is argmax(log p_t + G_t), where the vector G_t depends only on
the row's generator and t. This is a draw from p_t (Gumbel-max), whatever was drafted and in any batch. A drafter that
ranks with the same G_t is coupled to the target and agrees with it with probability at least (1 - TV) / (1 + TV)
(Daliri, Musco, Suresh, "Coupling without communication", 2024).

`AcceptanceNoise` is for rules that accept and reject samples from a known distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec import kernels
from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import Categorical, Denoising, Maps, Trajectory, argmax, draw
from visspec.types import Draft, NodeProcessor, Request, RowProcessor, Sampling, State, Tree

CHUNK = 16  # positions drawn at a time; constant, so that a row's stream does not depend on how it is consumed
SIBLINGS = 32  # uniform numbers per position, and so the maximum number of children


class BufferedNoise:
    """Base class of random numbers by position. `samples`: drafts are samples from q, independent of these numbers."""

    samples = False

    def __init__(self, generators: Sequence[torch.Generator], width: int):
        self.generators, self.width = list(generators), width
        self.ahead = [self._chunk(g) for g in self.generators]  # (T, width), starting at each row's next position

    @classmethod
    def of(cls, numbers_BTU: Tensor) -> BufferedNoise:
        """Wrap given numbers, without generators, to record one round."""
        noise = cls.__new__(cls)
        noise.generators, noise.width, noise.ahead = [], numbers_BTU.shape[-1], list(numbers_BTU)
        return noise

    def _chunk(self, generator: torch.Generator) -> Tensor:
        return torch.rand(CHUNK, self.width, generator=generator, device=generator.device)

    def window(self, positions: int, first: int = 0) -> Tensor:
        """Return the numbers (B, positions - first, width) of each row's next positions, without consuming them."""
        self._reach(positions)
        return torch.stack([a[first:positions] for a in self.ahead])

    def _reach(self, positions: int) -> None:
        for b, generator in enumerate(self.generators):
            lacking = positions - len(self.ahead[b])
            if lacking > 0:
                self.ahead[b] = torch.cat([self.ahead[b], *(self._chunk(generator) for _ in range(0, lacking, CHUNK))])

    def advance(self, counts: Sequence[int]) -> None:
        """Consume positions: counts[b] nodes of row b are now final."""
        self._reach(max(counts))
        self.ahead = [a[n:] for a, n in zip(self.ahead, counts)]

    def child_generators(self) -> list[torch.Generator]:
        """Return a generator per row for the drafter's own numbers. Called once per request. Numbers that accept or
        reject must be unknown to the drafter, so the number that seeds the child is skipped. Numbers indexed by
        position stay the same.
        """
        parents = self.generators if self.samples else [parent.clone_state() for parent in self.generators]
        seeds = [torch.randint(2**62, (), generator=parent, device=parent.device) for parent in parents]
        return [torch.Generator(parent.device).manual_seed(int(seed)) for parent, seed in zip(parents, seeds)]

    def select(self, keep: Sequence[int]) -> None:
        self.generators = [self.generators[i] for i in keep]
        self.ahead = [self.ahead[i] for i in keep]

    def join(self, other: BufferedNoise, take: Sequence[int]) -> None:
        """Add rows of other noise of the same kind."""
        self.generators += [other.generators[i] for i in take]
        self.ahead += [other.ahead[i] for i in take]

    def draft(self, distribution: Categorical, level: int) -> tuple[Tensor, Categorical | None]:
        """Draft a value (B,) for each row, `level` positions after the next one. Returns it with its distribution, or
        with None if the rule treats drafts as point masses.
        """
        raise NotImplementedError

    def perturb(self, logits_BWV: Tensor, level: int) -> Tensor:
        """Return the logits by which a tree ranks the tokens after W nodes of a level."""
        raise NotImplementedError


class Gumbel(BufferedNoise):
    """`width` Gumbel numbers per position. Drafts are coupled to the target's own draw."""

    def _chunk(self, generator: torch.Generator) -> Tensor:
        u = super()._chunk(generator)
        tiny = torch.finfo(u.dtype).tiny
        return -torch.log((-torch.log(u.clamp_(min=tiny))).clamp_(min=tiny))

    def draft(self, distribution: Categorical, level: int) -> tuple[Tensor, None]:
        numbers_BV = self.window(level + 1, level)[:, 0, : distribution.width]
        return argmax(distribution.logits + numbers_BV), None

    def perturb(self, logits_BWV: Tensor, level: int) -> Tensor:
        return logits_BWV + self.window(level + 1, level)[..., : logits_BWV.shape[-1]]


def gumbel_given(logp: Tensor, chosen: Tensor) -> Tensor:
    """Sample Gumbel numbers (..., V), given that log p + G is largest at `chosen` (...), with torch's global generator.
    The maximum is a Gumbel number independent of `chosen`; the others are truncated at it (Maddison, Tarlow, Minka
    2014).
    """
    largest, sums = (-torch.empty_like(x).exponential_().log() for x in (logp[..., :1], logp))
    logp = logp.clamp(min=-1e4)  # keeps the numbers of impossible ids finite
    sums = -torch.logaddexp(-largest, -(sums + logp))
    return sums.scatter(-1, chosen[..., None], largest) - logp


class Uniform(BufferedNoise):
    """`width` uniform numbers per position, for drafts sampled from a known q. The last number draws the draft."""

    samples = True

    def draft(self, distribution: Categorical, level: int) -> tuple[Tensor, Categorical]:
        return draw(distribution.p, self.window(level + 1, level)[:, 0, -1]), distribution

    def perturb(self, logits_BWV: Tensor, level: int) -> Tensor:
        return logits_BWV


class AcceptanceNoise(Uniform):
    """Uniform numbers per position: one for each sibling, one for the residual, and one for the draft."""

    def __init__(self, generators: Sequence[torch.Generator]):
        super().__init__(generators, SIBLINGS + 2)

    def accept_uniforms(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """Return a coin for each node (B, N), by its depth and rank among siblings, and one for the residual (B,)."""
        window_BTU = self.window(tree.levels + 1)
        coins_BN = window_BTU.flatten(1).gather(1, _coin(tree).expand(len(window_BTU), -1))
        return coins_BN, window_BTU[:, 0, SIBLINGS].contiguous()


class Normals(BufferedNoise):
    """Random numbers for chains of S steps in d dimensions. Per position: normal numbers of the start and of the steps,
    two uniform numbers per step, and for R of the steps K residual candidates with a uniform number each; candidates =
    (R, K).
    """

    samples = True

    def __init__(
        self, generators: Sequence[torch.Generator], steps: int, size: int, candidates: tuple[int, int] = (0, 0)
    ):
        self.steps, self.size, self.candidates = steps, size, candidates
        count = candidates[0] * candidates[1]
        self.parts = ((steps + 1) * size, count * size, steps * 2, count)
        super().__init__(generators, sum(self.parts))

    def _chunk(self, generator: torch.Generator) -> Tensor:
        normals = torch.randn(CHUNK, sum(self.parts[:2]), generator=generator, device=generator.device)
        uniforms = torch.rand(CHUNK, sum(self.parts[2:]), generator=generator, device=generator.device)
        return torch.cat([normals, uniforms], dim=1)

    def numbers(self, positions: int, first: int = 0) -> TrajectoryNumbers:
        """Return the numbers of each row's next positions, from `first` on, for M = B (positions - first) chains."""
        numbers_MU = self.window(positions, first).flatten(0, 1)
        steps, candidates, uniforms, chances = numbers_MU.split(self.parts, dim=1)
        steps = steps.unflatten(1, (self.steps + 1, self.size))
        return TrajectoryNumbers(
            steps[:, 0],
            steps[:, 1:],
            uniforms.unflatten(1, (self.steps, 2)).log(),
            candidates.unflatten(1, (*self.candidates, self.size)),
            chances.unflatten(1, self.candidates).log(),
        )

    def draft(self, distribution: Denoising, level: int) -> tuple[Tensor, Trajectory]:  # type: ignore[override]
        numbers = self.numbers(level + 1, level)
        path = distribution.sample(numbers.start, numbers.steps)
        return path.points[:, -1], path


class ScaleNoise(BufferedNoise):
    """Base class of noise for maps. A position is a scale, and each of its sizes[k] codes has `width` numbers."""

    def __init__(self, generators: Sequence[torch.Generator], width: int, sizes: Sequence[int]):
        self.sizes, self.next = list(sizes), [0] * len(generators)  # the next scale of each row
        super().__init__(generators, width)

    def codes(self, nodes: int, first: int = 0) -> Tensor:
        """Return the numbers (B, nodes, S, width) of each row's next scales, zero-padded to the largest scale."""
        spans = [[self._span(b, first + n) for n in range(nodes)] for b in range(len(self.generators))]
        self._reach(max(end for row in spans for _, end in row))
        most = max(end - begin for row in spans for begin, end in row)
        return torch.stack(
            [
                torch.stack([F.pad(ahead[begin:end], (0, 0, 0, most - (end - begin))) for begin, end in row])
                for ahead, row in zip(self.ahead, spans)
            ]
        )

    def _span(self, b: int, ahead: int) -> tuple[int, int]:
        """Return where the codes of a row's scale begin and end. The span is empty after the last scale."""
        begin = sum(self.sizes[self.next[b] : self.next[b] + ahead])
        return begin, begin + sum(self.sizes[self.next[b] + ahead : self.next[b] + ahead + 1])

    def advance(self, counts: Sequence[int]) -> None:
        super().advance([self._span(b, count)[0] for b, count in enumerate(counts)])
        self.next = [k + count for k, count in zip(self.next, counts)]

    def select(self, keep: Sequence[int]) -> None:
        super().select(keep)
        self.next = [self.next[i] for i in keep]

    def join(self, other: BufferedNoise, take: Sequence[int]) -> None:
        raise ValueError("stream: Models that generate maps can't be streamed.")


class ScaleGumbel(ScaleNoise, Gumbel):
    """Gumbel numbers for every code."""

    def draft(self, distribution: Maps, level: int) -> tuple[Tensor, None]:  # type: ignore[override]
        numbers_BSV = self.codes(1, level)[:, 0]
        return (distribution.logits[:, 0, : numbers_BSV.shape[1]] + numbers_BSV).argmax(dim=-1), None


class ScaleAcceptanceNoise(ScaleNoise, Uniform):
    """Uniform numbers for every code: one for acceptance, one for the residual, and one for the draft."""

    def __init__(self, generators: Sequence[torch.Generator], sizes: Sequence[int]):
        super().__init__(generators, 3, sizes)

    def draft(self, distribution: Maps, level: int) -> tuple[Tensor, Maps]:  # type: ignore[override]
        numbers_BS = self.codes(1, level)[:, 0, :, 2]
        return draw(distribution.p[:, 0, : numbers_BS.shape[1]], numbers_BS), distribution


class TrajectoryNumbers(NamedTuple):
    """Random numbers for M chains."""

    start: Tensor  # (M, d)
    steps: Tensor  # (M, S, d)
    uniforms: Tensor  # (M, S, 2) logarithms of uniform numbers
    candidates: Tensor  # (M, R, K, d) normal numbers
    chances: Tensor  # (M, R, K) logarithms of uniform numbers


@trees.cached_by_tree
def _coin(tree: Tree) -> Tensor:
    """Return the index of each node's coin among the numbers of a window, (1|B, N)."""
    return place(tree) * (SIBLINGS + 2) + ranks(tree).clamp(max=SIBLINGS - 1)


@trees.cached_by_tree
def place(tree: Tree) -> Tensor:
    """Return the number of levels between the first drafted position and each node, (1|B, N)."""
    return (tree.depth - 1).clamp(min=0)


def ranks(tree: Tree) -> Tensor:
    """Return the number of earlier siblings of each node, (1|B, N)."""
    twins = tree.parent[..., :, None] == tree.parent[..., None, :]
    return twins.tril(-1).sum(dim=-1)


def warp(logits: Tensor, sampling: Sampling, uncond: Tensor | None = None) -> Tensor:
    """Apply guidance (if `uncond` is given), temperature, top-k and top-p: (..., V) -> float32 (..., V), -inf where a
    token was cut. Greedy sampling only applies guidance. Not differentiable. See `kernels.guided_warp`.

    Args:
        logits: Logits (..., V).
        sampling: Temperature, top-k, top-p and guidance scale.
        uncond: Logits without the prompt, for guidance.
    """
    temperature = sampling.temperature
    if uncond is None and (temperature == 0 or not (0 < sampling.top_k < logits.shape[-1] or sampling.top_p < 1.0)):
        logits = logits.float()  # nothing to fuse
        return logits if temperature in (0.0, 1.0) else logits / temperature
    width = logits.shape[-1]
    z_RV = kernels.guided_warp_unchecked(  # `Sampling` has checked the numbers
        logits.reshape(-1, width),
        None if uncond is None else uncond.reshape(-1, width),
        sampling.guidance,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        True,  # scores
    )
    return z_RV.view_as(logits)


def process(logits_BNV: Tensor, draft: Draft, state: State, uncond_BNV: Tensor | None = None) -> Tensor:
    """Apply guidance, then the request's processors to every node with its prefix (prompt, emitted tokens, path), then
    `warp`.

    Processors may depend on the history, which differs between nodes, so they are called for each node separately,
    level by level. This is slow and synchronises once more per level. A `NodeProcessor` is called once for all nodes of
    a row. Nodes that can't be accepted, because they are unreal or have a token of probability 0 on their path, are
    only warped.

    Args:
        logits_BNV: The target's logits after every node.
        uncond_BNV: Logits without the prompt, for guidance.
    """
    sampling, rows = state.request.sampling, len(state.rows)
    if not any([own.processors for own in state.request.samplings]):
        return warp(logits_BNV, sampling, uncond_BNV)
    logits_BNV = warp(logits_BNV, replace(sampling, temperature=0.0), uncond_BNV).clone()
    path_BND = trees.paths(draft.tree).expand(rows, -1, -1)
    prefix = [
        state.ids(row)[0] for row in state.rows
    ]  # ends with the pending token; empty for prompts given as embeddings
    owners = [state.request.of(row) for row in state.rows]
    if all(_together(own.sampling.processors, len(ids), draft.tree) for (own, _), ids in zip(owners, prefix)):
        drafted_BND = draft.value.gather(1, path_BND.clamp(min=0).flatten(1)).view_as(path_BND)
        for logits_NV, drafted_ND, ids, (own, _) in zip(logits_BNV, drafted_BND, prefix, owners):
            ids_NL = torch.cat([ids.expand(len(drafted_ND), -1), drafted_ND[:, 1:]], dim=1)
            for processor in own.sampling.processors:
                logits_NV.copy_(processor(ids_NL, logits_NV))
        return warp(logits_BNV, sampling)
    paths = [[[i for i in path if i >= 0] for path in row] for row in path_BND.tolist()]
    level = [(b, 0) for b, (own, _) in enumerate(owners) if own.sampling.processors]
    while level:
        for b, n in level:
            ids = torch.cat([prefix[b], draft.value[b, paths[b][n][1:]]])
            logits_BNV[b, n] = _process_logits(logits_BNV[b, n], ids, *owners[b])
        level = _reachable_nodes(logits_BNV, draft, sampling, level, paths)
    return warp(logits_BNV, sampling)


def _together(processors: Sequence[Callable], length: int, tree: Tree) -> bool:
    return length > 0 and all(
        isinstance(p, NodeProcessor) and p.alike(length, length + tree.levels) for p in processors
    )


def _process_logits(logits_V: Tensor, ids: Tensor, own: Request, index: int) -> Tensor:
    """Apply the processors of a request, which may depend on the row, to the logits after `ids`."""
    batch = own.prompt.shape[0]
    for processor in own.sampling.processors:
        if isinstance(processor, RowProcessor):
            logits_V = processor.row(index, ids, logits_V)
        else:
            logits_V = processor(ids.expand(batch, -1), logits_V.expand(batch, -1).clone())[index]
    return logits_V


def _reachable_nodes(
    logits_BNV: Tensor, draft: Draft, sampling: Sampling, level: list[tuple[int, int]], paths: list[list[list[int]]]
) -> list[tuple[int, int]]:
    place = {node: m for m, node in enumerate(level)}
    parents = [
        ((b, n), place.get((b, path[-2]))) for b, row in enumerate(paths) for n, path in enumerate(row) if path[1:]
    ]
    inner = [(b, n, m) for (b, n), m in parents if m is not None]
    if not inner:
        return []
    numbers = to_device([i for node in (*level, *inner) for i in node], logits_BNV.device)  # one copy
    level_L2, below_M3 = numbers[: 2 * len(level)].view(-1, 2), numbers[2 * len(level) :].view(-1, 3)
    b_M, n_M, above_M = below_M3.T
    p_LV = warp(logits_BNV[tuple(level_L2.T)], sampling).softmax(dim=-1)
    may_M = p_LV[above_M, draft.value[b_M, n_M]] != 0  # NaN if every token is banned; one is emitted nevertheless
    if draft.real is not None:
        may_M &= draft.real[b_M, n_M]
    return [(b, n) for (b, n, _), may in zip(inner, may_M.tolist()) if may]


def choose(distribution: Categorical, depth_N: Tensor, noise: BufferedNoise | None, levels: int) -> Tensor:
    """Return the token (B, N) sampled at each node with its position's noise; the argmax without noise. depth_N (1|B,
    N) is the offset of the node's next position from the pending token.
    """
    logits_BNV = distribution.logits
    if noise is None:
        return argmax(logits_BNV)
    window_BTV = noise.window(levels + 1)
    rows, size, vocab = logits_BNV.shape
    if depth_N.shape[0] == 1:
        perturbed = logits_BNV + window_BTV[:, depth_N[0]]
    else:
        perturbed = logits_BNV + window_BTV.gather(1, depth_N[..., None].expand(rows, size, vocab))
    return argmax(perturbed)


def propose(logits_BV: Tensor, state: State, level: int) -> tuple[Tensor, Categorical | None]:
    """Draft one token per row (B,), `level` positions after the one that follows the pending token. Returns it with its
    distribution or None, as the request's rule expects.

    Without noise this is the argmax. Otherwise `BufferedNoise.draft` returns either a point mass, the argmax under the
    noise of the position, or a real sample with its distribution.

    Args:
        logits_BV: The drafter's logits.
        state: The request.
        level: Levels between the pending token's successor and this token.
    """
    logits_BV = warp(logits_BV, state.request.sampling)
    return (argmax(logits_BV), None) if state.noise is None else state.noise.draft(Categorical(logits_BV), level)
