"""Images to caption, from files, folders, globs, JSON lines, parquet, tar shards and Hugging Face data sets.

Everything is read record by record. A record that can't be read is a record with an error; a source that isn't there
is refused before work starts.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visspec.eval.metrics.images import SUFFIXES, image_files

TABLES = (".jsonl", ".parquet", ".tar")
DATASET = "hf:"  # hf:NAME[:SPLIT], or a folder that `save_to_disk` wrote


@dataclass(frozen=True)
class Record:
    """An image to caption. `image`: a path, the bytes of a file or a PIL image."""

    id: str
    image: Any = None
    prompt: str | None = None  # None: the one of the run
    error: str | None = None


def records(sources: Sequence[str | Path]) -> Iterator[Record]:
    """The records of all sources, in their order. Raises ValueError now for a source that isn't there, is empty, or
    needs a package that isn't installed.
    """
    readers = [reader(str(source)) for source in sources]
    return (record for read in readers for record in read())


def is_plain(source: str | Path) -> bool:
    """Whether a source is one file that is taken for an image."""
    name, path = str(source), Path(source)
    several = name.startswith(DATASET) or path.is_dir() or (glob.has_magic(name) and not path.exists())
    return not several and path.suffix.lower() not in TABLES


def reader(source: str) -> Callable[[], Iterator[Record]]:
    """How a source is read. Raises ValueError as `records`."""
    path = Path(source)
    if source.startswith(DATASET) or (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        need("datasets", source)
        return lambda: of_dataset(source)
    if path.is_dir():
        return _files(image_files(path))
    if not path.exists() and glob.has_magic(source):
        found = sorted(p for p in glob.glob(source, recursive=True) if Path(p).suffix.lower() in SUFFIXES)
        if not found:
            raise ValueError(f"{source}: got no image, expected files that end in {', '.join(SUFFIXES)}")
        return _files(map(Path, found))
    kinds = {".jsonl": of_lines, ".parquet": of_parquet, ".tar": of_tar}
    read = kinds.get(path.suffix.lower())
    if read is None:
        return _files([path])
    if not path.is_file():
        raise ValueError(f"{source}: got no such file, expected one")
    if read is of_parquet:
        need("pyarrow", source)
    return lambda: read(path)


def need(package: str, what: str, extra: str = "data") -> Any:
    """Import a package of an extra. Raises ValueError if it isn't installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"{what}: {package} is not installed, expected it (pip install 'visspec[{extra}]')") from None


def seed_of(seed: int, id: str) -> int:
    """A record's own seed in a run: the same in whatever process, order or batch it is made."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{id}".encode(), digest_size=7).digest(), "big")


def readers(sources: Sequence[str | Path]) -> list[Callable[[], Iterator[Record]]]:
    """How the sources are read, each apart from the others; plain files among them together. Raises as `records`."""
    plain = [Path(source) for source in sources if is_plain(source)]
    several = [reader(str(source)) for source in sources if not is_plain(source)]
    return [*([_files(plain)] if plain else []), *several]


def _files(paths: Any) -> Callable[[], Iterator[Record]]:
    found = list(paths)
    return lambda: (Record(str(path), path) for path in found)


def of_entry(entry: Any, fallback: str, folder: Path) -> Record:
    """From a mapping with image, and optionally prompt and id; relative paths start at `folder`."""
    if not isinstance(entry, Mapping):
        return Record(fallback, error=f"{fallback}: got {type(entry).__name__}, expected an object with an image")
    image, prompt = entry.get("image"), entry.get("prompt")
    id = str(fallback if entry.get("id") is None else entry["id"])
    if isinstance(image, Mapping):  # as data sets keep images: the bytes, or else a path
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and image:
        image = folder / image
    elif not isinstance(image, bytes) or not image:
        shown = "no image" if image is None else f"an image of type {type(image).__name__}"
        return Record(id, error=f"{id}: got {shown}, expected a path or the bytes of a file")
    if prompt is not None and not isinstance(prompt, str):
        return Record(id, error=f"{id}: got a prompt of type {type(prompt).__name__}, expected a text")
    return Record(id, image, prompt)


def of_lines(path: Path) -> Iterator[Record]:
    """JSON lines."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            name = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError:
                yield Record(name, error=f"{name}: got a line that is no JSON, expected an object with an image")
            else:
                yield of_entry(entry, name, path.parent)


def of_parquet(path: Path) -> Iterator[Record]:
    """Parquet, a few rows at a time."""
    parquet = importlib.import_module("pyarrow.parquet")
    number = 0
    try:
        table = parquet.ParquetFile(path)
        columns = [name for name in ("id", "image", "prompt") if name in table.schema_arrow.names]
        for batch in table.iter_batches(batch_size=64, columns=columns):
            for entry in batch.to_pylist():
                number += 1
                yield of_entry(entry, f"{path}:{number}", path.parent)
    except (OSError, ValueError) as error:
        yield Record(str(path), error=f"{path}: can't be read behind row {number} ({_short(error)})")


def of_tar(path: Path) -> Iterator[Record]:
    """A shard in the layout of webdataset: neighbours of one name are one record: NAME.jpg with its prompt in NAME.json
    or NAME.prompt. A name goes up to the first dot behind the last slash.
    """
    name, image, prompt = None, None, None
    try:
        with tarfile.open(path, "r|") as shard:
            for member in shard:
                if not member.isfile() or (file := shard.extractfile(member)) is None:
                    continue
                folder, _, last = member.name.rpartition("/")
                stem, _, suffix = last.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if key != name and name is not None:
                    yield _of_member(path, name, image, prompt)
                    image, prompt = None, None
                name, data = key, file.read()
                if f".{suffix.lower()}" in SUFFIXES:
                    image = data
                elif suffix in ("json", "prompt"):
                    prompt = data
    except (tarfile.TarError, OSError, EOFError) as error:
        yield Record(str(path), error=f"{path}: can't be read behind {name or 'its beginning'} ({_short(error)})")
        return
    if name is not None:
        yield _of_member(path, name, image, prompt)


def _of_member(path: Path, name: str, image: bytes | None, prompt: bytes | None) -> Record:
    id = f"{path.name}/{name}"
    entry: Any = {}
    try:
        entry = json.loads(prompt) if prompt else {}
    except ValueError:
        entry = {"prompt": (prompt or b"").decode(errors="replace").strip()}
    return of_entry(
        {"image": image, "prompt": entry.get("prompt") if isinstance(entry, dict) else None}, id, path.parent
    )


def of_dataset(source: str) -> Iterator[Record]:
    """A data set of the library `datasets`: hf:NAME[:SPLIT] (default train), or a folder written by `save_to_disk`."""
    datasets = importlib.import_module("datasets")
    name, _, split = source.removeprefix(DATASET).partition(":")
    if source.startswith(DATASET) and not Path(name).exists():
        found = datasets.load_dataset(name, split=split or "train", streaming=True)
    else:
        found = datasets.load_from_disk(name)
        found = found[split or "train"] if isinstance(found, datasets.DatasetDict) else found
    if "image" in (found.features or {}):
        found = found.cast_column("image", datasets.Image(decode=False))
    for number, entry in enumerate(found):
        yield of_entry(entry, f"{source}:{number}", Path())


def prompts(path: Path) -> Iterator[Record]:
    """What to draw, from JSON lines of {prompt, id}, or of any other file the lines. Raises ValueError as `records`."""
    if not path.is_file():
        raise ValueError(f"{path}: got no such file, expected one with prompts")
    return _prompts(path)


def _prompts(path: Path) -> Iterator[Record]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            name, text = f"{path}:{number}", line.decode(errors="replace").strip()
            if not text:
                continue
            entry: Any = {"prompt": text}
            if path.suffix.lower() == ".jsonl":
                try:
                    entry = json.loads(text)
                except ValueError:
                    entry = None
            prompt = entry.get("prompt") if isinstance(entry, dict) else None
            if isinstance(prompt, str) and prompt:
                yield Record(str(entry.get("id") if entry.get("id") is not None else name), prompt=prompt)
            else:
                yield Record(name, error=f"{name}: got a line without a prompt, expected an object with one")


def write_parquet(rows: Iterator[dict[str, Any]], path: Path, columns: Mapping[str, str]) -> None:
    """Write records as parquet, some at a time. `columns`: arrow types by name."""
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    schema = arrow.schema([(name, arrow.type_for_alias(kind)) for name, kind in columns.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        some: list[dict[str, Any]] = []
        for row in rows:
            some.append({name: row.get(name) for name in columns})
            if len(some) == 1024:
                writer.write_table(arrow.Table.from_pylist(some, schema))
                some = []
        writer.write_table(arrow.Table.from_pylist(some, schema))


def _short(error: Exception) -> str:
    return str(error).split("\n")[0][:200]
