"""The page of `visspec caption --report`: thumbnails beside captions, coloured by origin, and what failed."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from visspec.eval.report.images import MAX_PIXELS, thumbnail
from visspec.io.files import replacing
from visspec.io.images import open_image, read_image
from visspec.loop.stats import COLOURS, MEANING, coloured

MOST = 200  # records with a thumbnail, and errors, on a page
STYLE = (
    "body{font-family:sans-serif;max-width:60em;margin:2em auto}td{vertical-align:top;padding:.4em}"
    "small{color:#666}img{max-width:128px}"
)


class CaptionSamples:
    """Thumbnails and coloured texts of the first records of a run, which are not in its file."""

    def __init__(self) -> None:
        self.images: dict[str, Any] = {}
        self.pieces: dict[str, Any] = {}

    def look(self, record: Any) -> None:
        """Keep the image of a record that has no path, while there is room."""
        if len(self.images) < MOST and isinstance(record.image, bytes):
            self.images[record.id] = record.image

    def tell(self, id: str, pieces: Any) -> None:
        if len(self.pieces) < MOST:
            self.pieces[id] = pieces

    def thumbnail(self, record: Mapping[str, Any]) -> str | None:
        """A data URI; None if the image is gone or unreadable."""
        try:
            data = self.images.get(record["id"])
            if data is None and not record["image"]:
                return None
            image = open_image(record["image"], MAX_PIXELS) if data is None else read_image(data, "", MAX_PIXELS)
            return thumbnail(image)
        except (ValueError, OSError):
            return None


def write_page(
    path: Path, records: Iterable[Mapping[str, Any]], shown: CaptionSamples, about: Mapping[str, Any]
) -> None:
    """Write the page of all records: counts of all of them, the first ones with pictures, the first errors."""
    count = tokens = rounds = failed = 0
    rows: list[Any] = []
    errors: list[Any] = []
    for record in records:
        count += 1
        if record["error"]:
            failed += 1
            if len(errors) < MOST:
                errors.append(f"<li>{html.escape(record['error'])}</li>")
            continue
        tokens, rounds = tokens + max(record["tokens"] - 1, 0), rounds + record["rounds"]
        if len(rows) < MOST:
            rows.append(_row(record, shown))
    legend = " · ".join(f'<b style="color:{COLOURS[o]}">{html.escape(MEANING[o])}</b>' for o in COLOURS)
    said = html.escape(json.dumps(about, indent=1))
    page = (
        f"<!doctype html><meta charset=utf-8><title>Captions</title><style>{STYLE}</style><h1>Captions</h1>"
        f"<p>{count} records, {failed} failed; tau {tokens / max(rounds, 1):.2f}, bonus included.</p><p>{legend}</p>"
        f"<table>{''.join(rows)}</table>" + (f"<h2>Failed</h2><ul>{''.join(errors)}</ul>" if errors else "")
    )
    with replacing(path) as draft:
        draft.write_text(f"{page}<h2>Provenance</h2><pre>{said}</pre>\n", encoding="utf-8", errors="backslashreplace")


def _row(record: Mapping[str, Any], shown: CaptionSamples) -> str:
    uri, pieces = shown.thumbnail(record), shown.pieces.get(record["id"])
    picture = f'<img src="{uri}" alt="">' if uri else ""
    text = coloured(pieces) if pieces else html.escape(record["caption"])
    small = html.escape(f"{record['id']} · {record['tokens']} tokens · {record['ended']}")
    return f"<tr><td>{picture}<td>{text}<br><small>{small}</small>"
