"""Training data: items that are read on demand, in an order that only depends on a seed.

An item is a prompt of a record: all turns before one of its answers, which comes from the target or from the data.
Images stay on disk until they are needed, and so do records, except those of a JSON array.
"""

from __future__ import annotations

import hashlib
import tarfile
from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from visspec.api import sources
from visspec.api.captions import PROMPT
from visspec.api.training.conversations import ArchiveMember, Conversation, Media, conversation_of
from visspec.io import images
from visspec.io.checkpoint import first_line
from visspec.io.files import loads
from visspec.io.videos import SUFFIXES, Clip, open_media

ANSWERS = ("target", "own")
HELD_OUT = 0.05  # share of the records used for validation, at least one

Entry = Mapping[str, Any]


# --- location of records ----------------------------------------------------------------------------------------------


@dataclass
class Records:
    """`count` records. `read` returns the entry of a number, `name` its name for messages. Relative paths start at
    `folder`.
    """

    count: int
    read: Callable[[int], Entry]
    name: Callable[[int], str]
    folder: Path = Path()


def of_files(source: str, ignore: Collection[str]) -> Records:
    """Read images and videos of a folder, a glob, or one file."""
    files = [record for record in sources.records([source]) if not record.passed_over]
    for record in files:
        if record.error is not None:
            raise ValueError(record.error)
    names = [str(record.image) for record in files]

    def read(number: int) -> Entry:
        return {"video" if Path(names[number]).suffix.lower() in SUFFIXES else "image": names[number]}

    return Records(len(names), read, names.__getitem__)


def of_lines(source: str, ignore: Collection[str]) -> Records:
    """Read JSON lines, or the elements of a JSON array, which is read whole."""
    path, starts, at = Path(source), array("q"), 0

    def name(number: int) -> str:
        return f"line {number + 1} of {path}"

    with open(path, "rb") as file:
        for line in file:
            if not starts and line.lstrip().startswith(b"["):
                entries = loads(path.read_bytes())
                return Records(len(entries), entries.__getitem__, name, path.parent)
            if line.strip():
                starts.append(at)
            at += len(line)

    def read(number: int) -> Entry:
        with open(path, "rb") as file:
            file.seek(starts[number])
            return loads(file.readline())

    return Records(len(starts), read, name, path.parent)


def of_shard(source: str, ignore: Collection[str]) -> Records:
    """Read a tar in the layout of webdataset, as `sources.of_tar` does. Files stay in the tar until they are needed."""
    path, samples = Path(source), dict[str, dict[str, ArchiveMember]]()
    with tarfile.open(path, "r:") as shard:
        for member in shard:
            suffix = member.name.rpartition("/")[2].partition(".")[2]
            if not member.isfile() or suffix in ignore:
                continue
            kind = "image" if f".{suffix.lower()}" in images.SUFFIXES else suffix
            if kind not in sources.PARTS or member.issparse() or member.size > sources.LARGEST:
                raise ValueError(f"got {member.name}, expected it to be an image, .json, .prompt or among --ignore")
            parts = samples.setdefault(member.name.removesuffix(f".{suffix}"), {})
            if kind in parts:
                raise ValueError(f"got {member.name}, expected one {kind} of a name")
            parts[kind] = ArchiveMember(path, member.offset_data, member.size)
    names = list(samples)

    def read(number: int) -> Entry:
        parts = samples[names[number]]
        entry = loads(parts["json"].read()) if "json" in parts else {}
        if not isinstance(entry, dict):
            raise ValueError("got a .json that is not an object")
        entry = {name: value for name, value in entry.items() if name not in ("image", "images")}
        if "prompt" in parts:
            entry["prompt"] = parts["prompt"].read().decode(errors="replace").strip()
        return entry | ({"image": parts["image"]} if "image" in parts else {})

    return Records(len(names), read, lambda number: f"{names[number]} of {path}")


def of_dataset(source: str, ignore: Collection[str]) -> Records:
    """Read parquet or a data set of the library `datasets`: hf:NAME[:SPLIT] (default: train), or a folder written by
    `save_to_disk`. The library maps files into memory; it keeps copies of parquet files and of downloads.
    """
    rows = sources.open_dataset(source, streaming=False).with_format("arrow")  # does not decode images
    folder = Path() if sources.is_dataset(source) else Path(source).parent
    return Records(len(rows), lambda n: rows[n : n + 1].to_pylist()[0], lambda n: f"row {n + 1} of {source}", folder)


def records_of(data: str, ignore: Collection[str] = ()) -> Records:
    """Return the records of a folder, a glob, a file or hf:NAME. Raises ValueError if there are none."""
    path = Path(data)
    kinds = {".jsonl": of_lines, ".json": of_lines, ".parquet": of_dataset, ".tar": of_shard}
    kind = kinds.get(path.suffix.lower()) if path.is_file() else None
    if kind is None and not path.exists() and sources.is_plain(data):
        raise ValueError(f"data: {path} is neither a folder nor a file, expected a folder of images or a JSONL file")
    try:
        records = (of_dataset if sources.is_dataset(data) else kind or of_files)(data, ignore)
    except Exception as error:  # of tarfile and `datasets` as well
        raise ValueError(f"data: {path}: {first_line(error)}") from error
    if not records.count:
        raise ValueError(f"data: {path} holds no line, expected JSONL of {{image, prompt}}")
    return records


# --- items ------------------------------------------------------------------------------------------------------------


class Item(NamedTuple):
    """A prompt, and the data's own answer to it, if there is one."""

    conversation: Conversation
    answer: str | None


class TrainingData:
    """The items of data, read on demand. All records are read once at the start, without images. Raises ValueError if
    one can't be used. With answers "target" every place where the user waits for an answer is an item, with "own" every
    answer in the data. `prompt` is used for records that have none.
    """

    def __init__(self, data: str | Path, answers: str = "target", ignore: Collection[str] = (), prompt: str = PROMPT):
        if answers not in ANSWERS:
            raise ValueError(f"answers: got {answers!r}, expected one of {', '.join(ANSWERS)}")
        self.records, self.ignore, self.prompt = records_of(str(data), ignore), ignore, prompt
        self.record, self.turn, digest = array("q"), array("q"), hashlib.sha256()
        self.answers = 0  # number of answers in the data
        for number in range(self.records.count):
            try:
                conversation = self.conversation(number)
                turns = conversation.questions()
                own_turns = [turn for turn in turns if conversation.answer(turn) is not None]
                if answers == "own" and not own_turns:
                    raise ValueError("got no answer, which --answers own requires")
            except (ValueError, OSError) as error:
                raise ValueError(f"data: {self.records.name(number)}: {error}") from None
            self.answers += len(own_turns)
            turns = own_turns if answers == "own" else turns
            self.record.extend([number] * len(turns))
            self.turn.extend(turns)
            digest.update(repr((conversation.messages, [name_of(one) for one in conversation.media])).encode())
        self.digest = f"{len(self)} items, sha256 {digest.hexdigest()[:16]}"  # does not depend on the location

    def conversation(self, number: int) -> Conversation:
        """Return a whole record. Raises ValueError as `conversation_of`."""
        return conversation_of(self.records.read(number), self.records.folder, self.ignore, self.prompt)

    def __len__(self) -> int:
        return len(self.record)

    def __getitem__(self, number: int) -> Item:
        whole, turn = self.conversation(self.record[number]), self.turn[number]
        return Item(whole.until(turn), whole.answer(turn))

    def name(self, number: int) -> str:
        """Return the name of an item for error messages."""
        return self.records.name(self.record[number])

    def hold_out(self, most: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of the items to train on, and of at most `most` items to validate on, which belong to
        `HELD_OUT` of the records, drawn by seed. With a single record, both are all items.
        """
        count, record_N = self.records.count, torch.tensor(self.record)
        if count == 1:
            return torch.arange(len(self)), torch.arange(len(self))[:most]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        held_N = torch.isin(record_N, order[: max(1, min(int(HELD_OUT * count), most))])
        return (~held_N).nonzero()[:, 0], held_N.nonzero()[:, 0][:most]

    def shuffle(self, number_N: Tensor, seed: int) -> Tensor:
        """Return items in a seeded order."""
        return number_N[torch.randperm(len(number_N), generator=torch.Generator().manual_seed(seed))]


def name_of(media: Media) -> str | int:
    """Return what identifies a picture or video independent of its location: a name, or the number of bytes."""
    return media.name if isinstance(media, Path) else media.size if isinstance(media, ArchiveMember) else len(media)


def read_media(media: Media, max_pixels: int | None = None) -> Image.Image | Clip:
    """Read a picture or a video's frames, scaled down to `max_pixels`. Raises ValueError or OSError if it can't."""
    opened = open_media(media.read() if isinstance(media, ArchiveMember) else media, "data")
    if max_pixels is None:
        return opened
    if isinstance(opened, Clip):
        return replace(opened, frames=[shrink(frame, max_pixels) for frame in opened.frames])
    return shrink(opened, max_pixels)


def shrink(image: Image.Image, max_pixels: int) -> Image.Image:
    """Scale an image down to at most this many pixels, keeping its proportions."""
    share = (max_pixels / (image.width * image.height)) ** 0.5
    if share >= 1:
        return image
    return image.resize((max(int(image.width * share), 1), max(int(image.height * share), 1)), Image.Resampling.BICUBIC)


class Reader:
    """Reads items and records the bad ones in `bad`, item to reason. Raises ValueError for more than `max_bad`."""

    def __init__(self, data: TrainingData, max_bad: int = 100, max_pixels: int | None = None):
        self.data, self.max_bad, self.max_pixels = data, max_bad, max_pixels
        self.bad: dict[int, str] = {}

    def __call__(self, number: int, pictures: bool = True) -> tuple[Item, list[Image.Image | Clip]] | None:
        """Return an item and its pictures, or None for a bad one. `pictures=False` leaves pictures out."""
        if number in self.bad:
            return None
        try:
            item = self.data[number]
            return item, [read_media(one, self.max_pixels) for one in item.conversation.media if pictures]
        except (ValueError, OSError) as error:
            self.skip(number, error)
            return None

    def skip(self, number: int, error: Exception) -> None:
        """Record an item that can't be used."""
        self.bad[number] = f"{self.data.name(number)}: {str(error).splitlines()[0]}"
        if len(self.bad) > self.max_bad:
            raise ValueError(
                f"data: got {len(self.bad)} items that can't be read, the last of them {self.bad[number]},"
                f" expected at most {self.max_bad} (--max-bad)"
            )
