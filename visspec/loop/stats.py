"""Statistics of a call. They print as a table; in a notebook they show the text coloured by origin."""

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
    """Statistics of one `generate` call.

    Attributes:
        tau: Tokens per round, bonus token included; `tau_without_bonus` excludes it.
        acceptance_by_depth: Share of the reached drafts that were accepted, by depth.
        times: Seconds by stage.
        drift_per_token: Measured total variation of an approximate rule; None if it is not measured.
        faults: Invalid drafts and exceptions of the drafter.
        gave_up: Rounds without a draft because it would not have saved time.
        declared: Description of the declared target's distribution.
        why: Why "auto" chose the drafter.
        pieces: (text, origin) of every token, per row.
    """

    tokens: int
    rounds: int
    tau: float
    tau_without_bonus: float
    acceptance_by_depth: list[float]
    times: dict[str, float]
    guarantee: str
    drafter: str
    acceptance: str
    order: str
    drift_per_token: float | None
    faults: int
    gave_up: int
    declared: str = ""
    why: str = ""
    pieces: list[list[tuple[str, str]]] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, state: State, setup: DecodingSetup, tokenizer=None) -> Stats:
        """Compute the statistics of a finished state. Pieces are text with a tokenizer, ids without.

        Args:
            state: The finished request.
            setup: The setup that decoded it.
            tokenizer: Turns ids into text; None for ids.
        """
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
            *([f"the drafter was chosen because {self.why}"] if self.why else []),
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
        # dark text on white is readable in dark notebooks, too
        style = "font-family:sans-serif;color:#1b1b1b;background:#ffffff;padding:.5em"
        return f'<div style="{style}">{rows}<p>{legend}</p><pre>{html.escape(str(self))}</pre></div>'


def drift_total(state: State, guarantee: str) -> float | None:
    """Return the summed drift. If none was measured, 0 for an exact rule and None for an approximate one."""
    if state.drift is not None:
        return float(state.drift.sum())
    return None if guarantee == "approximate" else 0.0


def drift_text(drift: float | None) -> str:
    return "not measured" if drift is None else f"{drift:.4f}"


def finish_reason(tokens: list[int], request: Request) -> str:
    """Return why a row ended: "eos" (a token that ends text), "length" (max_new_tokens) or "stop" (a criterion)."""
    if tokens[-1] in request.eos:
        return "eos"
    return "length" if len(tokens) >= request.max_new_tokens else "stop"


def text_pieces(tokenizer, tokens: list[int], origin: list[str]) -> list[tuple[str, str]]:
    """Return the text that each token added to the decoded text, with the token's origin."""
    if tokenizer is None:
        return [(f" {token}", kind) for token, kind in zip(tokens, origin)]
    pieces, previous = [], ""
    for end, kind in enumerate(origin, start=1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        whole = text.startswith(previous)  # else the token completes the last character
        pieces.append((text[len(previous) - (not whole) :], kind))
        previous = text
    return pieces


def html_spans(pieces: list[tuple[str, str]]) -> str:
    """Return text pieces as escaped HTML spans, coloured by origin."""
    return "".join(f'<span style="color:{COLOURS[origin]}">{html.escape(text)}</span>' for text, origin in pieces)


def by_depth(rounds: Iterable[Round]) -> tuple[list[int], list[int]]:
    """Return, by depth, the number of drafted nodes whose ancestors were all accepted, and how many of them were
    accepted. Depth i counts as reached in a row if its draft has a node there below the accepted path.
    """
    rounds = list(rounds)
    deepest = max((r.levels for r in rounds), default=0)
    reached, accepted = [0] * deepest, [0] * deepest
    for levels, committed, had_rejection in rounds:
        for g, t in zip(committed, had_rejection):
            for d in range(min(g - 1 + t, levels)):  # passes out of raster order return tokens without a draft
                reached[d] += 1
                accepted[d] += g - 1 > d
    return reached, accepted


def acceptance_by_depth(rounds: Iterable[Round]) -> list[float]:
    """Return accepted / reached for each depth, over all rounds and rows."""
    return [a / r for r, a in zip(*by_depth(rounds)) if r]
