"""Our own diffusion language models as block drafters, trained for any target (DEER, arXiv 2512.15176, starts from a
pretrained one): transformers' ModernBERT with full attention, between the target's embedding and its LM head.

Shapes: B rows, L places, K masks, T distributions of an answer, d hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import ModernBertConfig, ModernBertModel, PreTrainedModel

from visspec.cache import to_device
from visspec.io.checkpoint import check_whole
from visspec.models.block.diffusion import DiffusionModel
from visspec.models.block.drafter import bare
from visspec.models.block.trained import DECAY
from visspec.models.decoder.small_model import READS
from visspec.models.decoder.target import spare_id, text_sizes
from visspec.models.drafting import checkpoint
from visspec.models.layers import MOST_LAYERS
from visspec.train.batches import Prediction, TrainingBatch
from visspec.types import MAX_NODES


@dataclass(frozen=True)
class DiffusionConfig(checkpoint.DrafterConfig):
    """Configuration of the network and of its target.

    Args:
        mask: The id at places to predict, which gets the network's own vector.
        block: Maximum number of places per pass.
    """

    layers: int
    heads: int
    intermediate: int
    mask: int
    block: int = 15
    eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self):
        super().__post_init__()
        check_whole("layers", self.layers, 1, MOST_LAYERS)
        check_whole("mask", self.mask, 0, self.vocab - 1)
        check_whole("block", self.block, 1, MAX_NODES - 1)
        if self.hidden % (2 * self.heads):
            raise ValueError(f"heads: got {self.heads}, expected a divisor of half of the hidden size {self.hidden}.")

    @property
    def levels(self) -> int:
        return self.block

    def modern_bert(self) -> ModernBertConfig:
        turns = {"rope_type": "default", "rope_theta": self.rope_theta}
        return ModernBertConfig(
            vocab_size=1,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            norm_eps=self.eps,
            layer_types=["full_attention"] * self.layers,
            rope_parameters={"full_attention": turns, "sliding_attention": turns},
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            cls_token_id=None,
            sep_token_id=None,
        )


class DiffusionLMLayers(nn.Module):
    """Trainable weights of a diffusion language model: its layers and the mask's vector."""

    kind: ClassVar[str] = "diffusion_lm"  # identifies its checkpoints
    config_class: ClassVar[type[DiffusionConfig]] = DiffusionConfig

    def __init__(self, config: DiffusionConfig):
        super().__init__()
        self.config = config
        self.model = ModernBertModel(config.modern_bert())

    def forward(self, embeds_BLd: Tensor, masked_BL: Tensor, real_BL: Tensor) -> Tensor:
        """Return hidden states (B, L, d) of places with these embeddings, or the mask's vector where masked."""
        mask_d = self.model.get_input_embeddings().weight[0]
        embeds_BLd = torch.where(masked_BL[..., None], mask_d, embeds_BLd.to(mask_d))
        return self.model(inputs_embeds=embeds_BLd, attention_mask=real_BL.long()).last_hidden_state


class DiffusionDrafter(checkpoint.NetworkDrafter[PreTrainedModel], DiffusionModel):
    """A drafter around `DiffusionLMLayers`, for one loaded target whose embedding and head it uses. Options are those
    of `DiffusionModel`. Raises ValueError if the network was made for another target.
    """

    head_class = DiffusionLMLayers

    def __init__(
        self,
        head: DiffusionLMLayers,
        model: PreTrainedModel,
        *,
        steps: int = 1,
        reads: int = READS,
        width: int = 1,
        nodes: int = 24,
    ):
        self.check_target(head.config, model)
        self.head, self.config = head.to(model.device), head.config
        self.embed = bare(model.get_input_embeddings())
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.borrowed = (model.get_input_embeddings(), self.lm_head)
        self.refresh()
        super().__init__(self.run, model, head.config.mask, head.config.block, steps, reads, width=width, nodes=nodes)

    @classmethod
    def sizes(cls, target: PreTrainedModel) -> dict[str, Any]:
        known = text_sizes(target)
        del known["target_layers"]
        return known

    @classmethod
    def defaults(cls, target: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
        """Return default sizes. The mask is an id that never occurs in text: an image placeholder, or padding."""
        text = target.config.get_text_config()
        return {
            "layers": 4,
            "heads": text.num_attention_heads,
            "intermediate": text.intermediate_size,
            "mask": spare_id(target),
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Use the network's current weights for drafting, in the target's dtype; call it after they change."""
        self.head.eval()
        self.run = self.network = self.head_in(self.embed.weight.dtype)

    def _vocabularies(self, network: nn.Module) -> tuple[int, int]:
        return self.config.vocab, self.config.vocab

    def _states(self, network: nn.Module, ids_BL: Tensor, real_BL: Tensor, at_BK: Tensor) -> Tensor:
        """Return hidden states (B, K, d) at these places of a pass."""
        embeds_BLd = torch.nn.functional.embedding(ids_BL, self.embed.weight)
        hidden_BLd = network(embeds_BLd, ids_BL == self.mask, real_BL)
        return hidden_BLd[torch.arange(len(ids_BL), device=ids_BL.device)[:, None], at_BK]

    def _read(self, ids_BL: Tensor, real_BL: Tensor, at_BK: Tensor) -> Tensor:
        states_BKd = self._states(self.network, ids_BL, real_BL, at_BK)
        return self.trained_logits(states_BKd, at_BK)

    def trained_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., d)."""
        return self.lm_head(states.to(self.lm_head.weight.dtype))[..., : self.known]

    def rollout(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """Run `steps` training passes (`visspec.train.capture.TrainingBatch`), each over one block of each answer: up
        to `block` masks after a random token of it (DEER's prefix continuation).

        Returns, for each pass, hidden states (B, K, d); the weight of each element (B, K), `DECAY` to the power of its
        place in the block, or 0 if it does not count; and the elements' indices.
        """
        start, total, device = batch.prompt_length, batch.best.shape[1], batch.ids.device
        prompts = self.words(batch.host_ids[:, :start], batch.host_attention)
        answers = [row[:n] for row, n in zip(batch.host_ids[:, start:].tolist(), batch.lengths)]
        predictions = []
        for _ in range(steps):
            masks = int(torch.randint(1, self.block + 1, ()))
            anchors = [int(torch.randint(max(n - 1, 1), ())) for n in batch.lengths]
            texts = [(p + a[: n + 1])[-self.reads :] for p, a, n in zip(prompts, answers, anchors)]
            states_BKd = self._states(self.head, *self.masked(texts, None, masks))
            place_K = torch.arange(masks, device=device)
            at_BK = to_device([[anchor] for anchor in anchors], device) + place_K
            last_B1 = to_device([[n - 1] for n in batch.lengths], device)
            weight_BK = (DECAY ** place_K.float()) * (at_BK < last_B1)
            predictions.append(Prediction(states_BKd, weight_BK, at_BK.clamp(max=total - 1)))
        return predictions
