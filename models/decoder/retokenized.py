"""A small model with another tokenizer as drafter: what it says is read as text and put into the target's ids.

Drafts are point masses, so they are verified as any others are: whatever the tokenizers disagree on costs tokens, never
changes one (universal assisted generation, transformers' docs). The text so far becomes ids of the small model again in
every round; keys and values of the ids that it shares with the round before stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from visspec import tree as trees
from visspec.cache import to_device
from visspec.types import Draft, Drafter, DrafterTraits, Scores, State, Tokenizer

CONTEXT = 16  # ids of the target whose text is put into ids again with what follows it: words that a draft goes on with


class RetokenizedModel(Drafter):
    """Chains from `small`, a loaded decoder of text, with `theirs`, its tokenizer; `tokenizer` is the target's.

    Pictures are not shown to it. Rows are drafted one after the other.
    """

    traits = DrafterTraits(levels=5, observes="none")

    def __init__(self, small: PreTrainedModel, theirs: Tokenizer, tokenizer: Tokenizer):
        for name, value in (("theirs", theirs), ("tokenizer", tokenizer)):
            if not hasattr(value, "decode"):
                raise ValueError(f"{name}: got {type(value).__name__}, expected a tokenizer")
        self.small, self.theirs, self.tokenizer = small, theirs, tokenizer

    def start(self, state: State, scores: Scores) -> None:
        state.memory = {row: _CachedRow() for row in state.rows}

    def propose(self, state: State, depth: int) -> Draft:
        return trees.ragged_draft(state.pending, [self._ahead(state, b, depth) for b in range(len(state.rows))])

    def _ahead(self, state: State, b: int, depth: int) -> list[int]:
        """At most `depth` ids behind a live row's pending token."""
        row, said = state.memory[state.rows[b]], state.ids(b)[0].tolist()
        read = self._ids(self.theirs, self._text(self.tokenizer, said))
        if not read:
            return []
        before, known = self._text(self.theirs, read), self._text(self.tokenizer, said[-CONTEXT:])
        count = max(depth, round(depth * len(read) / len(said)))  # of ids that may be shorter than the target's
        text = self._text(self.theirs, read + row.follow(self.small, read, count))
        if not text.startswith(before):
            return []
        own, whole = (self._ids(self.tokenizer, part) for part in (known, known + text[len(before) :]))
        return whole[len(own) :][:depth] if whole[: len(own)] == own else []  # else it goes on inside of the last id

    def _text(self, tokenizer: Tokenizer, ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    def _ids(self, tokenizer: Tokenizer, text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass
class _CachedRow:
    """Ids whose keys and values the small model has."""

    ids: list[int] = field(default_factory=list)
    cache: DynamicCache = field(default_factory=DynamicCache)

    def follow(self, small: PreTrainedModel, read: list[int], count: int) -> list[int]:
        """The `count` most probable ids behind `read`, one by one."""
        pairs = zip(self.ids, read[:-1])
        same = next((n for n, (old, new) in enumerate(pairs) if old != new), min(len(self.ids), len(read) - 1))
        if same < len(self.ids):
            self.cache.crop(same - len(self.ids))
        new, found = read[same:], list[int]()
        for _ in range(count):
            ids = to_device([new], small.device)
            at = torch.arange(same, same + len(new), device=small.device)
            logits = small(input_ids=ids, position_ids=at[None], past_key_values=self.cache, use_cache=True).logits
            same += len(new)
            new = [int(logits[0, -1].argmax())]
            found += new
        self.ids = [*read, *found][:same]
        return found
