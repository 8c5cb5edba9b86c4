"""Captioning of images in batches or as a stream. An image that can't be read yields an entry with an error."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from PIL.Image import Image
from transformers import PreTrainedTokenizerBase

from visspec.api.sources import Record, seed_of
from visspec.api.text import queueing
from visspec.api.text.accelerate import Accelerated
from visspec.io import included
from visspec.io.checkpoint import first_line
from visspec.io.images import MAX_PIXELS
from visspec.io.videos import FRAMES, Clip, open_media
from visspec.loop.stats import text_pieces
from visspec.loop.stream import Answer
from visspec.types import Processor

Given = TypeVar("Given")
Made = TypeVar("Made")
Prepared = tuple[Record, dict[str, Any] | Exception]  # a record without its pixels, and its inputs or an error
PROMPT = "describe the picture in detail ."  # for the included models, which know few words
PROMPT_OF_OTHERS = "Describe this image in detail."


@dataclass(frozen=True)
class Caption:
    """The result for one image. If it can't be read or captioned, `text` is None and `error` is the reason."""

    record: Record  # without the pixels
    text: str | None = None
    tokens: int = 0
    error: str | None = None
    pieces: tuple[tuple[str, str], ...] = ()  # (text, origin) of each token
    ended: str | None = None  # see `stats.finish_reason`
    drift: float = 0.0  # summed over tokens
    rounds: int = 0  # rounds after the prefill

    @property
    def path(self) -> str:
        """The record's id, which for a file is its path."""
        return self.record.id


def default_prompt(model: str | Path) -> str:
    """Return the default question about an image for a model, given by name or folder."""
    return PROMPT if included.is_included(model) else PROMPT_OF_OTHERS


def chat_prompt(processor, request: str) -> str:
    """Render one user turn with an image and a request, as `chat_text`."""
    return chat_text(processor, [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": request}]}])


def chat_text(processor, messages: Sequence[dict[str, Any]]) -> str:
    """Render a conversation with the chat template, or as plain text. Raises ValueError if the template fails."""
    if getattr(processor, "chat_template", None):
        options: dict[str, Any] = {"add_generation_prompt": True}
        if isinstance(processor, PreTrainedTokenizerBase):  # templates of text models expect plain strings
            messages = [m | {"content": "".join(part["text"] for part in m["content"])} for m in messages]
            options["tokenize"] = False
        try:
            return processor.apply_chat_template(messages, **options)
        except Exception as error:  # a checkpoint's template may raise anything
            raise ValueError(f"chat_template: the processor's template failed ({first_line(error)}).") from error
    marks = {kind: getattr(processor, f"{kind}_token", f"<{kind}>") for kind in ("image", "video")}
    return " ".join(marks.get(p["type"]) or p["text"] for m in messages for p in m["content"])


def prepare(processor, images: Sequence, request: str | Sequence[str], model) -> dict[str, Any]:
    """Return a model's inputs, on its device, for a batch of PIL images or clips with one request or one each."""
    requests = [request] * len(images) if isinstance(request, str) else request
    return move_inputs(process_batch(processor, images, requests), model)


def process_batch(processor, images: Sequence, requests: Sequence[str]) -> dict[str, Any]:
    """Process PIL images, lists of them, or clips, with a request each. Raises ValueError as `process_chats`."""
    media = [image if isinstance(image, list) else [image] for image in images]
    chats = []
    for own, request in zip(media, requests):
        content = [{"type": "video" if isinstance(one, Clip) else "image"} for one in own]
        chats.append([{"role": "user", "content": [*content, {"type": "text", "text": request}]}])
    return process_chats(processor, chats, media)


def process_chats(
    processor,
    chats: Sequence[Sequence[dict[str, Any]]],
    media: Sequence[Sequence[Image | Clip]],
    render: Callable[..., str] = chat_text,
) -> dict[str, Any]:
    """Process conversations with their PIL images and clips, left-padded, on the CPU. Conversations without any use the
    tokenizer.

    Raises:
        ValueError: If a text contains an image token, or the processor does not support images or clips.
    """
    tokenizer_of(processor).padding_side = "left"
    if isinstance(processor, PreTrainedTokenizerBase):
        return _process_texts(processor, [render(processor, chat) for chat in chats], media)
    images = [[one for one in own if not isinstance(one, Clip)] for own in media]
    clips = [one for own in media for one in own if isinstance(one, Clip)]
    if clips and getattr(processor, "video_processor", None) is None:
        raise ValueError(f"video: got a clip, expected an image: {type(processor).__name__} reads no videos.")
    names = ("image_token", "boi_token", "video_token")
    marks = {m for name in names if isinstance(m := getattr(processor, name, None), str)}
    for chat, own in zip(chats, media):
        texts = [part["text"] for message in chat for part in message["content"] if part["type"] == "text"]
        for text, mark in itertools.product(texts, marks):
            if mark in text:
                count, count_text = text.count(mark) + len(own), f"{len(own)} image{'s' * (len(own) != 1)}"
                raise ValueError(f"prompt: got {text!r} with {count} {mark} for {count_text}, expected none in it.")
    options: dict[str, Any] = {"images": images} if any(images) else {}
    if clips:
        options |= {"videos": [clip.frames for clip in clips], "video_metadata": [clip.metadata for clip in clips]}
        options |= {"do_sample_frames": False}
    texts = [render(processor, chat) for chat in chats]
    return dict(processor(text=texts, **options, return_tensors="pt", padding=True))


def tokenizer_of(processor) -> Any:
    """Return the tokenizer of a processor. Text models have only a tokenizer."""
    return getattr(processor, "tokenizer", processor)


def _process_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str], media: Sequence[Sequence]) -> dict[str, Any]:
    if any(media):
        raise ValueError("image: got one, expected text alone: this model generates text and sees no pictures.")
    if tokenizer.pad_token is None:  # padding is masked, so any token will do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    special = not tokenizer.chat_template
    return dict(tokenizer(text=texts, return_tensors="pt", padding=True, add_special_tokens=special))


def move_inputs(inputs: dict[str, Any], model) -> dict[str, Any]:
    """Move inputs to a model's device, pixels in its dtype. Copies from pinned memory don't block."""
    there = {k: v.to(model.device, non_blocking=True) for k, v in inputs.items()}
    return {k: v.to(model.dtype) if torch.is_floating_point(v) else v for k, v in there.items()}


class Captions(AbstractContextManager):
    """Captions many images by continuous batching (`Accelerated.stream`): an image enters as a slot comes free.

    Use it as a context manager, or call `close` to stop unfinished captions and the threads.

    Args:
        fast: The accelerated model.
        processor: Its processor.
        request: Question for images whose record has no prompt (default: `default_prompt`).
        slots: Number of images captioned at once.
        workers: Number of threads that read and prepare images, up to `2 * slots` images ahead.
        max_pixels: Limit to which images are scaled down.
        frames: Number of frames read from a video.
        generate: Arguments of `generate`. Each record's seed is derived from `seed` and the record's id
            (`sources.seed_of`), so results do not depend on batch, order or process.
    """

    def __init__(
        self,
        fast: Accelerated,
        processor: Processor,
        *,
        request: str | None = None,
        slots: int = 8,
        workers: int = 2,
        max_pixels: int = MAX_PIXELS,
        frames: int = FRAMES,
        **generate: Any,
    ):
        self.fast, self.processor, self.slots, self.workers = fast, processor, slots, workers
        self.request = request or default_prompt(getattr(fast.model, "name_or_path", ""))
        self.max_pixels, self.frames, self.generate = max_pixels, frames, generate
        self.context = getattr(fast.model.config.get_text_config(), "max_position_embeddings", None)
        self._processing = threading.Lock()  # tokenizers are not thread-safe
        self._runs: weakref.WeakSet[Generator[Caption, None, None]] = weakref.WeakSet()

    def __call__(self, records: Iterable[Record | str | Path]) -> Iterator[Caption]:
        """Yield captions in the order in which they end. If an image can't be read or captioned, its caption has an
        error.

        Args:
            records: Records or paths. If the iterable raises, the records before are captioned first.
        """
        raised: list[Exception] = []
        prepared = prefetch_map(self._prepare, _until_error(records, raised), self.workers, 2 * self.slots)
        options = {k: v for k, v in self.generate.items() if k != "seed"}
        answers = self.fast.stream(map(self._entry, prepared), slots=self.slots, **options)
        run = self._run(answers, prepared, raised)
        self._runs.add(run)
        return run

    def _run(
        self, answers: Generator[Answer, None, None], prepared: Generator[Any, None, None], raised: list[Exception]
    ) -> Generator[Caption, None, None]:
        try:
            yield from map(self._caption, answers)
        finally:
            answers.close()
            prepared.close()
        if raised:
            raise raised[0]

    def close(self) -> None:
        """Stop unfinished captions."""
        for run in list(self._runs):
            run.close()

    def __exit__(self, *error: BaseException | type | TracebackType | None) -> None:
        self.close()

    def open_record(self, record: Record) -> Image | Clip:
        """Open the picture of a record, or the frames of its video.

        Args:
            record: The record.

        Raises:
            ValueError, OSError: If it can't be read.
        """
        return open_media(record.image, record.id, self.max_pixels, self.frames)

    def _prepare(self, record: Record) -> Prepared:
        """In a worker thread: return a record without its pixels, and the processor's output or the error."""
        label = str(record.image) if isinstance(record.image, (str, Path)) else None
        bare = replace(record, image=label, prompt=record.prompt or self.request)
        try:
            if record.error is not None:
                raise ValueError(record.error)
            image = self.open_record(record)
            with self._processing:
                inputs = process_batch(self.processor, [image], [bare.prompt or ""])
            length, new = inputs["input_ids"].shape[1], self.generate.get("max_new_tokens") or 0
            if self.context is not None and length + new > self.context:
                raise ValueError(f"{record.id}: {length} + {new} tokens exceed {self.context}, the model's context.")
            if self.fast.model.device.type == "cuda":
                inputs = {k: v.pin_memory() for k, v in inputs.items()}
            return bare, inputs
        except Exception as error:
            return bare, error

    def _entry(self, prepared: Prepared) -> queueing.Entry:
        record, inputs = prepared
        if isinstance(inputs, Exception):
            return record, inputs
        run = self.generate.get("seed")
        seed = {} if run is None else {"seed": seed_of(run, record.id)}
        return move_inputs(inputs, self.fast.model) | seed | {"id": record}

    def _caption(self, answer: Answer) -> Caption:
        record, error = answer.id, answer.error
        if error is not None:
            message = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
            message = message if message.startswith(record.id) else f"{record.id}: {message}"
            return Caption(record, error=message)
        tokenizer = self.processor.tokenizer
        return Caption(
            record,
            tokenizer.decode(answer.tokens, skip_special_tokens=True).strip(),
            len(answer.tokens),
            pieces=tuple(text_pieces(tokenizer, answer.tokens, answer.origin)),
            ended=answer.ended,
            drift=answer.drift,
            rounds=len(answer.rounds),
        )


def _until_error(records: Iterable[Record | str | Path], raised: list[Exception]) -> Iterator[Record]:
    """Yield records up to an exception, which is appended to `raised`."""
    try:
        for record in records:
            yield record if isinstance(record, Record) else Record(str(record), record)
    except Exception as error:
        raised.append(error)


def prefetch_map(
    make: Callable[[Given], Made], inputs: Iterable[Given], workers: int, ahead: int
) -> Generator[Made, None, None]:
    """Map in threads, in order, at most `ahead` items in advance."""
    queue: deque[Any] = deque()
    items = iter(inputs)
    pool = ThreadPoolExecutor(workers, "visspec-images")
    try:
        while True:
            while len(queue) < ahead and (item := next(items, queue)) is not queue:
                queue.append(pool.submit(make, item))  # type: ignore[arg-type]
            if not queue:
                return
            yield queue.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
