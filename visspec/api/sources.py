"""Images to caption, from files, folders, globs, JSON lines, parquet, tar shards and Hugging Face data sets.

Everything is read record by record. A record that can't be read becomes a record with an error, and so does the rest of
a source after a place that can't be read. A missing source raises an error before work starts.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import os
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from visspec.io import images, videos
from visspec.io.files import loads
from visspec.io.images import image_files, unread_kinds

TABLES = (".jsonl", ".parquet", ".tar")
SUFFIXES = images.SUFFIXES + videos.SUFFIXES
LARGEST = 256 << 20  # maximum bytes of a member of a shard, since a sparse one may claim any size
Reader = Callable[[], Iterator["Record"]]
PARTS = ("image", "json", "prompt")  # parts of a record in a shard
DATASET = "hf:"  # prefix of hf:NAME[:SPLIT]; folders written by `save_to_disk` work too


@dataclass(frozen=True)
class Record:
    """An image to caption. `image` is a path, the bytes of a file or a PIL image."""

    id: str
    image: Any = None
    prompt: str | None = None  # None: the prompt of the run
    error: str | None = None
    passed_over: bool = False  # whether the error is that files of this kind are not supported
    category: str = ""  # subfolder of the file, or `kind` or `category` of the entry


class RecordStream(Iterator[Record]):
    """An iterator of records. `total` is their number, or None if it is unknown."""

    def __init__(self, iterator: Iterator[Record], total: int | None):
        self._found, self.total = iterator, total

    def __next__(self) -> Record:
        return next(self._found)


def records(sources: Sequence[str | Path]) -> RecordStream:
    """Return the records of all sources, in order. Raises ValueError if a source is missing, empty or unreadable."""
    readers = [reader(str(source)) for source in sources]
    totals = [total for _, total in readers if total is not None]
    total = sum(totals) if len(totals) == len(readers) else None
    return RecordStream((record for read_all, _ in readers for record in read_all()), total)


def is_plain(source: str | Path) -> bool:
    """Return whether a source is a single image file."""
    name, path = str(source), Path(source)
    several = name.startswith(DATASET) or path.is_dir() or (glob.has_magic(name) and not path.exists())
    return not several and path.suffix.lower() not in TABLES


def is_dataset(source: str) -> bool:
    """Return whether a source is a data set of the library `datasets`."""
    saved = (Path(source, name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    return source.startswith(DATASET) or any(saved)


def reader(source: str) -> tuple[Reader, int | None]:
    """Return the function that reads a source, and its number of records, if known. Raises ValueError as `records`."""
    path = Path(source)
    if is_dataset(source):
        need("datasets", source)
        return lambda: _to_the_end(source, of_dataset(source)), None
    if path.is_dir():
        return _files(image_files(path, SUFFIXES), source, unread_kinds(path))
    if not path.exists() and glob.has_magic(source):
        there = [Path(name) for name in sorted(glob.glob(source, recursive=True))]
        files = [file for file in there if file.suffix.lower() in SUFFIXES]
        if not files:
            raise ValueError(f"{source}: got no image, expected files that end in {', '.join(SUFFIXES)}.")
        return _files(files, source, unread_kinds(there))
    kinds = {".jsonl": of_lines, ".parquet": of_parquet, ".tar": of_tar}
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        return _files([path])
    if not path.is_file():
        raise ValueError(f"{source}: got no such file.")
    if kind is of_parquet:
        need("pyarrow", source)
    return lambda: _to_the_end(source, kind(path)), _rows(path)


def _rows(path: Path) -> int | None:
    try:
        if path.suffix.lower() == ".parquet":
            return importlib.import_module("pyarrow.parquet").read_metadata(path).num_rows
        return sum(1 for _ in _lines(path)) if path.suffix.lower() == ".jsonl" else None
    except (ValueError, OSError):
        return None


def _to_the_end(source: str, iterator: Iterator[Record]) -> Iterator[Record]:
    count = 0
    try:
        for record in iterator:
            count += 1
            yield record
    except Exception as error:
        yield Record(source, error=f"{source}: can't be read behind row {count} ({_short(error)})")


def need(package: str, what: str, extra: str = "data") -> Any:
    """Import a package of an extra. Raises ValueError if it isn't installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"{what}: {package} is not installed. Run pip install 'visspec[{extra}]'.") from None


def seed_of(seed: int, id: str) -> int:
    """Derive a record's own seed, which does not depend on process, order or batch."""
    text = f"{seed}/{id}".encode(errors="surrogatepass")  # file names may not be UTF-8
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def as_utf8(text: str) -> str:
    """Return a text that parquet can store: bytes of a file name that are not UTF-8 become \\udc80 to \\udcff."""
    return text.encode(errors="backslashreplace").decode()


def new_records(records: Iterable[Record], done: Collection[str], repeated: Callable[[str], None]) -> Iterator[Record]:
    """Yield records whose ids are not done, each id once. `repeated` is called with each repeated id."""
    ids: set[str] = set()
    for record in records:
        if record.id in ids:
            repeated(record.id)
            continue
        ids.add(record.id)
        if record.id not in done:
            yield record


def _files(paths: Iterable[Path], source: str = "", unread: Mapping[str, int] | None = None) -> tuple[Reader, int]:
    depth = len(Path(source).parts) if Path(source).is_dir() else None  # depth of the subfolder in a file's path
    records = [Record(str(p), p, category=p.parts[depth] if depth and len(p.parts) > depth + 1 else "") for p in paths]
    for kind, count in (unread or {}).items():
        message = f"{source}: {count} {kind} files can't be read and are skipped. Convert them to PNG or JPEG."
        records.append(Record(f"{source}/*{kind}", error=message, passed_over=True))
    return lambda: iter(records), len(records)


def of_entry(entry: object, fallback: str, folder: Path) -> Record:
    """Convert a mapping with image (or a video's path) and optional prompt and id. Relative paths start at `folder`."""
    if not isinstance(entry, Mapping):
        return Record(fallback, error=f"{fallback}: got {type(entry).__name__}, expected an object with an image")
    image, prompt = entry.get("image", entry.get("video")), entry.get("prompt")
    category = str(entry.get("kind") or entry.get("category") or "")
    id = str(fallback if entry.get("id") is None else entry["id"])
    try:
        image = media_of(image, folder)
    except ValueError as error:
        return Record(id, error=f"{id}: {error}")
    if prompt is not None and not isinstance(prompt, str):
        return Record(id, error=f"{id}: got a prompt of type {type(prompt).__name__}, expected a text")
    return Record(id, image, prompt, category=category)


def media_of(value: object, folder: Path, kind: str = "image") -> Path | bytes:
    """Return the file of an entry, or its content: a path, which may be relative to `folder`, bytes, or a data URL.
    Raises ValueError for anything else.
    """
    if isinstance(value, Mapping):  # data sets store images as bytes, or else a path
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and value and kind == "image":
        return value
    if not isinstance(value, str) or not value:
        got = f"got no {kind}" if value is None else f"{kind}: got {type(value).__name__}"
        raise ValueError(f"{got}, expected a path or the bytes of a file")
    if value.startswith("data:") and kind == "image":
        return images.data_url_bytes(value, kind)
    if "://" in value and not value.startswith("file://"):
        raise ValueError(f"{kind}: got {value!r:.60}, expected a file. Nothing is downloaded")
    return folder / value.removeprefix("file://")


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", line


def of_lines(path: Path) -> Iterator[Record]:
    """Read JSON lines."""
    for name, line in _lines(path):
        try:
            yield of_entry(loads(line), name, path.parent)
        except ValueError:
            yield Record(name, error=f"{name}: got a line that is not JSON, expected an object with an image")


def of_parquet(path: Path) -> Iterator[Record]:
    """Read parquet, a few rows at a time."""
    parquet = importlib.import_module("pyarrow.parquet")
    number = 0
    with open(path, "rb") as file:
        table = parquet.ParquetFile(file)
        columns = [name for name in ("id", "image", "prompt", "kind", "category") if name in table.schema_arrow.names]
        for batch in table.iter_batches(batch_size=64, columns=columns):
            for row in range(batch.num_rows):
                number += 1
                name = f"{path}:{number}"
                try:
                    (entry,) = batch.slice(row, 1).to_pylist()
                except (ValueError, OverflowError) as error:  # a time before year 1, a text that is not UTF-8
                    yield Record(name, error=f"{name}: got values that can't be read ({_short(error)})")
                else:
                    yield of_entry(entry, name, path.parent)


def of_tar(path: Path) -> Iterator[Record]:
    """Read a shard in the layout of webdataset. Adjacent files of one name form a record: NAME.jpg with its prompt in
    NAME.json or NAME.prompt. A name ends at the first dot after the last slash; the record's id is PATH/NAME.
    """
    name, parts = None, dict[str, Any]()
    with tarfile.open(path, "r:") as shard:
        for member in shard:
            folder, _, last = member.name.rpartition("/")
            stem, _, suffix = last.partition(".")
            kind = "image" if f".{suffix.lower()}" in images.SUFFIXES else suffix
            if member.isdir() or (not member.isfile() and kind not in PARTS):
                continue
            key = f"{folder}/{stem}" if folder else stem
            if key != name and name is not None:
                yield _of_member(path, name, parts)
                parts = {}
            name = key
            if kind not in PARTS:
                continue
            if (file := _opened(shard, member)) is None:
                parts["error"] = f"{member.name}, which is neither a file nor a link to one in the archive"
            elif (size := file.seek(0, os.SEEK_END)) > LARGEST:
                parts["error"] = f"{member.name} of {size} bytes, expected at most {LARGEST}"
            else:
                file.seek(0)
                parts[kind] = file.read()
    if name is not None:
        yield _of_member(path, name, parts)


def _opened(shard: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes] | None:
    """Open a member's file, or the one in the archive that a link refers to; None if there is none."""
    try:
        return shard.extractfile(member)
    except (KeyError, RecursionError, tarfile.TarError):  # no such file, circular links, a truncated archive
        return None


def _of_member(path: Path, name: str, parts: Mapping[str, Any]) -> Record:
    id = f"{path}/{name}"
    if "error" in parts:
        return Record(id, error=f"{id}: got {parts['error']}")
    prompt = parts["prompt"].decode(errors="replace").strip() if "prompt" in parts else None
    if "json" in parts:
        try:
            entry = loads(parts["json"])
        except ValueError:
            return Record(id, error=f"{id}: got a .json that is not JSON, expected an object")
        prompt = entry.get("prompt", prompt) if isinstance(entry, dict) else prompt
    return of_entry({"image": parts.get("image"), "prompt": prompt}, id, path.parent)


def open_dataset(source: str, streaming: bool) -> Any:
    """Open a data set of the library `datasets`: hf:NAME[:SPLIT] (default: train), a folder written by `save_to_disk`,
    or parquet. With `streaming`, data sets of the hub are read record by record, else downloaded. Raises ValueError if
    the library isn't installed.
    """
    datasets = need("datasets", source)
    if Path(source).suffix.lower() == ".parquet":
        return datasets.Dataset.from_parquet(source)
    name, _, split = source.removeprefix(DATASET).partition(":")
    if source.startswith(DATASET) and not Path(name).exists():
        return datasets.load_dataset(name, split=split or "train", streaming=streaming)
    dataset = datasets.load_from_disk(name)
    return dataset[split or "train"] if isinstance(dataset, datasets.DatasetDict) else dataset


def of_dataset(source: str) -> Iterator[Record]:
    """Read the records of `open_dataset`."""
    datasets, dataset = importlib.import_module("datasets"), open_dataset(source, streaming=True)
    if "image" in (dataset.features or {}):
        dataset = dataset.cast_column("image", datasets.Image(decode=False))
    for number, entry in enumerate(dataset):
        yield of_entry(entry, f"{source}:{number}", Path())


def prompts(path: Path) -> Iterator[Record]:
    """Read prompts from JSON lines of {prompt, id} or from lines of text. Raises ValueError as `records`."""
    if not path.is_file():
        raise ValueError(f"{path}: got no such file.")
    return (_of_prompt(name, line, path.suffix.lower() == ".jsonl") for name, line in _lines(path))


def checked_prompts(path: Path) -> list[Record]:
    """Return all prompts of such a file. Raises ValueError if a line has none, or the file has none."""
    rows = list(prompts(path))
    if error := next((record.error for record in rows if record.error is not None), None if rows else f"{path}: empty"):
        raise ValueError(f"prompts: {error}")
    return rows


def texts(path: Path) -> list[str]:
    """The texts of `checked_prompts`."""
    return [str(record.prompt) for record in checked_prompts(path)]


def _of_prompt(name: str, line: bytes, is_json: bool) -> Record:
    try:
        text = line.decode().strip()
        entry = loads(text) if is_json else {"prompt": text}
        if isinstance(entry["prompt"], str) and entry["prompt"].strip():
            id, category = entry.get("id"), str(entry.get("kind") or entry.get("category") or "")
            return Record(str(name if id is None else id), prompt=entry["prompt"], category=category)
    except (ValueError, KeyError, TypeError):
        pass
    expected = "an object with one" if is_json else "a text in UTF-8"
    return Record(name, error=f"{name}: got a line without a prompt, expected {expected}")


def write_parquet(rows: Iterator[dict[str, Any]], path: Path, columns: Mapping[str, str]) -> None:
    """Write records as parquet, some at a time. `columns` are arrow types by name."""
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    schema = arrow.schema([(name, arrow.type_for_alias(kind)) for name, kind in columns.items()])
    with open(path, "wb") as file, parquet.ParquetWriter(file, schema) as writer:
        some: list[dict[str, Any]] = []
        for row in rows:
            values = ((name, row.get(name)) for name in columns)
            some.append({name: as_utf8(value) if isinstance(value, str) else value for name, value in values})
            if len(some) == 1024:
                writer.write_table(arrow.Table.from_pylist(some, schema))
                some = []
        writer.write_table(arrow.Table.from_pylist(some, schema))


def _short(error: Exception) -> str:
    return str(error).split("\n")[0][:200]
