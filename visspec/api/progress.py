"""Progress of long runs on stderr: a bar in a terminal, or else lines, such as in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TextIO

from tqdm import tqdm

EVERY_S = 30.0  # seconds between lines
LINE = "{n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
LINE_OF_UNKNOWN = "{n_fmt} {unit} [{elapsed}, {rate_fmt}{postfix}]"  # for an unknown total


class Progress(AbstractContextManager):
    """Context manager that shows count, total, rate and figures of a run. `initial` is the count of an earlier run. The
    total may be unknown. If `hidden`, nothing is printed.
    """

    def __init__(self, unit: str, total: int | None = None, initial: int = 0, hidden: bool = False):
        self.hidden, self.shown = hidden, {"unit": unit, "total": total, "initial": initial}
        self.bar = tqdm(**self.shown, smoothing=0.05, leave=False, disable=hidden or not sys.stderr.isatty())
        self.began = self.printed = time.monotonic()

    def update(self, count: int, figures: Mapping[str, Any]) -> None:
        """Show that `count` are done, including those of earlier runs."""
        now = time.monotonic()
        if not self.bar.disable:
            self.bar.set_postfix(figures, refresh=False)
            self.bar.update(count - self.bar.n)
        elif not self.hidden and now - self.printed >= EVERY_S:
            self.printed = now
            postfix = ", ".join(f"{name}={value}" for name, value in figures.items())
            line = LINE_OF_UNKNOWN if self.shown["total"] is None else LINE
            text = tqdm.format_meter(n=count, elapsed=now - self.began, bar_format=line, postfix=postfix, **self.shown)
            print(f"visspec: {text}", file=sys.stderr, flush=True)

    def write(self, text: str, file: TextIO | None = None) -> None:
        """Print a separate line, to stderr by default."""
        with tqdm.external_write_mode(file or sys.stderr):
            print(text, file=file or sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        self.bar.close()
