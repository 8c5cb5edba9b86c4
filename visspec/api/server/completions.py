"""OpenAI's chat completions and image generations as pydantic models. Unsupported arguments are rejected by name.
Images are sent as data URLs; addresses are never fetched.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from openai.types.chat import ChatCompletionContentPartImage, ChatCompletionContentPartText
from openai.types.shared import ResponseFormatJSONObject, ResponseFormatJSONSchema, ResponseFormatText
from PIL.Image import Image
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from visspec.io.images import data_url_bytes, image_size, read_image
from visspec.io.options import sampling_arguments


class RequestError(ValueError):
    """An error response, with the HTTP status and OpenAI's `param` and `code`."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Strict(BaseModel):
    """An object of a request body. Values are not converted, and unknown members must be null or empty."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def drop_empty(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if name == "model" or value not in (None, [], {})}


Part = Annotated[ChatCompletionContentPartText | ChatCompletionContentPartImage, Field(discriminator="type")]
AsPart = BeforeValidator(lambda given: [{"type": "text", "text": given}] if isinstance(given, str) else given)
Format = ResponseFormatText | ResponseFormatJSONObject | ResponseFormatJSONSchema


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], AsPart]


class StreamOptions(Strict):
    include_usage: bool = False


class Body(Strict):
    """Arguments of both kinds of request."""

    temperature: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(None, ge=0, le=2**62)  # row or image i uses seed + i
    user: object = None  # this and the next two have no effect
    metadata: object = None
    store: object = None


Stop = Annotated[str, Field(min_length=1)]
AsStop = BeforeValidator(lambda given: [given] if isinstance(given, str) else given)


class ChatBody(Body):
    """Arguments of a chat completion, those of OpenAI and top_k."""

    model: str
    messages: list[Message] = Field(min_length=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[Stop], AsStop] = Field(default_factory=list, max_length=4)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=16)
    logprobs: Literal[False] = False  # not supported, but clients send the default values of this and the next two
    frequency_penalty: float = Field(0, ge=0, le=0)
    presence_penalty: float = Field(0, ge=0, le=0)
    response_format: Annotated[Format, Field(discriminator="type")] = ResponseFormatText(type="text")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `generate`. If no temperature is given, other settings are added to the model's own."""
        options = {} if self.temperature is None else sampling_arguments(self.temperature)
        names = {"seed"} if self.temperature == 0 else {"seed", "top_p", "top_k"}  # greedy decoding has nothing to cut
        return options | self.model_dump(include=names, exclude_none=True)

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema of the answer; None for text."""
        if isinstance(self.response_format, ResponseFormatJSONSchema):
            return self.response_format.json_schema.schema_ or {}
        return {"type": "object"} if self.response_format.type == "json_object" else None

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages in the form of chat templates, without images."""
        messages = []
        for message in self.messages:
            parts = [part.to_dict() if part.type == "text" else {"type": "image"} for part in message.content]
            messages.append({"role": message.role.replace("developer", "system"), "content": parts})
        return messages

    def images(self, max_pixels: int) -> list[Image]:
        """Decode the images. Raises ValueError if they have more than `max_pixels` pixels in total."""
        parts = [part for message in self.messages for part in message.content]
        files = [data_url_bytes(part.image_url.url, "messages") for part in parts if part.type == "image_url"]
        pixels = sum(math.prod(image_size(data, "messages: an image", max_pixels)) for data in files)
        if pixels > max_pixels:
            raise ValueError(f"messages: the images have {pixels} pixels in total, more than {max_pixels}.")
        return [read_image(data, "messages: an image", max_pixels) for data in files]


class DrawingBody(Body):
    """Arguments of an image generation, those of OpenAI and seed, temperature and guidance_scale."""

    model: str = ""
    prompt: str = Field(pattern=r"\S")
    n: int = Field(1, ge=1, le=10)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    size: str = Field("auto", pattern=r"^(auto|0*[1-9][0-9]{0,4}x0*[1-9][0-9]{0,4})$")
    response_format: Literal["b64_json"] = "b64_json"
    output_format: Literal["png"] = "png"


def as_request_error(error: Exception) -> RequestError:
    """Convert an exception. The message of a ValueError begins with the name of the argument."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RequestValidationError):
        return refusal(error.errors()[0])
    if isinstance(error, HTTPException):
        return RequestError(error.detail, error.status_code)
    if isinstance(error, ValueError):
        name = str(error).partition(":")[0]
        return RequestError(str(error), param=name if name.isidentifier() else None)
    return RequestError(f"{type(error).__name__}: {error}.", 500)


def refusal(error: dict[str, Any]) -> RequestError:
    """Convert an error of pydantic to a RequestError that names the argument."""
    at, unknown = error["loc"], error["type"] == "extra_forbidden"
    path = [part for part, previous in zip(at[1:], at) if part != previous and error["type"] != "json_invalid"]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:] or "body"
    message = "this server does not support this argument" if unknown else error["msg"]
    return RequestError(f"{name}: {message}", param=name, code="unknown_parameter" if unknown else None)
