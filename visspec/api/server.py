"""OpenAI's chat completions and image generations over HTTP, on FastAPI: the extra `serve`."""

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
from openai.types import ImagesResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from visspec.api.completions import ChatBody, DrawingBody, RequestError, refusal
from visspec.api.images import ImagePipeline
from visspec.api.serving import Part, TextWorker

LOCAL = ("127.0.0.1", "localhost", "::1")
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]*)?", re.IGNORECASE)


class Guard:
    """Middleware that lets requests in, `places` at once, each of `max_body` bytes. key: None lets everybody in. local:
    only names of this machine are answered to, because a page in a browser may have given it another one.
    """

    def __init__(self, app: ASGIApp, key: str | None, local: bool, places: int, max_body: int):
        self.app, self.key, self.local, self.places = app, (key or "").encode(errors="surrogateescape"), local, places
        self.max_body, self.taken = max_body, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body:  # the length was not told before
                raise RequestError(f"body: it has more than {self.max_body} bytes", 413)
            return message

        self.taken += 1
        try:
            self._check(Headers(scope=scope))
            with suppress(asyncio.CancelledError):  # the server stops and waits no longer
                await self.app(scope, limited, send)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
        finally:
            self.taken -= 1

    def _check(self, headers: Headers) -> None:
        host = " ".join(headers.getlist("host"))
        if self.local and not HOST.fullmatch(host):
            raise RequestError(f"host: got {host!r}, this server answers to {', '.join(LOCAL)}", 403)
        scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
        if self.key and not (hmac.compare_digest(given.strip(), self.key) and scheme.lower() == b"bearer"):
            raise RequestError("The API key is missing or wrong.", 401, code="invalid_api_key")
        if int(headers.get("content-length", 0)) > self.max_body:
            raise RequestError(f"body: it has more than {self.max_body} bytes", 413)
        if self.taken > self.places:
            raise RequestError(f"The server works on {self.places} requests. Try again later.", 429)


class Service:
    """The routes. pipe: draws images under the name `image_model`."""

    def __init__(self, text: TextWorker, pipe: ImagePipeline | None = None, image_model: str | None = None):
        self.text, self.pipe, self.image_model, self.began = text, pipe, image_model, int(time.time())
        self.unread = asyncio.Semaphore(text.slots)  # chats whose pixels are held, because the model has not read them
        self.reader, self.painter = (ThreadPoolExecutor(1, f"visspec-{name}") for name in ("reader", "painter"))

    async def chat(self, body: ChatBody, request: Request) -> Any:
        check_model(body.model, self.text.name)
        parts = self._parts(request, body)
        prompt, first = await anext(parts), await anext(parts)  # an error before the first token has its own status
        frame = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.text.name}
        if body.stream:
            chunks = stream_chunks(frame | {"object": "chat.completion.chunk"}, body, prompt, first, parts)
            return StreamingResponse(chunks, media_type="text/event-stream", headers={"cache-control": "no-store"})
        found = [first, *[part async for part in parts]]
        choices = []
        for index in range(body.n):
            own = [part.choice for part in found if part.choice["index"] == index]
            text = "".join(choice["delta"]["content"] for choice in own)
            entries = [entry for choice in own if body.logprobs for entry in choice["logprobs"]["content"]]
            logprobs = {"content": entries, "refusal": None} if body.logprobs else None
            message = {"role": "assistant", "content": text, "refusal": None}
            reason = own[-1]["finish_reason"]
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
        return frame | {"object": "chat.completion", "choices": choices, "usage": usage(prompt, found)}

    async def _parts(self, request: Request, body: ChatBody) -> AsyncIterator[Any]:
        """The length of the prompt, and the parts of its answers. Raises RequestError and ClientDisconnect."""
        loop, queue, cancelled = asyncio.get_running_loop(), asyncio.Queue[Part | Exception](), threading.Event()
        watch = loop.create_task(disconnected(request, lambda: queue.put_nowait(ClientDisconnect())))
        tell = partial(loop.call_soon_threadsafe, queue.put_nowait)
        try:
            async with self.unread:
                rows, prompt = await loop.run_in_executor(self.reader, self.text.prepare, body, tell, cancelled)
                for row in rows:
                    self.text.queue.put(row)
                part = await queue.get()
            yield prompt
            left = body.n
            while True:
                if isinstance(part, ClientDisconnect | RequestError):
                    raise part
                if isinstance(part, Exception):
                    status = 400 if isinstance(part, ValueError) else 500
                    raise RequestError(f"{type(part).__name__}: {part}", status) from part
                yield part
                left -= part.choice["finish_reason"] is not None
                if not left:
                    return
                part = await queue.get()
        finally:
            cancelled.set()
            watch.cancel()

    async def images(self, body: DrawingBody, request: Request) -> Any:
        check_model(body.model or self.image_model, self.image_model)
        loop, cancelled = asyncio.get_running_loop(), threading.Event()
        watch = loop.create_task(disconnected(request, cancelled.set))
        try:
            files = await loop.run_in_executor(self.painter, self._draw, body, cancelled)
        except ValueError as error:
            raise RequestError(str(error), param=str(error).partition(":")[0]) from None
        finally:
            cancelled.set()
            watch.cancel()
        data = [{"b64_json": base64.b64encode(file).decode()} for file in files]
        return {"created": int(time.time()), "data": data, "output_format": "png"}

    def _draw(self, body: DrawingBody, cancelled: threading.Event) -> list[bytes]:
        """PNG files. Raises ValueError for what the model cannot draw."""
        assert self.pipe is not None
        width, height = (None, None) if body.size == "auto" else map(int, body.size.split("x"))
        try:
            self.pipe.family.layout(height, width)
        except ValueError as error:
            raise ValueError(f"size: the model does not draw {body.size} ({error})") from None

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
        """Finish what was taken."""
        self.text.close()
        for pool in (self.reader, self.painter):
            pool.shutdown(cancel_futures=True)


async def stream_chunks(
    frame: dict[str, Any], body: ChatBody, prompt: int, first: Part, others: AsyncIterator[Part]
) -> AsyncIterator[str]:
    """Server-sent events of a chat."""

    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        found = ChatCompletionChunk.model_validate(frame | {"choices": choices} | more)
        return f"data: {found.model_dump_json(exclude_unset=True)}\n\n"

    begin, parts = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, [first]
    try:
        for index in range(body.n):
            yield chunk([begin | {"index": index}])
        yield chunk([first.choice])
        async for part in others:
            parts.append(part)
            yield chunk([part.choice])
        if body.stream_options.include_usage:
            yield chunk([], usage=usage(prompt, parts))
    except RequestError as error:  # the status was sent
        yield f"data: {json.dumps(error.body)}\n\n"
    except ClientDisconnect:
        return
    yield "data: [DONE]\n\n"


def usage(prompt: int, parts: list[Part]) -> dict[str, Any]:
    """Counts of a completion. The prompt counts once."""
    counts = sum((part.counts for part in parts), Counter[str]())
    details = {f"{name}_prediction_tokens": counts[name] for name in ("accepted", "rejected")}
    new = counts["tokens"]
    found = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return found | {"completion_tokens_details": details}


def check_model(given: str | None, name: str | None) -> None:
    if name is None or given != name:
        has = "was started without --image-model" if name is None else f"has {name!r}"
        raise RequestError(f"model: got {given!r}, this server {has}", 404, "model", "model_not_found")


def error_response(error: RequestError) -> Response:
    headers = {"retry-after": "1"} if error.status == 429 else None
    return Response(json.dumps(error.body), error.status, headers, "application/json")  # any text, as ASCII


async def disconnected(request: Request, call: Callable[[], Any]) -> None:
    """Call a function when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    call()


async def failed(request: Request, error: Exception) -> Response:
    """The answer to a request that raised."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, RequestValidationError):
        error = refusal(error.errors()[0])
    if isinstance(error, HTTPException):
        error = RequestError(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
    if not isinstance(error, RequestError):
        error = RequestError(f"The server failed with {type(error).__name__}.", 500)
    return error_response(error)


def application(
    service: Service,
    *,
    key: str | None = None,
    local: bool = True,
    places: int = 64,
    max_body: int = 20_000_000,
) -> FastAPI:
    """The application. It finishes what it has taken when it shuts down."""

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
