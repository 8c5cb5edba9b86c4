"""OpenAI's chat completions and image generations over HTTP, on FastAPI: the extra `serve`.

Nothing of a request is trusted: its key is compared in constant time, its host is a name of this machine if the server
is bound to it, its body is received up to a limit, takes a place when complete, and is read by `completions`.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from visspec import __version__
from visspec.api import completions
from visspec.api.answers import Piece, QueuedChat, TextResult, Told, choice, completion, usage
from visspec.api.completions import RequestError
from visspec.api.serving import (
    ClientDisconnected,
    ImageWorker,
    QueuedImages,
    QueueWorker,
    RequestQueue,
    TextWorker,
)
from visspec.io.files import Json

LOCAL = ("127.0.0.1", "localhost", "::1")
HOST = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]*)?", re.IGNORECASE)
READING = 60.0  # seconds for a body to arrive
READERS = 2  # threads that read bodies, decode images and run the processor
Reading = Callable[[Any], Any]  # of a body's JSON


class Service:
    """What the routes share. key: None lets everybody in. local: only this machine's names are answered to."""

    def __init__(
        self, desk: RequestQueue, writing: TextWorker | None, painting: ImageWorker | None, key: str | None, local: bool
    ):
        self.desk, self.writing, self.painting, self.key, self.local = desk, writing, painting, key, local
        self.limits = writing.limits if writing is not None else completions.RequestLimits()
        self.began = int(time.time())
        self.readers = ThreadPoolExecutor(READERS, "visspec-reader")

    @property
    def workers(self) -> list[QueueWorker]:
        return [worker for worker in (self.writing, self.painting) if worker is not None]

    def close(self) -> None:
        """Finish what was taken."""
        for worker in self.workers:
            worker.close()
        self.readers.shutdown(wait=False, cancel_futures=True)

    async def guard(self, request: Request) -> None:
        """Raises RequestError for a stranger."""
        hosts = [value for name, value in request.headers.raw if name == b"host"]
        if self.local and not (len(hosts) == 1 and HOST.fullmatch(hosts[0])):
            # a page in a browser may have given this machine a name of its own
            found = " and ".join(host.decode("latin-1") for host in hosts) or "none"
            raise RequestError(f"host: got {found[:60]}, expected one of {', '.join(LOCAL)}", 403)
        scheme, _, given = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        if self.key is not None and not (
            hmac.compare_digest(given.strip(), self.key.encode(errors="surrogateescape"))
            and scheme.lower() == b"bearer"
        ):
            raise RequestError("key: got another one or none, expected that of the server", 401, code="invalid_api_key")

    async def receive(self, request: Request, held: Callable[[int], None]) -> bytes:
        """A body; `held` is told its bytes as they come. Raises RequestError."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != "application/json":  # a page of another origin can't send this without asking
            raise RequestError(f"content-type: got {kind or 'none'}, expected application/json", 415)
        try:
            return await asyncio.wait_for(self._bytes(request, held), READING)
        except TimeoutError:
            raise RequestError(f"body: got a part of it in {READING:g} seconds, expected all of it", 408) from None

    async def _bytes(self, request: Request, held: Callable[[int], None]) -> bytes:
        told = request.headers.get("content-length", "0")
        size, parts = int(told) if told.isdecimal() else 0, []
        if size <= self.limits.body:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size > self.limits.body:
                    break
                held(len(part))
                parts.append(part)
        if size > self.limits.body:
            raise RequestError(f"body: got more than {self.limits.body} bytes, expected at most as many", 413)
        return b"".join(parts)

    async def read(self, data: bytes, worker: QueueWorker | None, what: str, reading: Reading) -> Any:
        """What `reading` makes of a body's JSON. Raises RequestError, also unless it names the worker's model."""

        def work() -> Any:
            try:
                body = json.loads(data)
            except (ValueError, RecursionError):
                raise RequestError("body: got no JSON, expected an object") from None
            name = body.get("model") if isinstance(body, dict) else None
            if worker is None:
                raise RequestError(
                    f"model: got {name!r}, expected a server that {what}", 404, "model", "model_not_found"
                )
            if name is not None:
                self.named(name, [worker])
            return reading(body)

        return await asyncio.get_running_loop().run_in_executor(self.readers, work)

    def named(self, name: Json, workers: list[QueueWorker]) -> QueueWorker:
        """The worker of a model. Raises RequestError for another name."""
        for worker in workers:
            if name == worker.name:
                return worker
        names = " or ".join(repr(worker.name) for worker in workers)
        raise RequestError(f"model: got {name!r}, expected {names}", 404, "model", "model_not_found")

    async def _take(
        self,
        stack: AsyncExitStack,
        kind: str,
        request: Request,
        worker: QueueWorker | None,
        what: str,
        reading: Reading,
    ) -> tuple[Any, JobEvents]:
        """What `reading` makes of a request, which has a place until the stack ends, and the events of its job."""
        stack.enter_context(self.desk.meter(kind))
        waiting = await stack.enter_async_context(AsyncExitStack())  # ends when the model has read the prompt
        self.desk.check()
        data = await self.receive(request, waiting.enter_context(self.desk.held()))
        stack.enter_context(self.desk.place())
        asked = await self.read(data, worker, what, reading)
        events = JobEvents(request, waiting)
        stack.callback(events.close)
        return asked, events

    async def chat(self, request: Request) -> Response:
        async with AsyncExitStack() as stack:
            writing, reading = self.writing, partial(completions.chat, limits=self.limits)
            asked, events = await self._take(stack, "chat", request, writing, "was started with --model", reading)
            assert writing is not None
            await events.until(events.waiting.enter_async_context(self.desk.decoded(asked.pixels * asked.n)))
            loop = asyncio.get_running_loop()
            job = await loop.run_in_executor(self.readers, writing.job, asked, events.tell)
            stack.callback(setattr, job, "cancelled", True)  # however this ends
            writing.submit(job)
            first = await events.next()
            id, name = f"chatcmpl-{uuid.uuid4().hex}", writing.name
            if job.asked.stream:
                return EventStream(job, events, first, id, name, stack.pop_all())
            results = [first, *[await events.next() for _ in range(1, asked.n)]]
            results.sort(key=lambda result: result.index)
            frame = {"role": "assistant", "content": None, "refusal": None}
            choices = [choice(r.index, r.logprobs, r.ended, message=frame | r.message) for r in results]
            return JSONResponse(completion("chat.completion", id, name, *choices) | {"usage": usage(results)})

    async def images(self, request: Request) -> Response:
        async with AsyncExitStack() as stack:
            painting, started = self.painting, "was started with --image-model"
            asked, events = await self._take(stack, "images", request, painting, started, completions.drawing)
            assert painting is not None
            job = QueuedImages(events.tell, asked=asked)
            stack.callback(setattr, job, "cancelled", True)
            painting.submit(job)
            files = [{"b64_json": base64.b64encode(file).decode()} for file in await events.next()]
            return JSONResponse({"created": int(time.time()), "data": files, "output_format": "png"})

    async def model(self, id: str) -> dict[str, Any]:
        return self._model_info(self.named(id, self.workers))

    def _model_info(self, worker: QueueWorker) -> dict[str, Any]:
        return {"id": worker.name, "object": "model", "created": self.began, "owned_by": "visspec"}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model_info(worker) for worker in self.workers]}

    async def metrics(self) -> PlainTextResponse:
        running = sum(len(worker.running) for worker in self.workers)
        now: dict[str, float] = {"queue": self.desk.taken - running, "running": running, "places": self.desk.places}
        return PlainTextResponse(self.desk.meters.lines(now), media_type="text/plain; version=0.0.4")


class JobEvents:
    """What a worker tells of a job, or that the client has gone. waiting: closed when the model has read a chat."""

    def __init__(self, request: Request, waiting: AsyncExitStack):
        self.waiting = waiting
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.gone = asyncio.ensure_future(self._watch(request))

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    def tell(self, event: Told) -> None:
        """Called in any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self.queue.put_nowait, event)

    async def until(self, awaited: Awaitable[Any]) -> Any:
        """What is awaited. Raises ClientDisconnected if the client goes before."""
        task = asyncio.ensure_future(awaited)
        try:
            await asyncio.wait({task, self.gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            raise ClientDisconnected
        return task.result()

    async def next(self) -> Any:
        """The next event. Raises what the worker told as an exception, and ClientDisconnected."""
        while (event := await self.until(self.queue.get())) is None:
            await self.waiting.aclose()
        if isinstance(event, RequestError):
            raise event
        if isinstance(event, ValueError):
            raise RequestError(str(event)) from event
        if isinstance(event, Exception):
            raise RequestError(f"model: got {type(event).__name__} in a pass, expected none", 500) from event
        return event

    def close(self) -> None:
        self.gone.cancel()


class EventStream(Response):
    """A streamed completion as server-sent events; `held` is let go when it ends."""

    def __init__(
        self, job: QueuedChat, events: JobEvents, first: Piece | TextResult, id: str, name: str, held: AsyncExitStack
    ):
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self.job, self.events, self.first, self.id, self.name, self.held = job, events, first, id, name, held

    async def __call__(self, scope, receive, send) -> None:
        async def say(data: Json) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

        with suppress(
            ClientDisconnected, asyncio.CancelledError
        ):  # of a client that reads no more, when the server stops
            try:
                async with self.held:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await self._say_all(say)
            except RequestError as error:  # the status was sent
                await say(error.body)
            await say("[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _say_all(self, say) -> None:
        def chunk(*choices: dict[str, Any]) -> dict[str, Any]:
            return completion("chat.completion.chunk", self.id, self.name, *choices)

        n, results, event = self.job.asked.n, list[TextResult](), self.first
        for index in range(n):
            await say(chunk(choice(index, None, None, delta={"role": "assistant", "content": ""})))
        while True:
            if isinstance(event, Piece):
                await say(chunk(choice(event.index, event.logprobs, None, delta={"content": event.text})))
            else:
                results.append(event)
                calls = [{"index": i, **call} for i, call in enumerate(event.message.get("tool_calls", ()))]
                delta = {"tool_calls": calls} if calls else {}
                await say(chunk(choice(event.index, None, event.ended, delta=delta)))
            if len(results) == n:
                break
            event = await self.events.next()
        if self.job.asked.usage:
            await say(chunk() | {"usage": usage(results)})


def application(service: Service) -> FastAPI:
    """The application. Its workers are closed, and finish what they have, when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        yield
        await asyncio.get_running_loop().run_in_executor(None, service.close)

    app = FastAPI(
        title="visspec", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )

    async def health() -> dict[str, str]:
        return {"status": "stopping" if service.desk.closing else "ok"}

    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("GET", "/health", health),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{id:path}", service.model),
        ("GET", "/metrics", service.metrics),
        ("POST", "/v1/chat/completions", service.chat),
        ("POST", "/v1/images/generations", service.images),
    ]
    for method, path, call in routes:
        guards = [] if call is health else [Depends(service.guard)]
        app.add_api_route(path, call, methods=[method], response_model=None, dependencies=guards)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        later = {"retry-after": str(service.desk.patience)} if error.status in (429, 503) else {}
        return JSONResponse(error.body, error.status, headers=later)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        asked, paths = f"{request.method} {request.url.path}", ", ".join(path for _, path, _ in routes)
        refused = RequestError(f"path: got {asked}, expected one of {paths}", error.status_code)
        return JSONResponse(refused.body, refused.status)

    @app.exception_handler(ClientDisconnected)
    @app.exception_handler(ClientDisconnect)
    async def leave(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(RequestError(f"server: got {type(error).__name__}, expected no error", 500).body, 500)

    return app


class Server(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C: what it has taken is finished, for `grace` seconds, and nothing more is taken."""

    def __init__(self, service: Service, host: str, port: int, grace: int, log_level: str = "info"):
        self.service = service
        super().__init__(
            uvicorn.Config(
                application(service),
                host=host,
                port=port,
                log_level=log_level,
                timeout_graceful_shutdown=grace,
                server_header=False,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.desk.closing = True  # connections that are open get an answer
        super().handle_exit(sig, frame)
