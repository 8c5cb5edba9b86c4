"""The feature drafter of text (EAGLE-type): drafts on the target's hidden states, with its embeddings and LM head.

As in ViSpec (arXiv 2509.15235), images are compressed to learned latents and a global vector, see
`eagle/feature_head.py`.

Shapes: B rows, L prompt, T elements, d hidden size, F features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from visspec import tree as trees
from visspec.models.decoder.target import content_ids, text_sizes
from visspec.models.eagle import sequence as layouts
from visspec.models.eagle.feature_drafting import FeatureDrafting
from visspec.models.eagle.feature_head import FeatureHead
from visspec.models.eagle.head import EagleHead
from visspec.models.eagle.layer import FeatureMemory
from visspec.models.eagle.levels import CompiledDrafter, GraphedDrafter, ahead
from visspec.types import Draft, Scores, State, TrainingBatch

BLOCK = 512  # elements of a prompt that are read at a time, on the CPU


class FeatureDrafter(FeatureDrafting[PreTrainedModel]):
    """A drafter around a `FeatureHead`, for one loaded target.

    width 1 drafts chains; above it, dynamic trees of at most `nodes` nodes. images=False drafts without image latents
    and global vectors (for ablations). Raises ValueError if the network was made for another target.
    """

    head_class: ClassVar[type[nn.Module]] = FeatureHead
    passes: CompiledDrafter | None = None
    recorder: GraphedDrafter | None = None

    def __init__(
        self,
        head: FeatureHead | EagleHead,
        model: PreTrainedModel,
        *,
        width: int = 1,
        nodes: int = 24,
        images: bool = True,
    ):
        config = head.config
        self.check_target(config, model)
        self.model, self.images = model, images and config.image_latents > 0
        embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self.borrowed = (embed, lm_head)
        super().__init__(head, embed, lm_head, self._like(model), width, nodes)
        self.traits = replace(self.traits, embeddings=self.images, joins=True)

    @classmethod
    def sizes(cls, target: PreTrainedModel) -> dict[str, Any]:
        return text_sizes(target)

    @classmethod
    def defaults(cls, target: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
        text = target.config.get_text_config()
        heads = options.get("heads", text.num_attention_heads)
        rope = getattr(text, "rope_parameters", None) or {}
        return {
            "heads": heads,
            "intermediate": text.intermediate_size,
            "image_ids": tuple(sorted(content_ids(target.config))),
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
            "mrope_section": scaled_section(rope, text.hidden_size // heads // 2),
        }

    @classmethod
    def config_for(cls, target: PreTrainedModel, **options: Any) -> Any:
        blind = {} if content_ids(target.config) else {"image_latents": 0}  # a decoder of text
        return super().config_for(target, **options | blind)

    def _like(self, target: PreTrainedModel) -> Tensor:
        return torch.empty(0, dtype=target.dtype, device=target.device)

    def start(self, state: State, scores: Scores) -> None:
        """Read the prompt: compute keys and values of all elements except the last, which needs the pending token."""
        assert scores.features is not None
        rows = state.rows
        prompt = state.request.prompt[rows]
        features_BLF = scores.features[rows]
        attention = scores.aux.get("attention")
        attention = None if attention is None else attention[rows]
        layout = self._plan(prompt, attention)
        embeddings = features_BLF[..., : self.config.hidden]  # in their place, for a drafter that reads none
        if self.traits.embeddings:
            embeddings = scores.aux["embeddings"][rows]
        positions = scores.aux["positions"]
        if positions.shape[-2] > len(rows):
            positions = positions[..., rows, :]
        positions = self._places(positions, attention)
        following = self._shifted_embeddings(prompt[:, 1:], embeddings)
        dtype = self.trained.dtype
        context = self._context(layout, embeddings.to(dtype), features_BLF.to(dtype))
        given = following, features_BLF, embeddings, positions, context
        # block by block, so that what is computed on the way stays in the processor's cache
        size = BLOCK if features_BLF.device.type == "cpu" else max(layout.token.shape[1], 1)
        starts = range(0, max(layout.token.shape[1], 1), size)
        parts = (self.elements(layout.part(start, size), *given)[:2] for start in starts)
        memory = FeatureMemory(self.config.key_heads, self._first(state, attention), state.request.max_new_tokens)
        if self.images and layout.runs:
            globals_Bd = context[1][layout.last_image.to(context[1].device)]
            memory.image_bias = self.layer.shift(globals_Bd.to(self.dtype))
        self._read_prompt(state, memory, layout.lengths, parts, features_BLF[:, -1:])

    def compile(self) -> None:
        """Draft chains through `torch.compile`, with graphs that the first long request makes; trees as ever."""
        if self.passes is None and self._chains():
            self.passes = CompiledDrafter(self)

    def record(self) -> None:
        """Draft chains in recordings, trees as ever."""
        if self.passes is None and self.recorder is None and self._chains():
            self.recorder = GraphedDrafter(self)

    def _chains(self) -> bool:
        """Whether it drafts chains, a level a call of the network."""
        return self.width == 1 and self.stop is None

    def refresh(self) -> None:
        super().refresh()
        if self.passes is not None:
            self.passes = CompiledDrafter(self)
        if self.recorder is not None:
            self.recorder = GraphedDrafter(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("passes", "recorder")}

    def finish(self, state: State) -> None:
        if self.recorder is not None and state.memory is not None:
            self.recorder.finish(state.memory)

    def propose(self, state: State, depth: int) -> Draft:
        calls = self.passes or self.recorder
        if calls is None or self.stop is not None:
            return super().propose(state, depth)
        memory: FeatureMemory = state.memory
        more = ahead(memory, depth)
        memory.reserve(memory.end + more)
        memory.table = self._turns_to(max(memory.positions) + more)
        if not calls.fits(state, more):
            return super().propose(state, depth)
        return trees.chain_draft(state.pending, calls.draft(state, depth))

    def join(self, state: State, other: State, take: list[int]) -> None:
        state.memory.join(other.memory, take)

    def _plan(self, ids_BL: Tensor, attention_BL: Tensor | None) -> layouts.PromptLayout:
        latents = self.config.image_latents if self.images else 0
        return layouts.plan(ids_BL, attention_BL, self.config.image_ids, latents)

    def _first(self, state: State, attention_BL: Tensor | None) -> list[int]:
        """Position of each row's element after its prompt."""
        return [p - 1 for p in state.position.tolist()]

    def _places(self, positions: Tensor, attention_BL: Tensor | None) -> Tensor:
        """The drafter's positions of the target's, (1|B, L) or (3|4, 1|B, L)."""
        return positions

    def _shifted_embeddings(self, ids: Tensor, embeddings_BLd: Tensor | None) -> Tensor:
        """Embeddings of the token after each. ids: of all tokens but the first; embeddings: of the prompt's, None of a
        text model, which looks them up itself.
        """
        return self._embed_ids(ids)

    def _embed_ids(self, ids: Tensor) -> Tensor:
        """Embeddings of ids; ids beyond the table are image placeholders, whose embeddings are not used."""
        return self.embed(ids.clamp(max=self.embed.weight.shape[0] - 1))

    def _following(self, lesson: TrainingBatch) -> Tensor:
        return self._shifted_embeddings(lesson.ids[:, 1:], lesson.embeddings)


def scaled_section(rope: dict[str, Any], half: int) -> tuple[int, ...]:
    """The target's rotary channels per position row, for a head of `half` rotary channels; () without M-RoPE."""
    section = tuple(rope.get("mrope_section") or ())
    if not section or sum(section) == half:
        return section
    shares = [half * n // sum(section) for n in section]
    return (half - sum(shares[1:]), *shares[1:])
