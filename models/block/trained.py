"""Our own block drafters, trained for any target: DFlash, DSpark (with a Markov and a confidence head) and DFlash 2
(with convolutions and a selector).

Shapes: B rows, L prompt, M longest answer, T = M - 1 distributions of an answer, A anchors, K block, C context, d
hidden size, F features, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel

from visspec.cache import additive, to_device
from visspec.io.checkpoint import check_whole
from visspec.models.block.dflash2 import DFlash2Model, with_convolutions
from visspec.models.block.drafter import BlockModel, DFlashVariant
from visspec.models.block.sequential import CandidateSelector, Confidence, Markov, Sequential, Spark
from visspec.models.decoder.target import spare_id, text_sizes
from visspec.models.drafting import checkpoint
from visspec.models.layers import MOST_LAYERS
from visspec.train.batches import Prediction, TrainingBatch
from visspec.types import MAX_NODES

DECAY = 0.8  # weight of a place in the loss, relative to the place before it


@dataclass(frozen=True)
class BlockConfig(checkpoint.DrafterConfig):
    """Configuration of the network and of its target."""

    target_layers: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    feature_layers: tuple[int, ...]  # indices into the target's hidden_states, above 0
    mask: int  # id at the places to predict
    block: int = 16  # places per pass, including the pending token's
    markov: int = 0  # rank of the head that adds logits given the token before a place (DSpark, arXiv 2607.05147)
    # a head that predicts a place's acceptance rate from its hidden state and the Markov head's vector of the token
    # before it (also DSpark)
    confidence: bool = False
    selector: int = 0  # rank of DFlash 2's selector; above 0 the network has convolutions, too
    candidates: int = 16  # likeliest tokens of a place that the selector chooses from
    taps: int = 2  # places that a convolution covers
    group: int = 16  # channels that share a convolution kernel
    eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self):
        super().__post_init__()
        check_whole("layers", self.layers, 1, MOST_LAYERS)
        check_whole("mask", self.mask, 0, self.vocab - 1)
        check_whole("block", self.block, 2, MAX_NODES)
        check_whole("candidates", self.candidates, 1, self.vocab)
        self.check_layers(1, self.target_layers)
        if self.selector and (self.markov or self.confidence):
            raise ValueError(f"selector: got {self.selector} beside DSpark's heads, expected one or the other.")

    @property
    def levels(self) -> int:
        return self.block - 1

    def assistant(self) -> MuseGlimmerAssistantConfig:
        config = MuseGlimmerAssistantConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            rms_norm_eps=self.eps,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            sliding_window=1,
            layer_types=["full_attention"] * self.layers,
            block_size=self.block,
            mask_token_id=self.mask,
            target_layer_ids=[i - 1 for i in self.feature_layers],
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        if self.selector:
            with_convolutions(config, self.taps, self.group)
        return config


class BlockHead(nn.Module):
    """Trainable weights of a block drafter."""

    kind: ClassVar[str] = "block_drafter"  # identifies its checkpoints
    config_class: ClassVar[type[BlockConfig]] = BlockConfig

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        self.model = (DFlash2Model if config.selector else MuseGlimmerAssistantModel)(config.assistant())
        if config.markov:
            self.markov = Markov(config.vocab, config.markov)
        if config.confidence:
            self.confidence = Confidence(config.hidden, config.markov)
        if config.selector:
            self.candidate_selector = CandidateSelector(config.vocab, config.hidden, config.selector, config.candidates)

    @property
    def sequential(self) -> Sequential | None:
        """The block's sequential head, sharing these weights."""
        markov, confidence = getattr(self, "markov", None), getattr(self, "confidence", None)
        return Spark(markov, confidence) if markov or confidence else getattr(self, "candidate_selector", None)


class BlockDrafter(checkpoint.NetworkDrafter[PreTrainedModel], BlockModel):
    """A drafter around a `BlockHead`, for one loaded target. width > 1: trees of at most `nodes` nodes (DDTree).

    Raises ValueError if the network was made for another target.
    """

    head_class = BlockHead

    def __init__(self, head: BlockHead, model: PreTrainedModel, *, width: int = 1, nodes: int = 24):
        self.check_target(head.config, model)
        self.head, self.config = head.to(model.device), head.config
        running = self._running(model.dtype)
        form = DFlashVariant(causal=True, index=True, raw=True, sequential=self.run.sequential)
        super().__init__(running, model, width, nodes, form)
        self.borrowed = (model.get_input_embeddings(), model.get_output_embeddings())

    @classmethod
    def sizes(cls, target: PreTrainedModel) -> dict[str, Any]:
        return text_sizes(target)

    @classmethod
    def defaults(cls, target: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
        """Return default sizes: five evenly spaced layers of the target are read, and the mask is an image placeholder
        or padding.
        """
        text = target.config.get_text_config()
        depth, heads = text.num_hidden_layers, text.num_attention_heads
        rope = getattr(text, "rope_parameters", None) or {}
        return {
            "layers": 5,
            "heads": heads,
            "kv_heads": text.num_key_value_heads,
            "head_size": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "intermediate": text.intermediate_size,
            "feature_layers": tuple(sorted({1 + round(i * max(depth - 2, 0) / 4) for i in range(5)})),
            "mask": spare_id(target),
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
        }

    def _running(self, dtype: torch.dtype) -> PreTrainedModel:
        """Return the network that drafts, in the target's dtype."""
        self.head.eval()
        self.run = self.head_in(dtype)
        return self.run.model

    @torch.no_grad()
    def refresh(self) -> None:
        """Use the network's current weights for drafting; call it after they change."""
        self.assistant = self._running(self.embed.weight.dtype)
        self.form = replace(self.form, sequential=self.run.sequential)

    def trained_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., d) after tokens (...), with the weights being trained."""
        logits = self.lm_head(states.to(self.lm_head.weight.dtype))[..., : self.vocab]
        return logits + self.head.markov(states, tokens)[0] if self.config.markov else logits

    def rollout(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """Run one training pass over blocks that tile the answers (`visspec.train.capture.TrainingBatch`). `steps` is
        unused.

        Returns hidden states (B, T, d) and the weight of each element (B, T), 0 if it does not count. Element t, the
        distribution after answer token t, is predicted by the block with the last anchor up to token t. In training
        mode the first anchor is random.
        """
        ids, prompt, ahead = batch.ids, batch.prompt_length, self.block - 1
        count, device = batch.best.shape[1], ids.device
        first = int(torch.randint(max(min(ahead, count), 1), ())) if self.head.training else 0
        anchor_A = torch.arange(first, max(count, first + 1), ahead, device=device)
        rows, blocks = len(ids), len(anchor_A)
        block_BAK = torch.full((rows, blocks, self.block), self.mask, dtype=ids.dtype, device=device)
        block_BAK[:, :, 0] = ids[:, prompt + anchor_A]
        place_K = torch.arange(self.block, device=device)
        seen_BC, place_BC, start_B1 = self._context(batch)
        ahead_BN = start_B1 + (anchor_A[:, None] + place_K).flatten()
        block_N = torch.arange(blocks, device=device).repeat_interleave(self.block)
        known_NC = torch.arange(seen_BC.shape[1], device=device) < prompt + anchor_A[block_N][:, None]
        own_NN = (block_N[:, None] == block_N).expand(rows, -1, -1)
        like = next(self.head.parameters())
        mask = additive(torch.cat([known_NC & seen_BC[:, None], own_NN], dim=2), like.dtype)[:, None]
        hidden_BNd = self.head.model(
            noise_embeds=self._embed_ids(block_BAK.flatten(1)).to(like),
            context_hidden_states=batch.features.to(like),
            attention_mask={"full_attention": mask},
            position_ids=torch.cat([place_BC, ahead_BN], dim=1),
        ).last_hidden_state
        hidden_BTd = hidden_BNd.unflatten(1, (blocks, self.block))[:, :, 1:].flatten(1, 2)
        hidden_BTd = F.pad(hidden_BTd, (0, 0, first, 0))[:, :count]
        index_T = torch.arange(count, device=device)
        counts_B1 = to_device([[n - 1] for n in batch.lengths], device)
        weight_T = DECAY ** ((index_T - first) % ahead).to(like.dtype)
        return [Prediction(hidden_BTd, weight_T * ((index_T >= first) & (index_T < counts_B1)))]

    def _context(self, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return which context slots are real (B, C), their positions (B, C), and the first answer token's position."""
        rows, width = batch.features.shape[:2]
        seen_BC = torch.ones(rows, width, dtype=torch.bool, device=batch.ids.device)
        if batch.attention is not None:
            seen_BC[:, : batch.prompt_length] = batch.attention.bool()
        place_BC = (seen_BC.cumsum(dim=1) - 1).clamp(min=0)
        return seen_BC, place_BC, seen_BC[:, : batch.prompt_length].sum(dim=1, keepdim=True)
