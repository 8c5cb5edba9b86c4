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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from visspec.api import chat_inputs
from visspec.api.accelerate import Accelerated
from visspec.api.answers import (
    Choice,
    QueuedChat,
    QueuedRequest,
    StopTextFilter,
    TextResult,
    Told,
    parsed_message,
    response_template,
)
from visspec.api.captions import move_inputs
from visspec.api.completions import ChatRequest, RequestError, RequestLimits
from visspec.api.image_call import ImageRequest
from visspec.api.images import ImagePipeline
from visspec.api.schemas import JsonGrammars
from visspec.io.files import Json
from visspec.loop.stats import by_depth
from visspec.loop.stream import Answer
from visspec.models.decoder.prefix import ROOM, PrefixCache
from visspec.types import Processor

BODIES = 100_000_000  # bytes of bodies that are held at once
logger = logging.getLogger(__name__)


class ClientDisconnected(Exception):
    """The client has disconnected."""


@dataclass(eq=False)
class QueuedImages(QueuedRequest):
    """A request of images."""

    asked: ImageRequest = field(kw_only=True)


Job = TypeVar("Job", bound=QueuedRequest)


class ServerMetrics:
    """Counts of what was served, as Prometheus reads them. Added to in any thread, each name in one."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by kind and outcome
        names = "tokens", "drafted_tokens", "accepted_tokens", "images", "passes"
        self.totals: dict[str, float] = dict.fromkeys(names, 0) | {"drift": 0.0, "request_seconds": 0.0}
        self.committed = 0  # tokens of rounds
        self.reused = 0  # tokens of prompts that were not read again
        self.prefixes = PrefixCache(0)  # of the model of text
        self.reached: Counter[int] = Counter()  # by depth
        self.accepted: Counter[int] = Counter()

    def row(self, answer: Answer) -> None:
        """Count the rounds of a row that has ended."""
        self.totals["tokens"] += len(answer.tokens)
        self.totals["drafted_tokens"] += sum(r.levels for r in answer.rounds)
        self.totals["accepted_tokens"] += answer.origin.count("drafted")
        self.totals["passes"] += len(answer.rounds)
        self.totals["drift"] += answer.drift
        self.committed += sum(r.committed[0] for r in answer.rounds)
        self.reused += answer.reused
        for depth, (reached, accepted) in enumerate(zip(*by_depth(answer.rounds)), 1):
            self.reached[depth] += reached
            self.accepted[depth] += accepted

    def over(self, kind: str, outcome: str, began: float) -> None:
        """Count a request that has ended."""
        self.requests[kind, outcome] += 1
        self.totals["request_seconds"] += time.monotonic() - began

    def lines(self, now: dict[str, float]) -> str:
        """Prometheus' text. now: gauges of the moment."""
        reached, accepted = sum(self.reached.values()), sum(self.accepted.values())
        gauges = {
            **now,
            "tau": self.committed / max(self.totals["passes"], 1),
            "acceptance": accepted / max(reached, 1),
            "drift_per_token": self.totals["drift"] / max(self.totals["tokens"], 1),
            "prefix_bytes": self.prefixes.bytes,
        }
        prefixes = {"hits": self.prefixes.hits, "misses": self.prefixes.misses, "tokens": self.reused}
        counters = self.totals | {f"prefix_{name}": count for name, count in prefixes.items()}
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
        """Counts a request and how it ended. Raises RequestError for one that is cut off because the server stops."""
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
        """Raises RequestError if there is no place."""
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
        """A place for one request whose body is complete. Raises RequestError if there is none."""
        self.check()
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    @contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """A function that is told the bytes of a body as they come. It raises RequestError where all have too many."""
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
        return min(max(round(self.meters.totals["request_seconds"] / max(served, 1)), 1), 60)


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
        prefix_cache: int = ROOM,
    ):
        self.prefixes = meters.prefixes = PrefixCache(prefix_cache)  # which outlives a stream that has failed
        fast.stream([], slots=slots)  # raises ValueError for a drafter whose rows can't enter a running batch
        self.fast, self.processor, self.slots = fast, processor, slots
        self.template = response_template(processor, fast.model)
        no_tools = chat_inputs.why_no_tools(processor, self.template is not None)
        self.limits = replace(limits, vocab=fast.target.capabilities.vocab, no_tools=no_tools)
        self.decoder: Any = copy.deepcopy(processor.tokenizer)  # tokenizers are not made for several threads
        self.processing = threading.Lock()
        self.tensors = chat_inputs.takes_tensors(processor)
        self.grammars: JsonGrammars | None = None
        self.over = False
        super().__init__(name, meters)

    def job(self, asked: ChatRequest, tell: Callable[[Told], None]) -> QueuedChat:
        """A job of a chat, whose images are decoded here and let go. Raises RequestError. Called in any thread."""
        inputs = chat_inputs.prompt_of(self.processor, asked, self.processing, self.tensors)
        prompt = inputs["input_ids"][0].tolist()
        most = chat_inputs.room(len(prompt), asked, self.limits)
        inputs = move_inputs(inputs, self.fast.model) | asked.options | {"max_new_tokens": most}
        if asked.schema is not None:
            inputs |= self._by_schema(asked.schema)
        job = QueuedChat(tell, asked=asked, inputs=inputs, prompt=prompt, unread=asked.n, left=asked.n)
        live = bool(asked.stops or asked.stream or asked.top is not None)
        for index in range(asked.n):
            writer = StopTextFilter(self._decode, asked.stops)
            job.choices.append(Choice(job, index, writer, live, None if asked.top is None else []))
        return job

    def _by_schema(self, schema: Json) -> dict[str, Any]:
        """generate's arguments for an answer of a schema. Raises RequestError."""
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
                for answer in self.fast.stream(self._entries(), slots=self.slots, prefix_cache=self.prefixes):
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
            for choice in job.choices:
                entry = choice.arguments()
                yield entry
                entry.clear()
            job.inputs = {}  # of pixels too, before it waits

    def _answer(self, choice: Choice, answer: Answer) -> None:
        job, writer = choice.job, choice.writer
        job.left -= 1
        if not job.left:
            self.running.discard(job)
        self.meters.row(answer)
        if answer.error is not None:
            job.tell(answer.error)
            return
        if not choice.live:
            writer.add(answer.tokens)
        rest, message = writer.finish(), {"content": writer.text}
        if job.asked.tools:
            message = self._parsed(job, writer) or message
            rest = message["content"] or ""
        choice.say(rest)
        ended = "length" if answer.ended == "length" and not writer.stopped else "stop"
        if "tool_calls" in message and ended == "stop":
            ended = "tool_calls"
        result = TextResult(choice.index, message, len(writer.tokens), len(job.prompt), ended, answer, choice.take())
        job.tell(result)

    def _parsed(self, job: QueuedChat, writer: StopTextFilter) -> dict[str, Any] | None:
        """The message that an answer is, by the tokenizer's own parser; None if it can't read it."""
        text, prompt = self.decoder.decode(writer.tokens), self.decoder.decode(job.prompt)
        text = text[: min((at for stop in writer.stops if (at := text.find(stop)) >= 0), default=len(text))]
        tools = list(job.asked.tools)
        try:
            return parsed_message(self.decoder.parse_response(text, self.template, prefix=prompt, tools=tools))
        except Exception:  # of parsers of what a model wrote, which raise anything
            return None


class ImageWorker(QueueWorker[QueuedImages]):
    """Draws images with a pipeline."""

    def __init__(self, name: str, pipe: ImagePipeline, meters: ServerMetrics):
        self.pipe = pipe
        super().__init__(name, meters)

    def _work(self) -> None:
        while (job := self._next(block=True)) is not None:
            self.running.add(job)
            try:
                job.tell(self._draw(job))
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
        self.meters.totals["images"] += len(out.images)
        files = []
        for image in out.images:
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            files.append(buffer.getvalue())
        return files
