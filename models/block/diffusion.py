"""Masked diffusion language models as block drafters (DEER, arXiv 2512.15176; DiffuSpec, arXiv 2510.02358).

Such a model maps ids, some of them masks, to logits at all places. It has the target's tokenizer and sees nothing else
of the target: each pass reads the text so far, without image placeholders, followed by masks. One pass denoises the
whole block (DEER). With `steps` above 1, the first places are filled and the others denoised again. Places are filled
from left to right, not by confidence as these models usually generate, so that the distribution of a place depends
only on the tokens before it, as rejection sampling requires.

Shapes: B rows, L text, N drafted tokens, K masks, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from visspec.cache import to_device
from visspec.io.checkpoint import check_whole
from visspec.models.decoder.small_model import READS, VOCABULARY_PADDING
from visspec.models.decoder.target import describe, vocabulary
from visspec.models.drafting.base import Chain, StructuredDrafter
from visspec.types import MAX_NODES, Draft, DrafterTraits, Scores, State


def denoises(network: nn.Module) -> bool:
    """Return whether a loaded model predicts masked tokens, judged by its class or a mask id in its configuration."""
    named = getattr(getattr(network, "config", None), "mask_token_id", None)
    return type(network).__name__.endswith("ForMaskedLM") or named is not None


class DiffusionModel(StructuredDrafter):
    """Drafts from a loaded masked language model with the target's tokenizer.

    Args:
        network: The masked language model.
        model: The target.
        mask: The mask id, by default from the network's configuration.
        block: Maximum number of masks per pass.
        steps: Passes per block, each of which fills an equal part of it.
        reads: How many tokens of a text are read at most, its first one and the last ones.
        shifted: The logits of a place are at the place before it, as in Dream, an adapted autoregressive model.
        width: Above 1, draft trees of at most `nodes` nodes over the distributions of one pass; `shaped` changes this.
        nodes: Maximum number of nodes of a tree.

    Raises:
        ValueError: The vocabularies differ by more than padding, or a value is out of range.
    """

    def __init__(
        self,
        network: nn.Module,
        model: PreTrainedModel,
        mask: int | None = None,
        block: int = 16,
        steps: int = 1,
        reads: int = READS,
        shifted: bool = False,
        width: int = 1,
        nodes: int = 24,
    ):
        theirs, config = describe(model), getattr(network, "config", None)
        mask = getattr(config, "mask_token_id", None) if mask is None else mask
        if mask is None:
            raise ValueError("mask: got None, expected the id of the network's mask token.")
        self.network, self.vocab, self.mask = network, theirs.vocab, mask
        self.known, read = self._vocabularies(network)
        check_whole("mask", mask, 0, read - 1)
        if abs(self.known - self.vocab) > VOCABULARY_PADDING:
            raise ValueError(f"drafter: vocabulary of {self.known}, expected the target's {self.vocab}.")
        for name, value, most in (
            ("block", block, MAX_NODES - 1),
            ("steps", steps, block),
            ("reads", reads, 1 << 30),
            ("width", width, self.vocab),
            ("nodes", nodes, MAX_NODES - 1),
        ):
            check_whole(name, value, 1, most)
        if steps > 1 and width > 1:
            raise ValueError(f"steps: got {steps} for trees, expected 1.")
        longest = getattr(config, "max_position_embeddings", None) or 1 << 30
        self.block, self.steps, self.reads = block, steps, min(reads, longest - block)
        if self.reads < 1:
            raise ValueError(f"block: got {block}, expected less than the {longest} positions of the network.")
        self.shift, self.width, self.nodes = int(shifted), width, nodes
        self.content = theirs.never_drafted
        self.placed = "position_ids" in inspect.signature(network.forward).parameters
        self.traits = DrafterTraits(levels=block, trees=width > 1, joins=True)

    @property
    def each(self) -> int:
        return -(-self.block // self.steps)

    def _vocabularies(self, network: Any) -> tuple[int, int]:
        """Return the number of ids with logits, and the number of ids that the network reads."""
        return vocabulary(network), network.get_input_embeddings().weight.shape[0]

    def _grow(self, tree: str) -> None:
        super()._grow(tree)
        if self.steps > 1 and self.width > 1:
            raise ValueError(f"tree: got {tree!r} with {self.steps} steps, expected chains.")

    def start(self, state: State, scores: Scores) -> None:
        state.memory = self.words(state.request.prompt, scores.aux.get("attention"))

    def words(self, prompt_BL: Tensor, attention_BL: Tensor | None) -> list[list[int]]:
        """Return each row's ids without padding and image placeholders."""
        real = [[1] * prompt_BL.shape[1]] * len(prompt_BL) if attention_BL is None else attention_BL.tolist()
        return [
            [i for i, is_real in zip(ids, row) if is_real and i not in self.content]
            for ids, row in zip(prompt_BL.tolist(), real)
        ]

    def propose(self, state: State, depth: int) -> Draft:
        depth = min(self.levels(state, depth), self.block)
        texts = [state.memory[row] + list(state.tokens[row]) for row in state.rows]
        texts = [text if len(text) <= self.reads else [text[0], *text[len(text) - self.reads + 1 :]] for text in texts]
        if self.structure(state).width > 1:
            state.calls["draft_pass"] += 1
            return self.block_tree(state, self._mask_undraftable(self.denoised(texts, None, depth)))
        chain = Chain(state)
        while (done := len(chain.tokens)) < depth:
            state.calls["draft_pass"] += 1
            filled_BN = torch.stack(chain.tokens, dim=1) if done else None
            logits_BKV = self._mask_undraftable(self.denoised(texts, filled_BN, depth - done))
            chain.extend(logits_BKV[:, : self.each])
        return chain.finish()

    def denoised(self, texts: list[list[int]], filled_BN: Tensor | None, masks: int) -> Tensor:
        """Return logits (B, K, v) of masks after texts and the tokens that follow them, over the network's v ids."""
        return self._read(*self.masked(texts, filled_BN, masks))

    def masked(self, texts: list[list[int]], filled_BN: Tensor | None, masks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a pass's ids (B, L), the mask of real ids (B, L), and the places to predict (B, K)."""
        device, filled = next(self.network.parameters()).device, 0 if filled_BN is None else filled_BN.shape[1]
        longest = max(map(len, texts))
        blank = [self.mask] * (filled + masks)
        ids_BL = to_device([[*text, *blank, *[0] * (longest - len(text))] for text in texts], device)
        length_B1 = to_device([len(text) for text in texts], device)[:, None]
        if filled_BN is not None:
            ids_BL.scatter_(1, length_B1 + torch.arange(filled, device=device), filled_BN)
        place_L = torch.arange(ids_BL.shape[1], device=device)
        real_BL = place_L < length_B1 + filled + masks
        at_BK = length_B1 + filled - self.shift + torch.arange(masks, device=device)
        return ids_BL, real_BL, at_BK

    def _read(self, ids_BL: Tensor, real_BL: Tensor, at_BK: Tensor) -> Tensor:
        """Return logits (B, K, v) at these places of a pass."""
        more: dict[str, Any] = {}
        if self.placed:
            more["position_ids"] = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand_as(ids_BL)
        logits_BLV = self.network(input_ids=ids_BL, attention_mask=real_BL.long(), **more).logits
        return logits_BLV[torch.arange(len(ids_BL), device=ids_BL.device)[:, None], at_BK]

    def _mask_undraftable(self, logits_BKV: Tensor) -> Tensor:
        """Return logits over the target's ids (B, K, V), -inf for ids that are never drafted or unknown to the network,
        and for the mask.
        """
        known = min(self.known, self.vocab)
        logits_BKV = nn.functional.pad(logits_BKV[..., :known].float(), (0, self.vocab - known), value=float("-inf"))
        barred = [i for i in {*self.content, self.mask} if i < self.vocab]
        logits_BKV[..., barred] = float("-inf")
        return logits_BKV

    def join(self, state: State, other: State, take: list[int]) -> None:
        for b, row in zip(take, state.rows[-len(take) :]):
            state.memory[row : row + 1] = other.memory[other.rows[b] :][:1]
