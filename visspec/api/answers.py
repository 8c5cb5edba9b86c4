"""Answers to chats: the text of each choice as its tokens come, log-probabilities, and OpenAI's form of them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from visspec.api.completions import ChatRequest
from visspec.loop.stats import added_text
from visspec.loop.stream import Answer
from visspec.types import Processor

LEAST = -9999.0  # OpenAI's value for a token without probability
CONTEXT = 3  # tokens: a character of UTF-8 has one more at most
Entries = list[dict[str, Any]]  # OpenAI's logprobs, one for each token


@dataclass(frozen=True)
class Piece:
    """What a round added to choice `index` of a streamed answer. logprobs: None where none were asked for."""

    index: int
    text: str
    logprobs: Entries | None = None


@dataclass(frozen=True)
class TextResult:
    """A finished choice. message: as parsed, its text and calls; logprobs: of all its tokens, or of a streamed answer
    those that no piece had; tokens: their number; prompt: that of the prompt's; ended: OpenAI's `finish_reason`.
    """

    index: int
    message: dict[str, Any]
    tokens: int
    prompt: int
    ended: str
    answer: Answer
    logprobs: Entries | None = None


Told = Piece | TextResult | list[bytes] | Exception | None  # what a worker tells of a request; bytes: of PNG files


@dataclass(eq=False)
class QueuedRequest:
    """One request. tell: called in the worker's thread, with None when the model has read a chat, with pieces
    (streamed answers), and at last with the result, that of each choice of a chat, or an exception.
    """

    tell: Callable[[Told], None]
    cancelled: bool = False


@dataclass(eq=False)
class QueuedChat(QueuedRequest):
    """A request of a chat, of one row a choice. inputs: arguments of generate, while it waits. prompt: its ids."""

    asked: ChatRequest = field(kw_only=True)
    inputs: dict[str, Any] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    unread: int = 0  # choices whose prompt the model has not read
    left: int = 0  # choices without a result


@dataclass(eq=False)
class Choice:
    """A row of a chat. live: whether its text is read round by round. logprobs: of its tokens, if they are asked for,
    of which `told` went to the client.
    """

    job: QueuedChat
    index: int
    writer: StopTextFilter
    live: bool
    logprobs: Entries | None
    told: int = 0
    begun: bool = False

    def arguments(self) -> dict[str, Any]:
        """Arguments of the stream. Seeds count up from the request's."""
        asked, found = self.job.asked, self.job.inputs | {"id": self, "on_tokens": self.put}
        if asked.penalties is not None:
            penalties = replace(asked.penalties, prompt=len(self.job.prompt))
            found["logits_processor"] = [penalties, *found.get("logits_processor", ())]  # a grammar has the last word
        if self.logprobs is not None:
            found["on_logits"] = self.read
        return found | ({"seed": found["seed"] + self.index} if "seed" in found else {})

    def read(self, tokens: list[int], logits_TV: Tensor) -> None:
        """Take the logits of a round's tokens, before these."""
        before, top = self.writer.tokens, self.job.asked.top
        if self.logprobs is not None and top is not None:
            self.logprobs += token_logprobs(self.writer.decode, before, tokens, logits_TV, top)

    def put(self, tokens: list[int]) -> bool:
        """Take a round's tokens. Returns whether the row is to end."""
        job = self.job
        if not self.begun:
            self.begun = True
            job.unread -= 1
            if not job.unread:
                job.tell(None)
        if job.cancelled or not self.live:
            return job.cancelled
        piece = self.writer.add(tokens)
        if not job.asked.tools:  # those are parsed at the end
            self.say(piece)
        return self.writer.stopped

    def say(self, piece: str) -> None:
        """Tell what is new of a streamed answer."""
        if self.job.asked.stream and (piece or (self.logprobs is not None and self.told < len(self.writer.tokens))):
            self.job.tell(Piece(self.index, piece, self.take()))

    def take(self) -> Entries | None:
        """The logprobs that were not told."""
        if self.logprobs is None:
            return None
        before, self.told = self.told, len(self.writer.tokens)
        return self.logprobs[before : self.told]


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


def response_template(processor: Processor, model: PreTrainedModel) -> Any:
    """How a model writes messages, for `parse_response`, by its tokenizer or by transformers; None if neither knows."""
    if (own := getattr(processor.tokenizer, "response_template", None)) is not None:
        return own
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # transformers' own server, which needs more than is installed here
        return None
    return get_response_template(processor, model)


def parsed_message(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form from that of transformers' `parse_response`."""
    calls = []
    for call in parsed.get("tool_calls") or ():
        name, given = call["function"]["name"], call["function"].get("arguments") or {}
        function = {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}
        calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
    text = parsed.get("content")
    return {"content": text, "tool_calls": calls} if calls else {"content": text or ""}


def token_logprobs(
    decode: Callable[[list[int]], str], before: Sequence[int], tokens: Sequence[int], logits_TV: Tensor, top: int
) -> Entries:
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


def completion(name: str, id: str, model: str, *choices: dict[str, Any]) -> dict[str, Any]:
    """The frame of a completion, or of a piece of a streamed one."""
    return {"id": id, "object": name, "created": int(time.time()), "model": model, "choices": choices}


def choice(index: int, logprobs: Entries | None, ended: str | None, **content: dict[str, Any]) -> dict[str, Any]:
    """A choice of a completion: its `message`, or a `delta` of a streamed one."""
    given = None if logprobs is None else {"content": logprobs, "refusal": None}
    return {"index": index, **content, "logprobs": given, "finish_reason": ended}


def usage(results: Collection[TextResult]) -> dict[str, Any]:
    """Counts of a completion. The prompt counts once. Beyond OpenAI's own: tau, tokens of a round."""
    prompt, new = max(result.prompt for result in results), sum(result.tokens for result in results)
    rounds = [one for result in results for one in result.answer.rounds]
    accepted = sum(result.answer.origin[: result.tokens].count("drafted") for result in results)
    details = {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(one.levels for one in rounds) - accepted,
        "tau": sum(one.committed[0] for one in rounds) / max(len(rounds), 1),
    }
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return counts | {"completion_tokens_details": details}
