"""Drafters of the published one-layer forms (`eagle/head.py`): EAGLE-1, 2 and 3, MSD, HiViS, ViSpec, FLASH,
SpecVLM, DREAM, and a control that sees nothing of the picture.

Prompts are read as their own code reads them: an element belongs to an image if the token it *predicts from* is a slot,
and has the position of the token before it, as serving engines count. Shapes as in `feature_drafting.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from visspec.models.decoder.target import content_ids, text_sizes
from visspec.models.drafting.published_config import check_verifier_named
from visspec.models.drafting.structure import Chain
from visspec.models.eagle import export
from visspec.models.eagle import sequence as layouts
from visspec.models.eagle.config import COMPRESSED, EagleConfig
from visspec.models.eagle.drafter import FeatureDrafter, scaled_section
from visspec.models.eagle.head import EagleHead, LowRank
from visspec.models.eagle.layer import FeatureMemory, PublishedLayer, head_logits, stored_rows
from visspec.types import Draft, State, TrainingBatch

SEEN = ("slots", "embeddings", *COMPRESSED)  # values of `images` that take the target's input embeddings


class EagleDrafter(FeatureDrafter):
    """A drafter around an `EagleHead`, for one loaded target.

    width 1 drafts chains; above it, dynamic trees of at most `nodes` nodes (EAGLE-2), which end with the tokens of one
    pass where that predicts several (FLASH). Raises ValueError if the network was made for another target.
    """

    head_class = EagleHead
    head: EagleHead
    config: EagleConfig

    def __init__(self, head: EagleHead, model: PreTrainedModel, *, width: int = 1, nodes: int = 24):
        config = head.config
        if 0 < config.draft_vocab < width:
            raise ValueError(
                f"width: got {width}, expected at most the {config.draft_vocab} ids that the head predicts"
            )
        super().__init__(head, model, width=width, nodes=nodes, images=config.images == "latents")
        levels = config.levels if width == 1 or config.block == 1 else min(config.levels, config.block)
        self.traits = replace(self.traits, levels=levels, embeddings=config.images in SEEN, joins=True)

    @classmethod
    def sizes(cls, target: PreTrainedModel) -> dict[str, Any]:
        known = text_sizes(target)
        hidden = known.pop("hidden")
        return known | {"target_hidden": hidden}

    @classmethod
    def defaults(cls, target: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
        known, text = super().defaults(target, options), target.config.get_text_config()
        rope, heads = getattr(text, "rope_parameters", None) or {}, known["heads"]
        size = options.get("head_size", text.hidden_size // heads)
        index = options.get("positions") == "index"
        return known | {
            "hidden": text.hidden_size,
            "kv_heads": heads,
            "head_size": size,
            "mrope_section": () if index else scaled_section(rope, size // 2),
            "mrope_interleaved": bool(rope.get("mrope_interleaved")) and not index,
        }

    @classmethod
    def config_for(cls, target: PreTrainedModel, **options: Any) -> EagleConfig:
        if not content_ids(target.config):  # a decoder of text
            options["images"] = "blind" if options.get("images") == "blind" else "none"
        return super().config_for(target, **options)

    @classmethod
    def for_model(cls, target: PreTrainedModel, *, seed: int = 0, **options: Any) -> Self:
        """As that of the base class. A head of its own starts as the target's rows of the first ids; `keep` of the
        network chooses others.
        """
        drafter = super().for_model(target, seed=seed, **options)
        if drafter.config.draft_vocab:
            drafter.keep(torch.arange(drafter.config.draft_vocab))
        return drafter

    def check_form(self, form: str) -> None:
        """Raises ValueError where `export` would have no place for what the drafter is."""
        export.check_form(self.config, form)

    def export(self, folder: str | Path, form: str, verifier: str | None = None) -> None:
        """Write the drafter for other engines: "eagle" (EAGLE-1 and 2, MSD, ViSpec), "eagle3" (SpecForge, SGLang, vLLM)
        or "speculators" (vLLM), for which `verifier` names the target. Raises ValueError where a form has no place for
        what the drafter is.
        """
        check_verifier_named(self.model, form, verifier)
        export.write(self, folder, form, verifier)

    @torch.no_grad()
    def keep(self, ids: Tensor) -> None:
        """Predict these target ids (D,), in ascending order, with the target's own rows if sizes allow."""
        ids = ids.to(self.trained.device)
        if self.head.ids is not None:
            self.head.keep(ids)
        weight = self.lm_head.weight
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape[1] == self.config.hidden:
            own, rows_Dd = self.head.lm_head, weight[ids.to(weight.device)].to(self.trained.device)
            own.approximate(rows_Dd) if isinstance(own, LowRank) else own.weight.copy_(rows_Dd)
        self.refresh()

    def _draft_layer(self) -> PublishedLayer:
        return PublishedLayer(self.head_in(self.dtype), self.embed, self.lm_head)

    def _chains(self) -> bool:
        return super()._chains() and self.config.block == 1

    @property
    def ids(self) -> Tensor | None:
        return self.head.ids

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _plan(self, ids_BL: Tensor, attention_BL: Tensor | None) -> layouts.PromptLayout:
        config = self.config
        return layouts.plan(ids_BL, attention_BL, config.image_ids, config.image_latents, config.images, ahead=1)

    def _context(
        self, layout: layouts.PromptLayout, embeddings_BLd: Tensor, features_BLF: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.images:
            return super()._context(layout, embeddings_BLd, features_BLF)
        if self.config.image_latents:
            return layouts.condense(self.head, embeddings_BLd, features_BLF, layout)
        zero = embeddings_BLd.new_zeros(1, embeddings_BLd.shape[-1])
        raw = torch.cat([zero, embeddings_BLd.flatten(0, 1)]) if self.config.images == "embeddings" else zero
        return raw, zero

    def _first(self, state: State, attention_BL: Tensor | None) -> list[int]:
        if self.config.positions == "target":
            return super()._first(state, attention_BL)
        if attention_BL is None:
            return [state.request.prompt.shape[1] - 1] * len(state.rows)
        return (attention_BL.sum(dim=1) - 1).tolist()

    def _places(self, positions: Tensor, attention_BL: Tensor | None) -> Tensor:
        if self.config.positions == "target":
            return positions
        length, device = positions.shape[-1], positions.device
        if attention_BL is None:
            return torch.arange(length, device=device)[None]
        padding_B1 = (~attention_BL).sum(dim=1, keepdim=True)
        return (torch.arange(length, device=device) - padding_B1).clamp(min=0)

    def _lesson_positions(self, lesson: TrainingBatch) -> Tensor:
        places = self._places(lesson.positions, lesson.attention)
        return places if places.dim() == 3 else places.expand(len(lesson.lengths), -1)

    def _shifted_embeddings(self, ids: Tensor, embeddings_BLd: Tensor | None) -> Tensor:
        if self.config.images != "slots":
            return super()._shifted_embeddings(ids, embeddings_BLd)
        assert embeddings_BLd is not None
        known_BLd = embeddings_BLd[:, 1:]
        return torch.cat([known_BLd, self._embed_ids(ids[:, known_BLd.shape[1] :]).to(known_BLd)], dim=1)

    def _embed_ids(self, ids: Tensor) -> Tensor:
        return stored_rows(self.head.embed_tokens if self.config.own_embedding else self.embed, ids)

    # --- several tokens a pass ------------------------------------------------------------------------------------

    def propose(self, state: State, depth: int) -> Draft:
        if self.config.block == 1:
            return super().propose(state, depth)
        memory: FeatureMemory = state.memory
        depth = self.levels(state, depth)
        spread = cast(PublishedLayer, self.layer).head.spread
        ahead_BKd = spread(self._catch_up(memory, depth))
        if self.structure(state).width > 1:
            return self.block_tree(state, self._logits(ahead_BKd[:, :depth]))
        chain = Chain(state, self.stop)
        while True:
            chain.extend(self._logits(ahead_BKd[:, : depth - len(chain.tokens)]))
            if len(chain.tokens) == depth:
                return chain.finish()
            ahead_BKd = spread(self._again(memory, torch.stack(chain.tokens, dim=1), ahead_BKd))

    def _again(self, memory: FeatureMemory, token_BT: Tensor, feature_BKd: Tensor) -> Tensor:
        """Read the last K of the drafted ids, stored after those before them: the predicted feature (B, d)."""
        rows, width = feature_BKd.shape[:2]
        done = token_BT.shape[1] - width
        bias, rope = memory.context_bias(width), memory.rope(memory.table, width, done)
        x_Nd, query_BKHE = self.layer.read(memory, token_BT[:, done:], feature_BKd, bias, rope, done)
        attend = partial(memory.attend, drafted=done + width)
        return self.layer.after_attention(x_Nd.view(rows, width, -1)[:, -1], query_BKHE[:, -1], attend)

    def _spread(self, feature: Tensor) -> Tensor:
        return self.head.spread(feature)

    def trained_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        read = self.head.decodable(states)
        return self.head.lm_head(read) if self.config.draft_vocab else head_logits(self.lm_head, read, self.dtype)
