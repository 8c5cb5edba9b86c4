"""Prompts that a model writes itself, for `visspec train drafter --data self`.

An instruct model that is given its chat template up to the start of the user's text continues like a user (Magpie,
arXiv 2406.08464). A vision-language model that is given a picture there asks about it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from visspec.api.captions import chat_text, move_inputs, process_chats, tokenizer_of
from visspec.api.progress import Progress
from visspec.api.sources import seed_of
from visspec.api.text.accelerate import accelerate
from visspec.api.training.data import of_files, read_media
from visspec.api.training.export import say
from visspec.api.training.options import DrafterTraining
from visspec.io.files import Journal
from visspec.io.options import sampling_arguments
from visspec.types import Processor

COUNT = 2000
TRIES = 4  # maximum number of samples per prompt
MARK = "visspec"  # placeholder for the user's text in the template


def count_of(spec: DrafterTraining, several: bool) -> int:
    """Return the number of prompts that "self" or "self:N" requests, 0 for other data. Raises ValueError for options
    that don't go together. `several` is whether there is more than one process.
    """
    match = re.fullmatch(r"self(:[1-9]\d*)?", str(spec.data))
    if match is None and spec.images is not None:
        raise ValueError(f"images: --data {spec.data} has its own images. Use --images with --data self.")
    if match is not None and several:
        raise ValueError("data: got self in several processes. Write the prompts in one process first.")
    return 0 if match is None else int((match[1] or f":{COUNT}")[1:])


def user_turn(*kinds: str) -> list[dict[str, Any]]:
    """Return a conversation of pictures or videos and `MARK`."""
    return [{"role": "user", "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": MARK}]}]


def opening(processor: Processor, messages: Sequence[dict[str, Any]]) -> str:
    """Return the chat template up to the start of the user's text."""
    return chat_text(processor, messages).partition(MARK)[0]


def write(model: PreTrainedModel, processor: Processor, spec: DrafterTraining, count: int) -> Path:
    """Let a model write prompts to prompts.jsonl in the folder `out`. An interrupted run is continued. Returns the
    file, for `TrainingData`. Raises ValueError if the model has no chat template, or no sample is usable.
    """
    if not getattr(processor, "chat_template", None):
        raise ValueError("data: got self for a model without a chat template. Pass a file of prompts.")
    images = of_files(str(Path(spec.images).resolve()), ()) if spec.images else None
    tokenizer, own = tokenizer_of(processor), model.generation_config.eos_token_id
    ends = {*tokenizer.all_special_ids, *(own if isinstance(own, list) else [own])} - {None}
    # the template's mark after the user's text, in case it is not a special token
    closing = next(iter(chat_text(processor, user_turn()).partition(MARK)[2].split()), "\0")

    def about(number: int) -> Mapping[str, str]:
        return images.read(number % images.count) if images else {}

    def entry(number: int) -> dict[str, Any] | tuple[int, Exception]:
        """Return the inputs of a sample, or the error that prevents it."""
        try:
            media = [read_media(Path(name), spec.max_pixels) for name in about(number).values()]
            inputs = process_chats(processor, [user_turn(*about(number))], [media], opening)
        except (ValueError, OSError) as error:
            return number, error
        return move_inputs(inputs, model) | {"id": number, "seed": seed_of(spec.seed, str(number))}

    lengths = {"max_new_tokens": spec.max_new_tokens, "eos_token_id": sorted(ends)}
    options: dict[str, Any] = lengths | sampling_arguments(1.0)
    settings = {"target": spec.target, "images": spec.images, "seed": spec.seed, **options}
    fast, path, samples = accelerate(model, "context", tokenizer=tokenizer), spec.out / "prompts.jsonl", Counter[str]()
    with Journal(path, settings) as journal, Progress("prompts", count) as bar:
        words = set(map(words_of, journal))
        first = max(map(int, journal.done), default=-1) + 1
        numbers = range(first, first + TRIES * (count - len(words)))
        answers = fast.stream(map(entry, numbers), slots=spec.rows, **options)
        while len(words) < count and (answer := next(answers, None)) is not None:
            text, closed, _ = (answer.text or "").partition(closing)
            row = {"id": str(answer.id), **about(answer.id), "prompt": text.strip()}
            checks = {
                "unread": answer.error is not None,
                "cut": not closed and answer.ended != "eos",
                "empty": len(words_of(row)) == 1,
                "duplicate": words_of(row) in words,
                "new": True,
            }
            kind = next(name for name, failed in checks.items() if failed)
            samples[kind] += 1
            if kind == "new":
                words.add(words_of(row))
                journal.add(row)
            bar.update(len(words), samples)
        answers.close()
    share = samples["duplicate"] / max(samples["duplicate"] + samples["new"], 1)
    failed = f"; {share:.1%} duplicates among {samples.total():,} samples: {dict(samples)}" if samples else ""
    say(f"{path} holds {len(words):,} prompts{failed}")
    if not words:
        raise ValueError(f"data: got no prompt from {spec.target}. Pass a file of prompts.")
    return path


def words_of(row: Mapping[str, str]) -> tuple[str | None, ...]:
    """Return what duplicates of a prompt share: its picture or video, and its words in lower case."""
    return row.get("image") or row.get("video"), *re.findall(r"\w+", row["prompt"].casefold())
