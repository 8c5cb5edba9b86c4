"""A target and a drafter without networks: codes drawn from distributions of a given entropy and distance.

Codes stand in a latent space, E_KE normal; the logits of a position are linear in them, z = s E h, plus a part of their
own for each code, so that near codes have near probabilities as codebooks of image models have. The scale s gives the
mean entropy, and the drafter's h is turned away from the target's until the mean total variation is the distance.
Positions are independent of each other and of what was drawn: acceptance is that of rules, not of drafting again.

Shapes: B rows, T positions, K codes, E latent size, N nodes, D levels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visspec.distributions import Categorical
from visspec.loop.output import TokenBuffer
from visspec.models.drafting.static_tree import StaticTreeBuilder
from visspec.models.drafting.structure import Chain, StructuredDrafter
from visspec.sampling import Gumbel
from visspec.types import Capabilities, Draft, DrafterTraits, Outcome, Request, Sampling, Scores, State, Target

LATENT = 8
SMOOTH = 0.8  # share of the variance of logits that is linear in the latent space
STEPS = 18  # of a bisection


def bisect(measure: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a rising measure has the wanted value, or the end of the range nearest to it."""
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if measure(middle) > wanted else (middle, high)
    return (low + high) / 2


class Simulation:
    """Log-distributions of a target and of a drafter, (B, T, K), and the codebook (K, E).

    entropy: of the target, in nats, the mean over positions; distance: the mean total variation of both. Raises
    ValueError for an entropy that so many codes can't have, or a distance that no turn reaches.
    """

    def __init__(self, codes: int, entropy: float, distance: float, rows: int, positions: int, seed: int = 0):
        if not 0 < entropy < torch.tensor(float(codes)).log():
            raise ValueError(f"entropy: got {entropy} nats, expected more than 0 and less than log {codes}")
        generator = torch.Generator().manual_seed(seed)
        shape = rows, positions
        self.codebook = torch.randn(codes, LATENT, generator=generator)
        self.codes, self.entropy, self.distance = codes, entropy, distance

        def logits() -> Tensor:
            smooth = torch.randn(*shape, LATENT, generator=generator) @ self.codebook.T * (SMOOTH / LATENT) ** 0.5
            return smooth + torch.randn(*shape, codes, generator=generator) * (1 - SMOOTH) ** 0.5

        own, other = logits(), logits()
        flatness = bisect(lambda x: nats(own / x), entropy, 1e-3, 100.0)
        self.target = (own / flatness).log_softmax(-1)

        def turned(share: float) -> Tensor:
            return (((1 - share**2) ** 0.5 * own + share * other) / flatness).log_softmax(-1)

        share = bisect(lambda x: float(overlap(self.target, turned(x)).neg().mean() + 1), distance, 0.0, 1.0)
        self.drafter = turned(share)
        found = 1 - float(overlap(self.target, self.drafter).mean())
        if abs(found - distance) > 0.01:
            raise ValueError(f"distance: got {distance}, expected at most {found:.2f} at an entropy of {entropy} nats")

    def bound(self, levels: int) -> float:
        """Tokens a pass that no exact rule on chains of so many levels can exceed: each draft is accepted with
        probability 1 - TV at most.
        """
        rate = float(overlap(self.target, self.drafter).mean())
        return sum(rate**level for level in range(levels + 1))

    def request(self, tokens: int, seed: int) -> Request:
        """So many tokens of all rows, at temperature 1."""
        rows = len(self.target)
        generators = [torch.Generator().manual_seed(seed * rows + b) for b in range(rows)]
        prompt = torch.zeros(rows, 1, dtype=torch.long)
        return Request({}, prompt, tokens, sampling=Sampling(temperature=1.0), generators=generators)


def nats(logits: Tensor) -> float:
    """The mean entropy of distributions."""
    return float(torch.special.entr(logits.softmax(-1)).sum(-1).mean())


def overlap(logp: Tensor, logq: Tensor) -> Tensor:
    """1 - TV of pairs of distributions."""
    return torch.minimum(logp, logq).exp().sum(-1)


def ahead(state: State, depth_N: Tensor, logits_BTK: Tensor) -> Tensor:
    """Log-distributions of the positions `depth` behind each live row's newest token, (B, N, K)."""
    newest = torch.tensor([[len(state.tokens[row])] for row in state.rows])
    at_BN = (newest + depth_N).clamp(max=logits_BTK.shape[1] - 1)
    return logits_BTK[torch.tensor(state.rows)[:, None], at_BN]


class SimulatedTarget(Target):
    """Draws each position from its distribution."""

    device = torch.device("cpu")

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.capabilities = Capabilities(vocab=simulation.codes, codebook=simulation.codebook)

    def prefill(self, request: Request) -> tuple[State, Scores]:
        rows = len(request.prompt)
        zeros = torch.zeros(rows, dtype=torch.long)
        state = State(request, request.prompt[:, -1], zeros, None, list(range(rows)), TokenBuffer(request, rows))
        return state, Scores(Categorical(self.simulation.target[:, :1]))

    def verify(self, state: State, draft: Draft) -> Scores:
        return Scores(Categorical(ahead(state, draft.tree.depth, self.simulation.target)))

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        pass

    def select(self, state: State, keep: list[int]) -> None:
        pass


class SimulatedDrafter(StructuredDrafter):
    """Drafts from the other distributions: chains, or the static tree of so many nodes a depth ("4-2-1").

    A tree for a rule that judges draws is drawn without replacement, by numbers of its own.
    """

    nodes = 64

    def __init__(self, simulation: Simulation, levels: int, tree: str = ""):
        self.simulation = simulation
        self.traits = DrafterTraits(levels=levels, adaptive_depth=False)
        self.shaped(tree)

    def start(self, state: State, scores: Scores) -> None:
        if state.noise is not None and state.noise.samples and self.paths:
            state.memory = Gumbel(state.noise.child_generators(), self.simulation.codes)

    def propose(self, state: State, depth: int) -> Draft:
        logits_BDK = ahead(state, torch.arange(depth)[None], self.simulation.drafter)
        if not self.paths:
            chain = Chain(state)
            chain.extend(logits_BDK)
            return chain.finish()
        own = None if state.memory is None else state.memory.window(depth)
        builder = StaticTreeBuilder(state.pending, tuple(path for path in self.paths if len(path) <= depth), own)
        width = 1
        for level in range(self.levels(state, depth)):
            logp_BWK = logits_BDK[:, level : level + 1].expand(-1, width, -1)
            if own is None and state.noise is not None:
                logp_BWK = state.noise.perturb(logp_BWK, level).log_softmax(-1)
            width = builder.grow(logp_BWK)[0].shape[1]
        return builder.finish(self.nodes)

    def observe(self, state, draft, scores, verdict, outcome) -> None:
        if state.memory is not None:
            state.memory.advance([len(tokens) for tokens in outcome.tokens])

    def select(self, state: State, keep: list[int]) -> None:
        if state.memory is not None:
            state.memory.select(keep)
