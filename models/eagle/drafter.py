"""Feature drafter for text models, built on an `EagleHead`: EAGLE-1, 2 and 3, MSD, HiViS, ViSpec, FLASH, SpecVLM,
DREAM, our own variant, and a control that sees no image.

For published checkpoints, prompts are laid out as the original code does: an element belongs to an image if the token
that it predicts is an image slot, and it takes the position of the token before that, as serving engines count.

Shapes: B rows, L prompt, T elements, d hidden size, F features, K tokens of a pass.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from visspec.models.decoder.target import content_ids, text_sizes
from visspec.models.drafting.published_config import check_verifier_named
from visspec.models.eagle import export
from visspec.models.eagle import sequence as layouts
from visspec.models.eagle.config import COMPRESSED, EagleConfig
from visspec.models.eagle.feature_drafting import FeatureDrafting
from visspec.models.eagle.head import EagleHead
from visspec.models.eagle.layer import FeatureMemory, head_logits, stored_rows
from visspec.models.eagle.levels import CompiledDrafter, GraphedDrafter
from visspec.train.batches import TrainingBatch
from visspec.types import Scores, State

SEEN = ("slots", "embeddings", *COMPRESSED)  # values of `images` that take the target's input embeddings
OWN = {  # defaults when no `fusion` is requested: ViSpec's form with norms
    "images": "latents",
    "image_latents": 1,
    "ahead": 0,
    "eps": 1e-12,
    "norm_embedding": True,
    "norm_input": True,
    "norm_output": True,
}
BLOCK = 512  # elements of a prompt processed at a time on the CPU


class EagleDrafter(FeatureDrafting[PreTrainedModel]):
    """A drafter for one loaded target.

    With width 1 it drafts chains; otherwise dynamic trees of at most `nodes` nodes (EAGLE-2). If one pass predicts
    several tokens (FLASH), a tree is at most as deep. Raises ValueError if the network was made for another target.
    """

    head_class = EagleHead
    passes: CompiledDrafter | None = None
    recorder: GraphedDrafter | None = None

    def __init__(self, head: EagleHead, model: PreTrainedModel, *, width: int = 1, nodes: int = 24):
        config = head.config
        if 0 < config.draft_vocab < width:
            raise ValueError(f"width: got {width}, expected at most the {config.draft_vocab} ids of the head.")
        self.check_target(config, model)
        self.model = model
        embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self.borrowed = (embed, lm_head)
        own = head.embed_tokens if config.own_embedding else embed
        super().__init__(head, own, lm_head, self._like(model), width, nodes)
        levels = config.levels if width == 1 or config.block == 1 else min(config.levels, config.block)
        self.traits = replace(self.traits, levels=levels, embeddings=config.images in SEEN, joins=True)

    @classmethod
    def sizes(cls, target: PreTrainedModel) -> dict[str, Any]:
        sizes = text_sizes(target)
        return sizes | {"target_hidden": sizes.pop("hidden")}

    @classmethod
    def defaults(cls, target: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
        text = target.config.get_text_config()
        heads = options.get("heads", text.num_attention_heads)
        rope = getattr(text, "rope_parameters", None) or {}
        size = options.get("head_size", text.hidden_size // heads)
        index = options.get("positions") == "index"
        return {
            **({} if "fusion" in options else OWN),
            "hidden": text.hidden_size,
            "heads": heads,
            "kv_heads": heads,
            "head_size": size,
            "intermediate": text.intermediate_size,
            "image_ids": tuple(sorted(content_ids(target.config))),
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
            "mrope_section": () if index else scaled_section(rope, size // 2),
            "mrope_interleaved": bool(rope.get("mrope_interleaved")) and not index,
        }

    @classmethod
    def config_for(cls, target: PreTrainedModel, **options: object) -> EagleConfig:
        if not content_ids(target.config) or options.get("image_latents") == 0:  # text only, or treated as such
            options |= {"images": "blind" if options.get("images") == "blind" else "none", "image_latents": 0}
        return super().config_for(target, **options)

    @classmethod
    def for_model(cls, target: PreTrainedModel, *, seed: int = 0, **options: object) -> Self:
        """Build a drafter for a target as the base class does. If the head has its own vocabulary, it starts from the
        target's LM head rows of the first ids; call `keep` to choose other ids.
        """
        drafter = super().for_model(target, seed=seed, **options)
        if drafter.config.draft_vocab:
            drafter.keep(torch.arange(drafter.config.draft_vocab))
        return drafter

    def export(self, folder: str | Path, form: str, verifier: str | None = None) -> None:
        """Write the drafter for other engines: "eagle" (EAGLE-1 and 2, MSD, ViSpec), "eagle3" (SpecForge, SGLang, vLLM)
        or "speculators" (vLLM), for which `verifier` names the target. Raises ValueError if the form cannot represent
        this drafter.
        """
        check_verifier_named(self.model, form, verifier)
        export.write(self, folder, form, verifier)

    @torch.no_grad()
    def keep(self, ids: Tensor) -> None:
        """Predict these target ids (D,), in ascending order. Copy the target's LM head rows if their size matches."""
        ids = ids.to(self.trained.device)
        if self.head.ids is not None:
            self.head.keep(ids)
        weight = self.lm_head.weight
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape[1] == self.config.hidden:
            self.head.lm_head.weight.copy_(weight[ids.to(weight.device)])
        self.refresh()

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
        layout = layouts.plan(self.config, prompt, attention)
        embeddings = features_BLF[..., : self.config.hidden]  # placeholder for drafters that read no embeddings
        if self.traits.embeddings:
            embeddings = scores.aux["embeddings"][rows]
        positions = scores.aux["positions"]
        if positions.shape[-2] > len(rows):
            positions = positions[..., rows, :]
        positions = self._places(positions, attention)
        following = self._shifted_embeddings(prompt[:, 1:], embeddings)
        dtype = self.trained.dtype
        context = self._context(layout, embeddings.to(dtype), features_BLF.to(dtype))
        arguments = following, features_BLF, embeddings, positions, context
        # process the prompt in blocks so that intermediate results stay in the CPU cache
        size = BLOCK if features_BLF.device.type == "cpu" else max(layout.token.shape[1], 1)
        starts = range(0, max(layout.token.shape[1], 1), size)
        parts = (self.elements(layout.part(start, size), *arguments)[:2] for start in starts)
        memory = FeatureMemory(self._first(state, attention), state.request.max_new_tokens)
        if self.config.images == "latents" and layout.runs:
            globals_Bd = context[1][layout.last_image.to(context[1].device)]
            memory.image_bias = self.head.shift(globals_Bd).to(self.dtype)
        self._read_prompt(state, memory, layout.lengths, parts, features_BLF[:, -1:])

    def compile(self) -> None:
        """Draft chains with `torch.compile`; the first long request builds the graphs. Trees still run eagerly."""
        if self.passes is None and self.width == 1 and self.config.block == 1:
            self.passes = CompiledDrafter(self)

    def record(self) -> None:
        """Draft with CUDA graphs, unless one pass predicts several tokens."""
        if self.passes is None and self.recorder is None and self.config.block == 1:
            self.recorder = GraphedDrafter(self)

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
            self.recorder.finish(state.memory.slots)

    def join(self, state: State, other: State, take: list[int]) -> None:
        state.memory.join(other.memory, take)

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _context(
        self, layout: layouts.PromptLayout, embeddings_BLd: Tensor, features_BLF: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.config.image_latents:
            return layouts.compress(self.head, embeddings_BLd, features_BLF, layout)
        zero = embeddings_BLd.new_zeros(1, embeddings_BLd.shape[-1])
        raw = torch.cat([zero, embeddings_BLd.flatten(0, 1)]) if self.config.images == "embeddings" else zero
        return raw, zero

    def _first(self, state: State, attention_BL: Tensor | None) -> list[int]:
        """Return the position of each row's first element after its prompt."""
        if self.config.positions == "target":
            return [p - 1 for p in state.position.tolist()]
        if attention_BL is None:
            return [state.request.prompt.shape[1] - 1] * len(state.rows)
        return (attention_BL.sum(dim=1) - 1).tolist()

    def _places(self, positions: Tensor, attention_BL: Tensor | None) -> Tensor:
        """Convert the target's positions to the drafter's, (1|B, L) or (3|4, 1|B, L)."""
        if self.config.positions == "target":
            return positions
        length, device = positions.shape[-1], positions.device
        if attention_BL is None:
            return torch.arange(length, device=device)[None]
        padding_B1 = (~attention_BL).sum(dim=1, keepdim=True)
        return (torch.arange(length, device=device) - padding_B1).clamp(min=0)

    def _shifted_embeddings(self, ids: Tensor, embeddings_BLd: Tensor | None) -> Tensor:
        """Return the embedding of the token after each.

        Args:
            ids: All tokens except the first.
            embeddings: Those of the prompt, or None for a text model, where ids are looked up instead.
        """
        if self.config.images != "slots":
            return stored_rows(self.embed, ids)
        assert embeddings_BLd is not None
        known_BLd = embeddings_BLd[:, 1:]
        return torch.cat([known_BLd, stored_rows(self.embed, ids[:, known_BLd.shape[1] :]).to(known_BLd)], dim=1)

    def _batch_embeddings(self, batch: TrainingBatch) -> Tensor:
        return self._shifted_embeddings(batch.ids[:, 1:], batch.embeddings)

    def trained_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (..., V) over `ids` of predicted features (..., d), with the weights being trained."""
        inputs = self.head.decodable(states)
        return self.head.lm_head(inputs) if self.config.draft_vocab else head_logits(self.lm_head, inputs, self.dtype)


def scaled_section(rope: dict[str, Any], half: int) -> tuple[int, ...]:
    """Scale the target's rotary channels per position row to a head of `half` channels; () without M-RoPE."""
    section = tuple(rope.get("mrope_section") or ())
    if not section or sum(section) == half:
        return section
    shares = [half * n // sum(section) for n in section]
    return (half - sum(shares[1:]), *shares[1:])
