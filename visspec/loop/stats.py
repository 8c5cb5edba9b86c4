"""Statistics of a call: prints as a table, and in a notebook shows the text coloured by origin."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, field

from visspec.loop.setup import DecodingSetup
from visspec.types import Request, Round, State

COLOURS = {"plain": "#555555", "drafted": "#00724d", "bonus": "#0b5cad", "corrected": "#b34700"}
MEANING = {
    "plain": "no draft",
    "drafted": "drafted and accepted",
    "bonus": "bonus after a full path",
    "corrected": "corrected by the target",
}


@dataclass
class Stats:
    """Statistics of one `generate` call. tau includes the bonus token, `tau_without_bonus` does not."""

    tokens: int
    rounds: int
    tau: float
    tau_without_bonus: float
    acceptance_by_depth: list[float]  # accepted / reached
    times: dict[str, float]  # seconds by stage
    guarantee: str
    drafter: str
    acceptance: str
    order: str  # order of generation
    drift_per_token: float | None  # None if it is not measured
    faults: int
    gave_up: int
    declared: str = ""  # the distribution of the declared target, in words
    why: str = ""  # "auto" took the drafter, in words
    pieces: list[list[tuple[str, str]]] = field(default_factory=list, repr=False)  # per row: (text, origin)

    @classmethod
    def of(cls, state: State, setup: DecodingSetup, tokenizer=None) -> Stats:
        """From a finished state. With a tokenizer the pieces are text, else ids."""
        trace = state.trace
        passes = sum(len(r.committed) for r in trace.rounds)
        committed = sum(sum(r.committed) for r in trace.rounds)
        tokens = sum(map(len, state.tokens))
        drift = drift_total(state, setup.guarantee)
        return cls(
            tokens=tokens,
            rounds=len(trace.rounds),
            tau=committed / max(passes, 1),
            tau_without_bonus=(committed - passes) / max(passes, 1),
            acceptance_by_depth=acceptance_by_depth(trace.rounds),
            times=dict(trace.times),
            guarantee=setup.guarantee,
            drafter=setup.name,
            acceptance=type(setup.rule.inner).__name__,
            drift_per_token=None if drift is None else drift / max(tokens, 1),
            order=setup.order.name,
            faults=trace.faults,
            gave_up=trace.gave_up,
            declared=setup.target.capabilities.declared,
            pieces=[text_pieces(tokenizer, row, origin) for row, origin in zip(state.tokens, trace.origin)],
        )

    def __str__(self) -> str:
        declared = f" ({self.declared})" if self.declared else ""
        drift = drift_text(self.drift_per_token)
        depth = " ".join(f"{a:.2f}" for a in self.acceptance_by_depth) or "-"
        spent = "  ".join(f"{k} {1e3 * v:.1f}" for k, v in self.times.items())
        lines = [
            f"{self.tokens} tokens in {self.rounds} rounds of drafter {self.drafter!r}: tau {self.tau:.2f} "
            f"(without bonus {self.tau_without_bonus:.2f})",
            *([f"the drafter was taken because {self.why}"] if self.why else []),
            f"guarantee: {self.guarantee}{declared}; drift per token {drift}",
            f"accepted / reached by depth: {depth}",
            f"milliseconds: {spent}",
        ]
        if self.gave_up or self.faults:
            lines.append(
                f"rounds without drafting because it did not pay: {self.gave_up}; drafter faults: {self.faults}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        legend = " · ".join(f'<b style="color:{COLOURS[o]}">{MEANING[o]}</b>' for o in COLOURS)
        rows = "".join(f"<p>{html_spans(row)}</p>" for row in self.pieces)
        return f'<div style="font-family:sans-serif">{rows}<p>{legend}</p><pre>{html.escape(str(self))}</pre></div>'


def drift_total(state: State, guarantee: str) -> float | None:
    """The summed drift: 0 where an exact rule measures none, None where an approximate one measures none."""
    if state.drift is not None:
        return float(state.drift.sum())
    return None if guarantee == "approximate" else 0.0


def drift_text(drift: float | None) -> str:
    """A drift in words."""
    return "not measured" if drift is None else f"{drift:.4f}"


def ended_by(state: State, row: int) -> str:
    """Why a finished row ended, see `finish_reason`."""
    return finish_reason(state.tokens[row], state.request.of(row)[0])


def finish_reason(tokens: list[int], request: Request) -> str:
    """Why a row ended: "eos" (a token that ends text), "length" (max_new_tokens) or "stop" (a criterion)."""
    if tokens[-1] in request.eos:
        return "eos"
    return "length" if len(tokens) >= request.max_new_tokens else "stop"


def text_pieces(tokenizer, tokens: list[int], origin: list[str]) -> list[tuple[str, str]]:
    """Each token's share of the decoded text, with its origin: the text added by the token."""
    if tokenizer is None:
        return [(f" {token}", kind) for token, kind in zip(tokens, origin)]
    pieces, before = [], ""
    for end, kind in enumerate(origin, start=1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        whole = text.startswith(before)  # else the token completes the last character
        pieces.append((text[len(before) - (not whole) :], kind))
        before = text
    return pieces


def html_spans(pieces: list[tuple[str, str]]) -> str:
    """Text pieces as HTML spans, coloured by origin, escaped."""
    return "".join(f'<span style="color:{COLOURS[origin]}">{html.escape(text)}</span>' for text, origin in pieces)


def by_depth(rounds: Iterable[Round]) -> tuple[list[int], list[int]]:
    """By depth: number of drafted nodes whose ancestors were all accepted, and number of accepted ones.

    Counted per row: depth i is reached if the row's draft has a node there below its accepted path.
    """
    rounds = list(rounds)
    deepest = max((r.levels for r in rounds), default=0)
    reached, accepted = [0] * deepest, [0] * deepest
    for levels, committed, had_rejection in rounds:
        for g, t in zip(committed, had_rejection):
            for d in range(min(g - 1 + t, levels)):  # passes out of raster order give tokens without a draft
                reached[d] += 1
                accepted[d] += g - 1 > d
    return reached, accepted


def acceptance_by_depth(rounds: Iterable[Round]) -> list[float]:
    """accepted at depth i / reached depth i, over all rounds and rows."""
    return [a / r for r, a in zip(*by_depth(rounds)) if r]
