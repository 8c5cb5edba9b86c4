"""From logits to distributions, and the random numbers that make values of them.

Shapes: B rows, N nodes, T positions, V vocabulary, U numbers of a position. Laws are float32.

`Gumbel` numbers belong to positions. Token t of a row is argmax(log p_t + G_t), with G_t a vector of Gumbel numbers
that depends on the row's generator and on t alone; that is a draw from p_t (Gumbel-max), whatever was drafted, in
whatever batch. A drafter that ranks with the same G_t is coupled to the target and agrees with it with probability at
least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, "Coupling without communication", 2024).

`AcceptanceNoise` belong to a rule that accepts and rejects draws from a reported distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec import kernels, ranking
from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import Categorical, Denoising, Maps, Trajectory, draw
from visspec.types import Draft, NodeProcessor, Request, RowProcessor, Sampling, State, Tree

CHUNK = 16  # positions drawn at a time: a constant, so that a row's stream does not depend on how it is consumed
SIBLINGS = 32  # uniform numbers of a position; a node has at most this many children


class BufferedNoise:
    """Base class. samples: drafts are draws from a distribution that they report, independent of these numbers."""

    samples = False

    def __init__(self, generators: Sequence[torch.Generator], width: int):
        self.generators, self.width = list(generators), width
        self.ahead = [self._chunk(g) for g in self.generators]  # (T, width), starting at each row's next position

    @classmethod
    def of(cls, numbers_BTU: Tensor) -> BufferedNoise:
        """Noise of given numbers, without generators: for one round that is recorded."""
        made = cls.__new__(cls)
        made.generators, made.width, made.ahead = [], numbers_BTU.shape[-1], list(numbers_BTU)
        return made

    def _chunk(self, generator: torch.Generator) -> Tensor:
        return torch.rand(CHUNK, self.width, generator=generator, device=generator.device)

    def window(self, positions: int, first: int = 0) -> Tensor:
        """(B, positions - first, width): the numbers of each row's next positions, from `first` on. Reading them does
        not consume them.
        """
        self._reach(positions)
        return torch.stack([a[first:positions] for a in self.ahead])

    def _reach(self, positions: int) -> None:
        """Draw what is missing of each row's next positions."""
        for b, generator in enumerate(self.generators):
            lacking = positions - len(self.ahead[b])
            if lacking > 0:
                self.ahead[b] = torch.cat([self.ahead[b], *(self._chunk(generator) for _ in range(0, lacking, CHUNK))])

    def advance(self, counts: Sequence[int]) -> None:
        """Consume positions: counts[b] nodes of row b are now final."""
        self._reach(max(counts))
        self.ahead = [a[n:] for a, n in zip(self.ahead, counts)]

    def child_generators(self) -> list[torch.Generator]:
        """A generator for each row, for numbers of a drafter. Called once a request.

        Numbers that accept or reject draws must be unknown to the drafter, so they skip the one that seeds the child.
        Others are indexed by position and stay as they are.
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
        """A drafted value for each row (B,), `level` positions after the next one, and the distribution it was drawn
        from; None where drafts are point masses to the rule.
        """
        raise NotImplementedError

    def perturb(self, logits_BWV: Tensor, level: int) -> Tensor:
        """Logits of W nodes of a level as a tree ranks them."""
        raise NotImplementedError


class Gumbel(BufferedNoise):
    """`width` Gumbel numbers a position. Drafts are coupled to the target's own draw."""

    def _chunk(self, generator: torch.Generator) -> Tensor:
        u = super()._chunk(generator)
        tiny = torch.finfo(u.dtype).tiny
        return -torch.log((-torch.log(u.clamp_(min=tiny))).clamp_(min=tiny))

    def draft(self, distribution: Categorical, level: int) -> tuple[Tensor, None]:
        numbers_BV = self.window(level + 1, level)[:, 0, : distribution.width]
        return ranking.argmax(distribution.logits + numbers_BV), None

    def perturb(self, logits_BWV: Tensor, level: int) -> Tensor:
        return logits_BWV + self.window(level + 1, level)[..., : logits_BWV.shape[-1]]


def gumbel_given(logp: Tensor, chosen: Tensor) -> Tensor:
    """Gumbel numbers (..., V) given that log p + G is largest at `chosen` (...), from torch's global generator.

    The largest sum is a Gumbel number whatever `chosen` is; the others are below it (Maddison, Tarlow, Minka 2014).
    """
    largest, sums = (-torch.empty_like(x).exponential_().log() for x in (logp[..., :1], logp))
    logp = logp.clamp(min=-1e4)  # numbers of what is impossible stay finite
    sums = -torch.logaddexp(-largest, -(sums + logp))
    return sums.scatter(-1, chosen[..., None], largest) - logp


class Uniform(BufferedNoise):
    """`width` numbers in [0, 1) a position, for draws that a distribution is reported of; the last of them draws the
    draft.
    """

    samples = True

    def draft(self, distribution: Categorical, level: int) -> tuple[Tensor, Categorical]:
        return draw(distribution.p, self.window(level + 1, level)[:, 0, -1]), distribution

    def perturb(self, logits_BWV: Tensor, level: int) -> Tensor:
        return logits_BWV


class AcceptanceNoise(Uniform):
    """Of each position: a uniform number for each sibling, the draw of the residual, and the drafter's own draw."""

    def __init__(self, generators: Sequence[torch.Generator]):
        super().__init__(generators, SIBLINGS + 2)

    def accept_uniforms(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """(each node's coin (B, N), by its depth and its rank among its siblings; the residual's draw (B,))."""
        window_BTU = self.window(tree.levels + 1)
        coins_BN = window_BTU.flatten(1).gather(1, trees.tree_cache(tree, _coin).expand(len(window_BTU), -1))
        return coins_BN, window_BTU[:, 0, SIBLINGS].contiguous()


class Normals(BufferedNoise):
    """Of each position, for chains of S steps in d dimensions: the start and the steps' normal numbers, two uniform
    numbers a step, and K candidates of residuals, with a uniform number each, for R of the steps: candidates = (R, K).
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
        """The numbers of each row's next positions from `first` on, for M = B (positions - first) chains."""
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
    """Noise of maps: a position is a scale, and `width` numbers belong to each of its sizes[k] codes. Base class."""

    def __init__(self, generators: Sequence[torch.Generator], width: int, sizes: Sequence[int]):
        self.sizes, self.next = list(sizes), [0] * len(generators)  # the next scale of each row
        super().__init__(generators, width)

    def codes(self, nodes: int, first: int = 0) -> Tensor:
        """(B, nodes, S, width): numbers of each row's next scales from `first` on, padded by zeros to the largest."""
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
        """Where the codes of a row's scale begin and end; behind the last scale there are none."""
        begin = sum(self.sizes[self.next[b] : self.next[b] + ahead])
        return begin, begin + sum(self.sizes[self.next[b] + ahead : self.next[b] + ahead + 1])

    def advance(self, counts: Sequence[int]) -> None:
        super().advance([self._span(b, count)[0] for b, count in enumerate(counts)])
        self.next = [k + count for k, count in zip(self.next, counts)]

    def select(self, keep: Sequence[int]) -> None:
        super().select(keep)
        self.next = [self.next[i] for i in keep]

    def join(self, other: BufferedNoise, take: Sequence[int]) -> None:
        raise ValueError(f"stream: got {type(self).__name__}, expected noise of tokens: maps are not drawn in streams")


class ScaleGumbel(ScaleNoise, Gumbel):
    """Gumbel numbers of every code."""

    def draft(self, distribution: Maps, level: int) -> tuple[Tensor, None]:  # type: ignore[override]
        numbers_BSV = self.codes(1, level)[:, 0]
        return (distribution.logits[:, 0, : numbers_BSV.shape[1]] + numbers_BSV).argmax(dim=-1), None


class ScaleAcceptanceNoise(ScaleNoise, Uniform):
    """Of every code: a uniform number, the draw of the residual, and the drafter's own draw."""

    def __init__(self, generators: Sequence[torch.Generator], sizes: Sequence[int]):
        super().__init__(generators, 3, sizes)

    def draft(self, distribution: Maps, level: int) -> tuple[Tensor, Maps]:  # type: ignore[override]
        numbers_BS = self.codes(1, level)[:, 0, :, 2]
        return draw(distribution.p[:, 0, : numbers_BS.shape[1]], numbers_BS), distribution


class TrajectoryNumbers(NamedTuple):
    """Random numbers of M chains."""

    start: Tensor  # (M, d)
    steps: Tensor  # (M, S, d)
    uniforms: Tensor  # (M, S, 2) logarithms of uniform numbers
    candidates: Tensor  # (M, R, K, d) normal numbers
    chances: Tensor  # (M, R, K) logarithms of uniform numbers


def _coin(tree: Tree) -> Tensor:
    """(1|B, N) where each node's coin stands among the numbers of a window."""
    return place(tree) * (SIBLINGS + 2) + ranks(tree).clamp(max=SIBLINGS - 1)


def place(tree: Tree) -> Tensor:
    """(1|B, N) levels between a node and the first drafted position."""
    return (tree.depth - 1).clamp(min=0)


def ranks(tree: Tree) -> Tensor:
    """How many siblings stand before each node, (1|B, N)."""
    twins = tree.parent[..., :, None] == tree.parent[..., None, :]
    return twins.tril(-1).sum(dim=-1)


def warp(logits: Tensor, sampling: Sampling, uncond: Tensor | None = None) -> Tensor:
    """Guidance (with `uncond`), temperature, top-k, top-p, see `kernels.guided_warp`. (..., V) -> (..., V) float32.

    Cut entries become -inf. Greedy sampling only applies guidance. Not differentiable.
    """
    temperature = sampling.temperature
    if uncond is None and (temperature == 0 or not (0 < sampling.top_k < logits.shape[-1] or sampling.top_p < 1.0)):
        logits = logits.float()  # nothing to fuse
        return logits if temperature in (0.0, 1.0) else logits / temperature
    width = logits.shape[-1]
    z_RV = kernels.guided_warp(
        logits.reshape(-1, width),
        None if uncond is None else uncond.reshape(-1, width),
        sampling.guidance,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        scores=True,
    )
    return z_RV.view_as(logits)


def process(logits_BNV: Tensor, draft: Draft, state: State, uncond_BNV: Tensor | None = None) -> Tensor:
    """Apply guidance, the request's processors at every node with its prefix (prompt, emitted tokens, path), then warp.

    Processors may depend on the history, which differs between the nodes of a draft, so they are called for each node
    separately, level by level. They are not called for nodes that can't be accepted: those that are not real or have a
    token of probability 0 on their path. Distributions of such nodes are warped without them. This is slow and needs a
    synchronisation more for each level. Where a `NodeProcessor` may be, it is called once for all nodes of a row.
    """
    sampling, rows = state.request.sampling, len(state.rows)
    if not any(own.sampling.processors for own in state.request.each or (state.request,)):
        return warp(logits_BNV, sampling, uncond_BNV)
    logits_BNV = warp(logits_BNV, replace(sampling, temperature=0.0), uncond_BNV).clone()
    path_BND = trees.paths(draft.tree).expand(rows, -1, -1)
    prefix = [state.ids(row)[0] for row in state.rows]  # ends with the pending token; empty below an embedded prompt
    owners = [state.request.of(row) for row in state.rows]
    if all(_together(own.sampling.processors, len(ids), draft.tree) for (own, _), ids in zip(owners, prefix)):
        drafted_BND = draft.value.gather(1, path_BND.clamp(min=0).flatten(1)).view_as(path_BND)  # or the pending token
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
    """Whether processors may be called once for all nodes below a prefix of this length."""
    return length > 0 and all(
        isinstance(p, NodeProcessor) and p.alike(length, length + tree.levels) for p in processors
    )


def _process_logits(logits_V: Tensor, ids: Tensor, own: Request, index: int) -> Tensor:
    """The logits after ids, by the processors of a request, which may have settings for each of its rows."""
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
    """Nodes (row, index) below those of a level that are real and have a token of a probability above 0."""
    place = {node: m for m, node in enumerate(level)}
    parents = [
        ((b, n), place.get((b, path[-2]))) for b, row in enumerate(paths) for n, path in enumerate(row) if path[1:]
    ]
    below = [(b, n, m) for (b, n), m in parents if m is not None]
    if not below:
        return []
    numbers = to_device([i for node in (*level, *below) for i in node], logits_BNV.device)  # one copy
    level_L2, below_M3 = numbers[: 2 * len(level)].view(-1, 2), numbers[2 * len(level) :].view(-1, 3)
    b_M, n_M, above_M = below_M3.T
    p_LV = warp(logits_BNV[tuple(level_L2.T)], sampling).softmax(dim=-1)
    may_M = p_LV[above_M, draft.value[b_M, n_M]] != 0  # NaN where every token is banned, of which one is emitted
    if draft.real is not None:
        may_M &= draft.real[b_M, n_M]
    return [(b, n) for (b, n, _), may in zip(below, may_M.tolist()) if may]


def choose(distribution: Categorical, depth_N: Tensor, noise: BufferedNoise | None, levels: int) -> Tensor:
    """The token sampled at each node with its position's noise, or the argmax without noise: (B, N).

    depth_N (1|B, N) is the offset of the node's next position from the pending token.
    """
    logits_BNV = distribution.logits
    if noise is None:
        return ranking.argmax(logits_BNV)
    window_BTV = noise.window(levels + 1)
    rows, size, vocab = logits_BNV.shape
    if depth_N.shape[0] == 1:
        perturbed = logits_BNV + window_BTV[:, depth_N[0]]
    else:
        perturbed = logits_BNV + window_BTV.gather(1, depth_N[..., None].expand(rows, size, vocab))
    return ranking.argmax(perturbed)


def propose(logits_BV: Tensor, state: State, level: int) -> tuple[Tensor, Categorical | None]:
    """One drafted token per row, in the form that the request's rule expects: (tokens (B,), the distribution or None).

    Greedy: the argmax. Otherwise as the request's noise says (`BufferedNoise.draft`): the argmax under the noise of
    that position (level 0 is the position after the pending token), a point mass; or a real draw, and the distribution
    it came from.
    """
    return sample_distribution(Categorical(warp(logits_BV, state.request.sampling)), state, level)


def sample_distribution(distribution: Categorical, state: State, level: int) -> tuple[Tensor, Categorical | None]:
    """The same of a distribution."""
    return (
        (ranking.argmax(distribution.logits), None) if state.noise is None else state.noise.draft(distribution, level)
    )
