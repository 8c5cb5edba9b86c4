"""Chats of many clients on one model. A thread runs a stream of rows (`Accelerated.stream`), which answers join as
others leave. From that thread, each row reports the parts of OpenAI's streamed choices.
"""

from __future__ import annotations

import copy
import logging
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from visspec.api.captions import move_inputs, process_chats, tokenizer_of
from visspec.api.schemas import JsonGrammars
from visspec.api.server.completions import ChatBody, RequestError
from visspec.api.text.accelerate import Accelerated
from visspec.io.checkpoint import first_line
from visspec.io.images import MAX_PIXELS
from visspec.loop.stream import Answer
from visspec.models.decoder.prefix import PrefixCache
from visspec.types import Processor

Tell = Callable[[dict[str, Any] | Exception], Any]  # takes a piece of an answer in OpenAI's streamed form


class StopTextFilter:
    """Decodes the text of one row as its tokens arrive. Text that may still change is held back: trailing whitespace,
    incomplete characters, and the possible beginning of a stop text, which is not part of the answer.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, stops
        self.tokens: list[int] = []
        self.text = ""  # text that will not change
        self.stopped = False

    def add(self, tokens: list[int]) -> str:
        """Add tokens up to the first one that completes a stop text, and return the text that they complete."""
        for some in ([token] for token in tokens) if self.stops else [tokens]:
            self.tokens += some
            text = self._read()
            if ends := [at for stop in self.stops if (at := text.find(stop)) >= 0]:
                self.stopped = True
                return self._grown(text[: min(ends)])
        text = self._read().rstrip("\ufffd")
        beginnings = (stop[:n] for stop in self.stops for n in range(1, len(stop)))
        return self._grown(text[: len(text) - max((len(s) for s in beginnings if text.endswith(s)), default=0)])

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        return "" if self.stopped else self._grown(self._read())

    def _read(self) -> str:
        return self.decode(self.tokens).lstrip()

    def _grown(self, text: str) -> str:
        text, length = text.rstrip(), len(self.text)
        if len(text) > length:
            self.text = text
        return text[length:]


@dataclass(eq=False)
class AnswerRow:
    """One choice of a chat. `inputs` are freed when it runs, and `counts` of tokens are set at its end. `explain`
    returns why a text violates the schema.
    """

    index: int
    inputs: dict[str, Any]
    writer: StopTextFilter
    tell: Tell
    cancelled: threading.Event
    explain: Callable[[str], str | None] | None
    begun: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def put(self, tokens: list[int]) -> bool:
        """Process a round's tokens. Returns whether the row should end."""
        if text := self.writer.add(tokens):
            self._tell(text)
        return self.writer.stopped or self.cancelled.is_set()

    def finish(self, answer: Answer) -> None:
        """Send the end of the answer, or its error, to the client."""
        if answer.error is not None:
            return self.tell(answer.error)
        rest, count, stopped = self.writer.finish(), len(self.writer.tokens), self.writer.stopped
        reason = "length" if answer.ended == "length" and not stopped else "stop"
        if self.explain is not None and reason == "stop" and not stopped and (why := self.explain(self.writer.text)):
            return self.tell(RequestError(f"response_format: the answer does not fit the schema ({why})", 500))
        accepted, drafted = answer.origin[:count].count("drafted"), sum(one.levels for one in answer.rounds)
        self.counts = Counter(tokens=count, accepted=accepted, rejected=drafted - accepted)
        self._tell(rest, reason)

    def _tell(self, text: str, reason: str | None = None) -> None:
        delta = {"content": text} | ({} if self.begun else {"role": "assistant"})
        self.begun = True
        self.tell({"index": self.index, "delta": delta, "finish_reason": reason})


class TextWorker:
    """Answers chats with a stream of `slots` rows. `name` is the model's name for clients, `max_new_tokens` the default
    limit of an answer, and `max_pixels` the limit for all images of a request.
    """

    def __init__(
        self, name: str, fast: Accelerated, processor: Processor, *, slots: int = 8, max_new_tokens: int = 512,
        max_pixels: int = MAX_PIXELS, prefix_cache: int | None = None,
    ):  # fmt: skip
        fast.stream([], slots=slots)  # raises ValueError if rows can't enter a batch with this drafter
        self.name, self.fast, self.processor, self.slots = name, fast, processor, slots
        self.max_new_tokens, self.max_pixels = max_new_tokens, max_pixels
        self.context = getattr(fast.model.config.get_text_config(), "max_position_embeddings", sys.maxsize)
        self.prefixes = PrefixCache(prefix_cache)  # kept if a stream fails
        self.decode = partial(copy.deepcopy(tokenizer_of(processor)).decode, skip_special_tokens=True)  # for one thread
        self.grammars = cache(partial(JsonGrammars, tokenizer_of(processor), fast.model, "response_format"))
        self.queue: queue.Queue[AnswerRow | None] = queue.Queue(slots)
        self.running: set[AnswerRow] = set()
        self.closed = False
        self.thread = threading.Thread(target=self._work, name="visspec-chats", daemon=True)
        self.thread.start()

    def submit(self, body: ChatBody, tell: Tell, cancelled: threading.Event) -> tuple[list[AnswerRow], int]:
        """Prepare a chat and wait until the queue has room, so that few pixels are in memory. Returns its rows, one per
        choice, and the prompt's length. Not thread-safe. Raises ValueError.
        """
        images = body.images(self.max_pixels)
        try:
            inputs = process_chats(self.processor, [body.chat], [images])
        except Exception as error:  # chat templates and processors may raise anything
            raise ValueError(f"messages: the model's processor rejects them ({first_line(error)}).") from None
        length, explain = inputs["input_ids"].shape[1], None
        inputs = move_inputs(inputs, self.fast.model) | body.options | {"max_new_tokens": self._room(length, body)}
        if (schema := body.json_schema) is not None:
            inputs |= self.grammars().options(schema)
            explain = partial(self.grammars().explain, schema=schema)
        rows = []
        for index in range(body.n):
            own = inputs | ({} if body.seed is None else {"seed": body.seed + index})
            rows.append(AnswerRow(index, own, StopTextFilter(self.decode, body.stop), tell, cancelled, explain))
            self.queue.put(rows[-1])
        return rows, length

    def _room(self, length: int, body: ChatBody) -> int:
        """Return how many tokens an answer may have after a prompt. Raises ValueError beyond the model's context."""
        room = self.context - length
        most = body.max_completion_tokens or body.max_tokens or max(1, min(self.max_new_tokens, room))
        if most > room:
            raise ValueError(f"messages: {length} + {most} tokens exceed the model's context, {self.context}.")
        return most

    def close(self) -> None:
        """Finish the rows in the queue."""
        self.queue.put(None)
        self.thread.join()

    def _work(self) -> None:
        while not self.closed:
            try:
                for answer in self.fast.stream(self._entries(), slots=self.slots, prefix_cache=self.prefixes):
                    self.running.discard(answer.id)
                    answer.id.finish(answer)
            except Exception as error:  # the model failed: running rows are lost, waiting ones are not
                logging.getLogger(__name__).exception("%s: a pass failed", self.name)
                for row in self.running:
                    row.tell(error)
                self.running.clear()

    def _entries(self) -> Iterator[dict[str, Any] | None]:
        while True:
            try:
                row = self.queue.get(block=not self.running)
            except queue.Empty:
                yield None
                continue
            if row is None:
                self.closed = True
                return
            if not row.cancelled.is_set():
                self.running.add(row)
                entry, row.inputs = row.inputs | {"id": row, "on_tokens": row.put}, {}  # does not keep the pixels
                yield entry
