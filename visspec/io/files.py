"""Atomic file writes, and result files that are written record by record."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # not available on this system
    fcntl = None  # type: ignore[assignment]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]  # content of a JSON file or request body
TRIAL = 4096  # number of bytes written to test for a full disk


@contextmanager
def file_errors(path: str | Path) -> Iterator[None]:
    """Context manager that adds this file to system errors without a name, and wraps decoding errors."""
    try:
        yield
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8.") from None
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Context manager for a temporary path next to `path`, which is moved to `path` if the block does not raise. If the
    process is killed, `path` is unchanged. An error leaves no file. Parent folders are created. Symbolic links are
    followed, and special files (a pipe, /dev/stdout) are written directly.
    """
    path = Path(path)
    if is_device(path):
        yield path
        return
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with file_errors(path):
            yield draft
            with open(draft, "rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_json(path: str | Path | None, value: object) -> None:
    """Write a value as JSON; does nothing if `path` is None."""
    if path is None:
        return
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(value, indent=1) + "\n")


def loads(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply.") from None


def lock(file: BinaryIO, path: Path) -> None:
    """Lock a file for this process until it is closed. Raises ValueError if another process has locked it."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{path}: Another run is writing to this place. Choose another one.") from None


def same_settings(home: Path, path: str | Path, about: dict[str, Any]) -> None:
    """Write a run's settings to `home`, or raise ValueError if an earlier run had others. Messages name `path`."""
    if not home.exists():
        write_json(home, about)
        return
    stored = None
    with suppress(ValueError):
        stored = loads(home.read_bytes())
    if not isinstance(stored, dict):
        raise ValueError(f"{home}: got no JSON object, expected the settings of the records in {path}.")
    for name, value in json.loads(json.dumps(about)).items():
        if name != "provenance" and stored.get(name) != value:
            problem = f"records made with {stored.get(name)!r}"
            raise ValueError(f"{path}: got {name} {value!r} and {problem}. Use the same value or another place.")


def check_there(path: Path) -> None:
    """Raise ValueError if a file that is open for writing was removed or moved, since writes would be lost."""
    if not path.exists():
        raise ValueError(f"{path}: The file was removed during the run.")


class Journal:
    """Context manager for records kept line by line in a file of JSON lines, for runs that can be resumed.

    A record is one line, written in one call. A killed process leaves all records that it added, and at most one
    incomplete line, which the next run removes. Settings (`about`) are kept in PATH.about.json. `done` has the ids of
    existing records, `failed` those with an `error`, which `retry` removes. Raises ValueError if another process writes
    to the file, it has other content or settings, or it is removed meanwhile.
    """

    def __init__(self, path: str | Path, about: dict[str, Any], *, retry: bool = False):
        self.path, self.about, self.retry = Path(path), about, retry
        self.done: set[str] = set()
        self.failed: set[str] = set()

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")
        try:
            lock(self._file, self.path)
            same_settings(self.path.with_name(f"{self.path.name}.about.json"), self.path, self.about)
            self._file.truncate(self._read())
            if self.retry and self.failed:
                self._take_failed_out()
        except BaseException:
            self._file.close()
            raise
        return self

    def _read(self) -> int:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                self._note(loads(line))
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{self.path}: got line {number}, expected a JSON object with an id.") from None
            end += len(line)
        return end

    def _note(self, record: dict[str, Any]) -> None:
        self.done.add(record["id"])
        if record.get("error"):
            self.failed.add(record["id"])

    def _take_failed_out(self) -> None:
        with atomic_write(self.path) as draft:
            new = open(draft, "a+b")
            lock(new, self.path)
            self._file.seek(0)
            new.writelines(line for line in self._file if json.loads(line)["id"] not in self.failed)
            new.flush()
        self._file.close()
        self._file = new
        self.done -= self.failed
        self.failed.clear()

    def add(self, record: dict[str, Any]) -> None:
        """Append a record. It is then safe even if the process is killed."""
        check_there(self.path)
        with file_errors(self.path):
            self._file.write((json.dumps(record) + "\n").encode())
            self._file.flush()
        self._note(record)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all records in the order in which they were added."""
        check_there(self.path)
        with open(self.path, "rb") as file:
            yield from map(json.loads, file)

    def __exit__(self, kind, error, trace) -> None:
        with file_errors(self.path):
            self._file.close()
        if kind is None:
            check_there(self.path)


def is_device(path: Path) -> bool:
    """Return whether the path is neither a file nor a folder, such as a pipe, so that a move can't replace it."""
    return path.exists() and not path.is_file() and not path.is_dir()


def unwritable(path: Path, folder: bool = False) -> str | None:
    """Return why a file can't be written, or created in a folder; None if it can. Existing files are not changed."""
    try:
        if path.exists() and path.is_dir() != folder:
            kind, expected = ("file", "folder") if folder else ("folder", "file")
            return f"{path} is a {kind}, expected a {expected}"
        if is_device(path):
            return None
        with suppress(FileNotFoundError):
            path.stat()  # raises OSError for circular links
        home = path if folder else path.resolve().parent
        while not home.exists():
            home = home.parent
        with tempfile.TemporaryFile(dir=home) as trial:
            trial.write(bytes(TRIAL))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        return f"{path} can't be written ({error.strerror}). Choose another place."
    return None
