"""The page of `visspec caption --report`: thumbnails with captions coloured by origin, and failures."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from visspec.eval.report import rendering
from visspec.eval.report.images import MAX_PIXELS, thumbnail
from visspec.io.images import read_image
from visspec.io.videos import Clip, open_media

Pieces = Sequence[tuple[str, str]]  # pieces of a text with their origins
MOST = 200  # maximum number of thumbnails, and of errors, on a page


class CaptionSamples:
    """Thumbnails and coloured texts of the first records of a run, which its file does not contain."""

    def __init__(self) -> None:
        self.images: dict[str, bytes] = {}
        self.pieces: dict[str, Pieces] = {}

    def look(self, id: str, image: object) -> None:
        """Keep the image of a record, if it has no path and there is room."""
        if len(self.images) < MOST and isinstance(image, bytes):
            self.images[id] = image

    def tell(self, id: str, pieces: Pieces) -> None:
        if len(self.pieces) < MOST:
            self.pieces[id] = pieces

    def thumbnail(self, record: Mapping[str, Any]) -> str | None:
        """Return a data URI, or None if the image is missing or unreadable."""
        try:
            data = self.images.get(record["id"])
            if data is None and not record["image"]:
                return None
            image = open_media(record["image"], MAX_PIXELS, 1) if data is None else read_image(data, "", MAX_PIXELS)
            return thumbnail(image.frames[0] if isinstance(image, Clip) else image)
        except (ValueError, OSError):
            return None


def write_page(
    path: Path, records: Iterable[Mapping[str, Any]], shown: CaptionSamples, about: Mapping[str, Any]
) -> None:
    """Write the page: counts of all records, the first ones with pictures, and the first errors."""
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
            rows.append((record, shown.thumbnail(record), shown.pieces.get(record["id"])))
    values = {"count": count, "failed": failed, "tau": tokens / max(rounds, 1), "rows": rows, "errors": errors}
    rendering.write_page(path, "captions", values | {"about": about})
