"""An image of a method in the JSON of `visspec bench image`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class RecordImage:
    """One image, as a path inside the folder of the record or as a small PNG in base64. `verdict` is {"correct",
    "reason"}. `acceptance` is (rows, columns) by token: 1 if the drafted token was accepted, 0 if it was replaced, None
    if nothing was drafted.
    """

    prompt: object = ""
    seed: object = ""
    path: str | None = None
    png: str | None = None
    verdict: Mapping[str, Any] | None = None
    acceptance: list[list[float | None]] | None = None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> RecordImage:
        """Create an entry from a JSON object, ignoring other fields."""
        return cls(**{f.name: entry[f.name] for f in fields(cls) if entry.get(f.name) is not None})

    def entry(self) -> dict[str, Any]:
        """Return the JSON object, without empty fields."""
        return {name: value for name, value in asdict(self).items() if value is not None}
