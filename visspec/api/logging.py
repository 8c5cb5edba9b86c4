"""The logger `visspec`, with the verbosity levels of transformers: `visspec.logging.set_verbosity_info()`.

Modules log to `logging.getLogger(__name__)`, a child of this logger. Nothing is printed until a level is asked for,
here or by the environment variable VISSPEC_VERBOSITY. Records then go to stderr, or to the handlers of the root logger
where the application has configured some. Warnings for users are Python warnings and do not depend on the level.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING

VARIABLE = "VISSPEC_VERBOSITY"
LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR, "critical": CRITICAL}
LOGGER = logging.getLogger("visspec")


class Console(logging.Handler):
    """Writes to what `sys.stderr` is at the time: notebooks and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if sys.stderr is not None:
                sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


CONSOLE = Console()
CONSOLE.setFormatter(logging.Formatter("[visspec] %(message)s"))


def get_logger(name: str | None = None) -> logging.Logger:
    """The logger of a module by its name; default: `visspec` itself."""
    return logging.getLogger(name or LOGGER.name)


def get_verbosity() -> int:
    """The level in force, a number of the standard library (20 is INFO, 30 WARNING)."""
    return LOGGER.getEffectiveLevel()


def set_verbosity(verbosity: int | str) -> None:
    """A level of the standard library, or its name. Raises ValueError for another."""
    level = LEVELS.get(verbosity.lower()) if isinstance(verbosity, str) else verbosity
    if not isinstance(level, int) or isinstance(level, bool) or level < 0:
        raise ValueError(f"verbosity: got {verbosity!r}, expected one of {', '.join(LEVELS)} or a level of logging")
    LOGGER.setLevel(level)
    if not logging.getLogger().handlers:
        enable_default_handler()


def set_verbosity_debug() -> None:
    set_verbosity(DEBUG)


def set_verbosity_info() -> None:
    set_verbosity(INFO)


def set_verbosity_warning() -> None:
    set_verbosity(WARNING)


def set_verbosity_error() -> None:
    set_verbosity(ERROR)


def enable_default_handler() -> None:
    """Write to stderr, and to no handler of the root logger, which would show records twice."""
    if CONSOLE not in LOGGER.handlers:
        LOGGER.addHandler(CONSOLE)
    LOGGER.propagate = False


def disable_default_handler() -> None:
    """Leave the records to the handlers of the application."""
    LOGGER.removeHandler(CONSOLE)
    LOGGER.propagate = True


def configure() -> None:
    """Called once, when visspec is imported: silent, or the level of the environment variable."""
    LOGGER.addHandler(logging.NullHandler())
    asked = os.environ.get(VARIABLE)
    if asked:
        try:
            set_verbosity(asked)
        except ValueError:
            warnings.warn(f"{VARIABLE}: got {asked!r}, expected one of {', '.join(LEVELS)}", stacklevel=2)


configure()
