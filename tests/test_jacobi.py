"""Jacobi windows: every redraw keeps the law, by enumeration of the drafter's own code; and they follow plain sampling.

One branch of the enumeration is (committed tokens, window). A round splits it by what the rejection rule can do and by
what the drafter's numbers can do; `Jacobi.propose` and `Jacobi.observe` are the real ones, in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.distributions import context_law, odds, plain_law, split, total_variation, verdicts
from visspec.distributions import Categorical, residual
from visspec.models.jacobi import drafter as jacobi
from visspec.models.jacobi.drafter import Front, Jacobi, Window
from visspec.types import Outcome, Request, Scores, Verdict

VOCAB, LENGTH, WIDTH = 2, 5, 2  # long enough to judge what was drawn behind a whole window
ALMOST_ONE = 1 - 1e-15


class Scripted:
    """Numbers given beforehand, (rows, positions, 2), and those that follow once they are used up."""

    def __init__(self, *stages):
        self.stages = list(stages)

    @property
    def numbers(self):
        return self.stages[0]

    def window(self, positions):
        return self.numbers[:, :positions]

    def advance(self, counts):
        del self.stages[: len(self.stages) > 1]


def state_of(committed, rows=1):
    request = Request(None, torch.zeros(rows, 1, dtype=torch.long), LENGTH, grid=(2, 2))
    return SimpleNamespace(
        request=request, rows=list(range(rows)), tokens=[list(committed)] * rows, noise=SimpleNamespace(samples=True),
        pending=torch.tensor([committed[-1]] * rows), memory=None,
    )  # fmt: skip


def pieces(distribution):
    """(number, probability) for each token that an inverse-CDF draw from the law can give."""
    ends = torch.cat([torch.zeros(1, dtype=distribution.dtype), distribution.cumsum(0)])
    middles = (ends[:-1] + ends[1:]) / 2
    return [(float(u), float(share)) for u, share in zip(middles, distribution) if share > 0]


def redraws(drafter, distributions, window, length):
    """All sets of numbers that matter to the next redraw, (positions, 2) each, with their probability."""
    choices = []
    for j in range(drafter.window):
        n = length + j  # the law after old node n; the old entry n
        if n >= len(distributions):
            choices.append([((0.5, 0.5), 1.0)])
            continue
        p, coupled = distributions[n], drafter.redraw != "independent" and n < drafter.window
        if not coupled:
            choices.append([((0.5, u), w) for u, w in pieces(p)])
            continue
        q, old = window.q[0, n], int(window.tokens[0, n])
        keep = min(1.0, float(p[old] / q[old]))
        options = [((0.0, 0.5), keep)] if keep > 0 else []
        if keep < 1:
            options += [((ALMOST_ONE, u), (1 - keep) * w) for u, w in pieces(residual(p, q))]
        choices.append(options)
    for combination in itertools.product(*choices):
        yield [numbers for numbers, _ in combination], odds(w for _, w in combination)


def starts(drafter, vocab):
    """All numbers, (1, drafter.window, 2), that matter to what a window begins with, with their probability."""
    if drafter.begin != "random":
        yield (), 1.0
        return
    for codes in itertools.product(range(vocab), repeat=drafter.window):
        yield (torch.tensor([[((code + 0.5) / vocab, 0.5) for code in codes]]).double(),), vocab**-drafter.window


def first_windows(drafter, committed, vocab):
    """The windows that a request can begin with, with their probability."""
    for begun, share in starts(drafter, vocab):
        uniforms = Scripted(*begun or [None])
        empty = Window(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, vocab).double(), uniforms)
        zero = torch.zeros(1, dtype=torch.long)
        yield drafter._extend_window(state_of(committed), empty, zero, vocab, drafter.window), share


def process_law(drafter, p, misreport=lambda q: q, idle=0):
    """Joint law of LENGTH tokens of the loop with rejection sampling. After `idle` tokens a round has no draft."""
    vocab = len(p(()))
    distribution = torch.zeros((vocab,) * LENGTH, dtype=torch.float64)
    branches = {}
    for y in range(vocab):
        for window, share in first_windows(drafter, (y,), vocab):
            window = Window(window.tokens, misreport(window.q), window.noise)
            branches[(y,), tuple(window.tokens[0].tolist())] = (float(p(())[y]) * share, window)
    while branches:
        new = {}
        for (committed, _), (weight, window) in branches.items():
            if len(committed) == LENGTH:
                distribution[committed] += weight
                continue
            for key, share, after in rounds(drafter, p, committed, window, misreport, idle):
                old = new.get(key, (0.0, None))[0]
                new[key] = (old + weight * share, after)
        branches = new
    return distribution


def rounds(drafter, p, committed, window, misreport, idle):
    state = state_of(committed)
    depth = 0 if len(committed) == idle else min(drafter.window, LENGTH - len(committed) - 1)
    spine = window.tokens[0, :depth].tolist()
    distributions = [p((*committed, *spine[:n])) for n in range(depth + 1)]
    state.memory = window
    draft = drafter.propose(state, depth)
    logits = torch.zeros(1, draft.tree.size, len(distributions[0]), dtype=torch.float64)
    logits[0] = torch.stack(distributions).log()
    for gained, share in verdicts(p, committed, draft):
        after = (*committed, *gained)
        if len(after) == LENGTH:
            yield (after, None), share, None
            continue
        length = len(gained)
        verdict = Verdict(torch.zeros(1, 1), torch.tensor([length]), torch.tensor([gained[-1]]))
        begins = starts(drafter, len(distributions[0]))
        every = itertools.product(redraws(drafter, distributions, window, length), begins)
        for (numbers, redrawn), (begun, started) in every:
            state = state_of(after)
            uniforms = Scripted(torch.tensor([numbers], dtype=torch.float64), *begun)
            state.memory = Window(window.tokens, window.q, uniforms)
            outcome = Outcome([list(range(length))], [list(gained)])
            drafter.observe(state, draft, Scores(Categorical(logits)), verdict, outcome)
            kept = Window(state.memory.tokens, misreport(state.memory.q), uniforms)
            key = (after, (tuple(kept.tokens[0].tolist()), tuple(kept.q.flatten().tolist())))
            yield key, share * redrawn * started, kept


@pytest.mark.parametrize("window,idle", [(1, 0), (2, 0), (2, 2)])
@pytest.mark.parametrize("start", ["left", "random"])
@pytest.mark.parametrize("redraw", ["maximal", "independent"])
def test_redraws_keep_the_law(redraw, start, window, idle):
    p = context_law(VOCAB, idle)
    distribution = process_law(Jacobi(window, redraw, start), p, idle=idle)
    assert abs(float(distribution.sum()) - 1) < 1e-12
    assert total_variation(distribution, plain_law(p, VOCAB, LENGTH)) < 1e-12


def test_control_codes_as_points():
    """The control: what a window begins with was drawn from all codes, not given."""
    p = context_law(VOCAB, 0)

    def points(q):
        return torch.where(q == 1 / VOCAB, torch.tensor([0.9, 0.1]).double(), q)

    distribution = process_law(Jacobi(WIDTH, "independent", "random"), p, points)
    assert total_variation(distribution, plain_law(p, VOCAB, LENGTH)) > 1e-3


@pytest.mark.parametrize("rows,width", [(1, 12), (4, 12), (8, 8), (64, 4)])
def test_window_width_by_rows(rows, width):
    state = state_of((0,), rows)
    state.noise = None
    drafter = Jacobi(12)
    drafter.start(state, Scores(Categorical(torch.zeros(rows, 1, VOCAB))))
    assert drafter.propose(state, 12).tree.levels == width
    state = state_of((0,), rows)
    state.noise.child_generators = lambda: [torch.Generator() for _ in range(rows)]
    drafter.start(state, Scores(Categorical(torch.zeros(rows, 1, VOCAB))))
    assert drafter.propose(state, 12).tree.levels == 12  # uniform numbers: an image must not depend on its batch


@pytest.mark.parametrize("redraw", ["maximal", "independent"])
def test_a_misreported_law_is_seen(redraw):
    p = context_law(VOCAB, 0)
    distribution = process_law(Jacobi(WIDTH, redraw), p, misreport=lambda q: 0.7 * q + 0.3 * q.flip(-1))
    assert total_variation(distribution, plain_law(p, VOCAB, LENGTH)) > 1e-3


def test_control_redraw(monkeypatch):
    """A draft kept by the coupling, or else drawn from the whole new law instead of the residual."""
    p = context_law(VOCAB, 0)
    drafter = Jacobi(WIDTH, "maximal")

    def wrong(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(jacobi, "residual", lambda p, q: p if p.dim() > 1 else residual(p, q))
            return Jacobi._redraw(drafter, *arguments)

    monkeypatch.setattr(drafter, "_redraw", wrong)
    assert total_variation(process_law(drafter, p), plain_law(p, VOCAB, LENGTH)) > 1e-3


class Positional:
    """Gumbel numbers of two tokens, one pair a position: the second is drawn where its u is below its probability."""

    def __init__(self, spans, late):
        u = torch.tensor(spans, dtype=torch.float64).mean(dim=-1)
        self.numbers = torch.stack([torch.zeros_like(u), ((1 - u) / u).log()], dim=-1)[None]
        self.late = late

    def window(self, positions):
        return self.numbers[:, :positions]

    def advance(self, counts):
        if not self.late:
            self.numbers = self.numbers[:, counts[0] :]


def positional_law(drafter, p, size, late=False, head=None):
    """As `process_law`, for numbers that a position keeps over all rounds: a branch also holds where each u may lie.

    late: new drafts read the numbers of the positions that were committed in this round. head: of drafts whose first
    places are mixed with its law, as many as it has `levels`.
    """
    distribution, branches = torch.zeros((2,) * size, dtype=torch.float64), {}
    halves = {i: [0.5] for i in range(WIDTH)} if drafter.begin == "random" else {}
    for y in range(2):
        for spans, share in split([(0.0, 1.0)] * WIDTH, halves):
            empty = Window(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, 2).double(), Positional(spans, late))
            window = drafter._extend_window(state_of((y,)), empty, torch.zeros(1, dtype=torch.long), 2, WIDTH)
            branches[y, tuple(spans)] = (float(p(())[y]) * share, (y,), window, spans)
    while branches:
        new = {}
        for weight, committed, window, spans in branches.values():
            for share, after, *rest in positional_rounds(drafter, p, size, committed, window, spans, late, head):
                if len(after) == size:
                    distribution[after] += weight * share
                    continue
                known = rest[0].tokens, rest[0].q, rest[0].logp, rest[0].judged
                key = (after, *(tuple(x.flatten().tolist()) for x in known), tuple(rest[1]))
                new[key] = (new.get(key, (0.0,))[0] + weight * share, after, *rest)
        branches = new
    return distribution


def positional_rounds(drafter, p, size, committed, window, spans, late, head):
    """The branches after one round: probability, tokens, window, spans."""
    depth = min(WIDTH, size - len(committed) - 1)
    for draft, drawn, shown in positional_drafts(drafter, committed, window, spans, depth, late, head):
        distributions = [p((*committed, *draft.value[0, 1 : n + 1].tolist())) for n in range(depth + 1)]
        for gained, share in verdicts(p, committed, draft):
            length, after = len(gained), (*committed, *gained)
            if len(after) == size:
                yield share * shown, after
                continue
            cuts = {}
            for j in range(WIDTH):
                if length + j <= depth:
                    cuts[j if late else length + j] = [float(distributions[length + j][1])]
                elif length + j >= WIDTH and drafter.begin == "random":
                    cuts[length + j] = [0.5]
            scores = Scores(Categorical(torch.stack(distributions).log()[None]))
            verdict = Verdict(torch.zeros(1, 1), torch.tensor([length]), torch.tensor([gained[-1]]))
            outcome = Outcome([list(range(length))], [list(gained)])
            for parts, likely in split([*drawn, *[(0.0, 1.0)] * length], cuts):
                state = state_of(after)
                state.memory = replace(window, noise=Positional(parts, late))
                drafter.observe(state, draft, scores, verdict, outcome)
                yield share * shown * likely, after, state.memory, parts[length:]


def positional_drafts(drafter, committed, window, spans, depth, late, head):
    """(draft, spans, probability): one, or those of a `Front`, by what its laws make of the numbers."""
    state = state_of(committed)
    state.memory = window
    if head is None or not depth:
        yield drafter.propose(state, depth), spans, 1.0
        return

    def built(parts, levels):
        front = Front(state, replace(window, noise=Positional(parts, late)), depth, 0.4)
        for _ in range(levels):
            front.add(head.law((*committed, *(int(token) for token in front.tokens[: front.level]))).log()[None])
        return front

    result = [(spans, 1.0)]
    levels = min(depth, head.levels)
    for level in range(levels):  # a place's law does not depend on its own number
        result = [
            (more, share * likely)
            for parts, share in result
            for more, likely in split(parts, {level: [float(built(parts, level + 1).q[level][0, 1])]})
        ]
    for parts, share in result:
        yield built(parts, levels).finish(), parts, share


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("start", ["left", "random"])
def test_gumbel_windows_keep_the_law(start, seed):
    p = context_law(VOCAB, seed)
    distribution = positional_law(Jacobi(WIDTH, "gumbel", start), p, 6)
    assert total_variation(distribution, plain_law(p, VOCAB, 6)) < 1e-12


def test_control_moved_numbers():
    p = context_law(VOCAB, 0)
    distribution = positional_law(Jacobi(WIDTH, "gumbel"), p, 6, late=True)
    assert abs(float(distribution.sum()) - 1) < 1e-12
    assert total_variation(distribution, plain_law(p, VOCAB, 6)) > 1e-3


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("start", ["left", "random"])
def test_a_front_keeps_the_law(start, levels, unwarped):
    p, head = context_law(VOCAB, 0), SimpleNamespace(levels=levels, law=context_law(VOCAB, 3))
    distribution = positional_law(Jacobi(WIDTH, "gumbel", start), p, 6, head=head)
    assert total_variation(distribution, plain_law(p, VOCAB, 6)) < 1e-12


@pytest.mark.parametrize("late", [False, True])
def test_control_front_reports_window(late, unwarped, monkeypatch):
    p, head = context_law(VOCAB, 0), SimpleNamespace(levels=1, law=context_law(VOCAB, 3))
    finish = Front.finish

    def reports(front):
        front.q = list(front.window.q.unbind(1))[: len(front.q)]
        return finish(front)

    if not late:
        monkeypatch.setattr(Front, "finish", reports)
    distribution = positional_law(Jacobi(WIDTH, "gumbel"), p, 6, late=late, head=head)
    assert total_variation(distribution, plain_law(p, VOCAB, 6)) > 1e-3


def test_front_ends_at_kept_token():
    """Rows: kept at once; changed, mixed and kept; changed where the window has no distribution. 0.6 for the head."""
    window_BWV = torch.tensor([0.9, 0.1]).repeat(3, 3, 1).log()
    window_BWV[1, 0] = window_BWV[1, 0].flip(0)
    judged = torch.tensor([[True], [True], [False]]).expand(3, 3)
    state = state_of((0,), 3)
    state.noise = None
    front = Front(state, Window(torch.zeros(3, 3, dtype=torch.long), None, None, window_BWV, judged), 3, 0.6)
    strong, weak = torch.tensor([0.01, 0.99]).log(), torch.tensor([0.2, 0.8]).log()  # 0.2^0.6 0.9^0.4 > 0.8^0.6 0.1^0.4
    assert front.add(torch.stack([weak, strong, weak])).tolist() == [0, 1, 1]
    assert front.add(torch.stack([strong, weak, weak])).tolist() == [0, 0, 1]
    assert front.add(torch.stack([strong, strong, weak])).tolist() == [0, 0, 1]
    assert front.finish().value.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 1]] and front.finish().q is None


def test_front_of_disjoint_laws():
    logp = torch.tensor([[[0.0, float("-inf")]]])
    tokens, noise = torch.zeros(1, 1, dtype=torch.long), Positional([(0.0, 1.0)], False)
    window = Window(tokens, logp.exp(), noise, logp, logp[..., 0] == 0)
    front = Front(state_of((0,)), window, 1, 0.6)
    front.add(logp[:, 0].flip(-1))
    assert front.q[0].isfinite().all() and abs(float(front.q[0].sum()) - 1) < 1e-6 and front.q[0][0, 1] > 0.5


@pytest.mark.parametrize("options", [{"window": 0}, {"redraw": "other"}, {"start": "below"}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=r"^(window|redraw|start): got .*, expected "):
        Jacobi(**options)
