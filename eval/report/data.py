"""Result files of the benches for the report. A field that is missing or not a number is shown as not measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from visspec.eval.metrics.intervals import wilson

Interval = tuple[float, float] | None

LARGEST = 1e12
REQUIRED = {  # bench -> required fields
    "caption": ("speedup", "tau"),
    "image": ("rows",),
    "text": ("speedup", "tau"),
    "sizes": ("rows",),
    "kernels": ("rows",),
}
GUARANTEES = {  # kind -> (mark, words)
    "tokens": ("●", "exact, the tokens of plain decoding"),
    "law": ("◆", "exact in distribution"),
    "approximate": ("▲", "approximate"),
    "unknown": ("○", "no guarantee stated"),
}


@dataclass(frozen=True)
class RecordImage:
    """An image of a method in the JSON of `visspec bench image`, as a small PNG in base64. `verdict` is {"correct",
    "reason"}. `origins` is (rows, columns): the origin of each token, an index into `stats.COLOURS`.
    """

    prompt: object = ""
    seed: object = ""
    png: str | None = None
    verdict: Mapping[str, Any] | None = None
    origins: list[list[int]] | None = None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> RecordImage:
        """Create an entry from a JSON object, ignoring other fields."""
        return cls(**{f.name: entry[f.name] for f in fields(cls) if entry.get(f.name) is not None})

    def entry(self) -> dict[str, Any]:
        """Return the JSON object, without empty fields."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class Method:
    """A measured method: a caption record, or a row of a record with several."""

    kind: str  # kind of bench
    record: dict[str, Any]
    source: str
    index: int = 0  # number on the page, from 1
    images: list[RecordImage] = field(default_factory=list)

    @property
    def label(self) -> str:
        parts = [self.record.get("drafter_name") or self.record.get("drafter"), self.record.get("acceptance")]
        parts = [self.record["name"]] if self.record.get("name") else parts
        return str(" · ".join(str(p) for p in parts if p) or f"method {self.index}")

    @property
    def target(self) -> str:
        """The name of the model, without the folders of a local path."""
        target = str(self.record.get("target") or "")
        return Path(target).name if target.startswith(("/", ".", "~")) else target

    @property
    def n(self) -> int:
        """Number of prompts."""
        return int(self.value("compared") or self.value("n_prompts") or len(self.images))

    @property
    def guarantee(self) -> str:
        """A kind of GUARANTEES."""
        stated = str(self.record.get("guarantee") or "")
        if stated.startswith("exact"):
            return "law" if self.record.get("promises_tokens") is False else "tokens"
        return "approximate" if stated else "unknown"

    def value(self, field: str) -> float | None:
        """Return a field of its record if it is a number."""
        return number(self.record.get(field))

    def interval(self, field: str) -> Interval:
        """Return the 95 % interval of a field; Wilson's for the share of right images."""
        if field == "right" and (share := self.value("right")) is not None and (n := self.value("quality_n")):
            return wilson(share * n, int(n))
        return interval(self.record.get(f"{field}_ci95"))

    @property
    def speed(self) -> float | None:
        """The speed-up if it is a positive number."""
        speed = self.value("speedup")
        return speed if speed and speed > 0 else None


def number(value: object) -> float | None:
    """Return a number that can be plotted, or None for anything else (null, NaN, missing, beyond `LARGEST`)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        return None
    return float(value)


def interval(value: object) -> Interval:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    low, high = number(value[0]), number(value[1])
    return None if low is None or high is None else (low, high)


def read(path: Path) -> dict[str, Any]:
    """Return the object of a result file. Raises ValueError or FileNotFoundError if it is not the JSON of a bench."""
    if not path.is_file():
        raise FileNotFoundError(f"report: result file {path} does not exist.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"report: {path} is not JSON ({error}).") from None
    bench = record.get("bench") if isinstance(record, dict) else type(record).__name__
    if not isinstance(record, dict) or bench not in REQUIRED:
        raise ValueError(f"report: {path.name}: bench: got {bench!r}, expected {', '.join(REQUIRED)}.")
    for name in REQUIRED[bench]:
        if record.get(name) in (None, []):
            raise ValueError(f"report: {path.name}: got no {name!r}, expected the JSON of visspec bench {bench}.")
    return record


def rows_of(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the rows of a record. Raises ValueError unless they are objects."""
    rows = record["rows"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"report: {where}: rows: got {type(rows).__name__}, expected a list of objects.")
    return rows


def methods_of(record: dict[str, Any], path: Path) -> list[Method]:
    """Return the methods of a caption or image record read from `path`. Raises ValueError."""
    shared = {key: value for key, value in record.items() if key not in ("rows", "failures", "texts", "thumbnails")}
    if "rows" not in record:
        return [Method(record["bench"], record, path.name)]
    methods = []
    for row in rows_of(record, path.name):
        images = [RecordImage.of(entry) for entry in row.get("images") or []]
        methods.append(Method(record["bench"], shared | row, path.name, images=images))
    if record.get("failures"):  # failures of the whole bench are shown once
        methods[0].record["failures"] = record["failures"]
    methods[0].record |= {name: record[name] for name in ("texts", "thumbnails") if name in record}
    return methods
