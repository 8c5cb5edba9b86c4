"""Logits processors that can be called with any prefix, as verification of drafts requires.

Grammars of xgrammar move between prefixes by its own rollback. Other processors that keep state between calls, such as
those of llguidance and outlines, are called on copies of themselves, one for each token. The most common processors of
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

Scorer = Callable[[Tensor, Tensor], Tensor]  # takes ids (B, L) and scores (B, V)
STATEFUL = {  # names, or with "*" modules, of processors whose scores depend on earlier calls
    "xgrammar.contrib.hf.LogitsProcessor",  # unless stateless=True
    "logits_processor_zoo.transformers.*",
    "outlines.backends.*",
    "transformers_cfg.generation.logits_process.GrammarConstrainedLogitsProcessor",
    "transformers.generation.logits_process.SynthIDTextWatermarkLogitsProcessor",
    "transformers.generation.logits_process.DiaEOSDelayPatternLogitsProcessor",
}
COPIES: dict[str, Callable[[Any], Any]] = {  # copy functions for objects of grammar packages that `copy` rejects
    **dict.fromkeys(("CompiledGrammar", "LLTokenizer", "Index"), lambda constant: constant),
    "GrammarMatcher": lambda matcher: matcher.fork(),
    "LLMatcher": lambda matcher: matcher.deep_copy(),
}
LEAST: dict[type, Callable[[Any], int]] = {  # for `types.NodeProcessor`: the prefix length from which nothing changes
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
BITS = 32  # bits per word of xgrammar's masks
SPELLINGS = 32  # maximum number of tokens that begin the same text


class Matcher:
    """xgrammar's matcher of a row, which moves between prefixes by rollback."""

    def __init__(self, compiled: Any):
        import xgrammar

        self.own, self.info = xgrammar.GrammarMatcher(compiled), compiled.tokenizer_info
        self.words = xgrammar.allocate_token_bitmask(1, self.info.vocab_size)
        self.tokens: list[int] = []
        self.masks: list[Tensor] = []  # (V,) bool, after each prefix of the tokens
        self._mask()

    def _mask(self) -> None:
        if self.own.is_terminated():  # xgrammar's processor keeps the last mask
            self.masks.append(self.masks[-1])
            return
        self.own.fill_next_token_bitmask(self.words)
        self.masks.append((self.words[0][:, None] >> torch.arange(BITS, dtype=torch.int32) & 1).bool().flatten())

    def allowed(self, tokens: list[int]) -> Tensor | None:
        """Return the mask after tokens; None if the grammar rejects one of them. Tokens after an end change nothing."""
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
        """Bytes of each token. xgrammar's public property builds a list, which takes seconds for 150,000 tokens."""
        return self.info._handle.decoded_vocab() if hasattr(self.info, "_handle") else self.info.decoded_vocab


class Grammar(RowProcessor):
    """Masks tokens that xgrammar's grammars, one per row or one for all, do not allow. Prompts have the length
    `start`.
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
        if allowed is None:  # another processor allowed what the grammar does not
            return scores_V
        allowed = allowed.to(scores_V.device)[: len(scores_V)]
        allowed = torch.nn.functional.pad(allowed, (0, len(scores_V) - len(allowed)), value=True)
        return scores_V.masked_fill(~allowed, float("-inf"))

    def forced_token(self, index: int, ids: list[int]) -> int | None:
        matcher = self.matcher(index)
        allowed = matcher.allowed(ids[self.start :])
        tokens = [] if allowed is None else allowed.nonzero()[: SPELLINGS + 1].flatten().tolist()
        if len(tokens) == 1:
            return tokens[0]
        if not tokens or len(tokens) > SPELLINGS or not {*tokens}.isdisjoint(matcher.own.stop_token_ids):
            return None
        texts = {token: bytes(matcher.texts[token]) for token in tokens}
        longest = max(texts, key=lambda token: (len(texts[token]), token))
        return longest if all(texts[longest].startswith(text) for text in texts.values()) else None


class PrefixFunction(RowProcessor):
    """Wraps a `prefix_allowed_tokens_fn`, such as that of lm-format-enforcer."""

    def __init__(self, allowed: Callable[[int, Tensor], Sequence[int]], device: torch.device):
        self.allowed, self.device = allowed, device

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        allowed = self.allowed(index, ids_L)
        if len(allowed) == 0:
            raise ValueError(f"prefix_allowed_tokens_fn: got no tokens for row {index}, expected at least one.")
        mask_V = torch.full_like(scores_V, float("-inf"))
        mask_V[allowed] = 0
        return scores_V + mask_V

    def forced_token(self, index: int, ids: list[int]) -> int | None:
        tokens = set(self.allowed(index, torch.tensor(ids, device=self.device)))
        return int(tokens.pop()) if len(tokens) == 1 else None


class Copies(RowProcessor):
    """Calls copies of a processor that keeps state: for each row one copy per token."""

    def __init__(self, processor: Scorer, start: int):
        self.start, self.fresh = start, fork(processor)
        # per row: its tokens, and the copy that was called after each
        self.paths: dict[int, list[tuple[int, Any]]] = {}

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        tokens = [-1, *ids_L[self.start :].tolist()]  # the first call is after the prompt
        path = self.paths.setdefault(index, [])
        del path[common([token for token, _ in path], tokens[:-1]) :]
        scores = scores_V[None]
        for at in range(len(path), len(tokens)):
            forked = fork(path[-1][1] if path else self.fresh)
            scores = forked(ids_L[None, : self.start + at], scores_V[None].clone())
            path.append((tokens[at], forked))
        return scores[0]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def fork(processor: object) -> Any:
    """Return an independent copy. Raises an exception if the processor can't be copied."""
    memo = {id(part): COPIES[type(part).__name__](part) for part in package_objects(processor)}
    memo |= {id(part): part for part in vars(processor).values() if isinstance(part, PreTrainedTokenizerBase)}
    memo[id(torch)] = torch  # outlines' processors hold a reference
    return copy.deepcopy(processor, memo)


def package_objects(processor: object) -> list[Any]:
    """Return the objects of grammar packages that a processor holds."""
    values = list(getattr(processor, "__dict__", {}).values())
    values += [entry for value in values if isinstance(value, list) for entry in value]
    return [value for value in values if type(value).__name__ in COPIES]


def at_any_prefix(processor: Scorer, prompt: Tensor) -> Scorer:
    """Return a processor that only depends on its arguments. Raises ValueError if its state can't be copied."""
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
    except Exception as error:  # copying may raise anything
        raise ValueError(f"logits_processor: the state of {name(type(processor))} can't be copied: {error}") from error


def keeps_state(processor: object) -> bool:
    """Return whether a processor is known to keep state between calls, holds a grammar, or has a method to reset it."""
    if getattr(getattr(processor, "call_fn", None), "__name__", None) == "stateless_call":  # xgrammar's
        return False
    is_listed = any(fnmatch(name(kind), pattern) for kind in type(processor).__mro__ for pattern in STATEFUL)
    return is_listed or bool(package_objects(processor)) or callable(getattr(processor, "reset", None))


def name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
