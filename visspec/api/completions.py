"""Bodies of OpenAI's chat completions and image generations: read strictly, answered in the same form.

What can't be honoured is refused with a sentence rather than passed over: a client that asks for tools or logprobs
should know that it gets none. Images come as data URLs; addresses are never fetched.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers.image_processing_backends import TorchvisionBackend

from visspec.api.captions import chat_text
from visspec.api.image_call import ImageRequest
from visspec.io.files import Json
from visspec.io.images import MAX_PIXELS, image_size, read_image
from visspec.types import Processor

MEDIA = ("image/png", "image/jpeg", "image/webp")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_STOPS = 4
TRIED = ((97, 150), (431, 260))  # heights and widths of images that a processor is tried on
MOST_SEED = 2**62  # rows and images count up from a seed
NOTHING: dict[str, tuple] = {  # arguments of a completion that are not supported, with the values that ask for nothing
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "parallel_tool_calls": (True, False),
    "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,),
    "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (), "moderation": (),
    "reasoning_effort": ("none",), "verbosity": ("medium",), "store": (False,), "service_tier": ("auto", "default"),
}  # fmt: skip
NO_PICTURE: dict[str, tuple] = {  # the same of an image generation
    "response_format": ("b64_json",), "output_format": ("png",), "stream": (False,), "partial_images": (0,),
    "background": ("auto", "opaque"), "output_compression": (100,), "quality": ("auto", "standard"), "style": (),
    "moderation": ("auto", "low"), "complexity": (), "frame_count": (1,), "frame_duration_ms": (), "svg": (),
}  # fmt: skip
NO_MATTER = (  # arguments that change no answer: who asks, what else may be cached
    "user",
    "safety_identifier",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prompt_cache_breakpoint",
)


class RequestError(ValueError):
    """What can't be served: its sentence, the HTTP status, and OpenAI's `param` and `code`."""

    def __init__(self, sentence: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(sentence)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refusal(name: str, found: Json, expected: str, code: str | None = None) -> RequestError:
    """An error about an argument of a body."""
    shown = repr(found)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return RequestError(f"{name}: got {shown}, expected {expected}", param=name, code=code)


@dataclass(frozen=True)
class RequestLimits:
    """What one request may bring. new: tokens of an answer that asks for no number; context: the model's, in tokens."""

    body: int = 20_000_000  # bytes
    pixels: int = MAX_PIXELS  # of an image
    at_once: int = 2 * MAX_PIXELS  # pixels of a request's images together, and of all that are decoded at once
    images: int = 16
    new: int = 128
    context: int | None = None


@dataclass(frozen=True)
class Picture:
    """An image that is not decoded yet. where: the argument that brought it."""

    data: bytes
    pixels: int
    where: str


@dataclass(frozen=True)
class ChatRequest:
    """A chat completion that was asked for. messages: roles and parts as chat templates take them."""

    messages: list[dict[str, Any]]
    images: list[Picture]
    options: dict[str, Any]  # of generate
    most: int | None = None  # new tokens
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False  # whether a streamed answer ends with its counts
    schema: Any = None  # of the JSON that the answer is

    @property
    def pixels(self) -> int:
        return sum(picture.pixels for picture in self.images)


def whole(least: int, most: int | None = None) -> Any:
    """A field of whole numbers. A field's description is what its error says was expected."""
    beyond = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Field(None, ge=least, le=most, description=f"a whole number {beyond}")


def number(least: float, most: float) -> Any:
    return Field(None, ge=least, le=most, description=f"a number from {least} to {most}")


class Body(BaseModel):
    """Arguments of both kinds of request. Nothing else is taken, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Any = None  # `server.Service` knows which there are
    temperature: float | None = number(0, 100)
    seed: int | None = whole(0, MOST_SEED)


class StreamOptions(BaseModel):
    model_config = Body.model_config

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


Stop = Annotated[str, Field(min_length=1)]


class ChatBody(Body):
    """Arguments of a chat completion. Beyond OpenAI's own: top_k."""

    messages: list[Any] = Field(min_length=1, description="a list of messages")
    top_p: float | None = Field(None, gt=0, le=1, description="a number above 0 and at most 1")
    top_k: int | None = whole(0)
    max_tokens: int | None = whole(1)
    max_completion_tokens: int | None = whole(1)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = Field(
        None, description=f"a text or a list of at most {MOST_STOPS}"
    )
    stream: bool | None = Field(None, description="true or false")
    response_format: Any = None
    stream_options: StreamOptions | None = Field(
        None, description="an object in which include_usage is true or false, include_obfuscation false"
    )


class DrawingBody(Body):
    """Arguments of an image generation. Beyond OpenAI's own: seed, temperature, guidance_scale."""

    prompt: str = Field(pattern=r"\S", description="a text")
    n: int | None = whole(1, 10)
    guidance_scale: float | None = number(0, 100)
    size: str | None = Field(
        None, pattern=r"^(auto|0*[1-9][0-9]{0,4}x0*[1-9][0-9]{0,4})$", description="WIDTHxHEIGHT in pixels, or auto"
    )


Read = TypeVar("Read", bound=Body)


def read(kind: type[Read], body: Json, neutral: Mapping[str, tuple]) -> Read:
    """The arguments of a body. Raises Refused for a body that is no object, and for the first argument that is not
    supported, not known or not valid.
    """
    if not isinstance(body, Mapping):
        raise RequestError(f"body: got {type(body).__name__}, expected a JSON object")
    for name, values in neutral.items():
        found = body.get(name)
        same = (found == value and isinstance(found, bool) == isinstance(value, bool) for value in values)
        if found is not None and not any(same):
            wanted = " or ".join(repr(value) for value in values) or "none"
            raise refusal(name, found, f"{wanted}: this server has nothing else", code="unsupported_value")
    only(body, {*kind.model_fields, *neutral})
    try:
        return kind.model_validate({name: found for name, found in body.items() if name in kind.model_fields})
    except ValidationError as error:
        name = str(error.errors(include_url=False)[0]["loc"][0])
    raise refusal(name, body.get(name), kind.model_fields[name].description or "another value")


def only(given: Mapping[str, Json], known: Collection[str], where: str = "") -> None:
    """Raises Refused for what an object of a body has beside its known members."""
    for name, found in given.items():
        if found is not None and name not in known and name not in NO_MATTER:
            shown = name if name.isidentifier() and len(name) <= 60 else ascii(name[:60])
            raise refusal(where + shown, found, "none: this server does not know it", code="unknown_parameter")


def chat(body: Json, limits: RequestLimits) -> ChatRequest:
    """Read the body of a chat completion; of its images the headers. Raises Refused."""
    asked = read(ChatBody, body, NOTHING)
    messages: list[dict[str, Any]] = []
    images: list[Picture] = []
    for i, message in enumerate(asked.messages):
        where = f"messages[{i}]"
        role = message.get("role") if isinstance(message, Mapping) else message
        if not isinstance(role, str) or role not in ROLES or not isinstance(message, Mapping):
            raise refusal(f"{where}.role", role, f"one of {', '.join(ROLES)}")
        only(message, ("role", "content"), f"{where}.")
        parts = content(message.get("content"), f"{where}.content", images, limits)
        messages.append({"role": ROLES[role], "content": parts})
    options: dict[str, Any] = {} if asked.seed is None else {"seed": asked.seed}
    if asked.temperature != 0:  # a greedy answer has nothing to cut
        cuts = {"top_p": asked.top_p, "top_k": asked.top_k}
        options |= {name: value for name, value in cuts.items() if value is not None}
    if asked.temperature is not None:
        options["do_sample"] = asked.temperature > 0
    if asked.temperature:  # without one the model's own settings hold beside what was asked
        options = {"temperature": float(asked.temperature), "top_p": 1.0, "top_k": 0} | options
    most = [n for n in (asked.max_completion_tokens, asked.max_tokens) if n is not None]
    usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
    stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    schema = schema_of(asked.response_format)
    found = ChatRequest(messages, images, options, min(most, default=None), stops, bool(asked.stream), usage, schema)
    if found.pixels > limits.at_once:
        said = f"messages: got images of {found.pixels} pixels together, expected at most {limits.at_once}"
        raise RequestError(said, param="messages")
    return found


def schema_of(given: Json) -> Json:
    """The schema of a response_format; None for text. Raises Refused."""
    if given in (None, {"type": "text"}):
        return None
    if given == {"type": "json_object"}:
        return {"type": "object"}
    described = given.get("json_schema") if isinstance(given, Mapping) and given.get("type") == "json_schema" else None
    if not (
        isinstance(given, Mapping) and isinstance(described, Mapping) and isinstance(described.get("schema"), Mapping)
    ):
        raise refusal("response_format", given, "text, json_object, or json_schema with its schema")
    only(given, ("type", "json_schema"), "response_format.")
    only(described, ("name", "description", "schema", "strict"), "response_format.json_schema.")
    return described["schema"]


def drawing(body: Json) -> ImageRequest:
    """Read the body of an image generation. Raises Refused."""
    asked = read(DrawingBody, body, NO_PICTURE)
    width, height = (None, None) if asked.size in (None, "auto") else map(int, str(asked.size).split("x"))
    try:
        return ImageRequest(
            asked.prompt,
            num_images_per_prompt=asked.n or 1,
            seed=asked.seed,
            guidance_scale=asked.guidance_scale,
            temperature=asked.temperature,
            width=width,
            height=height,
        )
    except ValueError as error:
        raise RequestError(str(error)) from None


def content(given: Json, where: str, images: list[Picture], limits: RequestLimits) -> list[dict[str, Any]]:
    """A message's parts as chat templates take them; its images are added to `images`."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list) or not given:
        raise refusal(where, given, "a text or a list of parts")
    found: list[dict[str, Any]] = []
    for i, part in enumerate(given):
        at, part = f"{where}[{i}]", part if isinstance(part, dict) else {}
        kind, text, url = (part.get(name) for name in ("type", "text", "image_url"))
        if kind in ("text", "image_url"):
            only(part, ("type", str(kind)), f"{at}.")
        if kind == "text" and isinstance(text, str):
            found.append({"type": "text", "text": text})
        elif kind == "image_url":
            if isinstance(url, dict):
                only(url, ("url", "detail"), f"{at}.image_url.")
                if (detail := url.get("detail")) not in (None, "auto", "high"):  # a model sees what its processor makes
                    raise refusal(f"{at}.image_url.detail", detail, "'auto' or 'high': this server has nothing else")
                url = url.get("url")
            if len(images) >= limits.images:
                raise refusal(at, "one image more", f"at most {limits.images} images in a request")
            images.append(picture(url, f"{at}.image_url.url", limits.pixels))
            found.append({"type": "image"})
        else:
            raise refusal(f"{at}.type", kind, "text with its text, or image_url")
    return found


def picture(url: Json, where: str, most: int) -> Picture:
    """The image of a data URL, at most `most` pixels by its header. Raises Refused; nothing is fetched."""
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    scheme, _, kind = head.lower().partition(":")
    if not comma or scheme != "data":
        shown = url[:40] if isinstance(url, str) else url
        raise refusal(where, shown, "a data URL (data:image/png;base64,...): this server fetches nothing")
    kind, *how = kind.split(";")
    if kind not in MEDIA or how[-1:] != ["base64"]:
        raise refusal(where, head, f"base64 of {', '.join(MEDIA)}")
    try:
        content = base64.b64decode(data, validate=True)
        width, height = image_size(content, where, most)
    except binascii.Error as error:
        raise RequestError(
            f"{where}: got base64 that can't be read ({error}), expected an image", param=where
        ) from None
    except ValueError as error:
        raise RequestError(str(error), param=where) from None
    return Picture(content, width * height, where)


def prompt_of(
    processor: Processor, asked: ChatRequest, lock: AbstractContextManager, tensors: bool = False
) -> dict[str, Any]:
    """A processor's output for a chat, on the CPU, whose images are decoded here and let go. lock: held while the
    processor runs. tensors: the processor is one that `takes_tensors`. Raises Refused for what can't be read.
    """
    images = []
    try:
        for picture in asked.images:
            try:
                image = read_image(picture.data, picture.where, picture.pixels)
            except ValueError as error:
                raise RequestError(str(error), param=picture.where) from None
            images.append(tensor_of(image) if tensors else image)
            del image
        with lock:
            return _process(processor, asked.messages, images)
    except RequestError:
        raise
    except Exception as error:  # of chat templates and processors, which raise anything
        said = str(error).split("\n")[0][:200]
    finally:
        images.clear()  # an error remembers what its functions had
        asked.images.clear()
    raise RequestError(f"messages: got what the model's processor can't read ({said}), expected a chat")


def _process(processor: Processor, messages: list[dict[str, Any]], images: list[Any]) -> dict[str, Any]:
    given = {"images": [images]} if images else {}
    return dict(processor(text=[chat_text(processor, messages)], **given, return_tensors="pt"))


def tensor_of(image: Image.Image) -> torch.Tensor:
    """Pixels of an RGB image, (3, H, W) uint8, as image processors of transformers make of it first."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def takes_tensors(processor: Processor) -> bool:
    """Whether a processor's first step is `tensor_of`, so that an image's tensor may stand for the image; where it is
    not, both are held until the last image of a prompt is read. Tried on two images.
    """
    if not isinstance(getattr(processor, "image_processor", None), TorchvisionBackend):
        return False
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    try:
        for size in TRIED:
            noise = torch.randint(256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
            image = Image.fromarray(noise.numpy())
            want, got = (_process(processor, messages, [given]) for given in (image, tensor_of(image)))
            if want.keys() != got.keys() or not all(torch.equal(want[name], got[name]) for name in want):
                return False
    except Exception:  # of chat templates and processors, which raise anything
        return False
    return True


def room(length: int, asked: ChatRequest, limits: RequestLimits) -> int:
    """How many tokens an answer may have behind a prompt of `length`. Raises Refused beyond the context."""
    most = limits.new if asked.most is None else asked.most
    if limits.context is not None and asked.most is None:
        most = max(1, min(most, limits.context - length))
    if limits.context is not None and length + most > limits.context:
        raise RequestError(
            f"messages: got a prompt of {length} tokens and {most} new ones, expected at most {limits.context},"
            " the model's context",
            param="messages",
            code="context_length_exceeded",
        )
    return most


def completion(name: str, id: str, model: str, choice: dict[str, Any]) -> dict[str, Any]:
    """The frame of a completion, or of a piece of a streamed one."""
    made = {"index": 0, "logprobs": None, **choice}
    return {"id": id, "object": name, "created": int(time.time()), "model": model, "choices": [made]}


def usage(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
