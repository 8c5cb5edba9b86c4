"""Answers to chats: the text of a choice as its tokens come, and log-probabilities in OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from visspec.loop.stats import added_text

LEAST = -9999.0  # OpenAI's value for a token without probability
CONTEXT = 3  # tokens: a character of UTF-8 has one more at most


class StopTextFilter:
    """The text of one row as its tokens come. Held back is what may still change: blanks at the end, half a
    character, and what may become a stop text, which is no part of the answer.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, stops
        self.tokens: list[int] = []
        self.text = ""  # that won't change
        self.stopped = False

    def add(self, tokens: list[int]) -> str:
        """Take tokens, and return the text that they add."""
        before = len(self.tokens)
        self.tokens += tokens
        full = self._read(len(self.tokens))
        if any(stop in full for stop in self.stops):  # the first token that completes one: rounds don't matter
            numbers = range(before + 1, len(self.tokens) + 1)
            del self.tokens[next(n for n in numbers if any(s in self._read(n) for s in self.stops)) :]
            self.stopped = True
            full = self._read(len(self.tokens))
            return self._grown(full[: min(at for stop in self.stops if (at := full.find(stop)) >= 0)])
        full = full.rstrip("\ufffd")
        return self._grown(full[: len(full) - max((pending(full, stop) for stop in self.stops), default=0)])

    def finish(self) -> str:
        """The text that was held back, when no token follows."""
        return "" if self.stopped else self._grown(self._read(len(self.tokens)))

    def _read(self, count: int) -> str:
        return self.decode(self.tokens[:count]).lstrip()

    def _grown(self, text: str) -> str:
        text, before = text.rstrip(), len(self.text)
        if len(text) > before:
            self.text = text
        return text[before:]


def pending(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop text."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def token_logprobs(
    decode: Callable[[list[int]], str], before: Sequence[int], tokens: Sequence[int], logits_TV: Tensor, top: int
) -> list[dict[str, Any]]:
    """An entry for each of T tokens: the text that it adds behind those before, its log-softmax of `logits_TV`, and the
    same of the `top` most likely ones in its place. `bytes` is None of a token that ends within a character.
    """
    logits_TV = logits_TV.float()
    total_T1, best = logits_TV.logsumexp(dim=-1, keepdim=True), logits_TV.topk(min(top, logits_TV.shape[-1]))
    own_T1 = logits_TV.gather(1, torch.tensor(tokens, device=logits_TV.device)[:, None])
    values_TK = (torch.cat([own_T1, best.values], dim=1) - total_T1).tolist()
    context, entries = list(before[-CONTEXT:]), []
    for token, likely, values in zip(tokens, best.indices.tolist(), values_TK):
        text = decode(context)
        texts = [added_text(text, decode([*context, id])) for id in (token, *likely)]
        own, *others = map(_entry, texts, values)
        entries.append(own | {"top_logprobs": others})
        context = [*context, token][-CONTEXT:]
    return entries


def _entry(text: str, logprob: float) -> dict[str, Any]:
    spelled = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": spelled}
