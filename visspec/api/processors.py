"""Logits processors that keep state between calls, as ones that can be called at any prefix (`types.RowProcessor`).

A grammar of xgrammar, llguidance or outlines is asked through a matcher of ours for every row, which goes from prefix
to prefix by rollback. Other processors that keep state are called on copies of themselves, one behind each token.
The commonest of transformers are called once for all nodes of a draft (`types.NodeProcessor`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import cached_property
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


class Matcher:
    """Where a grammar stands behind a row's tokens. matcher: of the package."""

    matcher: Any
    beyond = False  # whether ids that its vocabulary does not have are allowed

    @property
    def finished(self) -> bool:
        """Whether it takes no more tokens."""
        return False

    def accept(self, token: int) -> bool:
        """Go to the state behind a token; false, in the same state, where it is not allowed."""
        raise NotImplementedError

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        self.matcher.rollback(count)

    def mask(self) -> Tensor | None:
        """(ids / 32,) int32: a bit for each id, the lowest first, of the tokens allowed next; None: as before."""
        raise NotImplementedError

    def text(self, token: int) -> bytes | None:
        """What a token writes; None for an end, and where it is not known."""
        return None


class XGrammarMatcher(Matcher):
    """Of a compiled grammar of xgrammar."""

    beyond = True

    def __init__(self, compiled: Any):
        import xgrammar

        self.matcher = xgrammar.GrammarMatcher(compiled)
        self.words = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
        self.compiled, self.ends = compiled, frozenset(self.matcher.stop_token_ids)

    @cached_property
    def texts(self) -> Sequence[bytes]:
        info = self.compiled.tokenizer_info  # whose property makes a list, in seconds for 150,000 tokens
        return info._handle.decoded_vocab() if hasattr(info, "_handle") else info.decoded_vocab

    @property
    def finished(self) -> bool:
        return self.matcher.is_terminated()

    def accept(self, token: int) -> bool:
        return self.matcher.accept_token(token)

    def mask(self) -> Tensor | None:
        if self.finished:
            return None
        self.matcher.fill_next_token_bitmask(self.words)
        return self.words[0].clone()

    def text(self, token: int) -> bytes | None:
        return None if token in self.ends else bytes(self.texts[token])


class LLGuidanceMatcher(Matcher):
    """Of a grammar of llguidance, for one of its tokenizers. Raises ValueError for one that it can't read."""

    def __init__(self, grammar: str, tokenizer: Any):
        import llguidance

        self.tokenizer, self.matcher = tokenizer, llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if self.matcher.is_error():
            raise ValueError(f"grammar: got {grammar[:80]!r}, expected one of llguidance: {self.matcher.get_error()}")

    @property
    def finished(self) -> bool:
        return self.matcher.is_stopped()

    def accept(self, token: int) -> bool:
        return self.matcher.try_consume_tokens([token]) == 1

    def mask(self) -> Tensor:
        return torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.int32)

    def text(self, token: int) -> bytes | None:
        return None if self.tokenizer.is_special_token(token) else self.tokenizer.decode_bytes([token])


class OutlinesMatcher(Matcher):
    """Of an index of outlines_core, which has no vocabulary."""

    def __init__(self, index: Any):
        self.index, self.states = index, [index.get_initial_state()]

    def accept(self, token: int) -> bool:
        state = self.index.get_next_state(self.states[-1], token)
        if state is None and self.index.is_final_state(self.states[-1]):
            state = self.states[-1]
        if state is not None:
            self.states.append(state)
        return state is not None

    def rollback(self, count: int) -> None:
        del self.states[len(self.states) - count :]

    def mask(self) -> Tensor:
        allowed = torch.tensor(self.index.get_allowed_tokens(self.states[-1]) or [])
        bits = torch.zeros(int(allowed.max()) // BITS * BITS + BITS if len(allowed) else 0, dtype=torch.int32)
        bits[allowed] = 1
        return (bits.view(-1, BITS) << torch.arange(BITS, dtype=torch.int32)).sum(1, dtype=torch.int32)


class Path:
    """A row's matcher, the tokens that it stands behind, and what it allows behind each of them."""

    def __init__(self, matcher: Matcher):
        first = matcher.mask()
        assert first is not None
        self.matcher, self.tokens, self.masks, self.accepted = matcher, list[int](), [first], 0

    def mask(self, tokens: list[int]) -> Tensor | None:
        """What is allowed behind tokens; None where the grammar refuses one of them."""
        keep = common(self.tokens, tokens)
        if keep == len(tokens):
            return self.masks[keep]
        if keep < self.accepted:
            self.matcher.rollback(self.accepted - keep)
            self.accepted = keep
        del self.tokens[keep:], self.masks[keep + 1 :]
        for token in tokens[keep:]:
            if self.matcher.accept(token):
                self.accepted += 1
            elif not self.matcher.finished:
                return None
            self.tokens.append(token)
            mask = self.matcher.mask()
            self.masks.append(self.masks[-1] if mask is None else mask)
        return self.masks[-1]


class Grammar(RowProcessor):
    """Masks what a grammar does not allow. make: the matcher of a row; start: length of the prompt."""

    def __init__(self, make: Callable[[int], Matcher], start: int):
        self.make, self.start = make, start
        self.paths: dict[int, Path] = {}

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        path = self._path(index)
        words = path.mask(ids_L[self.start :].tolist())
        if words is None:  # behind an end, or where another processor allows what the grammar does not
            return scores_V
        allowed = unpack(words.to(scores_V.device))[: len(scores_V)]
        allowed = torch.nn.functional.pad(allowed, (0, len(scores_V) - len(allowed)), value=path.matcher.beyond)
        return scores_V.masked_fill(~allowed, float("-inf"))

    def forced(self, index: int, ids: list[int]) -> int | None:
        path = self._path(index)
        words = path.mask(ids[self.start :])
        found = [] if words is None else unpack(words).nonzero()[: SPELLINGS + 1].flatten().tolist()
        if len(found) == 1:
            return found[0]
        texts = {token: text for token in found[:SPELLINGS] if (text := path.matcher.text(token)) is not None}
        longest = max(texts, key=lambda token: (len(texts[token]), token), default=None)
        alike = len(texts) == len(found) and all(texts[longest].startswith(text) for text in texts.values())
        return longest if alike else None

    def _path(self, index: int) -> Path:
        if index not in self.paths:
            self.paths[index] = Path(self.make(index))
        return self.paths[index]


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


GRAMMARS: dict[str, Callable[[Any], Callable[[int], Matcher]]] = {  # by names: what makes the matcher of a row
    "xgrammar.contrib.hf.LogitsProcessor": lambda own: (
        lambda row: XGrammarMatcher(own.compiled_grammars[row if len(own.compiled_grammars) > 1 else 0])
    ),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": lambda own: lambda row: XGrammarMatcher(own.compiled_grammar),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": lambda own: (
        lambda row: LLGuidanceMatcher(own.grammar, own.llg_tokenizer)
    ),
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": lambda own: lambda row: OutlinesMatcher(own.index),
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
        return Grammar(make(processor), start)
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
