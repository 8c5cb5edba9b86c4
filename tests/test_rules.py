"""Rules with uniform numbers: the enumerated law, the acceptance identity, and the drift meter."""

from types import SimpleNamespace

import pytest
import torch

from tests.doubles import drafted
from visspec import registry, tree
from visspec.accept.cool import Cool
from visspec.accept.exact import Exact
from visspec.accept.rejection import Rejection
from visspec.accept.typical import Typical
from visspec.distributions import Categorical, draw, residual
from visspec.loop.decode import TokenBuffer, apply_verdict
from visspec.loop.draft_length import AdaptiveLength
from visspec.loop.orders import Raster
from visspec.loop.setup import DecodingSetup
from visspec.loop.stats import Stats
from visspec.sampling import SIBLINGS, AcceptanceNoise, ranks
from visspec.types import Request, Scores, State, Verdict

V, ROWS = 6, 40_000


def distributions(seed: int, sharpness: float = 1.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.softmax(sharpness * torch.randn(2, V, generator=generator, dtype=torch.float64), -1)
    return p, q


def one_step(rule, p, q, rows: int, seed: int = 0):
    """`rows` independent single-node rounds of a rule: the node drawn from q, judged under p. (drawn, verdict)."""
    generator = torch.Generator().manual_seed(seed)
    noise = rule.make_noise([generator], V)
    window = torch.rand(rows, 2, noise.width, generator=generator)
    noise.window = lambda positions: window[:, :positions]
    drawn = draw(q.float().expand(rows, V), window[:, 0, -1])
    tokens = torch.stack([torch.zeros_like(drawn), drawn], 1)
    logits = p.log().float().expand(rows, 2, V)
    distribution = torch.stack([torch.zeros(V), q.float()]).expand(rows, 2, V)
    return drawn, rule(drafted(tokens, tree.chain(1), distribution), Scores(Categorical(logits)), noise)


def typical_law(rule: Typical, p, q):
    """f for every token, and the law of the output, in closed form."""
    threshold = min(rule.epsilon, float(rule.delta * torch.exp(-torch.special.entr(p).sum())))
    f = torch.where(p >= threshold, 1.0, torch.clamp(p / q, max=1.0))
    rest = residual(p, q)
    return f, q * f + (q * (1 - f)).sum() * rest


def test_the_drift_meter_is_unbiased():
    p, q = distributions(1, 1.0)
    rule = Typical(0.2, 0.5)
    drawn, verdict = one_step(rule, p, q, ROWS, seed=1)
    _, output = typical_law(rule, p, q)
    tv = 0.5 * float((output - p).abs().sum())
    assert tv > 0.01
    error = float(verdict.drift.std()) / ROWS**0.5
    assert abs(float(verdict.drift.mean()) - tv) < 3 * error
    measured = torch.bincount(torch.where(verdict.length == 2, drawn, verdict.next), minlength=V) / ROWS
    assert ((measured - output).abs() < 4 * (0.25 / ROWS) ** 0.5).all()


def test_strict_typical_is_rejection():
    p, q = distributions(5)
    a = one_step(Rejection(), p, q, 5000)[1]
    b = one_step(Typical(1.5, 1e9), p, q, 5000)[1]
    assert torch.equal(a.next, b.next) and torch.equal(a.length, b.length)
    assert float(b.drift.sum()) == 0.0


def test_threshold_is_inclusive():
    p = torch.tensor([[[0.25, 0.5, 0.125, 0.125, 0.0, 0.0]] * 4])
    draft = drafted(torch.tensor([[0, 0, 1, 2]]), tree.static((-1, 0, 0, 0)))
    assert Typical(0.25, 1e9).mass(draft, p)[0, 1:].tolist() == [1, 1, 0]


def test_threshold_of_parent():
    """A node's parent has it: min(0.5, exp(-H)) is 0.25 at the root, and 0.5 at the node below, which is certain."""
    even, certain = [0.3, 0.3, 0.2, 0.2, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    draft = drafted(torch.tensor([[0, 1, 3, 2]]), tree.static((-1, 0, 1, 2)))
    mass = Typical(0.5, 1.0).mass(draft, torch.tensor([[even, certain, even, certain]]))
    assert mass[0, 1:].tolist() == [1, 1, 0]


def test_cool_decay():
    p = distributions(4)[0].expand(1, 4, V)
    draft = drafted(torch.tensor([[0, 1, 2, 3]]), tree.chain(3))
    excess = Cool(omega=1.5, nu=0.5).mass(draft, p) / p[0, 0, draft.value]
    torch.testing.assert_close(excess[0, 1:], torch.tensor([0.5, 0.25, 0.125], dtype=p.dtype))


def test_absent_nodes():
    shape = tree.static((-1, 0, 0, 1))
    tokens = torch.tensor([[0, -1, 3, 2]])
    logits = torch.full((1, 4, V), -1e9)
    logits[0, 0, 3] = logits[0, 1, 2] = logits[0, 2, 4] = logits[0, 3, 1] = 0.0
    rule = Rejection()
    noise = rule.make_noise([torch.Generator().manual_seed(0)], V)
    verdict = rule(drafted(tokens, shape), Scores(Categorical(logits)), noise)
    assert verdict.path.tolist()[0][:2] == [0, 2] and verdict.length.item() == 2 and verdict.next.item() == 4


def test_coins_belong_to_position_and_rank():
    shape = tree.static((-1, 0, 0, 1, 1, 1, 2))
    assert ranks(shape).tolist() == [[0, 0, 1, 0, 1, 2, 0]]
    noise = AcceptanceNoise.of(torch.arange(3 * (SIBLINGS + 2)).view(1, 3, -1).float())
    width = SIBLINGS + 2
    assert noise.accept_uniforms(shape)[0].tolist() == [[0, 0, 1, width, width + 1, width + 2, width]]


def test_siblings_share_last_coin():
    """None of them is judged by the number that draws the residual."""
    noise = AcceptanceNoise.of(torch.arange(2 * (SIBLINGS + 2)).view(1, 2, -1).float())
    uniforms, residual_draw = noise.accept_uniforms(tree.static((-1, *[0] * (SIBLINGS + 3))))
    assert uniforms[0, 1:].tolist() == [*range(SIBLINGS), *[SIBLINGS - 1] * 3]
    assert residual_draw.tolist() == [SIBLINGS]


def test_greedy_needs_no_coins():
    logits = torch.randn(2, 4, V, generator=torch.Generator().manual_seed(0))
    draft = drafted(torch.tensor([[0, 1, 2, 3], [0, 2, 1, 0]]), tree.chain(3))
    exact = Exact()(draft, Scores(Categorical(logits)), None)
    for rule in (Rejection(), Typical()):
        verdict = rule(draft, Scores(Categorical(logits)), None)
        assert torch.equal(verdict.path, exact.path) and torch.equal(verdict.next, exact.next)


@pytest.mark.parametrize("text", [
    "typicl", "typical:epsilon", "typical:epsilon=0", "typical:delta=0", "exact:k=3", "typical:k=1",
    "lantern:k=0", "lantern:k=1025", "lantern:delta=1", "lantern:delta=-0.1", "lantern:lam=2",
    "lantern_plus:lam=0.5", "lantern_plus:k=0", "grouped:group=0",
    "local:tau=-0.1", "local:radius=-1", "local:k=0",
    "local:radii=2", "cool:omega=0.9", "cool:nu=1.5",
])  # fmt: skip
def test_bad_rules_are_refused_in_a_sentence(text):
    name = text.partition(":")[2].partition("=")[0]
    with pytest.raises(ValueError, match=rf"{name}.*(expected|unexpected)|does not take"):
        registry.rule(text)


def metered():
    """A state of three rows whose second has left, after two rounds of two rows."""
    request = Request({}, torch.zeros(3, 1, dtype=torch.long), max_new_tokens=9)
    state = State(request, torch.zeros(2).long(), torch.zeros(2).long(), None, [2, 0], TokenBuffer(request, 3))
    state.trace.origin = [[] for _ in range(3)]
    draft = drafted(torch.tensor([[0, 1, 2], [0, 3, 4]]), tree.chain(2))
    for _ in range(2):
        path, length = torch.tensor([[0, 1, 2], [0, 1, -1]]), torch.tensor([3, 2])
        verdict = Verdict(path, length, torch.tensor([5, 5]), torch.tensor([0.25, 1.0]))
        apply_verdict(state, draft, Scores(Categorical(torch.zeros(2, 3, V))), verdict)
    return state


def test_drift_by_row():
    """Live rows by their original number; also where they stand in another order, or a row between them is gone."""
    assert metered().drift.tolist() == [2.0, 0.0, 0.5]


def test_drift_per_token():
    target = SimpleNamespace(capabilities=SimpleNamespace(guarantee="exact", declared=""))
    stats = Stats.of(metered(), DecodingSetup(target, None, "", Typical(), AdaptiveLength(), Raster()))
    assert (stats.tokens, stats.rounds) == (10, 2)
    assert stats.drift_per_token == 0.25
