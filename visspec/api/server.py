"""OpenAI's chat completions and image generations over HTTP, on FastAPI: the extra `serve`.

Nothing of a request is trusted: its key is compared in constant time, its host is one of this machine's own names if
the server is bound to it, its body is read up to a limit, and what it says is read by `completions`.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from visspec import __version__
from visspec.api import completions
from visspec.api.completions import Refused, completion, usage
from visspec.api.serving import Desk, Drawn, Gone, Job, Painting, Worker, Writing, Written

LOCAL = ("127.0.0.1", "localhost", "::1")
READING = 60.0  # seconds for a body to arrive


class Service:
    """What the routes share. key: None lets everybody in. local: only this machine's names are answered to."""

    def __init__(self, desk: Desk, writing: Writing | None, painting: Painting | None, key: str | None, local: bool):
        self.desk, self.writing, self.painting, self.key, self.local = desk, writing, painting, key, local
        self.body = writing.limits.body if writing is not None else completions.Limits().body
        self.began = int(time.time())

    @property
    def workers(self) -> list[Worker]:
        return [worker for worker in (self.writing, self.painting) if worker is not None]

    async def guard(self, request: Request) -> None:
        """Raises Refused for a stranger."""
        host = request.url.hostname
        if self.local and host not in LOCAL:  # a page in a browser may have given this machine a name of its own
            raise Refused(f"host: got {host}, expected one of {', '.join(LOCAL)}", 403)
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self.key is not None and not hmac.compare_digest(given, self.key.encode()):
            raise Refused("key: got another one or none, expected that of the server", 401, code="invalid_api_key")

    async def read(self, request: Request) -> Any:
        """The JSON of a body. Raises Refused."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":  # a page of another origin can't send this without asking
            raise Refused(f"content-type: got {kind or 'none'}, expected application/json", 415)
        try:
            data = await asyncio.wait_for(self._bytes(request), READING)
        except TimeoutError:
            raise Refused(f"body: got a part of it in {READING:g} seconds, expected all of it", 408) from None
        try:
            return await asyncio.get_running_loop().run_in_executor(None, json.loads, data)
        except (ValueError, RecursionError):
            raise Refused("body: got no JSON, expected an object") from None

    async def _bytes(self, request: Request) -> bytes:
        told = request.headers.get("content-length", "0")
        size, parts = int(told) if told.isdecimal() else 0, []
        if size <= self.body:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size > self.body:
                    break
                parts.append(part)
        if size > self.body:
            raise Refused(f"body: got more than {self.body} bytes, expected at most as many", 413)
        return b"".join(parts)

    def check_model(self, body: Any, worker: Worker | None, what: str) -> None:
        """Raises Refused unless a body names the worker's model."""
        name = body.get("model") if isinstance(body, dict) else None
        if worker is None:
            raise Refused(f"model: got {name!r}, expected a server that {what}", 404, "model", "model_not_found")
        if name not in (None, worker.name):
            raise Refused(f"model: got {name!r}, expected {worker.name!r}", 404, "model", "model_not_found")

    async def chat(self, request: Request) -> Response:
        with ExitStack() as stack:
            stack.enter_context(self.desk.place("chat"))
            body = await self.read(request)
            self.check_model(body, self.writing, "was started with --model")
            assert self.writing is not None
            loop, events = asyncio.get_running_loop(), Events(request)
            job = await loop.run_in_executor(self.writing.readers, self.writing.read, body, events.tell)
            stack.callback(setattr, job, "cancelled", True)  # however this ends
            stack.callback(events.close)
            self.writing.submit(job)
            first = await events.next()
            id, name = f"chatcmpl-{uuid.uuid4().hex}", self.writing.name
            if job.asked.stream:
                return Stream(job, events, first, id, name, stack.pop_all())
            choice = {"message": {"role": "assistant", "content": first.text, "refusal": None},
                      "finish_reason": first.ended}  # fmt: skip
            return JSONResponse(
                completion("chat.completion", id, name, choice) | {"usage": usage(first.prompt, first.tokens)}
            )

    async def images(self, request: Request) -> Response:
        with ExitStack() as stack:
            stack.enter_context(self.desk.place("images"))
            body = await self.read(request)
            self.check_model(body, self.painting, "was started with --image-model")
            assert self.painting is not None
            events = Events(request)
            job = Job(events.tell, completions.drawing(body))
            stack.callback(setattr, job, "cancelled", True)
            stack.callback(events.close)
            self.painting.submit(job)
            drawn: Drawn = await events.next()
            data = [{"b64_json": base64.b64encode(file).decode()} for file in drawn.files]
            return JSONResponse({"created": int(time.time()), "data": data, "output_format": "png"})

    async def models(self) -> dict[str, Any]:
        found = [{"id": w.name, "object": "model", "created": self.began, "owned_by": "visspec"} for w in self.workers]
        return {"object": "list", "data": found}

    async def metrics(self) -> PlainTextResponse:
        running = sum(len(worker.running) for worker in self.workers)
        now: dict[str, float] = {"queue": self.desk.taken - running, "running": running, "places": self.desk.places}
        return PlainTextResponse(self.desk.meters.lines(now), media_type="text/plain; version=0.0.4")


class Events:
    """What a worker tells about a job, for the loop of the server; or that the client has gone."""

    def __init__(self, request: Request):
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.gone = asyncio.ensure_future(self._watch(request))

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    def tell(self, event: Any) -> None:
        """Called in any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self.queue.put_nowait, event)

    async def next(self) -> Any:
        """The next event. Raises what the worker told as an exception, and Gone."""
        getting = asyncio.ensure_future(self.queue.get())
        try:
            await asyncio.wait({getting, self.gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not getting.done():
                getting.cancel()
        if not getting.done() or getting.cancelled():
            raise Gone
        event = getting.result()
        if isinstance(event, Refused):
            raise event
        if isinstance(event, ValueError):
            raise Refused(str(event)) from event
        if isinstance(event, Exception):
            raise Refused(f"model: got {type(event).__name__} in a pass, expected none", 500) from event
        return event

    def close(self) -> None:
        self.gone.cancel()


class Stream(Response):
    """A streamed completion as server-sent events; `held` is let go when it ends."""

    def __init__(self, job: Job, events: Events, first: Any, id: str, name: str, held: ExitStack):
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self.job, self.events, self.first, self.id, self.name, self.held = job, events, first, id, name, held

    async def __call__(self, scope, receive, send) -> None:
        async def say(data: Any) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

        with suppress(Gone), self.held:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._say_all(say)
            except Refused as error:  # the status was sent
                await say(error.body)
            await say("[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _say_all(self, say) -> None:
        def piece(delta: dict[str, Any], ended: str | None = None) -> dict[str, Any]:
            choice = {"delta": delta, "finish_reason": ended}
            return completion("chat.completion.chunk", self.id, self.name, choice)

        await say(piece({"role": "assistant", "content": ""}))
        event = self.first
        while not isinstance(event, Written):
            await say(piece({"content": event}))
            event = await self.events.next()
        await say(piece({}, event.ended))
        if self.job.asked.usage:
            await say(piece({}) | {"choices": [], "usage": usage(event.prompt, event.tokens)})


def application(service: Service) -> FastAPI:
    """The application. Its workers are closed, and finish what they have, when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        yield
        for worker in service.workers:
            await asyncio.get_running_loop().run_in_executor(None, worker.close)

    app = FastAPI(
        title="visspec", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )

    async def health() -> dict[str, str]:
        return {"status": "stopping" if service.desk.closing else "ok"}

    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("GET", "/health", health), ("GET", "/v1/models", service.models), ("GET", "/metrics", service.metrics),
        ("POST", "/v1/chat/completions", service.chat), ("POST", "/v1/images/generations", service.images),
    ]  # fmt: skip
    for method, path, call in routes:
        guards = [] if call is health else [Depends(service.guard)]
        app.add_api_route(path, call, methods=[method], response_model=None, dependencies=guards)

    @app.exception_handler(Refused)
    async def refuse(request: Request, error: Refused) -> JSONResponse:
        later = {"retry-after": str(service.desk.patience)} if error.status in (429, 503) else {}
        return JSONResponse(error.body, error.status, headers=later)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        asked = f"{request.method} {request.url.path}"
        return JSONResponse(
            Refused(f"path: got {asked}, expected one of the API's", error.status_code).body, error.status_code
        )

    @app.exception_handler(Gone)
    @app.exception_handler(ClientDisconnect)
    async def leave(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(Refused(f"server: got {type(error).__name__}, expected no error", 500).body, 500)

    return app


class Server(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C: what it has taken is finished, for `grace` seconds, and nothing more is taken."""

    def __init__(self, service: Service, host: str, port: int, grace: int, log_level: str = "info"):
        self.service = service
        super().__init__(
            uvicorn.Config(
                application(service), host=host, port=port, log_level=log_level, timeout_graceful_shutdown=grace,
                server_header=False,
            )
        )  # fmt: skip

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.service.desk.closing = True  # connections that are open get an answer
        super().handle_exit(sig, frame)
