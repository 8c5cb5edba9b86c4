"""`visspec generate --best-of`: which of several images of a prompt are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from visspec.api import best_of
from visspec.api.best_of import Score

if TYPE_CHECKING:
    from visspec.api.images import ImageOutput
    from visspec.cli.generate import Options

SELECTED = "selection (not lossless)"


def scorer(arguments: Options, prompts: Sequence[str]) -> Score | None:
    """The score of --best-of for these prompts. Raises ValueError where one of the two options is missing."""
    if arguments.best_of == 1 and arguments.scorer is None:
        return None
    if arguments.best_of == 1 or arguments.scorer is None:
        found = f"{arguments.best_of} and --scorer {arguments.scorer}"
        raise ValueError(f"--best-of: got {found}, expected 2 or more and {best_of.NAMES}")
    return best_of.scorer(arguments.scorer, prompts, arguments.device)


def pick_best(
    stream: Iterable[ImageOutput], count: int, score: Score | None
) -> Iterator[tuple[ImageOutput, list[tuple[ImageOutput, int, dict[str, Any]]]]]:
    """Each batch, and the images to keep since the last one: all, or the best of every `count` in turn, which are of
    one prompt, with their scores.
    """
    waiting: list[tuple[ImageOutput, int]] = []
    for part in stream:
        picks: list[tuple[ImageOutput, int, dict[str, Any]]] = []
        for i in range(len(part.images)):
            waiting.append((part, i))
            if len(waiting) < count:
                continue
            about: dict[str, Any] = {}
            at = 0
            if score is not None:
                scores = score([p.images[j] for p, j in waiting], part.prompts[i])
                at = best_of.best(scores)
                about = {"score": scores[at], "best_of": count, "selected_from": scores, "guarantee": SELECTED}
            picks.append((*waiting[at], about))
            waiting = []
        yield part, picks
