"""LANTERN's published drafters of image codes (arXiv 2410.03355), for LlamaGen and for Chameleon (Anole).

An `EagleHead` of EAGLE-1's form with its own embedding table. Under guidance it reads and predicts the conditional and
the unconditional state, each in its own row, and the target's head decodes their mixture. An element combines the
target's features after token t with the embedding of token t + 1, whose place determines the rotation:

* LlamaGen: rotated by row and column. The prefix is not rotated, and its tokens all have the embedding of id 0; its
  padding is read like everything else. The layer has no input norm, and pairs of neighboring channels are rotated.
* Chameleon: rotated by the element's number. The layer has an input norm and Chameleon's norm of queries and keys.

Shapes: B rows, R = B or 2 B rows of the memory, L prompt, d hidden size, V ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from visspec.io.checkpoint import CONFIG, check_folder, read_json, read_shapes, shorten
from visspec.models.drafting.checkpoint import sentence_of
from visspec.models.drafting.published_config import read_stripped, strip_prefix
from visspec.models.eagle import sequence as layouts
from visspec.models.eagle.config import EagleConfig
from visspec.models.eagle.head import EagleHead
from visspec.models.eagle.image_drafter import ImageFeatureDrafter, ImageMemory
from visspec.models.eagle.layout import layer_fields
from visspec.models.image_codes.family import Family
from visspec.models.published_tensors import load_published
from visspec.types import Scores, State

GRIDS = {"c2i": 24, "t2i": 16, "t2i2": 32}  # `input_type` of a LlamaGen drafter: side of its images in codes
QUERY, INPUT_NORM = "layers.0.self_attn.q_norm.bias", "layers.0.input_layernorm.weight"


def family_of_layout(data: dict, names: set[str]) -> str | None:
    """Return the family that a published drafter of image codes is made for, judged by its configuration and tensor
    names, or None if it is not such a drafter.
    """
    if not {"fc.weight", "embed_tokens.weight"} <= names:
        return None
    return "llamagen" if {"input_type", "caption_dim"} & set(data) else "chameleon" if QUERY in names else None


class LanternDrafter(ImageFeatureDrafter):
    """A published drafter for one image model (or its `Family`), with the trees of `ImageFeatureDrafter`.

    Raises ValueError, before it reads weights, if the target, the image size or the tensors do not match.
    """

    saved_as = "model"  # saving copies the files of the published folder
    head_class = EagleHead  # type: ignore[assignment]
    head: EagleHead  # type: ignore[assignment]
    config: EagleConfig  # type: ignore[assignment]

    @classmethod
    def sizes(cls, target: Family) -> dict[str, Any]:
        sizes = super().sizes(target)
        codes, hidden = sizes.pop("codes"), sizes["hidden"]
        vocab = codes if target.vocabulary is None else target.decoder.config.vocab_size
        return sizes | {"vocab": vocab, "target_hidden": hidden}

    @classmethod
    def from_pretrained(cls, folder: str | Path, target: nn.Module | Family, **options: Any) -> Self:
        """Load a published checkpoint from safetensors, strictly. `options` are those of the constructor."""
        root, family = check_folder(folder), cls.subject(target)
        shapes = strip_prefix(read_shapes(root), root)
        config = config_of(root, read_json(root, CONFIG), shapes, family)
        cls.check_target(config, family)
        with torch.device("meta"):
            head = EagleHead(config)
        head = load_published(head, shapes, partial(read_stripped, root), root, next(family.decoder.parameters()).dtype)
        if config.positions == "grid":
            halve(head)
        return cls(head, family, **options)  # type: ignore[arg-type]

    def attach(self, target: Family) -> None:
        """Adapt to a target, whose style may have other grammar ids."""
        super().attach(target)
        self._embed_again(target)
        self.refresh()

    def _whole(self, scores: Scores) -> Scores:
        return scores

    def _code_parts(self, head: EagleHead) -> tuple[nn.Embedding, nn.Module]:
        """Return the embedding of the loop's ids, and no head: `_logits` asks the family for logits. The network is
        cast to the target's dtype.
        """
        table = head.to(self._like(self.family)).embed_tokens
        if self.family.vocabulary is None:
            return table, nn.Identity()
        return nn.Embedding.from_pretrained(table.weight.detach()[self.family.vocabulary.ids]), nn.Identity()

    def _rotations(self, length: int, device: torch.device) -> Tensor:
        if self.config.positions != "grid":
            return super()._rotations(length, device)
        table_PC = self.family.grid_rope()
        assert table_PC is not None
        place = torch.arange(1, length + 1, device=device)  # place of the token after the feature's token
        return table_PC.to(device)[place.clamp(max=len(table_PC) - 1)]

    def _mix_features(self, feature: Tensor, state: State) -> Tensor:
        """Mix the two states under guidance. The head has no bias, so this mixes their logits, too."""
        if state.memory.parts == 1:
            return feature
        conditional, unconditional = feature.chunk(2)
        return unconditional + state.request.sampling.guidance * (conditional - unconditional)

    def _logits(self, feature: Tensor) -> Tensor:
        return self._with_grammar(self.family.head(feature.to(self.dtype)))

    def start(self, state: State, scores: Scores) -> None:
        """Read the prompt of each row and, under guidance, the unconditional one."""
        assert scores.features is not None
        prompt, features_BLF = state.request.inputs, scores.features[state.rows]
        parts, length = features_BLF.shape[-1] // self.config.hidden, prompt.ids.shape[1]
        every = [part * len(prompt.ids) + row for part in range(parts) for row in state.rows]
        ids_RL = (prompt.ids.repeat(parts, 1) if prompt.tokens is None else prompt.tokens)[every]
        attention_RL = None if self.config.positions == "grid" else prompt.attention[every]
        layout = layouts.plan(self.config, ids_RL, attention_RL)
        embeds_RLd, features_RLd = self.head.embed_tokens(ids_RL), torch.cat(features_BLF.chunk(parts, dim=-1))
        positions, none = torch.arange(length, device=ids_RL.device)[None], torch.zeros_like(embeds_RLd[0, :1])
        x, turn, _ = self.elements(layout, embeds_RLd[:, 1:], features_RLd, embeds_RLd, positions, (none, none))
        memory = ImageMemory([length - 1] * len(every))
        memory.parts = parts
        self._begin(state, scores, memory)
        self._read_prompt(state, memory, layout.lengths, [(x, turn)], features_BLF[:, -1:])


def config_of(folder: Path, data: dict, shapes: Mapping[str, tuple[int, ...]], family: Family) -> EagleConfig:
    """Convert a published configuration. Raises ValueError if it needs something that is not supported."""
    named, size = family_of_layout(data, set(shapes)), data.get("input_type")
    if named != family.name:
        raise ValueError(f"drafter: {folder} is made for a target of family {shorten(named)}, got {family.name!r}.")
    rows = family.layout().grid[0]
    if named == "llamagen" and size is not None and GRIDS.get(str(size)) != rows:
        raise ValueError(f"drafter: input_type of {folder} is {shorten(size)}, expected that of {rows} x {rows} codes.")
    with sentence_of(folder):
        return EagleConfig(
            **layer_fields(folder, data, shapes),
            family=family.name,
            target_layers=family.decoder.config.num_hidden_layers,
            target_hidden=data["hidden_size"],
            positions="grid" if named == "llamagen" else "index",
            images="none",
            norm_input=INPUT_NORM in shapes,
            qk_layer_norm=QUERY in shapes,
            levels=5,
        )


@torch.no_grad()
def halve(head: EagleHead) -> None:
    """Reorder query and key channels from neighboring pairs to halves: channel c is paired with c + E / 2."""
    attention, size = head.layer.self_attn, head.config.head_size
    for part in (attention.q_proj, attention.k_proj):
        part.weight.copy_(part.weight.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2))
