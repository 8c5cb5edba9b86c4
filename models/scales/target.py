"""Next-scale models (VAR) as targets of the loop: a node is a scale, the map of codes that one pass gives at once.

The distribution after a node is that of the next scale's codes, which are independent given the earlier scales
(`distributions.Maps`); one block-causal pass verifies a chain of drafted scales. Guidance grows with the scale, as
published: u + t (c - u) with t = 1 + (guidance - 1) k / (K - 1), so the published `cfg` of 1.5 is a guidance of 2.5.

With a `refiner` the declared target is a composition (CoDe, arXiv 2411.17787): scales below `handover` have the
distribution of the model, later ones that of the refiner, each given all earlier scales,

    p(r_1 .. r_K) = prod_(k <= N) p_model(r_k | r_<k)  prod_(k > N) p_refiner(r_k | r_<k),

which is neither model's own. The refiner reads the scales so far in one pass, and the model's cache is freed.

Shapes: B images, R = B or 2 B rows, N nodes, S codes of the largest scale, V codes, K scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visspec.distributions import Maps
from visspec.io.checkpoint import check_choice
from visspec.loop.decode import ScaleBuffer
from visspec.models.folders import OwnImageModel, unpack
from visspec.models.image_codes.family import Family, ImageLayout
from visspec.models.scales.blocks import NextScale
from visspec.models.scales.cache import ScaleCache
from visspec.models.scales.kv_budget import BudgetedCache, CacheBudget
from visspec.models.scales.multiscale import ScaleSizes, ScaleVAE
from visspec.models.scales.reading import ConditionState, DistanceGroup, stack_groups
from visspec.sampling import warp
from visspec.types import FREE, Capabilities, Draft, Outcome, Request, Sampling, Scores, State, Target

RAMPS = ("linear", "constant")  # how guidance depends on the scale


@dataclass(frozen=True)
class ScaleLayout(ImageLayout):
    """An image of K nodes with `total` codes in all; `grid` is that of the last scale."""

    total: int = 0

    @property
    def length(self) -> int:
        return self.total

    def codes(self, values: Tensor) -> Tensor:
        return values

    def latents(self, codes: Tensor) -> Tensor:
        return codes

    def placed(self, items: np.ndarray) -> np.ndarray:
        return items[None]


@dataclass(frozen=True, eq=False)
class ScalePrompt:
    """The conditions of B images, class numbers (B,) or `Texts`, and what replaces them in unconditional rows."""

    given: Any
    against: Any

    def __len__(self) -> int:
        return len(self.given)

    def of(self, images: list[int]) -> ScalePrompt:
        return type(self)(self.given[images], self.against[images])

    @property
    def ids(self) -> Tensor:
        """Placeholder ids (B, 1): the prompt has no tokens of the loop."""
        return torch.zeros(len(self), 1, dtype=torch.long, device=self.given.device)

    def rows(self, guided: bool) -> Any:
        """Return what R rows are given, conditional rows first."""
        return torch.cat([self.given, self.against]) if guided else self.given


class ScaleImages(Family):
    """Base class of next-scale models as image families.

    Args:
        model: The network, or a folder's model.
        processor: Encodes texts, if prompts are texts.
        codec: The autoencoder, needed to generate.
        ramp: Guidance by scale, "linear" or "constant"; by default as published.
        refiner: A model for the scales from number `handover` on (CoDe).
        handover: First scale of the refiner.
        budget: Tokens to keep in the cache by layer and scale (ScaleKV, `visspec.models.scales.kv_budget`), which makes
            the guarantee approximate.
    """

    draws = "maps"
    running = False
    default_drafter, default_rule, default_ramp = "none", "scales", "linear"
    autoencoder: tuple[type, str]  # its class, and a description for errors

    def __init__(
        self,
        model: NextScale | OwnImageModel,
        processor: Callable[..., Any] | None = None,
        codec: ScaleVAE | None = None,
        ramp: str | None = None,
        refiner: NextScale | None = None,
        handover: int | None = None,
        budget: CacheBudget | None = None,
    ):
        net, vae, guidance = unpack(model, codec)
        if guidance is not None:
            self.default_guidance = guidance
        ramp = self.default_ramp if ramp is None else ramp
        check_choice("ramp", ramp, RAMPS)
        if not isinstance(vae, self.autoencoder[0]):
            raise ValueError(f"codec: got {type(vae).__name__}, expected {self.autoencoder[1]}.")
        self.model = net
        self.codec = vae
        self.processor = processor
        self.ramp = ramp
        self.refiner, self.handover, self.budget = refiner, handover, budget
        self.scales, self.codes = net.config.scales, net.config.codes
        self.sizes = tuple(size * self.codec.quantize.each for size in self.scales.sizes)  # codes of each map
        got, want = (self.codec.shape.codes, self.codec.shape.size), (net.config.codes, net.config.code_size)
        if got != want:
            raise ValueError(f"codec: got {got[0]} codes of {got[1]}, expected the model's {want[0]} of {want[1]}.")
        if (refiner is None) != (handover is None):
            raise ValueError(f"handover: got {handover}, expected a refiner and its first scale's number, or neither.")
        if refiner is not None and handover is not None:
            check_alike("refiner", refiner, net)
            if not 0 <= handover <= len(self.scales):
                raise ValueError(f"handover: got {handover}, expected 0..{len(self.scales)}, the scales of the model.")
        if budget is not None:
            if refiner is not None:
                raise ValueError("budget: got a budget and a refiner, expected one of the two.")
            budget.check(self.scales, net.config.depth)

    @property
    def plain(self) -> bool:
        """Return whether the target has the model's own distribution."""
        return self.refiner is None and self.budget is None

    def layout(self, height: int | None = None, width: int | None = None) -> ScaleLayout:
        rows, columns = self.scales.grids[-1]
        size = rows * self.codec.factor, columns * self.codec.factor
        if (height or size[0], width or size[1]) != size:
            got = f"{height} x {width}"
            raise ValueError(f"height, width: got {got}, expected {size[0]} x {size[1]}, the size of the scales.")
        return ScaleLayout((rows, columns), torch.full((len(self.scales),), FREE), total=sum(self.sizes))

    def check(self, prompt: object, layout: ImageLayout, guidance: float) -> None:
        """Accept any prompt: nothing depends on its length."""

    def guidance(self, guidance: float, scale: int) -> float:
        last = len(self.scales) - 1
        return guidance if self.ramp == "constant" or last == 0 else 1 + (guidance - 1) * scale / last

    def warp(self, sampling: Sampling, logits_RSV: Tensor, scale: int) -> Tensor:
        """Apply the scale's guidance, then temperature, top-k and top-p: (B, S, V)."""
        if sampling.guidance == 1.0:
            return warp(logits_RSV, sampling)
        cond, uncond = logits_RSV.chunk(2)
        own = replace(sampling, guidance=self.guidance(sampling.guidance, scale))
        return warp(cond.contiguous(), own, uncond.contiguous())

    def distributions(self, state: State, groups: list[DistanceGroup], nodes: int) -> Maps:
        """Return distributions of the scales after nodes (B, N), from a model's logits."""
        sampling = state.request.sampling
        return Maps(*stack_groups(groups, len(state.rows), nodes, lambda x, k: self.warp(sampling, x, k)))

    def pixels(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        return self.codec.decode(tokens, self.scales).float() / 2 + 0.5


def check_alike(name: str, other: NextScale, model: NextScale) -> None:
    """Raise ValueError unless both models generate the same maps from the same prompts."""
    if type(other) is not type(model):
        raise ValueError(f"{name}: got {type(other).__name__}, expected {type(model).__name__} like the model.")
    for what in model.config.ALIKE:
        got, want = getattr(other.config, what), getattr(model.config, what)
        if got != want:
            values = (list(v.sizes) if isinstance(v, ScaleSizes) else v for v in (got, want))
            raise ValueError("{}: got {} {}, expected {} as in the model".format(name, what, *values))


class ScaleTarget(Target):
    """`ScaleImages` as a target of the loop. Drafts are chains of scales."""

    def __init__(self, family: ScaleImages):
        self.family, self.model, self.scales = family, family.model, family.scales
        self.capabilities = Capabilities(
            trees=False, vocab=family.codes, distribution=Maps, scales=family.sizes, **declared_distribution(family)
        )

    @property
    def device(self) -> torch.device:
        return self.model.device

    def prefill(self, request: Request) -> tuple[State, Scores]:
        """Start a request whose `inputs` are the family's prompt. Scores: distributions (B, 1) of the first scale."""
        prompt = request.inputs
        first = self.family.refiner if self.family.handover == 0 else None
        reading = self.initial_state(prompt, request.sampling, first or self.model)
        images, size = len(prompt), max(self.family.sizes)
        state = State(
            request,
            torch.zeros(images, size, dtype=torch.long, device=self.device),
            torch.full((images,), -1, device=self.device),
            reading,
            list(range(images)),
            ScaleBuffer(request, images, self.family.sizes),
        )
        return state, self._scores(state, reading.read(), 1)

    def fix_widths(self) -> None:
        """Images are drawn one at a time then, with drafts of one length."""

    def initial_state(self, prompt: Any, sampling: Sampling, model: NextScale) -> ConditionState:
        """Return the initial state of a model for a prompt."""
        cache: ScaleCache | None = None
        quantizer, rows = self.family.codec.quantize, prompt.rows(sampling.guidance != 1.0)
        if self.family.budget is not None:
            cache = BudgetedCache(self.scales, self.family.budget)
        elif self.family.refiner is not None and model is self.model:
            cache = ScaleCache(self.scales, model.config.depth, self.family.handover)
        return ConditionState(model, quantizer, rows, len(prompt), cache)

    def verify(self, state: State, draft: Draft) -> Scores:
        """Run one block-causal pass over all nodes, with two rows per image under guidance."""
        reading, nodes = state.cache, draft.tree.size
        if nodes > 1 and not self.family.plain:
            raise ValueError(f"draft: got {nodes - 1} scales, expected none: this target takes one scale at a time.")
        if len(state.tokens[state.rows[0]]) == self.family.handover:
            return self._scores(state, self._hand_over(state), 1)
        scores = self._scores(state, reading.read(draft.value), nodes)
        self._report(state)
        return scores

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        state.cache.keep([len(path) for path in outcome.path])

    def select(self, state: State, keep: list[int]) -> None:
        state.cache.select(keep)

    def _hand_over(self, state: State) -> list[DistanceGroup]:
        """Let the refiner read all scales so far in one pass, return the last one's logits, and drop the old cache."""
        assert self.family.refiner is not None
        assert isinstance(state.output, ScaleBuffer)
        maps_BNS = torch.stack([state.output.maps(row) for row in state.rows])
        prompt, size = state.request.inputs.of(state.rows), state.cache.cache.bytes
        state.cache = reading = self.initial_state(prompt, state.request.sampling, self.family.refiner)
        groups = reading.read(maps_BNS, last=True)
        reading.pass_over(maps_BNS.shape[1] - 1)
        state.trace.memory["freed"] = size
        self._report(state)
        return groups

    def _report(self, state: State) -> None:
        """Record bytes of keys and values: the maximum between passes, and the maximum within one."""
        cache, memory = state.cache.cache, state.trace.memory
        memory["cache"] = max(memory.get("cache", 0), cache.bytes)
        memory["pass"] = max(memory.get("pass", 0), cache.bytes, cache.peak)

    def _scores(self, state: State, groups: list[DistanceGroup], nodes: int) -> Scores:
        return Scores(self.family.distributions(state, groups, nodes))


def declared_distribution(family: ScaleImages) -> dict[str, Any]:
    """Return the guarantee that a setup may state for the target, and a description of the target's distribution."""
    count = len(family.scales)
    if family.refiner is not None:
        words = f"scales 1..{family.handover} by the model, the others of {count} by the refiner, each given all before"
        return {"guarantee": "exact for the declared target", "declared": words}
    if family.budget is not None and not family.budget.whole(family.scales):
        return {"guarantee": "approximate", "declared": "the model with a part of its cache"}
    return {}


ScaleImages.target = ScaleTarget
