"""Training data: items that are read on demand, in an order that only depends on a seed.

An item is a prompt of a record: all turns before one of its answers, which comes from the target or from the data. Only
the locations of records are kept in memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from visspec.api import sources
from visspec.api.captions import PROMPT
from visspec.api.conversations import ArchiveMember, Conversation, Media, conversation_of
from visspec.io import images
from visspec.io.files import loads
from visspec.io.images import MAX_PIXELS, read_image
from visspec.io.videos import SUFFIXES, Clip, open_media

ANSWERS = ("target", "own")
CHUNK = 1 << 20  # bytes of a JSON array read at once
WINDOW = 4  # row groups of parquet that are shuffled, and kept in memory, together
LARGEST_GROUP = 1 << 30  # maximum bytes of a row group
HELD_OUT = 0.05  # share of the records used for validation, at least one

Entry = Mapping[str, Any]


# --- location of records ----------------------------------------------------------------------------------------------


@dataclass
class Records:
    """`count` records, read by number.

    Args:
        count: Number of records.
        read: Returns the entry of a number.
        name: Returns the name of a number for error messages.
        folder: Where relative paths start.
        groups: First numbers of groups of records that are read together.
    """

    count: int
    read: Callable[[int], Entry]
    name: Callable[[int], str]
    folder: Path = Path()
    groups: Sequence[int] = (0,)


def of_files(source: str, ignore: Collection[str]) -> Records:
    """Read images and videos of a folder, a glob, or one file."""
    found = [record for record in sources.records([source]) if not record.passed_over]
    for record in found:
        if record.error is not None:
            raise ValueError(record.error)
    names = [str(record.image) for record in found]

    def read(number: int) -> Entry:
        return {"video" if Path(names[number]).suffix.lower() in SUFFIXES else "image": names[number]}

    return Records(len(names), read, names.__getitem__)


def of_lines(source: str, ignore: Collection[str]) -> Records:
    """Read JSON lines, or the elements of a JSON array."""
    path, starts, ends = Path(source), array("q"), array("q")
    for start, end in _elements(path):
        starts.append(start)
        ends.append(end)

    def read(number: int) -> Entry:
        with open(path, "rb") as file:
            file.seek(starts[number])
            return loads(file.read(ends[number] - starts[number]))

    return Records(len(starts), read, lambda number: f"line {number + 1} of {path}", path.parent)


def _elements(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the spans of the elements of a JSON array, or of the lines of another file. The file is read as Latin-1, in
    which a byte is a character, since the syntax of JSON is ASCII.
    """
    decode, blank = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    with open(path, "rb") as file:
        text, base = file.read(CHUNK).decode("latin-1"), 0
        at = len(text) - len(text.lstrip())
        if text[at : at + 1] != "[":
            file.seek(0)
            for line in file:
                base += len(line)
                if line.strip():
                    yield base - len(line), base
            return
        at += 1
        while True:
            at = blank.match(text, at).end()  # type: ignore[union-attr]
            try:
                if text[at : at + 1] == "]":
                    return
                _, end = decode(text, at)
            except ValueError:
                more = file.read(max(CHUNK, len(text))) if len(text) <= sources.LARGEST else b""
                if not more:
                    raise ValueError(f"got no JSON behind byte {base + at}, expected an array") from None
                text, base, at = text[at:] + more.decode("latin-1"), base + at, 0
            else:
                yield base + at, base + end
                at = end


def of_shard(source: str, ignore: Collection[str]) -> Records:
    """Read a tar in the layout of webdataset, as `sources.of_tar` does. Files stay in the tar until they are needed."""
    path, width, last = Path(source), 2 * len(sources.PARTS), None
    places = array("q")  # per record: offset and size of every part, or -1
    with tarfile.open(path, "r:") as shard:
        while (member := shard.next()) is not None:
            shard.members.clear()  # type: ignore[attr-defined]  # it would remember them all
            folder, _, file = member.name.rpartition("/")
            stem, _, suffix = file.partition(".")
            if not member.isfile() or suffix in ignore:
                continue
            kind = "image" if f".{suffix.lower()}" in images.SUFFIXES else suffix
            if kind not in sources.PARTS or member.issparse() or member.size > sources.LARGEST:
                raise ValueError(f"got {member.name}, expected it to be an image, .json, .prompt or among --ignore")
            if (folder, stem) != last:
                places.extend([-1] * width)
                last = folder, stem
            at = len(places) - width + 2 * sources.PARTS.index(kind)
            if places[at] >= 0:
                raise ValueError(f"got {member.name}, expected one {kind} of a name")
            places[at], places[at + 1] = member.offset_data, member.size

    def members(number: int) -> dict[str, ArchiveMember]:
        own = places[width * number : width * (number + 1)].tolist()
        found = zip(sources.PARTS, own[::2], own[1::2])
        return {kind: ArchiveMember(path, offset, size) for kind, offset, size in found if offset >= 0}

    def read(number: int) -> Entry:
        found = members(number)
        entry = loads(found["json"].read()) if "json" in found else {}
        if not isinstance(entry, dict):
            raise ValueError("got a .json that is not an object")
        entry = {name: value for name, value in entry.items() if name not in ("image", "images")}
        if "prompt" in found:
            entry["prompt"] = found["prompt"].read().decode(errors="replace").strip()
        return entry | ({"image": found["image"]} if "image" in found else {})

    def name(number: int) -> str:
        """Return the name in the header of its first file, which has at most 100 bytes."""
        first = next(iter(members(number).values()))
        header = ArchiveMember(path, first.offset - tarfile.BLOCKSIZE, 100).read()
        return f"{header.partition(bytes(1))[0].decode(errors='replace')} of {path}"

    return Records(len(places) // width, read, name)


def of_parquet(source: str, ignore: Collection[str]) -> Records:
    """Read rows of parquet. The most recent row groups are kept in memory."""
    file = sources.need("pyarrow.parquet", source).ParquetFile(source)
    sizes = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
    if (large := max((group.total_byte_size for group in sizes), default=0)) > LARGEST_GROUP:
        raise ValueError(f"got a row group of {large} bytes, expected at most {LARGEST_GROUP} (row_group_size=100)")
    *groups, count = accumulate((group.num_rows for group in sizes), initial=0)
    table = lru_cache(WINDOW)(file.read_row_group)

    def read(number: int) -> Entry:
        group = bisect_right(groups, number) - 1
        return table(group).slice(number - groups[group], 1).to_pylist()[0]

    return Records(count, read, partial(row_name, source), Path(source).parent, groups)


def of_dataset(source: str, ignore: Collection[str]) -> Records:
    """Read a data set of the library `datasets`, which maps its files into memory: hf:NAME[:SPLIT] (default: train; it
    is downloaded whole), or a folder written by `save_to_disk`.
    """
    found = sources.open_dataset(source, streaming=False)
    rows = found.with_format("arrow")  # does not decode images
    return Records(len(found), lambda n: rows[n : n + 1].to_pylist()[0], partial(row_name, source))


def row_name(source: str, number: int) -> str:
    return f"row {number + 1} of {source}"


def records_of(data: str, ignore: Collection[str] = ()) -> Records:
    """Return the records of a folder, a glob, a file or hf:NAME. Raises ValueError if there are none."""
    path = Path(data)
    kinds = {".jsonl": of_lines, ".json": of_lines, ".parquet": of_parquet, ".tar": of_shard}
    kind = kinds.get(path.suffix.lower()) if path.is_file() else None
    if kind is None and not path.exists() and sources.is_plain(data):
        raise ValueError(f"data: {path} is neither a folder nor a file, expected a folder of images or a JSONL file")
    try:
        found = (of_dataset if sources.is_dataset(data) else kind or of_files)(data, ignore)
    except (ValueError, OSError, tarfile.TarError) as error:
        raise ValueError(f"data: {path}: {str(error).splitlines()[0]}") from None
    if not found.count:
        raise ValueError(f"data: {path} holds no line, expected JSONL of {{image, prompt}}")
    return found


# --- items ------------------------------------------------------------------------------------------------------------


class Item(NamedTuple):
    """A prompt, and the data's own answer to it, if there is one."""

    conversation: Conversation
    answer: str | None


class TrainingData:
    """The items of data, read on demand.

    All records are read once at the start, without images. Raises ValueError if one can't be used.

    Args:
        data: A folder, a glob, a file or hf:NAME.
        answers: "target" makes an item of every place at which the user waits for an answer, "own" of every answer in
            the data.
        ignore: Fields or files to ignore.
        prompt: The prompt of records that have none.
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
                known = [turn for turn in turns if conversation.answer(turn) is not None]
                if answers == "own" and not known:
                    raise ValueError("got no answer, which --answers own requires")
            except (ValueError, OSError) as error:
                raise ValueError(f"data: {self.records.name(number)}: {error}") from None
            self.answers += len(known)
            turns = known if answers == "own" else turns
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
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        held_N = torch.isin(record_N, drawn[: max(1, min(int(HELD_OUT * count), most))])
        return (~held_N).nonzero()[:, 0], held_N.nonzero()[:, 0][:most]

    def shuffle(self, number_N: Tensor, seed: int) -> Tensor:
        """Return items in a seeded order. Records that are read in groups are shuffled `WINDOW` random groups at a
        time.
        """
        generator = torch.Generator().manual_seed(seed)
        number_N = number_N[torch.randperm(len(number_N), generator=generator)]
        groups_G = torch.tensor(self.records.groups)
        if len(groups_G) == 1:
            return number_N
        place_G = torch.randperm(len(groups_G), generator=generator)
        group_N = torch.searchsorted(groups_G, torch.tensor(self.record)[number_N], right=True) - 1
        return number_N[(place_G[group_N] // WINDOW).argsort(stable=True)]


def name_of(media: Media) -> str | int:
    """Return what identifies a picture or video independent of its location: a name, or the number of bytes."""
    return media.name if isinstance(media, Path) else media.size if isinstance(media, ArchiveMember) else len(media)


def read_media(media: Media, max_pixels: int | None = None) -> Image.Image | Clip:
    """Read a picture or a video's frames, scaled down to `max_pixels`. Raises ValueError or OSError if it can't."""
    if isinstance(media, Path):
        found = open_media(media)
    else:
        found = read_image(media.read() if isinstance(media, ArchiveMember) else media, "data", MAX_PIXELS)
    if max_pixels is None:
        return found
    if isinstance(found, Clip):
        return replace(found, frames=[shrink(frame, max_pixels) for frame in found.frames])
    return shrink(found, max_pixels)


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
