"""Feature drafter for image tokens (EAGLE-type, as in LANTERN): one stream under guidance, with a separate code head.

It drafts chains, dynamic trees (LANTERN), static trees sampled without replacement (LANTERN++), or the first places of
a Jacobi window. For rules with their own random numbers, chains, windows and static trees report the distribution of
every node, and dynamic trees are point masses. For the rule `exact` all drafts are coupled to the target's noise.

Shapes: B rows, L prompt, T positions of the image, d hidden size, F features, V ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec import tree as trees
from visspec.grammar import fixed_ids
from visspec.io.checkpoint import check_choice
from visspec.models.drafting import static_tree as feature_tree
from visspec.models.drafting.base import Chain
from visspec.models.eagle import sequence as layouts
from visspec.models.eagle.feature_drafting import FeatureDrafting
from visspec.models.eagle.image_head import ImageHead, ImageHeadConfig
from visspec.models.eagle.layer import FeatureMemory, head_logits
from visspec.models.image_codes.drafting import IMPOSSIBLE, ImageNetworkDrafter, embedding
from visspec.models.image_codes.family import Family
from visspec.models.image_codes.target import ImageAR
from visspec.models.jacobi.drafter import Front, Jacobi, Window
from visspec.sampling import Gumbel, warp
from visspec.train.batches import Prediction, TrainingBatch
from visspec.types import FREE, OWN, Draft, Outcome, Request, Scores, State, Structure, Verdict

TREES = ("chain", "dynamic", "static")
AHEAD = 2  # window places that the network drafts
WEIGHT = 0.6  # weight of the network's distribution in those places; the rest is the window's


class ImageMemory(FeatureMemory):
    """Memory that also holds position embeddings (P, d), if any, and the drafter's random numbers. With `parts` 2, the
    unconditional rows follow the conditional ones.
    """

    places: Tensor | None = None
    noise: Gumbel | None = None
    window: Window | None = None  # continues the chain
    parts = 1

    def context_bias(self, width: int, offset: int = 0) -> Tensor | None:
        return None if self.places is None else self.rope(self.places, width, offset)

    def each(self, x: Tensor) -> Tensor:
        return x if self.parts == 1 else torch.cat([x, x])

    def add(self, token_BT: Tensor, feature_BTF: Tensor, counts: list[int]) -> None:
        super().add(self.each(token_BT), torch.cat(feature_BTF.chunk(self.parts, dim=-1)), counts * self.parts)

    def select(self, keep: list[int]) -> None:
        rows = len(self.lengths) // self.parts
        super().select([part * rows + row for part in range(self.parts) for row in keep])
        if self.noise is not None:
            self.noise.select(keep)
        if self.window is not None:
            self.window = self.window.select(keep)


class ImageFeatureDrafter(ImageNetworkDrafter, FeatureDrafting[Family]):
    """A drafter around an `ImageHead`, for one image model (or its `Family`).

    Args:
        head: The network.
        target: The image model or its family.
        tree: "chain" of `levels`; "dynamic", a tree of `nodes` nodes and frontier `width`; "static", with `shape`.
        levels: Levels of a chain, by default the configuration's.
        width: Frontier width of a dynamic tree.
        nodes: Maximum number of nodes of a dynamic tree.
        shape: Nodes per depth of a static tree.
        window: Places of a Jacobi window, of which the network drafts the first `levels` (default 2; see
            `jacobi.drafter.Front`); 0 disables it.

    Raises:
        ValueError: An option is invalid, or the network was made for another target.
    """

    head_class = ImageHead
    head: ImageHead
    config: ImageHeadConfig
    window: Jacobi | None = None

    def __init__(
        self,
        head: ImageHead,
        target: nn.Module | Family,
        *,
        tree: str = "chain",
        levels: int | None = None,
        width: int = 4,
        nodes: int = 24,
        shape: str | int = "8-5-4-4-3",
        window: int = 0,
    ):
        check_choice("tree", tree, TREES)
        if window and tree != "chain":
            raise ValueError(f"window: got {window} for the tree {tree!r}, expected a chain.")
        if levels is not None and levels < 1:
            raise ValueError(f"levels: got {levels}, expected at least 1.")
        family = self.subject(target)
        self.check_target(head.config, family)
        self.counts = feature_tree.parse(shape) if tree == "static" else None
        if tree != "dynamic":
            width = max(self.counts or [1])
        self.family = family
        super().__init__(head, *self._code_parts(head), self._like(family), width, nodes)
        levels = len(self.counts) if self.counts else levels or (AHEAD if window else self.traits.levels)
        self.traits = dataclasses.replace(
            self.traits, levels=levels, trees=tree != "chain", own_noise=self.counts is not None
        )
        self.ahead = levels
        if window:
            self.window = Jacobi(window, redraw="gumbel")
            if levels > window:
                raise ValueError(f"levels: got {levels}, expected at most the window, {window}.")
            self.traits = dataclasses.replace(self.window.traits, feature_layers=self.traits.feature_layers)

    def attach(self, target: Family) -> None:
        """Attach as the base class does. Raises ValueError if the target is not an image family."""
        if not isinstance(target, Family):
            raise ValueError(f"drafter: got the target {type(target).__name__}, expected that of an ImagePipeline.")
        super().attach(target)

    @property
    def structures(self) -> tuple[Structure, ...]:
        return super().structures if self.counts is None else (OWN,)

    @property
    def vocab(self) -> int:
        return self.family.codes + self.family.grammar

    @classmethod
    def defaults(cls, target: Family, options: dict[str, Any]) -> dict[str, Any]:
        fields, hidden = super().defaults(target, options), target.decoder.config.hidden_size
        heads = options.get("heads", fields["heads"])
        sizes = {"target_hidden": hidden, "kv_heads": heads, "head_size": hidden // heads}
        return fields | sizes | {"guided": target.guided, "levels": 5}

    def start(self, state: State, scores: Scores) -> None:
        """Read the prompt: compute keys and values of all elements but the last, which needs the pending token."""
        self.check_request(state.request)
        prompt, rows = state.request.inputs, state.rows
        length = prompt.ids.shape[1]
        whole = self._whole(scores).features
        assert whole is not None
        features, embeds = whole[rows], prompt.embeds[rows]
        layout = layouts.plan(self.config, prompt.ids[rows], prompt.attention[rows])
        positions = torch.arange(length, device=embeds.device)[None]
        x, turn, places = self.elements(layout, embeds[:, 1:], features, embeds, positions)
        memory = ImageMemory([p - 1 for p in state.position.tolist()])
        first, last = places[:1].expand(length - 1, -1), places[-1:].expand(len(places), -1)
        memory.places = torch.cat([first, places[1:], last]).to(self.dtype)
        self._begin(state, scores, memory)
        self._read_prompt(state, memory, layout.lengths, [(x, turn)], features[:, -1:])

    def _begin(self, state: State, scores: Scores, memory: ImageMemory) -> None:
        """Create the window, or a static tree's random numbers if the acceptance rule judges samples."""
        if self.window is not None:
            memory.window = self.window.first_window(state, scores)
        elif self.counts is not None and state.noise is not None and state.noise.samples:
            memory.noise = Gumbel(state.noise.child_generators(), self.vocab)

    def _like(self, target: Family) -> Tensor:
        return next(target.decoder.parameters())

    def _code_parts(self, head: ImageHead) -> tuple[nn.Embedding, nn.Module]:
        """Return the embedding of ids and the head of codes."""
        return embedding(self.family, self.vocab), head.codes

    def _embed_again(self, target: Family) -> None:
        self.family = target
        self.embed, _ = self._code_parts(self.head)

    def _whole(self, scores: Scores) -> Scores:
        """Repeat the features if there is no guidance: the two states are then equal, u + s (c - u) = c."""
        assert scores.features is not None
        parts = self.config.parts * self.config.hidden // scores.features.shape[-1]
        return scores if parts == 1 else dataclasses.replace(scores, features=scores.features.repeat(1, 1, parts))

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        super().observe(state, draft, self._whole(scores), verdict, outcome)
        if state.memory.noise is not None:
            state.memory.noise.advance([len(tokens) for tokens in outcome.tokens])
        if self.window is not None:
            arguments = state, draft, scores, verdict, outcome
            state.memory.window = self.window.next_window(state.memory.window, *arguments)

    def levels(self, state: State, depth: int) -> int:
        if self.window is not None:
            return min(depth, self.ahead, state.memory.window.tokens.shape[1])
        return super().levels(state, min(depth, self.traits.levels) if self.counts else depth)

    def chain(self, state: State, depth: int) -> Chain | Front:
        return super().chain(state, depth) if self.window is None else Front(state, state.memory.window, depth, WEIGHT)

    def tree_builder(self, state: State, depth: int) -> trees.TreeBuilder | feature_tree.StaticTreeBuilder:
        if self.counts is None:
            return super().tree_builder(state, depth)
        noise = state.memory.noise
        return feature_tree.StaticTreeBuilder(
            state.pending, self.counts[:depth], None if noise is None else noise.window(depth)
        )

    def _level_inputs(self, token: Tensor, state: State, level: int) -> Tensor:
        if state.request.fixed is None:
            return token
        own_B1 = fixed_ids(state, torch.full((1, 1), level + 1, device=token.device))
        own = own_B1.view(-1, *[1] * (token.dim() - 1))
        return torch.where(own == FREE, token, own)

    def _logits(self, feature: Tensor) -> Tensor:
        return self._with_grammar(super()._logits(feature))

    def trained_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        return self._with_grammar(head_logits(self.head.codes, states, self.dtype))

    def _with_grammar(self, logits: Tensor) -> Tensor:
        """Append logits for the grammar ids after the codes; they are impossible because grammar is never drafted."""
        return F.pad(logits, (0, self.family.grammar), value=IMPOSSIBLE)

    def _context(
        self, layout: layouts.PromptLayout, embeddings_BLd: Tensor, features_BLF: Tensor
    ) -> tuple[Tensor, Tensor]:
        return embeddings_BLd.new_zeros(1, embeddings_BLd.shape[-1]), self.head.places()

    def _training_layout(self, batch: TrainingBatch) -> layouts.PromptLayout:
        layout = super()._training_layout(batch)
        place = (layout.token - batch.prompt_length + 2).clamp(0, self.config.places - 1)  # grammar ids may come after
        return dataclasses.replace(layout, image=place)

    def _batch_embeddings(self, batch: TrainingBatch) -> Tensor:
        assert batch.embeddings is not None
        answer = self.embed(batch.ids[:, batch.prompt_length :])
        return torch.cat([batch.embeddings[:, 1:].detach().to(answer.dtype), answer], dim=1)

    def rollout(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """Run the base class's rollout; positions fixed by grammar are masked."""
        free = batch.best < self.config.codes
        return [step._replace(weight=step.weight & free) for step in super().rollout(batch, steps)]


class CaptureTarget(ImageAR):
    """Target for `train.capture`: the scores of the prefill include positions, padding and embeddings, and every
    position has the states that the head reads.
    """

    def __init__(self, family: Family):
        super().__init__(family, features=True)

    def prefill(self, request: Request) -> tuple[State, Scores]:
        state, scores = super().prefill(request)
        rows, length = request.inputs.ids.shape
        aux = {
            "positions": torch.arange(length, device=self.device)[None],
            "attention": request.inputs.attention[:rows],
            "embeddings": request.inputs.embeds[:rows],
        }
        assert scores.features is not None
        return state, dataclasses.replace(scores, aux=aux | {"states": scores.features[:, -1:]})

    def verify(self, state: State, draft: Draft) -> Scores:
        scores = super().verify(state, draft)
        return dataclasses.replace(scores, aux={**scores.aux, "states": scores.features})

    def law(self, request: Request) -> Callable[[Tensor], Tensor] | None:
        family, sampling, parts = self.family, request.sampling, 1 if request.sampling.guidance == 1.0 else 2
        if sampling.processors:
            return None

        @torch.no_grad()
        def law(states: Tensor) -> Tensor:
            heads = (family.head(part) for part in states.chunk(parts, dim=-1))
            logits, *uncond = (F.pad(head, (0, family.grammar), value=float("-inf")) for head in heads)
            return warp(logits, sampling, *uncond)

        return law
