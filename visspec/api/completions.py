"""Bodies of OpenAI's chat completions and image generations: read strictly, answered in the same form.

What can't be honoured is refused with a sentence rather than passed over: a client that asks for tools or logprobs
should know that it gets none. Images come as data URLs; addresses are never fetched.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from visspec.api.captions import chat_text
from visspec.eval.metrics.images import MAX_PIXELS, read_image

MEDIA = ("image/png", "image/jpeg", "image/webp")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_STOPS = 4
MOST_SEED = 2**62  # rows and images count up from a seed
NOTHING: dict[str, tuple] = {  # arguments of a completion that are not supported, with the values that ask for nothing
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "logit_bias": ({},), "presence_penalty": (0,),
    "frequency_penalty": (0,), "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "prediction": (), "web_search_options": (),
}  # fmt: skip
NO_PICTURE: dict[str, tuple] = {  # the same of an image generation
    "response_format": ("b64_json",), "output_format": ("png",), "stream": (False,), "partial_images": (0,),
    "background": ("auto", "opaque"), "output_compression": (100,),
}  # fmt: skip


class Refused(ValueError):
    """What can't be served: its sentence, the HTTP status, and OpenAI's `param` and `code`."""

    def __init__(self, sentence: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(sentence)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refused(name: str, found: Any, expected: str, **more: Any) -> Refused:
    """An error about an argument of a body."""
    shown = repr(found)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return Refused(f"{name}: got {shown}, expected {expected}", param=name, **more)


@dataclass(frozen=True)
class Limits:
    """What one request may bring. new: tokens of an answer that asks for no number; context: the model's, in tokens."""

    body: int = 20_000_000  # bytes
    pixels: int = MAX_PIXELS  # of an image
    images: int = 16
    new: int = 128
    context: int | None = None


@dataclass(frozen=True)
class Chat:
    """A chat completion that was asked for. messages: roles and parts as chat templates take them."""

    messages: list[dict[str, Any]]
    images: list[Image.Image]
    options: dict[str, Any]  # of generate
    most: int | None = None  # new tokens
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False  # whether a streamed answer ends with its counts


@dataclass(frozen=True)
class Drawing:
    """Images that were asked for. options: of `ImagePipeline`."""

    prompt: str
    options: dict[str, Any] = field(default_factory=dict)


def chat(body: Any, limits: Limits) -> Chat:
    """Read the body of a chat completion and decode its images. Raises Refused."""
    check_nothing(body, NOTHING)
    messages: list[dict[str, Any]] = []
    images: list[Image.Image] = []
    for i, message in enumerate(listed(body, "messages", "a list of messages")):
        where = f"messages[{i}]"
        role = message.get("role") if isinstance(message, Mapping) else message
        if not isinstance(role, str) or role not in ROLES or not isinstance(message, Mapping):
            raise refused(f"{where}.role", role, f"one of {', '.join(ROLES)}")
        parts = content(message.get("content"), f"{where}.content", images, limits)
        messages.append({"role": ROLES[role], "content": parts})
    options: dict[str, Any] = {}
    temperature = number(body, "temperature", 0, 100)
    if temperature is not None:
        options["do_sample"] = temperature > 0
    top_p = number(body, "top_p", 0, 1)
    if top_p == 0:
        raise refused("top_p", top_p, "a number above 0 and at most 1")
    top_k = whole(body, "top_k", 0)
    if temperature:
        options |= {
            "temperature": float(temperature),
            "top_p": 1.0 if top_p is None else float(top_p),
            "top_k": top_k or 0,
        }
    if (seed := whole(body, "seed", 0, MOST_SEED)) is not None:
        options["seed"] = seed
    given = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    return Chat(
        messages, images, options, whole(body, given[0], 1) if given else None, stops(body.get("stop")),
        flag(body, "stream"), wants_usage(body.get("stream_options")),
    )  # fmt: skip


def drawing(body: Any) -> Drawing:
    """Read the body of an image generation. Raises Refused."""
    check_nothing(body, NO_PICTURE)
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise refused("prompt", prompt, "a text")
    options: dict[str, Any] = {"num_images_per_prompt": whole(body, "n", 1, 10) or 1}
    options["seed"] = whole(body, "seed", 0, MOST_SEED)
    for name, least, most in (("guidance_scale", 0, 100), ("temperature", 0, 100)):  # beyond OpenAI's own
        options[name] = number(body, name, least, most)
    size = body.get("size")
    if size not in (None, "auto"):
        sides = str(size).split("x")
        if len(sides) != 2 or not all(side.isdecimal() and 0 < int(side) < 100_000 for side in sides):
            raise refused("size", size, "WIDTHxHEIGHT in pixels, or auto")
        options["width"], options["height"] = map(int, sides)
    return Drawing(prompt, {name: value for name, value in options.items() if value is not None})


def check_nothing(body: Any, neutral: Mapping[str, tuple]) -> None:
    """Raises Refused for a body that is no object, and for arguments that ask for what isn't there."""
    if not isinstance(body, Mapping):
        raise Refused(f"body: got {type(body).__name__}, expected a JSON object")
    for name, values in neutral.items():
        found = body.get(name)
        same = (found == value and isinstance(found, bool) == isinstance(value, bool) for value in values)
        if found is not None and not any(same):
            wanted = " or ".join(repr(value) for value in values) or "none"
            raise refused(name, found, f"{wanted}: this server has nothing else", code="unsupported_value")


def content(given: Any, where: str, images: list[Image.Image], limits: Limits) -> list[dict[str, Any]]:
    """A message's parts as chat templates take them; its images are added to `images`."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list) or not given:
        raise refused(where, given, "a text or a list of parts")
    found: list[dict[str, Any]] = []
    for i, part in enumerate(given):
        at, kind = f"{where}[{i}]", part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            found.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            url = part.get("image_url")
            url = url.get("url") if isinstance(url, Mapping) else url
            if len(images) >= limits.images:
                raise refused(at, "one image more", f"at most {limits.images} images in a request")
            images.append(image(url, f"{at}.image_url.url", limits.pixels))
            found.append({"type": "image"})
        else:
            raise refused(f"{at}.type", kind, "text with its text, or image_url")
    return found


def image(url: Any, where: str, pixels: int) -> Image.Image:
    """The picture of a data URL. Raises Refused; nothing is fetched."""
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not comma or not head.startswith("data:"):
        shown = url[:40] if isinstance(url, str) else url
        raise refused(where, shown, "a data URL (data:image/png;base64,...): this server fetches nothing")
    kind, *how = head.removeprefix("data:").split(";")
    if kind not in MEDIA or how[-1:] != ["base64"]:
        raise refused(where, head, f"base64 of {', '.join(MEDIA)}")
    try:
        return read_image(base64.b64decode(data, validate=True), where, pixels)
    except binascii.Error as error:
        raise Refused(f"{where}: got base64 that can't be read ({error}), expected an image", param=where) from None
    except ValueError as error:
        raise Refused(str(error), param=where) from None


def stops(given: Any) -> tuple[str, ...]:
    """Texts that end an answer."""
    found = [given] if isinstance(given, str) else given or []
    if not isinstance(found, list) or len(found) > MOST_STOPS or not all(isinstance(s, str) and s for s in found):
        raise refused("stop", given, f"a text or a list of at most {MOST_STOPS}")
    return tuple(found)


def wants_usage(given: Any) -> bool:
    """Whether a streamed answer ends with its counts."""
    if given is not None and not isinstance(given, Mapping):
        raise refused("stream_options", given, "an object")
    return bool((given or {}).get("include_usage"))


def listed(body: Mapping[str, Any], name: str, what: str) -> list:
    found = body.get(name)
    if not isinstance(found, list) or not found:
        raise refused(name, found, what)
    return found


def flag(body: Mapping[str, Any], name: str) -> bool:
    found = body.get(name)
    if found is not None and not isinstance(found, bool):
        raise refused(name, found, "true or false")
    return bool(found)


def number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    """An argument between two numbers, None if it isn't there."""
    found = body.get(name)
    real = isinstance(found, (int, float)) and not isinstance(found, bool)
    if found is not None and not (real and least <= found <= most):
        raise refused(name, found, f"a number from {least} to {most}")
    return found


def whole(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    """A whole number, None if it isn't there."""
    found = body.get(name)
    fits = isinstance(found, int) and not isinstance(found, bool) and least <= found <= (most or found)
    if found is not None and not fits:
        beyond = f"from {least} to {most}" if most else f"of at least {least}"
        raise refused(name, found, f"a whole number {beyond}")
    return found


def prompt_of(processor: Any, asked: Chat) -> dict[str, Any]:
    """A processor's output for a chat, on the CPU. Raises Refused for what it can't read."""
    try:
        text = chat_text(processor, asked.messages)
        images = {"images": [asked.images]} if asked.images else {}
        return dict(processor(text=[text], **images, return_tensors="pt"))
    except Exception as error:  # of chat templates and processors, which raise anything
        said = str(error).split("\n")[0][:200]
        raise Refused(f"messages: got what the model's processor can't read ({said}), expected a chat") from None


def room(length: int, asked: Chat, limits: Limits) -> int:
    """How many tokens an answer may have behind a prompt of `length`. Raises Refused beyond the context."""
    most = limits.new if asked.most is None else asked.most
    if limits.context is not None and asked.most is None:
        most = max(1, min(most, limits.context - length))
    if limits.context is not None and length + most > limits.context:
        raise Refused(
            f"messages: got a prompt of {length} tokens and {most} new ones, expected at most {limits.context},"
            " the model's context", param="messages", code="context_length_exceeded",
        )  # fmt: skip
    return most


def completion(name: str, id: str, model: str, choice: dict[str, Any]) -> dict[str, Any]:
    """The frame of a completion, or of a piece of a streamed one."""
    made = {"index": 0, "logprobs": None, **choice}
    return {"id": id, "object": name, "created": int(time.time()), "model": model, "choices": [made]}


def usage(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
