"""From a chat to a model's inputs: images decoded, the chat template applied."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_backends import TorchvisionBackend

from visspec.api.captions import chat_text
from visspec.api.completions import ChatRequest, RequestError, RequestLimits
from visspec.io.images import read_image
from visspec.types import Processor

TRIED = ((97, 150), (431, 260))  # heights and widths of images that a processor is tried on


def prompt_of(
    processor: Processor, asked: ChatRequest, lock: AbstractContextManager, tensors: bool = False
) -> dict[str, Any]:
    """A processor's output for a chat, on the CPU, whose images are decoded here and let go. lock: held while the
    processor runs. tensors: the processor is one that `takes_tensors`. Raises RequestError for what can't be read.
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
            return _process(processor, asked.messages, images, asked.tools)
    except RequestError:
        raise
    except Exception as error:  # of chat templates and processors, which raise anything
        said = str(error).split("\n")[0][:200]
    finally:
        images.clear()  # an error remembers what its functions had
        asked.images.clear()
    raise RequestError(f"messages: got what the model's processor can't read ({said}), expected a chat")


def _process(
    processor: Processor, messages: list[dict[str, Any]], images: list[Any], tools: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    given = {"images": [images]} if images else {}
    return dict(processor(text=[chat_text(processor, messages, tools)], **given, return_tensors="pt"))


def why_no_tools(processor: Processor, readable: bool) -> str:
    """Why a model takes no tools; nothing if it does. Tried on a chat. readable: whether its calls can be read."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    try:
        if chat_text(processor, messages, [tool]) == chat_text(processor, messages):
            return "the model's chat template shows no tools"
    except Exception:  # of chat templates, which raise anything
        return "the model's chat template can't show tools"
    return "" if readable else "the model's tokenizer has no response_template to read calls with"


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
    """How many tokens an answer may have behind a prompt of `length`. Raises RequestError beyond the context."""
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
