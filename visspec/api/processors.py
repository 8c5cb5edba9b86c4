"""Logits processors that can be called at any prefix, as the verification of drafts needs them.

Grammars of xgrammar, llguidance and outlines go from prefix to prefix by the package's own rollback. Other processors
that keep state between calls are called on copies of themselves, one behind each token. The commonest processors of
transformers are called once for all nodes of a draft (`types.NodeProcessor`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache, partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor, PreTrainedTokenizerBase
from transformers.generation import logits_process as theirs

from visspec.types import NodeProcessor, RowProcessor

Scorer = Callable[[Tensor, Tensor], Tensor]  # of ids (B, L) and scores (B, V)
STATEFUL = {  # processors whose scores depend on earlier calls, by their names or, with "*", by their modules
    "xgrammar.contrib.hf.LogitsProcessor",  # unless stateless=True
    "logits_processor_zoo.transformers.*",
    "outlines.backends.*",
    "transformers_cfg.generation.logits_process.GrammarConstrainedLogitsProcessor",
    "transformers.generation.logits_process.SynthIDTextWatermarkLogitsProcessor",
    "transformers.generation.logits_process.DiaEOSDelayPatternLogitsProcessor",
}
COPIES: dict[str, Callable[[Any], Any]] = {  # of the grammar packages' objects, which `copy` refuses
    **dict.fromkeys(("CompiledGrammar", "LLTokenizer", "Index"), lambda constant: constant),
    "GrammarMatcher": lambda matcher: matcher.fork(),
    "LLMatcher": lambda matcher: matcher.deep_copy(),
}
LEAST: dict[type, Callable[[Any], int]] = {  # of `types.NodeProcessor`: the length from which nothing changes
    theirs.MinLengthLogitsProcessor: lambda own: own.min_length,
    theirs.MinNewTokensLengthLogitsProcessor: lambda own: own.prompt_length_to_skip + own.min_new_tokens,
    **dict.fromkeys(
        (
            theirs.RepetitionPenaltyLogitsProcessor,
            theirs.SuppressTokensLogitsProcessor,
            theirs.InfNanRemoveLogitsProcessor,
            theirs.LogitNormalization,
            theirs.TemperatureLogitsWarper,
            theirs.TopKLogitsWarper,
            theirs.TopPLogitsWarper,
            theirs.MinPLogitsWarper,
            theirs.TypicalLogitsWarper,
            theirs.EpsilonLogitsWarper,
            theirs.EtaLogitsWarper,
        ),
        lambda own: 0,
    ),
}
BITS = 32  # of a word of the packages' masks
SPELLINGS = 32  # tokens, at most, that are beginnings of one text


@dataclass
class Matcher:
    """A grammar in its package's own matcher, and the tokens of a row that it has read.

    accept: read a token; false, in the same state, where it is not allowed. mask: (ids / 32,) int32, a bit for each id,
    the lowest first, of the tokens allowed next; None for that of the token before. finished: it takes no more tokens.
    text: what a token writes, None for an end and where it is not known. beyond: ids that the package's vocabulary does
    not have are allowed.
    """

    accept: Callable[[int], bool]
    rollback: Callable[[int], object]
    mask: Callable[[], Tensor | None]
    finished: Callable[[], bool] = lambda: False
    text: Callable[[int], bytes | None] = lambda token: None
    beyond: bool = False
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self):
        first = self.mask()
        assert first is not None
        self.masks = [first]  # behind each prefix of the tokens

    def allowed(self, tokens: list[int]) -> Tensor | None:
        """The mask behind tokens, of which those behind an end change nothing; None where one of them is refused."""
        keep = common(self.tokens, tokens)
        if keep < len(tokens) and keep < len(self.tokens):
            self.rollback(len(self.tokens) - keep)
            del self.tokens[keep:], self.masks[keep + 1 :]
        for token in tokens[keep:]:
            if self.finished():
                return self.masks[-1]
            if not self.accept(token):
                return None
            self.tokens.append(token)
            mask = self.mask()
            self.masks.append(self.masks[-1] if mask is None else mask)
        return self.masks[len(tokens)]


def xgrammar_matcher(compiled: Any) -> Matcher:
    """Of a compiled grammar of xgrammar."""
    import xgrammar

    own, info = xgrammar.GrammarMatcher(compiled), compiled.tokenizer_info
    words, ends = xgrammar.allocate_token_bitmask(1, info.vocab_size), frozenset(own.stop_token_ids)

    @cache
    def texts() -> Sequence[bytes]:  # the public property makes a list, in seconds for 150,000 tokens
        return info._handle.decoded_vocab() if hasattr(info, "_handle") else info.decoded_vocab

    def mask() -> Tensor | None:
        if own.is_terminated():  # its own processor goes on with the last mask
            return None
        own.fill_next_token_bitmask(words)
        return words[0].clone()

    def text(token: int) -> bytes | None:
        return None if token in ends else bytes(texts()[token])

    return Matcher(own.accept_token, own.rollback, mask, own.is_terminated, text, beyond=True)


def llguidance_matcher(grammar: str, tokenizer: Any) -> Matcher:
    """Of a grammar of llguidance and one of its tokenizers. Raises ValueError for a grammar that it can't read."""
    import llguidance

    own = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    if own.is_error():
        raise ValueError(f"grammar: got {grammar[:80]!r}, expected one of llguidance: {own.get_error()}")
    return Matcher(
        lambda token: own.try_consume_tokens([token]) == 1,
        own.rollback,
        lambda: torch.frombuffer(bytearray(own.compute_bitmask()), dtype=torch.int32),
        own.is_stopped,
        lambda token: None if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token]),
    )


def outlines_matcher(index: Any) -> Matcher:
    """Of an index of outlines_core, which has no vocabulary: it forces a token where no other is allowed."""
    states = [index.get_initial_state()]

    def accept(token: int) -> bool:
        state = index.get_next_state(states[-1], token)
        if state is None and index.is_final_state(states[-1]):
            state = states[-1]
        if state is not None:
            states.append(state)
        return state is not None

    def rollback(count: int) -> None:
        del states[len(states) - count :]

    def mask() -> Tensor:
        allowed = index.get_allowed_tokens(states[-1]) or []
        bits = torch.zeros(max(allowed, default=-1) // BITS + 1, BITS, dtype=torch.int32)
        bits.view(-1)[allowed] = 1
        return (bits << torch.arange(BITS, dtype=torch.int32)).sum(1, dtype=torch.int32)

    return Matcher(accept, rollback, mask)


class Grammar(RowProcessor):
    """Masks what a grammar does not allow. make: the matcher of a row; start: length of the prompt."""

    def __init__(self, make: Callable[[int], Matcher], start: int):
        self.make, self.start = make, start
        self.matchers: dict[int, Matcher] = {}

    def matcher(self, index: int) -> Matcher:
        if index not in self.matchers:
            self.matchers[index] = self.make(index)
        return self.matchers[index]

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        matcher = self.matcher(index)
        words = matcher.allowed(ids_L[self.start :].tolist())
        if words is None:  # where another processor allows what the grammar does not
            return scores_V
        allowed = unpack(words.to(scores_V.device))[: len(scores_V)]
        allowed = torch.nn.functional.pad(allowed, (0, len(scores_V) - len(allowed)), value=matcher.beyond)
        return scores_V.masked_fill(~allowed, float("-inf"))

    def forced(self, index: int, ids: list[int]) -> int | None:
        matcher = self.matcher(index)
        words = matcher.allowed(ids[self.start :])
        found = [] if words is None else unpack(words).nonzero()[: SPELLINGS + 1].flatten().tolist()
        if len(found) == 1:
            return found[0]
        texts = {token: text for token in found[:SPELLINGS] if (text := matcher.text(token)) is not None}
        longest = max(texts, key=lambda token: (len(texts[token]), token), default=None)
        alike = len(texts) == len(found) and all(texts[longest].startswith(text) for text in texts.values())
        return longest if alike else None


class PrefixFunction(RowProcessor):
    """A `prefix_allowed_tokens_fn`, as of lm-format-enforcer."""

    def __init__(self, allowed: Callable[[int, Tensor], Sequence[int]], device: torch.device):
        self.allowed, self.device = allowed, device

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        allowed = self.allowed(index, ids_L)
        if len(allowed) == 0:
            raise ValueError(f"prefix_allowed_tokens_fn: got no tokens for row {index}, expected at least one")
        mask_V = torch.full_like(scores_V, float("-inf"))
        mask_V[allowed] = 0
        return scores_V + mask_V

    def forced(self, index: int, ids: list[int]) -> int | None:
        found = set(self.allowed(index, torch.tensor(ids, device=self.device)))
        return int(found.pop()) if len(found) == 1 else None


class Copies(RowProcessor):
    """A processor that keeps state, called on copies of itself: for each row one behind each of its tokens."""

    def __init__(self, processor: Scorer, start: int):
        self.start, self.fresh = start, fork(processor)
        self.paths: dict[int, list[tuple[int, Any]]] = {}  # tokens of a row, and the copy that was called behind each

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        tokens = [-1, *ids_L[self.start :].tolist()]  # the first call is behind the prompt
        path = self.paths.setdefault(index, [])
        del path[common([token for token, _ in path], tokens[:-1]) :]
        found = scores_V[None]
        for at in range(len(path), len(tokens)):
            called = fork(path[-1][1] if path else self.fresh)
            found = called(ids_L[None, : self.start + at], scores_V[None].clone())
            path.append((tokens[at], called))
        return found[0]


def unpack(words: Tensor) -> Tensor:
    """(32 W,) bool from W words."""
    return (words[:, None] >> torch.arange(BITS, dtype=words.dtype, device=words.device) & 1).bool().flatten()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def fork(processor: object) -> Any:
    """A copy with state of its own. Raises an exception for what can't be copied."""
    memo = {id(held): COPIES[type(held).__name__](held) for held in package_objects(processor)}
    memo |= {id(held): held for held in vars(processor).values() if isinstance(held, PreTrainedTokenizerBase)}
    return copy.deepcopy(processor, memo)


def package_objects(processor: object) -> list[Any]:
    """The grammar packages' objects that a processor holds."""
    values = list(getattr(processor, "__dict__", {}).values())
    values += [entry for value in values if isinstance(value, list) for entry in value]
    return [value for value in values if type(value).__name__ in COPIES]


GRAMMARS: dict[str, Callable[[Any, int], Matcher]] = {  # by names: the matcher of a processor's row
    "xgrammar.contrib.hf.LogitsProcessor": lambda own, row: xgrammar_matcher(
        own.compiled_grammars[row if len(own.compiled_grammars) > 1 else 0]
    ),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": lambda own, row: xgrammar_matcher(own.compiled_grammar),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": lambda own, row: llguidance_matcher(
        own.grammar, own.llg_tokenizer
    ),
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": lambda own, row: outlines_matcher(own.index),
}


def at_any_prefix(processor: Scorer, prompt: Tensor) -> Scorer:
    """A processor that depends on its arguments alone. Raises ValueError if it keeps state and can't be copied."""
    start = prompt.shape[1]
    if type(processor) is PrefixConstrainedLogitsProcessor:
        return PrefixFunction(processor._prefix_allowed_tokens_fn, prompt.device)
    if (least := LEAST.get(type(processor))) is not None:
        by_row = isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
        return processor if by_row else NodeProcessor(processor, least(processor))
    if not keeps_state(processor):
        return processor
    if (make := GRAMMARS.get(name(type(processor)))) is not None:
        return Grammar(partial(make, processor), start)
    try:
        return Copies(processor, start)
    except Exception as error:  # of copying, which calls anything
        raise ValueError(
            f"logits_processor: got {name(type(processor))}, which keeps state between calls, expected one that can be"
            f" copied: {error}"
        ) from error


def keeps_state(processor: object) -> bool:
    """Whether a processor is known to keep state between calls, holds a grammar, or can be reset, which says so."""
    if getattr(getattr(processor, "call_fn", None), "__name__", None) == "stateless_call":  # xgrammar's
        return False
    known = any(fnmatch(name(kind), pattern) for kind in type(processor).__mro__ for pattern in STATEFUL)
    return known or bool(package_objects(processor)) or callable(getattr(processor, "reset", None))


def name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
