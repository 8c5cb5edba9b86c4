"""Statistical laws of whole outputs of the real loop, with drafts of a random depth in every round."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.distributions import chi_square, plain_law
from tests.tables import Steady, Table, TableDrafter, TableTarget, TableTree, decoded
from visspec.accept.exact import Exact
from visspec.accept.rejection import Rejection
from visspec.distributions import Categorical, draw
from visspec.models.jacobi import drafter as jacobi
from visspec.models.jacobi.drafter import Jacobi, Window
from visspec.models.lookup.context import ContextDrafter
from visspec.models.lookup.merged import MergedDrafter


class Likely(TableDrafter):
    """The most likely tokens of another table, which share a tree with those of the context."""

    def drawn(self, logits_BV, state, level):
        return logits_BV.argmax(dim=-1), None


V, SHORT, LONG = 3, 6, 24
SHARP, FLAT, OTHER = Table(V, 0), Table(V, 0, 0.3), Table(V, 7, 1.0)
DRAFTERS = {
    "propose": lambda: TableDrafter(OTHER), "static tree": lambda: TableTree(OTHER, (2, 3)),
    "wide tree": lambda: TableTree(OTHER, (3, 1, 1)), "maximal": lambda: Jacobi(4, "maximal"),
    "maximal, random start": lambda: Jacobi(4, "maximal", "random"), "independent": lambda: Jacobi(4, "independent"),
    "independent, random start": lambda: Jacobi(4, "independent", "random"), "gumbel": lambda: Jacobi(4, "gumbel"),
    "gumbel, random start": lambda: Jacobi(4, "gumbel", "random"),
    "merged": lambda: MergedDrafter(TableDrafter(OTHER), ContextDrafter()),
    "shared tree": lambda: MergedDrafter(Likely(OTHER), ContextDrafter()),
}  # fmt: skip


def samples(table, drafter, rule, rows, length):
    state = decoded(TableTarget(table), drafter, rule, rows, length)
    assert state.trace.faults == 0 and state.drafting
    return torch.tensor(state.tokens)


def joint(drafter, rule, rows=3000):
    """The p-value of the joint law of the first tokens: the target's, by enumeration."""
    index = samples(SHARP, drafter, rule, rows, SHORT) @ torch.tensor([V**i for i in reversed(range(SHORT))])
    return chi_square(torch.bincount(index, minlength=V**SHORT), plain_law(SHARP.distribution(), V, SHORT))


def balance(drafter, rule, rows=1000):
    """Largest z-score of sums over long outputs: of "is v" less its probability, and of the square less variance."""
    tokens = samples(FLAT, drafter, rule, rows, LONG)
    code, total, variance = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, V), torch.zeros(rows, V)
    for token in tokens.T:
        p = FLAT.logp_CV[code].exp()
        total += F.one_hot(token, V) - p
        variance += p * (1 - p)
        code = FLAT.after(code, token)
    result = torch.cat([total, total**2 - variance], dim=1)
    return float((result.mean(0) / result.std(0)).abs().max()) * rows**0.5


@pytest.mark.parametrize("name", [*DRAFTERS][::2])
def test_law_of_first_tokens(name):
    assert joint(DRAFTERS[name](), Rejection()) > 1e-3


@pytest.mark.parametrize("name", [*[*DRAFTERS][1::2], "propose"])
def test_rounds_do_not_lean_on_each_other(name):
    assert balance(DRAFTERS[name](), Rejection()) < 3.5


@pytest.mark.parametrize("rule", [Exact, Rejection])
def test_law_of_plain_sampling(rule):
    assert joint(None, rule()) > 1e-3
    assert balance(None, rule()) < 3.5


@pytest.mark.parametrize(
    "make", [lambda: TableDrafter(OTHER), lambda: Jacobi(4), lambda: Jacobi(4, start="random"), DRAFTERS["shared tree"]]
)
def test_coupled_drafts_keep_tokens(make):
    assert torch.equal(samples(SHARP, make(), Exact(), 300, LONG), samples(SHARP, None, Exact(), 300, LONG))


@pytest.mark.parametrize("rule", [Exact, Rejection])
def test_perfect_drafter_never_corrected(rule):
    state = decoded(TableTarget(SHARP), TableDrafter(SHARP), rule(), 300, LONG)
    assert {word for row in state.trace.origin for word in row} == {"plain", "drafted", "bonus"}


@pytest.mark.parametrize(
    "rule, redraw", [(Exact, "auto"), (Rejection, "maximal"), (Rejection, "independent"), (Rejection, "gumbel")]
)
def test_windows_of_known_laws_are_all_kept(rule, redraw):
    """Where no law depends on what was drafted, whatever a pass judged and did not commit is right in the next."""
    table, width = Table(V, 0), 4
    table.logp_CV[:] = table.logp_CV[0].clone()
    for seed in range(8):
        state = decoded(TableTarget(table), Jacobi(width, redraw), rule(), 1, 60, seed, Steady(width))
        gained = [result.committed[0] for result in state.trace.rounds]
        assert all(a + b >= width + 2 for a, b in itertools.pairwise(gained[:-1])) and min(gained) < width


class Lawless(TableDrafter):
    """The same token always, from no law."""

    def drawn(self, logits_BV, state, level):
        return torch.zeros_like(logits_BV[:, 0], dtype=torch.long), Categorical(p=torch.full_like(logits_BV, torch.nan))


def test_a_draft_without_a_law_is_not_judged():
    """A rule would take NaN or zero for its law, and keep it whatever the target says."""
    state = decoded(TableTarget(SHARP), Lawless(SHARP), Rejection(), 20, LONG)
    assert int(state.refused) > 0 and {word for row in state.trace.origin for word in row} == {"plain"}


# Controls: errors of the past and near them. Each must be seen.


class Coined(TableDrafter):
    """Draws with the coin that accepts the draw."""

    def drawn(self, logits_BV, state, level):
        q = logits_BV.softmax(dim=-1)
        return draw(q, state.noise.window(level + 1)[:, level, 0]), Categorical(p=q)


class Stuck(Jacobi):
    """Tosses the same uniform numbers in every round."""

    def start(self, state, scores):
        super().start(state, scores)
        state.memory.noise.advance = lambda counts: None


class Forgetful(Jacobi):
    """Reports the newest law of a draft, judged or not, in place of the one it was drawn from."""

    def observe(self, state, draft, scores, verdict, outcome):
        super().observe(state, draft, scores, verdict, outcome)
        window, last = state.memory, scores.distribution.p[:, -1:]
        unjudged = verdict.length[:, None] + torch.arange(window.tokens.shape[1]) > draft.levels
        state.memory = Window(window.tokens, torch.where(unjudged[..., None], last, window.q), window.noise)


def careless(p, q):
    """No residual: after a rejection, the whole law again."""
    return p


def test_errors_in_the_law_are_seen(monkeypatch):
    assert joint(Coined(OTHER), Rejection()) < 1e-5
    assert joint(Forgetful(4, "maximal"), Rejection(), 6000) < 1e-5
    monkeypatch.setattr(jacobi, "residual", careless)
    assert joint(Jacobi(4, "maximal"), Rejection()) < 1e-5


@pytest.mark.parametrize("options", [("maximal",), ("independent",), ("maximal", "random"), ("gumbel", "random")])
def test_coins_that_never_advance_are_seen(options):
    assert balance(Stuck(4, *options), Rejection()) > 6


# What the loop keeps of a block that a stop cuts.


@pytest.mark.parametrize("rule", [Exact, Rejection])
def test_stored_laws_up_to_stop(rule):
    """One law a token, however far behind the stop the accepted block goes on."""
    state = decoded(TableTarget(SHARP), TableDrafter(SHARP), rule(), 60, LONG, eos=frozenset({2}), keep_logits=True)
    ends = {len(tokens) for tokens in state.tokens}
    assert len(ends) > 4 and all(2 not in tokens[:-1] for tokens in state.tokens)
    assert [len(row) for row in state.trace.origin] == [len(row) for row in state.tokens]
    assert any(word == "drafted" and tokens[-1] == 2 for tokens, (*_, word) in zip(state.tokens, state.trace.origin))
    for tokens, kept in zip(state.tokens, state.output.distributions):
        code, expected = torch.zeros((), dtype=torch.long), []
        for token in tokens:
            expected.append(SHARP.logp_CV[code])
            code = SHARP.after(code, torch.tensor(token))
        assert torch.equal(torch.stack(kept), torch.stack(expected))
