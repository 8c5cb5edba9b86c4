"""Jacobi windows: every redraw keeps the law, by enumeration of the drafter's own code; and they follow plain sampling.

One branch of the enumeration is (committed tokens, window). A round splits it by what the rejection rule can do and by
what the drafter's numbers can do; `Jacobi.propose` and `Jacobi.observe` are the real ones, in float64.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.laws import context_law, plain_law, total_variation
from visspec import sampling
from visspec.models.drafters.jacobi import Jacobi, Window
from visspec.types import Outcome, Request, Scores, Verdict

VOCAB, LENGTH, WIDTH = 2, 4, 2
ALMOST_ONE = 1 - 1e-15


class Scripted:
    """Numbers given beforehand, (rows, positions, 2)."""

    def __init__(self, numbers):
        self.numbers = numbers

    def window(self, positions):
        return self.numbers[:, :positions]

    def advance(self, counts):
        pass


def state_of(committed, rows=1):
    request = Request(None, torch.zeros(rows, 1, dtype=torch.long), LENGTH, grid=(2, 2))
    return SimpleNamespace(
        request=request, rows=list(range(rows)), tokens=[list(committed)] * rows, noise=SimpleNamespace(kind="uniform"),
        pending=torch.tensor([committed[-1]] * rows), memory=None,
    )  # fmt: skip


def pieces(law):
    """(number, probability) for each token that an inverse-CDF draw from the law can give."""
    ends = torch.cat([torch.zeros(1, dtype=law.dtype), law.cumsum(0)])
    return [(float(ends[i] + ends[i + 1]) / 2, float(law[i])) for i in range(len(law)) if law[i] > 0]


def redraws(drafter, laws, window, length):
    """All sets of numbers that matter to the next redraw, (positions, 2) each, with their probability."""
    choices = []
    for j in range(WIDTH):
        n = length + j  # the law after old node n; the old entry n
        if n >= len(laws):
            choices.append([((0.5, 0.5), 1.0)])
            continue
        p, coupled = laws[n], drafter.redraw != "independent" and n < WIDTH
        if not coupled:
            choices.append([((0.5, u), w) for u, w in pieces(p)])
            continue
        q, old = window.q[0, n], int(window.tokens[0, n])
        keep = min(1.0, float(p[old] / q[old]))
        options = [((0.0, 0.5), keep)] if keep > 0 else []
        if keep < 1:
            options += [((ALMOST_ONE, u), (1 - keep) * w) for u, w in pieces(sampling.residual(p, q))]
        choices.append(options)
    for combination in itertools.product(*choices):
        yield (
            [numbers for numbers, _ in combination],
            torch.tensor([w for _, w in combination], dtype=torch.float64).prod(),
        )


def verdicts(p, committed, draft):
    """What rejection sampling can do with a chain, (nodes kept with the root, next token, probability), and laws."""
    tokens = draft.tokens[0, 1:].tolist()
    laws = [p((*committed, *tokens[:n])) for n in range(len(tokens) + 1)]
    found, reached = [], 1.0
    for n, token in enumerate(tokens):
        q = draft.q[0, n + 1]
        keep = min(1.0, float(laws[n][token] / q[token]))
        if keep < 1:
            rest = sampling.residual(laws[n], q)
            found += [(n + 1, y, reached * (1 - keep) * float(rest[y])) for y in range(VOCAB)]
        reached *= keep
    found += [(len(tokens) + 1, y, reached * float(laws[-1][y])) for y in range(VOCAB)]
    return [v for v in found if v[2] > 0], laws


def first_windows(drafter, committed):
    state = state_of(committed)
    empty = Window(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, VOCAB).double(), Scripted(None))
    return drafter._extended(state, empty, torch.zeros(1, dtype=torch.long), VOCAB)


def process_law(drafter, p, misreport=lambda q: q):
    """Joint law of LENGTH tokens of the loop with this drafter and rejection sampling."""
    law = torch.zeros((VOCAB,) * LENGTH, dtype=torch.float64)
    branches = {}
    for y in range(VOCAB):
        branches[(y,), None] = (float(p(())[y]), first_windows(drafter, (y,)))
    while branches:
        new = {}
        for (committed, _), (weight, window) in branches.items():
            if len(committed) == LENGTH:
                law[committed] += weight
                continue
            for key, share, after in rounds(drafter, p, committed, window, misreport):
                old = new.get(key, (0.0, None))[0]
                new[key] = (old + weight * share, after)
        branches = new
    return law


def rounds(drafter, p, committed, window, misreport):
    """The branches after one round."""
    state = state_of(committed)
    state.memory = window
    draft = drafter.propose(state, min(WIDTH, LENGTH - len(committed) - 1))
    found, laws = verdicts(p, committed, draft)
    scores = Scores(torch.stack(laws)[None].log())
    for length, following, share in found:
        gained = (*draft.tokens[0, 1:length].tolist(), following)
        after = (*committed, *gained)
        if len(after) == LENGTH:
            yield (after, None), share, None
            continue
        verdict = Verdict(torch.zeros(1, 1), torch.tensor([length]), torch.tensor([following]))
        for numbers, odds in redraws(drafter, laws, window, length):
            state = state_of(after)
            coins = Scripted(torch.tensor([numbers], dtype=torch.float64))
            state.memory = Window(window.tokens, window.q, coins)
            drafter.observe(state, draft, scores, verdict, Outcome([list(range(length))], [list(gained)]))
            kept = Window(state.memory.tokens, misreport(state.memory.q), coins)
            key = (after, (tuple(kept.tokens[0].tolist()), tuple(kept.q.flatten().tolist())))
            yield key, share * float(odds), kept


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("start", ["left", "above"])
@pytest.mark.parametrize("redraw", ["maximal", "independent"])
def test_redraws_keep_the_law(redraw, start, seed):
    p = context_law(VOCAB, seed)
    law = process_law(Jacobi(WIDTH, redraw, start), p)
    assert abs(float(law.sum()) - 1) < 1e-12
    assert total_variation(law, plain_law(p, VOCAB, LENGTH)) < 1e-12


@pytest.mark.parametrize("redraw", ["maximal", "independent"])
def test_a_misreported_law_is_seen(redraw):
    p = context_law(VOCAB, 0)
    law = process_law(Jacobi(WIDTH, redraw), p, misreport=lambda q: 0.7 * q + 0.3 * q.flip(-1))
    assert total_variation(law, plain_law(p, VOCAB, LENGTH)) > 1e-3


def test_a_redraw_that_ignores_the_old_law_is_seen(monkeypatch):
    """A draft kept by the coupling, or else drawn from the whole new law instead of the residual."""
    p, residual = context_law(VOCAB, 0), sampling.residual
    drafter = Jacobi(WIDTH, "maximal")

    def wrong(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "residual", lambda p, q: p if p.dim() > 1 else residual(p, q))
            return Jacobi._drawn(drafter, *arguments)

    monkeypatch.setattr(drafter, "_drawn", wrong)
    assert total_variation(process_law(drafter, p), plain_law(p, VOCAB, LENGTH)) > 1e-3


@pytest.mark.parametrize("options", [{"window": 0}, {"redraw": "other"}, {"start": "below"}])
def test_bad_options_are_refused_in_a_sentence(options):
    with pytest.raises(ValueError, match=r"^(window|redraw|start): got .*, expected "):
        Jacobi(**options)
