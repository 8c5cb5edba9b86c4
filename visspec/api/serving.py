"""Requests of many clients on one model: a bounded number of them, and a thread per model that works on them.

`TextWorker` drives a stream of rows (`Accelerated.stream`): answers enter the running batch as others leave.
`ImageWorker` draws images, one request at a time. Both tell what happens through `QueuedRequest.tell`, from their
thread. A job that is cancelled leaves its slot with the next round.
"""

from __future__ import annotations

import copy
import io
import logging
import queue
import threading
import time
from asyncio import CancelledError, Event, Lock
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from visspec.api import completions
from visspec.api.accelerate import Accelerated
from visspec.api.captions import move_inputs
from visspec.api.completions import ChatRequest, RequestError, RequestLimits
from visspec.api.image_call import ImageRequest
from visspec.api.images import ImagePipeline
from visspec.api.schemas import JsonGrammars
from visspec.io.files import Json
from visspec.loop.stats import by_depth
from visspec.loop.stream import Answer
from visspec.types import Processor

BODIES = 100_000_000  # bytes of bodies that are held at once
logger = logging.getLogger(__name__)


class ClientDisconnected(Exception):
    """The client has disconnected."""


@dataclass(frozen=True)
class TextResult:
    """A finished answer. ended: "stop" or "length"."""

    text: str
    tokens: int
    prompt: int  # tokens
    ended: str


@dataclass(frozen=True)
class ImageResult:
    """Finished images, as PNG files."""

    files: list[bytes]


Told = str | TextResult | ImageResult | Exception | None  # what a worker tells of a request


@dataclass(eq=False)
class QueuedRequest:
    """One request. tell: called in the worker's thread, with None when the model has read a chat, with pieces of text
    (streamed answers), and at last with the result or an exception.
    """

    tell: Callable[[Told], None]
    cancelled: bool = False


@dataclass(eq=False)
class QueuedImages(QueuedRequest):
    """A request of images."""

    asked: ImageRequest = field(kw_only=True)


@dataclass(eq=False)
class QueuedChat(QueuedRequest):
    """A request of a chat. inputs: arguments of generate, while it waits. prompt: tokens."""

    asked: ChatRequest = field(kw_only=True)
    inputs: dict[str, Any] = field(default_factory=dict)
    prompt: int = 0
    writer: StopTextFilter | None = None
    begun: bool = False

    def put(self, tokens: list[int]) -> bool:
        """Take a round's tokens. Returns whether the row is to end."""
        if not self.begun:
            self.begun = True
            self.tell(None)
        if self.cancelled or self.writer is None:
            return self.cancelled
        piece = self.writer.add(tokens)
        if piece and self.asked.stream:
            self.tell(piece)
        return self.writer.stopped


Job = TypeVar("Job", bound=QueuedRequest)


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


class ServerMetrics:
    """Counts of what was served, as Prometheus reads them. Added to in any thread, each name in one."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by kind and outcome
        self.seconds = 0.0  # of finished requests
        self.tokens = self.images = self.passes = self.committed = 0
        self.drift = 0.0
        self.reached: Counter[int] = Counter()  # by depth
        self.accepted: Counter[int] = Counter()

    def row(self, answer: Answer) -> None:
        """Count the rounds of a row that has ended."""
        self.tokens += len(answer.tokens)
        self.passes += len(answer.rounds)
        self.committed += sum(r.committed[0] for r in answer.rounds)
        self.drift += answer.drift
        for depth, (reached, accepted) in enumerate(zip(*by_depth(answer.rounds)), 1):
            self.reached[depth] += reached
            self.accepted[depth] += accepted

    def over(self, kind: str, outcome: str, began: float) -> None:
        """Count a request that has ended."""
        self.requests[kind, outcome] += 1
        self.seconds += time.monotonic() - began

    def lines(self, now: dict[str, float]) -> str:
        """Prometheus' text. now: gauges of the moment."""
        reached, accepted = sum(self.reached.values()), sum(self.accepted.values())
        gauges = {
            **now,
            "tau": self.committed / max(self.passes, 1),
            "acceptance": accepted / max(reached, 1),
            "drift_per_token": self.drift / max(self.tokens, 1),
        }
        counters = {
            "tokens": self.tokens,
            "images": self.images,
            "passes": self.passes,
            "drift": self.drift,
            "request_seconds": self.seconds,
        }
        found = [f"# TYPE visspec_{name} gauge\nvisspec_{name} {value:g}" for name, value in gauges.items()]
        for name, value in counters.items():
            found.append(f"# TYPE visspec_{name}_total counter\nvisspec_{name}_total {value!r}")
        found.append("# TYPE visspec_requests_total counter")
        for (kind, outcome), count in sorted(self.requests.items()):
            found.append(f'visspec_requests_total{{kind="{kind}",outcome="{outcome}"}} {count}')
        for name, counts in (("reached", self.reached), ("accepted", self.accepted)):
            found.append(f"# TYPE visspec_{name}_total counter")
            found += [f'visspec_{name}_total{{depth="{d}"}} {n}' for d, n in sorted(counts.items())]
        return "\n".join(found) + "\n"


class RequestQueue:
    """Takes requests, `places` at once, until it closes. pixels, bytes: of images that are decoded, and of bodies that
    are held, at once. Used in the thread of the server's event loop only.
    """

    def __init__(self, places: int, meters: ServerMetrics, pixels: int = RequestLimits.at_once, bytes: int = BODIES):
        self.places, self.meters, self.most_pixels, self.most_bytes = places, meters, pixels, bytes
        self.taken, self.closing, self.pixels, self.bytes = 0, False, 0, 0
        self.turn, self.freed = Lock(), Event()

    @contextmanager
    def meter(self, kind: str) -> Iterator[None]:
        """Counts a request and how it ended. Raises Refused for one that is cut off because the server stops."""
        began, outcome = time.monotonic(), "ok"
        try:
            yield
        except CancelledError:
            outcome = "stopping"
            said = "server: got an order to stop before this answer was complete, expected none"
            raise RequestError(said, 503, code=outcome) from None
        except BaseException as error:
            outcome = "gone" if isinstance(error, ClientDisconnected) else "failed"
            if isinstance(error, RequestError) and error.status < 500:
                outcome = "refused"
            if isinstance(error, RequestError) and error.status in (429, 503):
                outcome = error.code or outcome
            raise
        finally:
            self.meters.over(kind, outcome, began)

    def check(self) -> None:
        """Raises Refused if there is no place."""
        if self.closing:
            raise RequestError("server: got a request while it stops, expected none", 503, code="stopping")
        if self.taken >= self.places:
            raise RequestError(
                f"server: got a request beside {self.taken} others, expected at most {self.places} at once",
                429,
                code="queue_full",
            )

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one request whose body is complete. Raises Refused if there is none."""
        self.check()
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    @contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """Gives a function that is told the bytes of a body as they come. It raises Refused where all bodies have too
        many.
        """
        mine = 0

        def add(count: int) -> None:
            nonlocal mine
            if self.bytes + count > self.most_bytes:
                raise RequestError(
                    f"server: got bodies of more than {self.most_bytes} bytes together, expected at most as many",
                    429,
                    code="queue_full",
                )
            self.bytes += count
            mine += count

        try:
            yield add
        finally:
            self.bytes -= mine

    @asynccontextmanager
    async def decoded(self, pixels: int) -> AsyncIterator[None]:
        """Room for images. Requests that have some get it in the order in which they came."""
        if pixels:
            async with self.turn:
                while self.pixels and self.pixels + pixels > self.most_pixels:
                    self.freed.clear()
                    await self.freed.wait()
                self.pixels += pixels
        try:
            yield
        finally:
            self.pixels -= pixels
            self.freed.set()

    @property
    def patience(self) -> int:
        """Seconds after which a client may come again: what a request took so far."""
        served = sum(self.meters.requests.values())
        return min(max(round(self.meters.seconds / max(served, 1)), 1), 60)


class QueueWorker(Generic[Job]):
    """A thread that works on jobs in the order in which they come. `close` lets it finish those it has."""

    def __init__(self, name: str, meters: ServerMetrics):
        self.name, self.meters = name, meters
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.running: set[Job] = set()
        self.thread = threading.Thread(target=self._work, name=f"visspec-{type(self).__name__.lower()}", daemon=True)
        self.thread.start()

    def submit(self, job: Job) -> None:
        self.jobs.put(job)

    def close(self) -> None:
        self.jobs.put(None)
        self.thread.join()

    def _next(self, block: bool) -> Job | None:
        """The next job that is still wanted; None at the end. Raises queue.Empty if none waits."""
        while (job := self.jobs.get(block=block)) is not None and job.cancelled:
            pass
        return job

    def _work(self) -> None:
        raise NotImplementedError


class TextWorker(QueueWorker[QueuedChat]):
    """Answers chats on a stream of `slots` rows. name: of the model, as clients know it."""

    def __init__(
        self,
        name: str,
        fast: Accelerated,
        processor: Processor,
        meters: ServerMetrics,
        slots: int,
        limits: RequestLimits,
    ):
        fast.stream([], slots=slots)  # raises ValueError for a drafter whose rows can't enter a running batch
        self.fast, self.processor, self.slots, self.limits = fast, processor, slots, limits
        self.decoder = copy.deepcopy(processor.tokenizer)  # tokenizers are not made for several threads
        self.processing = threading.Lock()
        self.tensors = completions.takes_tensors(processor)
        self.grammars: JsonGrammars | None = None
        self.over = False
        super().__init__(name, meters)

    def job(self, asked: ChatRequest, tell: Callable[[Told], None]) -> QueuedChat:
        """A job of a chat, whose images are decoded here and let go. Raises Refused. Called in any thread."""
        inputs = completions.prompt_of(self.processor, asked, self.processing, self.tensors)
        length = inputs["input_ids"].shape[1]
        most = completions.room(length, asked, self.limits)
        inputs = move_inputs(inputs, self.fast.model) | asked.options | {"max_new_tokens": most}
        if asked.schema is not None:
            inputs |= self._by_schema(asked.schema)
        writer = StopTextFilter(self._decode, asked.stops) if asked.stops or asked.stream else None
        return QueuedChat(tell, asked=asked, inputs=inputs, prompt=length, writer=writer)

    def _by_schema(self, schema: Json) -> dict[str, Any]:
        """generate's arguments for an answer of a schema. Raises Refused."""
        try:
            with self.processing:
                if self.grammars is None:
                    self.grammars = JsonGrammars(self.processor.tokenizer, self.fast.model, "response_format")
                return self.grammars.options(schema)
        except ValueError as error:
            raise RequestError(str(error), param="response_format") from None

    def _decode(self, tokens: list[int]) -> str:
        return self.decoder.decode(tokens, skip_special_tokens=True)

    def _work(self) -> None:
        while not self.over:
            try:
                for answer in self.fast.stream(self._entries(), slots=self.slots):
                    self._answer(answer.id, answer)
            except Exception as error:  # of the model itself: the rows that ran are lost, those that wait are not
                logger.exception("%s: a pass failed", self.name)
                for job in self.running:
                    job.tell(error)
                self.running.clear()

    def _entries(self) -> Iterator[dict[str, Any] | None]:
        """What the stream is given; it waits here while no row runs."""
        while True:
            try:
                job = self._next(block=not self.running)
            except queue.Empty:
                yield None
                continue
            if job is None:
                self.over = True
                return
            self.running.add(job)
            entry = job.inputs | {"id": job, "on_tokens": job.put}
            job.inputs = {}
            yield entry
            entry.clear()  # of pixels too, before it waits

    def _answer(self, job: QueuedChat, answer: Answer) -> None:
        self.running.discard(job)
        self.meters.row(answer)
        if answer.error is not None:
            job.tell(answer.error)
            return
        writer = job.writer or StopTextFilter(self._decode)
        if job.writer is None:
            writer.add(answer.tokens)
        if (rest := writer.finish()) and job.asked.stream:
            job.tell(rest)
        ended = "length" if answer.ended == "length" and not writer.stopped else "stop"
        job.tell(TextResult(writer.text, len(writer.tokens), job.prompt, ended))


class ImageWorker(QueueWorker[QueuedImages]):
    """Draws images with a pipeline."""

    def __init__(self, name: str, pipe: ImagePipeline, meters: ServerMetrics):
        self.pipe = pipe
        super().__init__(name, meters)

    def _work(self) -> None:
        while (job := self._next(block=True)) is not None:
            self.running.add(job)
            try:
                job.tell(ImageResult(self._draw(job)))
            except Exception as error:
                if not isinstance(error, ValueError):
                    logger.exception("%s: images failed", self.name)
                job.tell(error)
            self.running.discard(job)

    def _draw(self, job: QueuedImages) -> list[bytes]:
        def look(pipe: ImagePipeline, *_: int | dict) -> None:
            if job.cancelled:
                pipe.interrupt = True

        out = self.pipe.draw(replace(job.asked, callback_on_step_end=look))
        self.meters.images += len(out.images)
        files = []
        for image in out.images:
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            files.append(buffer.getvalue())
        return files
