"""Training data records as conversations: {image, prompt}, `conversations` (LLaVA, ShareGPT), `messages` (chats of
transformers, TRL and OpenAI), and the prompts of MMSpec, SPEED-Bench and vLLM's `custom_mm`. A field that is neither
empty nor used is rejected by name, so that no part of a record is lost silently.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from visspec.api.captions import PROMPT
from visspec.api.sources import media_of
from visspec.io.files import Json

IMAGES, VIDEOS = ("image", "images", "image_files"), ("video", "videos")
TURNS = ("prompt", "turns", "conversations", "messages")  # a record has at most one of these
CONTENT = {*IMAGES, *VIDEOS, *TURNS, "answer", "system"}
ABOUT = {"id", "question_id", "source", "data_source", "dataset", "category", "split", "model", "url", "license"} | {
    *("key", "status", "error_message", "exif", "sha256", "md5", "file_name")
}  # text fields about the origin of a record; numbers are ignored as well
ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
MARK = re.compile(r"\n?<(image|video)>\n?")
SOURCES = {  # keys of the source in parts of a turn
    "text": ("text",),
    "image": ("image", "path", "url", "image_url"),
    "video": ("video", "path", "url", "video_url"),
}

Message = dict[str, Any]  # role and content (a list of parts), as chat templates expect


class ArchiveMember(NamedTuple):
    """A file inside an archive, read on demand."""

    path: Path
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


Media = Path | bytes | ArchiveMember


class Conversation(NamedTuple):
    """Turns, and the pictures and videos in the order of the turns."""

    messages: list[Message]
    media: list[Media]

    def until(self, turn: int) -> Conversation:
        """Return the part before a message."""
        turns = self.messages[:turn]
        return Conversation(turns, self.media[: sum(part["type"] != "text" for m in turns for part in m["content"])])

    def texts(self) -> list[Message]:
        """Return the messages without pictures and videos."""
        return [m | {"content": [part for part in m["content"] if part["type"] == "text"]} for m in self.messages]

    def questions(self) -> list[int]:
        """Return the indices of answers, existing or still missing. Each ends a prompt."""
        ends = [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]
        return ends if self.messages[-1]["role"] == "assistant" else [*ends, len(self.messages)]

    def answer(self, turn: int) -> str | None:
        """Return the text of an answer, or None if the data has none."""
        return self.messages[turn]["content"][0]["text"] if turn < len(self.messages) else None


def conversation_of(entry: object, folder: Path, ignore: Collection[str] = (), prompt: str = PROMPT) -> Conversation:
    """Parse a record. Relative paths start at `folder`, and fields in `ignore` are ignored. `prompt` is used if it has
    none. Raises ValueError if it is not a record, or another field is neither empty nor used.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"got {type(entry).__name__}, expected an object with image (and prompt)")
    fields = {name: value for name, value in entry.items() if value is not None and name not in ignore}
    for name, value in fields.items():
        if name not in CONTENT | ABOUT and not isinstance(value, (bool, int, float)):
            raise ValueError(f"got {name}, which training does not use. Pass --ignore {name}")
    field = _one_of(fields, TURNS)
    media = {kind: _listed(fields, names) for kind, names in (("image", IMAGES), ("video", VIDEOS))}
    if field is None and not any(media.values()):
        raise ValueError(f"got no image, expected an object with image, or one of {', '.join(TURNS)}")
    messages, files = _parsed(_turns({"prompt": prompt} | fields, field or "prompt"), media, folder)
    _check_order(messages)
    return Conversation(messages, files)


def _one_of(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    present = [name for name in names if name in fields]
    if len(present) > 1:
        raise ValueError(f"got {present[0]} and {present[1]}, expected one of the two")
    return present[0] if present else None


def _listed(fields: Mapping[str, Any], names: tuple[str, ...]) -> list[Any]:
    name = _one_of(fields, names)
    value = [] if name is None else fields[name]
    return value if isinstance(value, list) else [value]


def _turns(fields: Mapping[str, Any], name: str) -> list[tuple[str, Json]]:
    if name in ("prompt", "turns"):
        prompt = fields[name]
        if name == "turns":
            if not isinstance(prompt, list) or len(prompt) != 1:
                raise ValueError(
                    f"turns: got {_short(prompt)}, expected one text, since there are no answers between turns"
                )
            (prompt,) = prompt
        pairs = [("user", prompt)]
        pairs += [("assistant", fields["answer"])] if "answer" in fields else []
    else:
        role, content = ("from", "value") if name == "conversations" else ("role", "content")
        turns = fields[name]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
            raise ValueError(f"{name}: got {_short(turns)}, expected a list of objects of {role} and {content}")
        if "answer" in fields:
            raise ValueError(f"got answer and {name}, expected one of the two")
        for turn in turns:
            if strange := [key for key in turn if turn[key] is not None and key not in (role, content)]:
                raise ValueError(f"{name}: got {strange[0]} in a turn, expected {role} and {content} alone")
            if turn.get(role) not in ROLES:
                raise ValueError(f"{name}: got {role} {_short(turn.get(role))}, expected one of {', '.join(ROLES)}")
        pairs = [(ROLES[turn[role]], turn.get(content)) for turn in turns]
    return [("system", fields["system"]), *pairs] if "system" in fields else pairs


def _parsed(
    turns: list[tuple[str, Json]], media: dict[str, list[Any]], folder: Path
) -> tuple[list[Message], list[Media]]:
    """Return the messages of a record, in parts, and its pictures and videos in the order of their marks.

    Without marks, they come before the first text of the user. `<image>` means a video in records that only have videos
    (LLaVA-Video).
    """
    alone = "video" if media["video"] and not media["image"] else "image"
    waiting = {kind: iter(values) for kind, values in media.items()}
    messages: list[Message] = []
    sources: list[Media] = []
    marks = 0
    for role, content in turns:
        parts: list[dict[str, str]] = []
        for kind, value in _parts(role, content):
            if kind == "text":
                parts.append({"type": "text", "text": value})
                continue
            kind, marks = alone if kind == "image" else kind, marks + (value is None)
            value = next(waiting[kind], None) if value is None else value
            if value is None:
                raise ValueError(f"got more marks of {kind}s than the {len(media[kind])} of the record")
            parts.append({"type": kind})
            sources.append(_media(value, folder, kind))
        messages.append({"role": role, "content": parts})
    rest = [(kind, value) for kind, values in waiting.items() for value in values]
    if rest and (marks or sources):
        raise ValueError(f"got {len(rest)} {rest[0][0]}s without a mark, expected <{rest[0][0]}> where each stands")
    if rest:
        first = next((m for m in messages if m["role"] == "user"), messages[0])
        first["content"] = [{"type": kind} for kind, _ in rest] + first["content"]
        sources = [_media(value, folder, kind) for kind, value in rest]
    return messages, sources


def _parts(role: str, content: Json) -> Iterator[tuple[str, Any]]:
    """Yield (kind, text or source) of the parts of a turn. Without a source, the next one of the record is used."""
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        fields = {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else {}
        kind = str(fields.pop("type", None)).removesuffix("_url")
        value: Any = next(iter(fields.values()), None)
        wrong = kind not in SOURCES or not {*fields} <= {*SOURCES[kind]} or len(fields) > 1
        if wrong or (kind == "text" and not isinstance(value, str)):
            raise ValueError(f"got a part {_short(part)}, expected one of {', '.join(SOURCES)}")
        if kind != "text":
            yield kind, value["url"] if isinstance(value, dict) and {*value} == {"url"} else value
            continue
        for number, piece in enumerate(MARK.split(value) if role == "user" else [value]):
            if number % 2 or piece:
                yield (piece, None) if number % 2 else ("text", piece)


def _media(value: object, folder: Path, kind: str) -> Media:
    return value if isinstance(value, ArchiveMember) else media_of(value, folder, kind)


def _check_order(messages: list[Message]) -> None:
    """Raise ValueError unless turns alternate between user and assistant, and none is empty."""
    own = [message["role"] for message in messages]
    if own[:1] == ["system"]:
        own = own[1:]
    for number, role in enumerate(own or ["nobody"]):
        if role != ("user", "assistant")[number % 2]:
            raise ValueError(f"got a turn of {role}, expected user and assistant alternately, the user first")
    for message in messages:
        texts = [part["text"] for part in message["content"] if part["type"] == "text"]
        if message["role"] == "assistant" and (len(texts) != 1 or len(message["content"]) != 1):
            raise ValueError("got an answer that is not a single text")
        if not message["content"] or (message["role"] != "user" and not texts[0].strip()):
            raise ValueError(f"got an empty turn of {message['role']}")


def _short(value: object) -> str:
    return f"{value!r:.60}"
