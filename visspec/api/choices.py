"""What is queued for a worker, and the text of each choice of a chat as its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from visspec.api.answers import Entries, Piece, TextResult, token_logprobs
from visspec.api.completions import ChatRequest

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
