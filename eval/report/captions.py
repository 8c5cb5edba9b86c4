"""The page of `visspec caption --report`: thumbnails with captions coloured by origin, and failures."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from visspec.eval.report import rendering
from visspec.eval.report.images import MAX_PIXELS, thumbnail
from visspec.io.videos import Clip, open_media

Pieces = Sequence[tuple[str, str]]  # pieces of a text with their origins
MOST = 200  # maximum number of thumbnails, and of errors, on a page


def thumbnail_of(image: Any) -> str | None:
    """Return a data URI of a file or the bytes of one, or None if it is missing or unreadable."""
    if image is None:
        return None
    try:
        media = open_media(image, max_pixels=MAX_PIXELS, frames=1)
        return thumbnail(media.frames[0] if isinstance(media, Clip) else media)
    except (ValueError, OSError):
        return None


def write_page(
    path: Path,
    records: Iterable[Mapping[str, Any]],
    images: Mapping[str, Any],
    pieces: Mapping[str, Pieces],
    about: Mapping[str, Any],
) -> None:
    """Write the page: counts of all records, the first ones with pictures, and the first errors.

    Args:
        images: Images of records by id; those of others are opened from the record's path.
        pieces: Captions of records by id, in pieces with their origins.
    """
    count = tokens = rounds = failed = 0
    rows: list[tuple[Mapping[str, Any], str | None, Pieces | None]] = []  # record, thumbnail, pieces of its text
    errors: list[str] = []
    for record in records:
        count += 1
        if record["error"]:
            failed += 1
            errors += [record["error"]] if len(errors) < MOST else []
            continue
        tokens, rounds = tokens + max(record["tokens"] - 1, 0), rounds + record["rounds"]
        if len(rows) < MOST:
            id = record["id"]
            rows.append((record, thumbnail_of(images.get(id, record["image"])), pieces.get(id)))
    values = {"count": count, "failed": failed, "tau": tokens / max(rounds, 1), "rows": rows, "errors": errors}
    rendering.write_page(path, "captions", values | {"about": about})
