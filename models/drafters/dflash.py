"""Block drafters that transformers loads as plain models (DFlash, arXiv 2602.06036), such as `muse_glimmer_assistant`.

One pass of the drafter denoises a whole block: the pending token and mask tokens, which see one another and the
target's hidden states of everything accepted before. transformers drives such a model at batch size 1; here its keys
and values of a request are slots, so that rows may be ragged.

Shapes: B rows, C context elements of a pass, K block, S slots, F features, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from visspec import tree as trees
from visspec.cache import additive, to_device
from visspec.laws import Categorical
from visspec.models.drafters.feature_memory import accepted, packed, prompt_first
from visspec.models.targets.hf_decoder import describe
from visspec.models.targets.slot_layers import SlotLayers
from visspec.sampling import propose, warp
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict

NEEDED = ("block_size", "mask_token_id", "target_layer_ids")  # of the configuration


class BlockModel(Drafter):
    """Drafts from `assistant`, a loaded block drafter made for `model`. width > 1: trees of at most `nodes` nodes over
    the block's laws instead of chains. Raises ValueError where it does not fit the target.
    """

    def __init__(self, assistant: nn.Module, model: nn.Module, width: int = 1, nodes: int = 24):
        config: Any = assistant.config
        theirs, text = describe(model), model.config.get_text_config()  # type: ignore[union-attr, operator]
        if config.hidden_size != text.hidden_size:
            raise ValueError(f"drafter: hidden size of {config.hidden_size}, expected the target's {text.hidden_size}")
        for layer in config.target_layer_ids:
            if not 0 <= layer < text.num_hidden_layers:
                raise ValueError(
                    f"drafter: target_layer_ids name layer {layer}, expected one of 0..{text.num_hidden_layers - 1}"
                )
        if not 0 <= config.mask_token_id < text.vocab_size:
            raise ValueError(f"drafter: mask_token_id {config.mask_token_id}, expected an id below {text.vocab_size}")
        self.assistant, self.vocab, self.width, self.nodes = assistant, theirs.vocab, width, nodes
        self.block, self.mask = config.block_size, config.mask_token_id
        self.kinds, self.window = frozenset(config.layer_types), int(config.sliding_window or 0)
        layers = tuple(layer + 1 for layer in config.target_layer_ids)
        self.traits = DrafterTraits(levels=self.block - 1, feature_layers=layers, trees=width > 1, joins=True)
        self.head = model.get_output_embeddings()  # type: ignore[operator]
        self.embed = bare(model.get_input_embeddings())  # type: ignore[operator]

    def start(self, state: State, scores: Scores) -> None:
        assert scores.features is not None
        positions, rows = scores.aux["positions"], len(scores.features)
        position_BL = (positions if positions.dim() == 2 else positions[-3]).expand(rows, -1)
        state.memory = _Context(rows, state.request.max_new_tokens)
        state.memory.waiting.append(prompt_first(position_BL, scores.features, scores.aux["attention"]))

    def propose(self, state: State, depth: int) -> Draft:
        logits_BKV = self._denoised(state)[:, :depth]
        if self.width > 1:
            return self._tree(state, logits_BKV)
        tokens, laws = [], []
        for level in range(logits_BKV.shape[1]):
            token, law = propose(logits_BKV[:, level], state, level)
            tokens.append(token)
            if law is not None:
                laws.append(law)
        return trees.chain_draft(state.pending, torch.stack(tokens, dim=1), Categorical.chain(laws) if laws else None)

    def _tree(self, state: State, logits_BKV: Tensor) -> Draft:
        """Best-first over the block, whose laws are those of their depth whatever stands above (DDTree)."""
        if state.noise is not None and state.noise.samples:
            raise ValueError("acceptance: got a rule that judges draws, expected point masses for a block's tree")
        growing, width = trees.Growing(state.pending, self.width), 1
        for level in range(logits_BKV.shape[1]):
            logits_BWV = warp(logits_BKV[:, level : level + 1], state.request.sampling)
            if state.noise is not None:
                logits_BWV = state.noise.perturbed(logits_BWV, level)
            token, _ = growing.grow(logits_BWV.log_softmax(dim=-1).expand(-1, width, -1))
            width = token.shape[1]
        return growing.finish(self.nodes)

    def _denoised(self, state: State) -> Tensor:
        """(B, K - 1, V) logits of the block behind the pending tokens, from one pass."""
        hidden_BKd = self._pass(state.memory, state.pending, state.position)
        state.calls["draft_pass"] += 1
        return self.head(hidden_BKd[:, 1:].to(self.head.weight.dtype))[..., : self.vocab]

    def _pass(self, memory: _Context, pending: Tensor, position_B: Tensor) -> Tensor:
        """Reads what the target has accepted since the last pass, and returns the block's hidden states (B, K, d)."""
        slots, like = memory.cache.slots, next(self.assistant.parameters())
        rows = len(slots.lengths)
        position_BC, context_BCF, counts = packed(memory.waiting) if memory.waiting else self._nothing(rows, position_B)
        memory.waiting = []
        width = context_BCF.shape[1]
        extent = slots.open(width + self.block, pending.device)
        ids_BK = torch.full((rows, self.block), self.mask, dtype=pending.dtype, device=pending.device)
        ids_BK[:, 0] = pending
        ahead_BK = position_B[:, None] + torch.arange(self.block, device=pending.device)
        output = self.assistant(
            noise_embeds=self.embed(ids_BK).to(like),
            context_hidden_states=context_BCF.to(like),
            attention_mask=self._masks(slots.lengths, counts, width, extent, like),
            position_ids=torch.cat([position_BC, ahead_BK], dim=1),
            past_key_values=memory.cache,
        )
        slots.lengths = [n + c for n, c in zip(slots.lengths, counts)]
        return output.last_hidden_state

    def _nothing(self, rows: int, position_B: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """No context that is not read yet."""
        config: Any = self.assistant.config
        size = len(self.traits.feature_layers) * config.hidden_size
        return position_B[:, None][:, :0], next(self.assistant.parameters()).new_empty(rows, 0, size), [0] * rows

    def _masks(
        self, lengths: list[int], counts: list[int], width: int, extent: int, like: Tensor
    ) -> dict[str, Tensor | None]:
        """By kind of layer, (B, 1, K, S): the context of each row, and the block. None where nothing is hidden."""
        even = min(counts) == width and min(lengths) == max(lengths)
        if even and ("sliding_attention" not in self.kinds or extent <= self.window):
            return dict.fromkeys(("full_attention", "sliding_attention"))
        length_B1, count_B1 = (to_device(n, like.device)[:, None] for n in (lengths, counts))
        slot = torch.arange(extent, device=like.device)
        own = (slot >= length_B1 + width) & (slot < length_B1 + width + self.block)
        seen_BS = (slot < length_B1 + count_B1) | own
        index_BS = torch.where(slot < length_B1 + count_B1, slot, slot - width + count_B1)
        query_BK = length_B1 + count_B1 + torch.arange(self.block, device=like.device)
        near_BKS = (query_BK[..., None] - index_BS[:, None]).abs() <= self.window
        full = additive(seen_BS, like.dtype)[:, None, None].expand(-1, -1, self.block, -1)
        sliding = full.masked_fill(~near_BKS[:, None], torch.finfo(like.dtype).min)
        return {"full_attention": full, "sliding_attention": sliding}

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Keep the target's features of the accepted nodes for the next pass."""
        path_BD, features, counts = accepted(scores, verdict, outcome)
        first_B = state.position - verdict.length
        position_BD = first_B[:, None] + torch.arange(path_BD.shape[1], device=first_B.device)
        state.memory.waiting.append((position_BD, features, counts))

    def select(self, state: State, keep: list[int]) -> None:
        memory: _Context = state.memory
        memory.cache.select(keep)
        memory.waiting = [(p[keep], f[keep], [c[b] for b in keep]) for p, f, c in memory.waiting]

    def join(self, state: State, other: State, take: list[int]) -> None:
        mine: _Context = state.memory
        theirs: _Context = other.memory
        for memory in (mine, theirs):  # keys and values of all rows are there, and nothing waits
            if memory.waiting:
                some = state.pending.new_zeros(len(memory.cache.slots.lengths))
                self._pass(memory, some, some)
        mine.cache.join(theirs.cache, take)


class _Context:
    """The drafter's cache, and the target's features that it has not read: (positions, features, counts)."""

    def __init__(self, rows: int, answer: int):
        self.cache = SlotLayers(rows, answer)
        self.waiting: list[tuple[Tensor, Tensor, list[int]]] = []


def bare(embed: nn.Module) -> nn.Module:
    """An embedding without the norm that some models give it: drafters read it as it is stored."""
    if getattr(embed, "embed_norm", None) is None:
        return embed
    new = copy.copy(embed)
    new._modules = {**embed._modules, "embed_norm": nn.Identity()}
    return new
