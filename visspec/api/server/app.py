"""OpenAI's chat completions and image generations over HTTP, with FastAPI (the extra `serve`)."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
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
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from visspec.api.images.pipeline import ImagePipeline
from visspec.api.server.completions import ChatBody, DrawingBody, RequestError, as_request_error
from visspec.api.server.worker import Tell, TextWorker
from visspec.io.images import png_bytes


class Guard:
    """Middleware that limits requests to `places` at once and `max_body` bytes each, and checks the API key. Without a
    `key` everybody is admitted.
    """

    def __init__(self, app: ASGIApp, key: str | None, places: int, max_body: int):
        self.app, self.key = app, (key or "").encode(errors="surrogateescape")
        self.places, self.max_body, self.taken = places, max_body, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        self.taken += 1
        try:
            self._check(Headers(scope=scope))
            with suppress(asyncio.CancelledError):  # the server is stopping
                await self.app(scope, receive, send)
        except RequestError as error:
            await (await failed(Request(scope), error))(scope, receive, send)
        finally:
            self.taken -= 1

    def _check(self, headers: Headers) -> None:
        scheme, _, key = headers.get("authorization", "").encode("latin-1").partition(b" ")
        if self.key and not (hmac.compare_digest(key.strip(), self.key) and scheme.lower() == b"bearer"):
            raise RequestError("The API key is missing or wrong.", 401, code="invalid_api_key")
        if "transfer-encoding" in headers:
            raise RequestError("body: got no content-length, expected one.", 411)
        if int(headers.get("content-length", 0)) > self.max_body:
            raise RequestError(f"body: it has more than {self.max_body} bytes.", 413)
        if self.taken > self.places:
            raise RequestError(f"The server works on {self.places} requests. Try again later.", 429)


class Service:
    """The routes. `pipe` draws images under the name `image_model`."""

    def __init__(self, text: TextWorker, pipe: ImagePipeline | None = None, image_model: str | None = None):
        self.text, self.pipe, self.image_model, self.began = text, pipe, image_model, int(time.time())
        self.reading, self.drawing = asyncio.Lock(), asyncio.Lock()

    async def chat(self, body: ChatBody, request: Request) -> Any:
        chunks = self._chunks(body, request)
        if body.stream:
            first = await anext(chunks)  # an error before the first token can still set the status
            return StreamingResponse(server_sent(first, chunks), media_type="text/event-stream")
        state = ChatCompletionStreamState()
        async for chunk in chunks:
            state.handle_chunk(chunk)
        return state.current_completion_snapshot

    async def _chunks(self, body: ChatBody, request: Request) -> AsyncIterator[ChatCompletionChunk]:
        """Yield the parts of a chat's answers as they are streamed. Raises RequestError."""
        check_model(body.model, self.text.name)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | Exception]()
        cancelled, open_choices = threading.Event(), body.n
        tell: Tell = lambda part: loop.call_soon_threadsafe(queue.put_nowait, part)  # noqa: E731
        frame: Any = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.text.name}
        chunk: Any = partial(ChatCompletionChunk, object="chat.completion.chunk", **frame)
        watch = asyncio.create_task(disconnected(request, queue))
        try:
            async with self.reading:
                rows, prompt = await asyncio.to_thread(self.text.submit, body, tell, cancelled)
            while open_choices:
                part = await queue.get()
                if isinstance(part, Exception):
                    raise as_request_error(part)
                yield chunk(choices=[part])
                open_choices -= part["finish_reason"] is not None
        finally:
            cancelled.set()
            watch.cancel()
        if body.stream_options.include_usage or not body.stream:
            counts = sum((row.counts for row in rows), Counter[str]())
            new, details = counts["tokens"], {f"{n}_prediction_tokens": counts[n] for n in ("accepted", "rejected")}
            usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
            yield chunk(choices=[], usage=usage | {"completion_tokens_details": details})

    async def images(self, body: DrawingBody) -> Any:
        check_model(body.model or self.image_model, self.image_model)
        async with self.drawing:
            data = await asyncio.to_thread(self._draw, body)
        return {"created": int(time.time()), "data": data, "output_format": "png"}

    def _draw(self, body: DrawingBody) -> list[dict[str, str]]:
        assert self.pipe is not None
        width, height = (None, None) if body.size == "auto" else map(int, body.size.split("x"))
        try:
            self.pipe.family.layout(height, width)
        except ValueError as error:
            raise ValueError(f"size: the model does not draw {body.size} ({error}).") from None
        options = body.model_dump(include={"seed", "temperature", "guidance_scale"})
        images = self.pipe(body.prompt, num_images_per_prompt=body.n, height=height, width=width, **options).images
        return [{"b64_json": base64.b64encode(png_bytes(image)).decode()} for image in images]

    async def models(self) -> dict[str, Any]:
        names = [name for name in (self.text.name, self.image_model) if name is not None]
        about = {"object": "model", "created": self.began, "owned_by": "visspec"}
        return {"object": "list", "data": [{"id": name, **about} for name in names]}


async def server_sent(first: ChatCompletionChunk, others: AsyncIterator[ChatCompletionChunk]) -> AsyncIterator[str]:
    """Convert a chat to server-sent events."""
    try:
        yield f"data: {first.model_dump_json(exclude_unset=True)}\n\n"
        async for chunk in others:
            yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
    except RequestError as error:  # the status has already been sent
        yield f"data: {json.dumps(error.body)}\n\n"
    yield "data: [DONE]\n\n"


def check_model(model: str | None, name: str | None) -> None:
    if name is None or model != name:
        has = "was started without --image-model" if name is None else f"has {name!r}"
        raise RequestError(f"model: got {model!r}, this server {has}.", 404, "model", "model_not_found")


async def disconnected(request: Request, queue: asyncio.Queue) -> None:
    """Put an error into a queue when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    queue.put_nowait(RequestError("The client has disconnected.", 499))


async def failed(request: Request, error: Exception) -> Response:
    """Convert an exception to a response."""
    error = as_request_error(error)
    headers = {"retry-after": "1"} if error.status == 429 else None
    return Response(json.dumps(error.body), error.status, headers, "application/json")  # escapes any text to ASCII


def application(
    service: Service, *, key: str | None = None, local: bool = True, places: int = 64, max_body: int = 20_000_000
) -> FastAPI:
    """Create the application. On shutdown it finishes accepted requests."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().run_in_executor(None, service.text.close)

    handlers: Any = dict.fromkeys((RequestValidationError, HTTPException, ValueError, Exception), failed)
    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=handlers)
    app.add_middleware(Guard, key=key, places=places, max_body=max_body)
    if local:  # a web page in a browser may use another host name
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    app.add_api_route("/health", lambda: {"status": "ok"})
    app.add_api_route("/v1/models", service.models)
    settings: dict[str, Any] = {"methods": ["POST"], "response_model_exclude_unset": True}
    app.add_api_route("/v1/chat/completions", service.chat, response_model=ChatCompletion, **settings)
    app.add_api_route("/v1/images/generations", service.images, response_model=ImagesResponse, **settings)
    return app
