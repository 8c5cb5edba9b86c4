"""OpenAI's chat completions and image generations over HTTP, with FastAPI (the extra `serve`)."""

from __future__ import annotations

import asyncio
import base64
import hmac
import io
import json
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import ImagesResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from visspec.api.images.pipeline import ImagePipeline
from visspec.api.server.completions import ChatBody, DrawingBody, RequestError, refusal
from visspec.api.server.worker import Part, Tell, TextWorker

LOCAL = ("127.0.0.1", "localhost", "::1")
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]*)?", re.IGNORECASE)


class Guard:
    """Middleware that limits requests to `places` at once and `max_body` bytes each, and checks the API key. Without a
    `key` everybody is admitted. `local` only accepts host names of this machine, because a web page in a browser may
    use another one.
    """

    def __init__(self, app: ASGIApp, key: str | None, local: bool, places: int, max_body: int):
        self.app, self.key, self.local, self.places = app, (key or "").encode(errors="surrogateescape"), local, places
        self.max_body, self.taken = max_body, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        left = self.max_body

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise RequestError(f"body: it has more than {self.max_body} bytes.", 413)
            return message

        self.taken += 1
        try:
            self._check(Headers(scope=scope))
            with suppress(asyncio.CancelledError):  # the server is stopping
                await self.app(scope, limited, send)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
        finally:
            self.taken -= 1

    def _check(self, headers: Headers) -> None:
        host = " ".join(headers.getlist("host"))
        if self.local and not HOST.fullmatch(host):
            raise RequestError(f"host: got {host!r}, but this server only answers to {', '.join(LOCAL)}.", 403)
        scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
        if self.key and not (hmac.compare_digest(given.strip(), self.key) and scheme.lower() == b"bearer"):
            raise RequestError("The API key is missing or wrong.", 401, code="invalid_api_key")
        if self.taken > self.places:
            raise RequestError(f"The server works on {self.places} requests. Try again later.", 429)


class Service:
    """The routes. `pipe` draws images under the name `image_model`."""

    def __init__(self, text: TextWorker, pipe: ImagePipeline | None = None, image_model: str | None = None):
        self.text, self.pipe, self.image_model, self.began = text, pipe, image_model, int(time.time())
        # limits the chats whose pixels are in memory, waiting for the model
        self.unread = asyncio.Semaphore(text.slots)
        self.reader, self.drawing = (ThreadPoolExecutor(1, f"visspec-{name}") for name in ("reader", "drawing"))

    async def chat(self, body: ChatBody, request: Request) -> Any:
        chunks = self._chunks(body, request)
        first = await anext(chunks)  # an error before the first token can still set the status
        if body.stream:
            return StreamingResponse(server_sent(first, chunks), media_type="text/event-stream")
        state = ChatCompletionStreamState()
        state.handle_chunk(first)
        async for chunk in chunks:
            state.handle_chunk(chunk)
        return state.current_completion_snapshot

    async def _chunks(self, body: ChatBody, request: Request) -> AsyncIterator[ChatCompletionChunk]:
        """Yield the parts of a chat's answers as they are streamed. Raises RequestError and ClientDisconnect."""
        check_model(body.model, self.text.name)
        loop, queue, cancelled = asyncio.get_running_loop(), asyncio.Queue[Part | Exception](), threading.Event()
        watch = loop.create_task(disconnected(request, lambda: queue.put_nowait(ClientDisconnect())))
        tell: Tell = lambda part: loop.call_soon_threadsafe(queue.put_nowait, part)  # noqa: E731
        counts, left = Counter[str](), body.n
        frame: Any = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.text.name}
        chunk: Any = partial(ChatCompletionChunk, object="chat.completion.chunk", **frame)
        try:
            async with self.unread:
                rows, prompt = await loop.run_in_executor(self.reader, self.text.prepare, body, tell, cancelled)
                for row in rows:
                    self.text.queue.put(row)
                part = await queue.get()
            while not isinstance(part, Exception):
                yield chunk(choices=[part.choice])
                counts += part.counts
                left -= part.choice["finish_reason"] is not None
                if not left:
                    break
                part = await queue.get()
            else:
                if isinstance(part, ClientDisconnect | RequestError):
                    raise part
                raise RequestError(f"{type(part).__name__}: {part}.", 400 if isinstance(part, ValueError) else 500)
        finally:
            cancelled.set()
            watch.cancel()
        if body.stream_options.include_usage or not body.stream:
            new, details = counts["tokens"], {f"{n}_prediction_tokens": counts[n] for n in ("accepted", "rejected")}
            usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
            yield chunk(choices=[], usage=usage | {"completion_tokens_details": details})

    async def images(self, body: DrawingBody, request: Request) -> Any:
        check_model(body.model or self.image_model, self.image_model)
        loop, cancelled = asyncio.get_running_loop(), threading.Event()
        watch = loop.create_task(disconnected(request, cancelled.set))
        try:
            files = await loop.run_in_executor(self.drawing, self._draw, body, cancelled)
        except ValueError as error:
            name = str(error).partition(":")[0]
            raise RequestError(str(error), param=name if name in DrawingBody.model_fields else None) from None
        finally:
            cancelled.set()
            watch.cancel()
        data = [{"b64_json": base64.b64encode(file).decode()} for file in files]
        return {"created": int(time.time()), "data": data, "output_format": "png"}

    def _draw(self, body: DrawingBody, cancelled: threading.Event) -> list[bytes]:
        assert self.pipe is not None
        width, height = (None, None) if body.size == "auto" else map(int, body.size.split("x"))
        try:
            self.pipe.family.layout(height, width)
        except ValueError as error:
            raise ValueError(f"size: the model does not draw {body.size} ({error}).") from None

        def look(pipe: ImagePipeline, *_: int | dict) -> None:
            if cancelled.is_set():
                pipe.interrupt = True

        options = body.model_dump(include={"seed", "temperature", "guidance_scale"})
        options |= {"num_images_per_prompt": body.n, "height": height, "width": width, "callback_on_step_end": look}
        files = []
        for image in [] if cancelled.is_set() else self.pipe(body.prompt, **options).images:
            image.save(buffer := io.BytesIO(), "PNG")
            files.append(buffer.getvalue())
        return files

    async def models(self) -> dict[str, Any]:
        names = [name for name in (self.text.name, self.image_model) if name is not None]
        about = {"object": "model", "created": self.began, "owned_by": "visspec"}
        return {"object": "list", "data": [{"id": name, **about} for name in names]}

    def close(self) -> None:
        """Finish accepted requests."""
        self.text.close()
        for pool in (self.reader, self.drawing):
            pool.shutdown(cancel_futures=True)


async def server_sent(first: ChatCompletionChunk, others: AsyncIterator[ChatCompletionChunk]) -> AsyncIterator[str]:
    """Convert a chat to server-sent events."""
    try:
        yield f"data: {first.model_dump_json(exclude_unset=True)}\n\n"
        async for chunk in others:
            yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
    except RequestError as error:  # the status has already been sent
        yield f"data: {json.dumps(error.body)}\n\n"
    except ClientDisconnect:
        return
    yield "data: [DONE]\n\n"


def check_model(given: str | None, name: str | None) -> None:
    if name is None or given != name:
        has = "was started without --image-model" if name is None else f"has {name!r}"
        raise RequestError(f"model: got {given!r}, this server {has}.", 404, "model", "model_not_found")


def error_response(error: RequestError) -> Response:
    headers = {"retry-after": "1"} if error.status == 429 else None
    return Response(json.dumps(error.body), error.status, headers, "application/json")  # escapes any text to ASCII


async def disconnected(request: Request, call: Callable[[], Any]) -> None:
    """Call a function when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    call()


async def failed(request: Request, error: Exception) -> Response:
    """Convert an exception to a response."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # the client is gone
    if isinstance(error, RequestValidationError):
        error = refusal(error.errors()[0])
    if isinstance(error.__cause__, RequestError):  # raised for a body that FastAPI could not parse
        error = error.__cause__
    if isinstance(error, HTTPException):
        error = RequestError(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
    if not isinstance(error, RequestError):
        error = RequestError(f"The server failed with {type(error).__name__}.", 500)
    return error_response(error)


def application(
    service: Service, *, key: str | None = None, local: bool = True, places: int = 64, max_body: int = 20_000_000
) -> FastAPI:
    """Create the application. On shutdown it finishes accepted requests."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().run_in_executor(None, service.close)

    handlers: Any = dict.fromkeys((RequestError, RequestValidationError, HTTPException, ClientDisconnect), failed)
    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=handlers | {Exception: failed})
    app.add_middleware(Guard, key=key, local=local, places=places, max_body=max_body)
    app.add_api_route("/health", lambda: {"status": "ok"})
    app.add_api_route("/v1/models", service.models)
    given: dict[str, Any] = {"methods": ["POST"], "response_model_exclude_unset": True}
    app.add_api_route("/v1/chat/completions", service.chat, response_model=ChatCompletion, **given)
    app.add_api_route("/v1/images/generations", service.images, response_model=ImagesResponse, **given)
    return app
