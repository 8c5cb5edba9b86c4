"""Drafters that attend to the target's own keys and values, as transformers loads them (Gemma 4's assistants).

They have no cache: every drafted node is one pass over its token's embedding and its parent's hidden state, at the
position of the pending token, with the target's keys and values of one layer of each kind. transformers runs them at
batch size 1, as chains; here rows may be ragged, and because nodes do not see each other, a level of a tree is one pass
as well.

Shapes: B rows, W nodes of a level, S slots, d hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from visspec import tree as trees
from visspec.cache import additive, gather_rows
from visspec.models.decoder.target import LAST, describe
from visspec.models.drafting.base import Chain, ranking_logits
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict

Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
LEVELS = 5  # if the assistant's generation configuration has no number


def shares_cache(spec: nn.Module) -> bool:
    """Return whether a model reads another model's keys and values."""
    named = "shared_kv_states" in inspect.signature(spec.forward).parameters
    return named and hasattr(getattr(spec, "config", None), "backbone_hidden_size")


class SharedCache(Drafter):
    """Drafts from `assistant`, loaded for `model`. With width > 1, trees of at most `nodes` nodes instead of chains.

    Raises ValueError if the assistant was made for another target.
    """

    saved_as = "model"

    def __init__(self, assistant: PreTrainedModel, model: PreTrainedModel, width: int = 1, nodes: int = 24):
        config, text = assistant.config, model.config.get_text_config()
        own, theirs = config.get_text_config(), describe(model)
        if config.backbone_hidden_size != text.hidden_size:
            raise ValueError(f"drafter: hidden size of {config.backbone_hidden_size}, expected {text.hidden_size}.")
        if own.vocab_size != theirs.vocab:
            raise ValueError(f"drafter: vocabulary of {own.vocab_size}, expected the target's {theirs.vocab}.")
        self.layers = providers(text)
        if missing := set(own.layer_types) - set(self.layers):
            kinds = ", ".join(sorted(missing))
            raise ValueError(f"drafter: reads layers of {kinds}, expected kinds that {type(model).__name__} has.")
        self.window, self.width, self.nodes = int(own.sliding_window or 0), width, nodes
        named = getattr(getattr(assistant, "generation_config", None), "num_assistant_tokens", None)
        self.traits = DrafterTraits(levels=named or LEVELS, feature_layers=LAST, trees=width > 1, joins=True)
        self.assistant = copy.copy(assistant)  # shares all weights, but takes masks unchanged
        vars(self.assistant)["create_attention_masks"] = lambda _, attention_mask, __: attention_mask
        self.embed = model.get_input_embeddings()

    def start(self, state: State, scores: Scores) -> None:
        assert scores.features is not None
        state.memory = scores.features[:, -1]  # (B, d) of the token before the pending one

    def propose(self, state: State, depth: int) -> Draft:
        reader = self._reader(state)
        if self.width > 1:
            return self._tree(state, depth, reader)
        chain, token, hidden_B1d = Chain(state), state.pending, state.memory[:, None]
        for _ in range(depth):
            logits_B1V, hidden_B1d = reader(token[:, None], hidden_B1d)
            token = chain.add(logits_B1V[:, 0])
        return chain.finish()

    def _tree(self, state: State, depth: int, reader: Read) -> Draft:
        if state.noise is not None and state.noise.samples:
            raise ValueError("acceptance: got a rule that judges draws, expected point masses for an assistant's tree.")
        tree_builder = trees.TreeBuilder(state.pending, self.width)
        token_BW, hidden_BWd = state.pending[:, None], state.memory[:, None]
        for level in range(depth):
            logits_BWV, hidden_BWd = reader(token_BW, hidden_BWd)
            token_BW, above_BW = tree_builder.grow(ranking_logits(logits_BWV, state, level))
            hidden_BWd = gather_rows(hidden_BWd, above_BW)
        return tree_builder.finish(self.nodes)

    def _reader(self, state: State) -> Read:
        """Return a function that runs the assistant over nodes of this round: (tokens, hidden) to (logits, hidden)."""
        assert state.target is not None
        stored, real_BS = state.target.keys_and_values(state, list(self.layers.values()))
        shared = dict(zip(self.layers, stored))
        position_B = state.position

        def read(token_BW: Tensor, hidden_BWd: Tensor) -> tuple[Tensor, Tensor]:
            state.calls["draft_pass"] += 1
            embedded = self.embed(token_BW)
            output = self.assistant(
                inputs_embeds=torch.cat([embedded, hidden_BWd.to(embedded.dtype)], dim=-1),
                attention_mask=self._masks(shared, real_BS, token_BW.shape[1], embedded.dtype),
                position_ids=position_B[:, None].expand(-1, token_BW.shape[1]),
                shared_kv_states=shared,
                use_cache=False,
                output_hidden_states=token_BW.shape[1] > 1,  # transformers 5.23 slices the hidden states, even if None
            )
            return output.logits, output.last_hidden_state

        return read

    def _masks(self, shared: dict, held_BS: Tensor | None, width: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
        """Return a mask (B, 1, W, S) per kind of layer: all committed tokens, or the last ones within the window."""
        keys = next(iter(shared.values()))[0]
        if held_BS is None:
            if "sliding_attention" not in shared or keys.shape[2] <= self.window + 1:
                return dict.fromkeys(("full_attention", "sliding_attention"))
            held_BS = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)
        slot = torch.arange(held_BS.shape[1], device=keys.device)
        last_B1 = torch.where(held_BS, slot, -1).amax(dim=1, keepdim=True)
        near_BS = held_BS & (slot >= last_B1 - self.window)
        visible = {"full_attention": held_BS, "sliding_attention": near_BS}
        return {kind: additive(of, dtype)[:, None, None].expand(-1, -1, width, -1) for kind, of in visible.items()}

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        assert scores.features is not None
        last_B1 = verdict.path.gather(1, verdict.length[:, None] - 1)
        state.memory = gather_rows(scores.features, last_B1)[:, 0]

    def select(self, state: State, keep: list[int]) -> None:
        state.memory = state.memory[keep]

    def join(self, state: State, other: State, take: list[int]) -> None:
        state.memory = torch.cat([state.memory, other.memory[take]])


def providers(text: PreTrainedConfig) -> dict[str, int]:
    """Return, per kind of attention, the layer whose keys and values are shared: the one that stores them for later
    layers, else the last.
    """
    modes = getattr(text, "kv_sharing_modes", None) or [None] * text.num_hidden_layers
    layers: dict[str, int] = {}
    kinds = getattr(text, "layer_types", None) or []
    for index, (kind, mode) in enumerate(zip(kinds, modes)):
        if mode != "reuse":
            layers[kind] = index
    return layers | {kind: i for i, (kind, mode) in enumerate(zip(kinds, modes)) if mode == "store"}
