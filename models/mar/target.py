"""MAR as a target of the loop: tokens are drawn one after another in each row's own order, each by its chain.

MAR is bidirectional, so every prefix of the order needs its own pass over all tokens. A draft's N prefixes are rows of
one padded batch, so that a verified distribution is that of MAR with one token at a time; nothing is cached. With noise
in the last step of chains, which the published sampler leaves out, rules for vectors are exact for it.

Shapes: B rows, N nodes, T tokens, K maximum number of known tokens over the rows, d size of a token, D width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from visspec.distributions import Denoising
from visspec.io.checkpoint import check_choice
from visspec.loop.decode import VectorBuffer
from visspec.models.folders import unpack
from visspec.models.image_codes.family import ImageLayout, class_numbers
from visspec.models.mar.layout import MARImageModel
from visspec.models.mar.network import GUIDANCE, MAR, UNCONDITIONAL
from visspec.models.vectors.diffusion_head import Schedule, schedule
from visspec.models.vectors.head_distribution import HeadDistributions
from visspec.models.vectors.target import VectorFamily
from visspec.types import Capabilities, Draft, Request, Sampling, Scores, State, Target

SCALES = ("linear", "constant")  # how a token's guidance depends on its number
STEPS = 100  # steps per chain in the published commands


@dataclass(frozen=True, eq=False)
class ClassPrompt:
    """classes (B,): numbers, or UNCONDITIONAL. order (B, T): the position of each row's first, second, ... token; None:
    drawn by the rows' generators, before any other number.
    """

    classes: Tensor
    order: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """Placeholder ids (B, 1): the prompt has no tokens."""
        return torch.zeros_like(self.classes)[:, None]

    def with_order(self, tokens: int, generators: Sequence[torch.Generator] | None) -> ClassPrompt:
        """Return the prompt with orders, which the generators draw if there are none."""
        if self.order is not None:
            return self
        assert generators is not None
        orders = [torch.randperm(tokens, generator=g, device=g.device) for g in generators]
        return ClassPrompt(self.classes, torch.stack([order.to(self.classes.device) for order in orders]))


class MARImages(VectorFamily):
    """Prompts are class numbers ("207") or class names. `MARTarget` draws vectors in each row's own order.

    Args:
        model: The network, or a folder's model.
        processor: Not needed, as prompts are classes.
        autoencoder: `visspec.models.mar.layout.load_mar_vae`, or the folder's.
        plan: Steps of the chains; by default the folder's, or 100 of the published schedule, with noise in the last.
        scale: "linear" if guidance grows from nearly 1 with the number of known tokens, as published, or "constant".
        denoising_steps: Steps per vector, replaces the folder's; fewer are faster but give another distribution.
    """

    name = "mar"
    running = False
    load = staticmethod(MARImageModel.read)

    def __init__(
        self,
        model: MAR | MARImageModel,
        processor: Callable[..., Any] | None = None,
        autoencoder: AutoencoderKL | None = None,
        plan: Schedule | None = None,
        scale: str = "linear",
        denoising_steps: int | None = None,
    ):
        check_choice("scale", scale, SCALES)
        if isinstance(model, MARImageModel):
            plan, self.labels = plan or model.schedule(denoising_steps), tuple(model.config.labels)
        net, autoencoder, guidance = unpack(model, autoencoder)
        self.model = self.decoder = net
        self.processor, self.scale = processor, scale
        self.chains = HeadDistributions(net.head, plan or schedule(STEPS, learned=net.head.learned))
        self.steps = self.chains.steps
        self.default_guidance = GUIDANCE.get(net.config.width, 1.0) if guidance is None else guidance
        self.side = math.isqrt(net.config.tokens)
        self.factor = 16
        if autoencoder is not None:
            self.patch = math.isqrt(net.config.size // autoencoder.config.latent_channels)
        self.use_autoencoder(autoencoder, net.config.size, "visspec.models.mar.layout.load_mar_vae")

    def layout(self, height: int | None = None, width: int | None = None) -> ImageLayout:
        return ImageLayout.only(self.side, self.side * self.factor, height, width, "those of the positions")

    def prompt(
        self, texts: list[str], guided: bool, layout: ImageLayout | None = None, negative: list[str] | None = None
    ) -> Any:
        self.refuse_negative(negative)
        classes = class_numbers(texts, self.model.config.classes, "prompt", self.labels)
        return ClassPrompt(classes.to(self.model.device))


@dataclass(eq=False)
class DrawnVectors:
    """Vectors drawn by the live rows of a request: `values` (B, T + 1, d) in each row's order, the last one unused."""

    classes: Tensor
    order: Tensor
    values: Tensor

    @classmethod
    def empty(cls, prompt: ClassPrompt, size: int) -> DrawnVectors:
        assert prompt.order is not None
        rows, tokens = prompt.order.shape
        return cls(prompt.classes, prompt.order, torch.zeros(rows, tokens + 1, size, device=prompt.order.device))

    def put(self, number_BN: Tensor, values_BNd: Tensor) -> None:
        """Store tokens by their numbers in the order; those beyond the end are dropped."""
        at = number_BN.clamp(max=self.order.shape[1])[..., None].expand_as(values_BNd)
        self.values = self.values.scatter(1, at, values_BNd.to(self.values.dtype))

    def select(self, keep: list[int]) -> DrawnVectors:
        return DrawnVectors(self.classes[keep], self.order[keep], self.values[keep])


class UnorderedBuffer(VectorBuffer):
    """Vectors drawn in each row's own order; `values` are in raster order, NaN where none is drawn yet."""

    def __init__(self, request: Request, order_BT: Tensor):
        super().__init__(request, len(order_BT))
        self.order = order_BT

    def in_raster_order(self, row: int, items: list[Any]) -> list[Any]:
        by_place = dict(zip(self.order[row].tolist(), items))
        return [by_place[place] for place in sorted(by_place)]

    def values(self, row: int) -> Tensor:
        drawn_Nd = super().values(row)
        raster_Td = drawn_Nd.new_full((self.order.shape[1], drawn_Nd.shape[1]), math.nan)
        return raster_Td.index_copy(0, self.order[row, : len(drawn_Nd)], drawn_Nd)


class MARTarget(Target):
    """`MARImages` as a target of the loop. Drafts are chains of vectors, in each row's order."""

    def __init__(self, family: MARImages):
        self.family, self.model = family, family.model
        size = family.model.config.size
        self.capabilities = Capabilities(trees=False, distribution=Denoising, steps=family.steps, size=size)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def fix_widths(self) -> None:
        """Do nothing: images are then drawn one at a time, and drafts keep the distribution, not the vectors."""

    def prefill(self, request: Request) -> tuple[State, Scores]:
        """Start a request whose `inputs` are a `ClassPrompt`. Scores: distributions (B, 1) of the first tokens."""
        state = self.open_state(request)
        return state, self._scores(state, state.position[:, None], range(1))

    def open_state(self, request: Request) -> State:
        """Return the state of a checked request before any pass."""
        self.family.check_sampling(request.sampling)
        prompt = request.inputs = request.inputs.with_order(self.model.config.tokens, request.generators)
        vectors = DrawnVectors.empty(prompt, self.model.config.size)
        position = torch.full_like(prompt.classes, -1)  # the number of a virtual node before the first token
        rows = list(range(len(position)))
        return State(request, vectors.values[:, 0], position, vectors, rows, UnorderedBuffer(request, prompt.order))

    def verify(self, state: State, draft: Draft) -> Scores:
        """Run one pass over every prefix of every row, with two rows each under guidance."""
        vectors: DrawnVectors = state.cache
        nodes, tokens = draft.value.shape[1], self.model.config.tokens
        rank_BN = state.position[:, None] + torch.arange(nodes, device=self.device)
        vectors.put(rank_BN, draft.value)
        known_rows = [len(state.tokens[row]) for row in state.rows]  # including the pending token
        most = min(max(known_rows) + nodes - 1, tokens)
        return self._scores(state, rank_BN, range(min(known_rows), most + 1))

    def select(self, state: State, keep: list[int]) -> None:
        state.cache = state.cache.select(keep)

    def _scores(self, state: State, rank_BN: Tensor, counts: range) -> Scores:
        """Return distributions after nodes with these numbers in the order.

        Args:
            counts: Range of the number of known tokens per prefix, known on the host.
        """
        number_BN, sampling = rank_BN + 1, state.request.sampling
        return Scores(self.next_vector(state.cache, number_BN, number_BN, counts, sampling, state.trace.calls))

    def next_vector(
        self,
        vectors: DrawnVectors,
        prefix_BN: Tensor,
        number_BP: Tensor,
        counts: range,
        sampling: Sampling,
        calls: Counter[str] | None = None,
        name: str = "head",
        step: int | None = None,
    ) -> Denoising:
        """Return distributions (B, P) of each row's tokens `number`, P / N of them given each prefix of its order.

        Args:
            counts: Range of the prefixes' lengths.
            step: Number of tokens drawn together, for the guidance; None means one.
        """
        tokens, guided = self.model.config.tokens, sampling.guidance != 1.0
        number_BP = number_BP.clamp(max=tokens - 1)  # a draft may extend beyond the end
        place_BP = vectors.order.gather(1, number_BP)
        condition = conditions(self.model, vectors, prefix_BN, place_BP, counts, guided)
        scale = None
        if guided:
            numbers = number_BP + 1 if step is None else prefix_BN + step
            scale = scales(self.family.scale, sampling.guidance, numbers.expand_as(number_BP), tokens).flatten()
        return self.family.chains(
            condition, (len(place_BP), place_BP.shape[1]), scale, sampling.temperature, calls, name
        )


def conditions(
    model: MAR, vectors: DrawnVectors, prefix_BN: Tensor, place_BP: Tensor, counts: range, guided: bool
) -> Tensor:
    """Return the head's conditions (B P, D) for tokens at `place`, P / N of them given the first `prefix` tokens of
    each row; with guidance the unconditional ones follow.
    """
    nodes, most = prefix_BN.shape[1], counts[-1]
    order = vectors.order[:, :most].repeat_interleave(nodes, dim=0)
    values = vectors.values[:, :most].repeat_interleave(nodes, dim=0).to(model.dtype)
    classes, place = vectors.classes.repeat_interleave(nodes), place_BP.reshape(prefix_BN.numel(), -1)
    mask = None
    if len(counts) > 1:
        mask = torch.arange(most, device=order.device) < prefix_BN.reshape(-1, 1)
    if guided:
        classes = torch.cat([classes, torch.full_like(classes, UNCONDITIONAL)])
        order, values, place = (torch.cat([part, part]) for part in (order, values, place))
        mask = None if mask is None else torch.cat([mask, mask])
    condition_MTD = model(values, order, mask, classes)
    return condition_MTD.gather(1, place[..., None].expand(-1, -1, condition_MTD.shape[-1])).flatten(0, 1)


def scales(kind: str, guidance: float, number: Tensor, tokens: int) -> Tensor:
    """Return float32 guidance scales for steps after which `number` tokens of an image are known.

    In the published sampler at least one token stays unknown until the end, so the last two scales are equal.
    """
    if kind == "constant":
        return torch.full(number.shape, guidance, device=number.device)
    return 1 + (guidance - 1) * number.clamp(max=tokens - 1) / tokens


MARImages.target = MARTarget
