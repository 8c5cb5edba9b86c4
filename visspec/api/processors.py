"""Logits processors that can be called at any prefix, as the verification of drafts needs them.

Grammars of xgrammar go from prefix to prefix by its own rollback. Other processors that keep state between calls, as
those of llguidance and outlines, are called on copies of themselves, one behind each token. The commonest processors of
transformers are called once for all nodes of a draft (`types.NodeProcessor`).
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
XGRAMMAR = ("xgrammar.contrib.hf.LogitsProcessor", "outlines.backends.xgrammar.XGrammarLogitsProcessor")
BITS = 32  # of a word of xgrammar's masks
SPELLINGS = 32  # tokens, at most, that are beginnings of one text


class Matcher:
    """xgrammar's matcher of a row, which goes from prefix to prefix by rollback."""

    def __init__(self, compiled: Any):
        import xgrammar

        self.own, self.info = xgrammar.GrammarMatcher(compiled), compiled.tokenizer_info
        self.words = xgrammar.allocate_token_bitmask(1, self.info.vocab_size)
        self.tokens: list[int] = []
        self.masks: list[Tensor] = []  # (V,) bool, behind each prefix of the tokens
        self._mask()

    def _mask(self) -> None:
        if self.own.is_terminated():  # its own processor goes on with the last mask
            self.masks.append(self.masks[-1])
            return
        self.own.fill_next_token_bitmask(self.words)
        self.masks.append((self.words[0][:, None] >> torch.arange(BITS, dtype=torch.int32) & 1).bool().flatten())

    def allowed(self, tokens: list[int]) -> Tensor | None:
        """The mask behind tokens, of which those behind an end change nothing; None where one of them is refused."""
        keep = common(self.tokens, tokens)
        if keep < len(tokens) and keep < len(self.tokens):
            self.own.rollback(len(self.tokens) - keep)
            del self.tokens[keep:], self.masks[keep + 1 :]
        for token in tokens[keep:]:
            if self.own.is_terminated():
                return self.masks[-1]
            if not self.own.accept_token(token):
                return None
            self.tokens.append(token)
            self._mask()
        return self.masks[len(tokens)]

    @cached_property
    def texts(self) -> Sequence[bytes]:
        """What each token writes. The public property makes a list, in seconds for 150,000 tokens."""
        return self.info._handle.decoded_vocab() if hasattr(self.info, "_handle") else self.info.decoded_vocab


class Grammar(RowProcessor):
    """Masks what a grammar of xgrammar does not allow.

    Args:
        compiled: The grammars of all rows, or one for all of them.
        start: Length of the prompt.
    """

    def __init__(self, compiled: Sequence[Any], start: int):
        self.compiled, self.start = compiled, start
        self.matchers: dict[int, Matcher] = {}

    def matcher(self, index: int) -> Matcher:
        if index not in self.matchers:
            self.matchers[index] = Matcher(self.compiled[index if len(self.compiled) > 1 else 0])
        return self.matchers[index]

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        allowed = self.matcher(index).allowed(ids_L[self.start :].tolist())
        if allowed is None:  # where another processor allows what the grammar does not
            return scores_V
        allowed = allowed.to(scores_V.device)[: len(scores_V)]
        allowed = torch.nn.functional.pad(allowed, (0, len(scores_V) - len(allowed)), value=True)
        return scores_V.masked_fill(~allowed, float("-inf"))

    def forced(self, index: int, ids: list[int]) -> int | None:
        matcher = self.matcher(index)
        allowed = matcher.allowed(ids[self.start :])
        found = [] if allowed is None else allowed.nonzero()[: SPELLINGS + 1].flatten().tolist()
        if len(found) == 1:
            return found[0]
        if not found or len(found) > SPELLINGS or not {*found}.isdisjoint(matcher.own.stop_token_ids):
            return None
        texts = {token: bytes(matcher.texts[token]) for token in found}
        longest = max(texts, key=lambda token: (len(texts[token]), token))
        return longest if all(texts[longest].startswith(text) for text in texts.values()) else None


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


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def fork(processor: object) -> Any:
    """A copy with state of its own. Raises an exception for what can't be copied."""
    memo = {id(held): COPIES[type(held).__name__](held) for held in package_objects(processor)}
    memo |= {id(held): held for held in vars(processor).values() if isinstance(held, PreTrainedTokenizerBase)}
    memo[id(torch)] = torch  # which outlines' processors hold
    return copy.deepcopy(processor, memo)


def package_objects(processor: object) -> list[Any]:
    """The grammar packages' objects that a processor holds."""
    values = list(getattr(processor, "__dict__", {}).values())
    values += [entry for value in values if isinstance(value, list) for entry in value]
    return [value for value in values if type(value).__name__ in COPIES]


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
    if name(type(processor)) in XGRAMMAR:
        own: Any = processor
        return Grammar(getattr(own, "compiled_grammars", None) or [own.compiled_grammar], start)
    try:
        return Copies(processor, start)
    except Exception as error:  # of copying, which calls anything
        raise ValueError(f"logits_processor: the state of {name(type(processor))} can't be copied: {error}") from error


def keeps_state(processor: object) -> bool:
    """Whether a processor is known to keep state between calls, holds a grammar, or can be reset, which says so."""
    if getattr(getattr(processor, "call_fn", None), "__name__", None) == "stateless_call":  # xgrammar's
        return False
    known = any(fnmatch(name(kind), pattern) for kind in type(processor).__mro__ for pattern in STATEFUL)
    return known or bool(package_objects(processor)) or callable(getattr(processor, "reset", None))


def name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
