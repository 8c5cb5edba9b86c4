"""Bodies of OpenAI's chat completions and image generations: read strictly, answered in the same form.

What can't be honoured is refused with a sentence rather than passed over: a client that asks for audio should know that
it gets none. Images come as data URLs; addresses are never fetched.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from visspec.api.image_call import ImageRequest
from visspec.api.penalties import GeneratedTokenPenalties
from visspec.io.files import Json
from visspec.io.images import MAX_PIXELS, image_size

MEDIA = ("image/png", "image/jpeg", "image/webp")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_STOPS = 4
MOST_CHOICES = 16
MOST_LOGPROBS = 20
MOST_SEED = 2**62  # rows and images count up from a seed
NOTHING: dict[str, tuple] = {  # arguments of a completion that are not supported, with the values that ask for nothing
    "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (), "moderation": (),
    "reasoning_effort": ("none",), "verbosity": ("medium",), "service_tier": ("auto", "default"),
}  # fmt: skip
NO_PICTURE: dict[str, tuple] = {  # the same of an image generation
    "response_format": ("b64_json",), "output_format": ("png",), "stream": (False,), "partial_images": (0,),
    "background": ("auto", "opaque"), "output_compression": (100,), "quality": ("auto", "standard"), "style": (),
    "moderation": ("auto", "low"), "complexity": (), "frame_count": (1,), "frame_duration_ms": (), "svg": (),
}  # fmt: skip
NO_MATTER = (  # arguments that change no answer: who asks, what else may be cached or kept
    "user",
    "safety_identifier",
    "metadata",
    "store",
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
    """What one request may bring. new: tokens of an answer that asks for no number; context, vocab: of the model, in
    tokens; no_tools: why it takes none.
    """

    body: int = 20_000_000  # bytes
    pixels: int = MAX_PIXELS  # of an image
    at_once: int = 2 * MAX_PIXELS  # pixels of a request's images together, and of all that are decoded at once
    images: int = 16
    new: int = 128
    context: int | None = None
    vocab: int | None = None
    no_tools: str = "this server has nothing else"


@dataclass(frozen=True)
class Picture:
    """An image that is not decoded yet. where: the argument that brought it."""

    data: bytes
    pixels: int
    where: str


@dataclass(frozen=True)
class ChatRequest:
    """A chat completion that was asked for. messages, tools: as chat templates take them. top: likely tokens whose
    logprobs are asked for beside each token's own; None: none at all.
    """

    messages: list[dict[str, Any]]
    images: list[Picture]
    options: dict[str, Any]  # of generate
    most: int | None = None  # new tokens
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False  # whether a streamed answer ends with its counts
    n: int = 1
    top: int | None = None
    penalties: GeneratedTokenPenalties | None = None
    tools: tuple[dict[str, Any], ...] = ()
    schema: Json = None  # of the JSON that the answer is

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


class Function(BaseModel):
    model_config = Body.model_config

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(BaseModel):
    model_config = Body.model_config

    type: Literal["function"]
    function: Function


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of an earlier answer, which has its arguments as a text."""

    id: str
    type: Literal["function"]
    function: CalledFunction


Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


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
    response_format: JsonValue = None
    stream_options: StreamOptions | None = Field(
        None, description="an object in which include_usage is true or false, include_obfuscation false"
    )
    n: int | None = whole(1, MOST_CHOICES)
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = whole(0, MOST_LOGPROBS)
    frequency_penalty: float | None = number(-2, 2)
    presence_penalty: float | None = number(-2, 2)
    logit_bias: dict[TokenId, Bias] | None = Field(
        None, description="ids of the model's tokens, and -100 to 100 for each"
    )
    tools: list[Tool] | None = Field(None, description="a list of functions, not strict: calls are not enforced")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="'none' or 'auto': calls are not enforced")
    parallel_tool_calls: bool | None = Field(None, description="true or false")


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
    """A body's arguments. Raises RequestError if it is no object, and for the first argument that can't be honoured."""
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
    """Raises RequestError for what an object of a body has beside its known members."""
    for name, found in given.items():
        if found is not None and name not in known and name not in NO_MATTER:
            shown = name if name.isidentifier() and len(name) <= 60 else ascii(name[:60])
            raise refusal(where + shown, found, "none: this server does not know it", code="unknown_parameter")


def chat(body: Json, limits: RequestLimits) -> ChatRequest:
    """Read the body of a chat completion; of its images the headers. Raises RequestError."""
    asked = read(ChatBody, body, NOTHING)
    messages: list[dict[str, Any]] = []
    images: list[Picture] = []
    for i, given in enumerate(asked.messages):
        messages.append(message(given, f"messages[{i}]", images, limits))
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
    found = ChatRequest(
        messages,
        images,
        options,
        min(most, default=None),
        stops,
        bool(asked.stream),
        usage,
        n=asked.n or 1,
        top=(asked.top_logprobs or 0) if asked.logprobs else None,
        penalties=penalties(asked, limits),
        tools=tools(asked, limits),
        schema=schema_of(asked.response_format),
    )
    if asked.top_logprobs and not asked.logprobs:
        raise refusal("top_logprobs", asked.top_logprobs, "none without logprobs: true")
    if found.pixels > limits.at_once:
        said = f"messages: got images of {found.pixels} pixels together, expected at most {limits.at_once}"
        raise RequestError(said, param="messages")
    return found


def schema_of(given: Json) -> Json:
    """The schema of a response_format; None for text. Raises RequestError."""
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


def penalties(asked: ChatBody, limits: RequestLimits) -> GeneratedTokenPenalties | None:
    """What a body asks for beside the model's own scores. Raises RequestError for tokens that the model has not."""
    bias = {int(id): value for id, value in (asked.logit_bias or {}).items()}
    if limits.vocab is not None and (strange := [id for id in bias if id >= limits.vocab]):
        raise refusal("logit_bias", strange[0], f"ids of tokens below {limits.vocab}, the size of the vocabulary")
    found = GeneratedTokenPenalties(asked.frequency_penalty or 0.0, asked.presence_penalty or 0.0, bias)
    return None if found == GeneratedTokenPenalties() else found


def tools(asked: ChatBody, limits: RequestLimits) -> tuple[dict[str, Any], ...]:
    """The tools that a chat template is to show. Raises RequestError where the model takes none."""
    if not asked.tools or asked.tool_choice == "none":
        return ()
    if limits.no_tools:
        raise refusal("tools", [tool.function.name for tool in asked.tools], f"none: {limits.no_tools}")
    if asked.parallel_tool_calls is False:
        raise refusal("parallel_tool_calls", False, "true: the number of calls is not enforced")
    return tuple(tool.model_dump(exclude_unset=True) for tool in asked.tools)


def message(given: Json, where: str, images: list[Picture], limits: RequestLimits) -> dict[str, Any]:
    """A message as chat templates take it; its images are added to `images`. Raises RequestError."""
    role = given.get("role") if isinstance(given, dict) else given
    roles = ROLES if limits.no_tools else ROLES | {"tool": "tool"}
    if not isinstance(role, str) or role not in roles or not isinstance(given, dict):
        raise refusal(f"{where}.role", role, f"one of {', '.join(roles)}")
    given = {name: found for name, found in given.items() if found not in (None, [])}
    own = {} if limits.no_tools else {"assistant": "tool_calls", "tool": "tool_call_id"}
    only(given, ("role", "content", own.get(role, "")), f"{where}.")
    found: dict[str, Any] = {"role": roles[role]}
    if "tool_calls" in given:
        given.setdefault("content", "")
        found["tool_calls"] = called(given["tool_calls"], f"{where}.tool_calls")
    if "tool_call_id" in given:
        found["tool_call_id"] = given["tool_call_id"]
    return found | {"content": content(given.get("content"), f"{where}.content", images, limits)}


def called(given: Json, where: str) -> list[dict[str, Any]]:
    """Calls of an earlier answer, with their arguments as objects. Raises RequestError."""
    try:
        calls = [ToolCall.model_validate(call).model_dump() for call in cast(list, given)]
        for call in calls:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    except (ValueError, TypeError):
        raise refusal(where, given, "calls with id, type and function, as they were answered") from None
    return calls


def drawing(body: Json) -> ImageRequest:
    """Read the body of an image generation. Raises RequestError."""
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
    """The image of a data URL, at most `most` pixels by its header. Raises RequestError; nothing is fetched."""
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
