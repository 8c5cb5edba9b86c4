"""Relaxed image rules, enumerated: laws, limits and drift. K codes in the plane; V = K + 1 with a grammar id."""

import pytest
import torch

from tests.distributions import context_law, output_law, plain_law, total_variation
from tests.doubles import drafted
from tests.kernels.test_accept_law import first_token_law
from visspec import tree
from visspec.accept import codebook
from visspec.accept.cool import Cool
from visspec.accept.exact import Exact
from visspec.accept.grouped import Grouped
from visspec.accept.lantern import Lantern, LanternPlus
from visspec.accept.local import Local
from visspec.accept.rejection import Rejection
from visspec.distributions import Categorical, residual
from visspec.types import Capabilities, Scores

K = 6
CODES = torch.randn(K, 2, generator=torch.Generator().manual_seed(3))
IMAGE = Capabilities(vocab=K, codebook=CODES)
CHAIN, TREE = tree.chain(1), tree.static((-1, 0, 0, 1, 1, 2, 3))


def bound(rule, capabilities=IMAGE):
    rule.bind(capabilities)
    return rule


def rules(delta, lam, group, omega) -> dict:
    return {
        "lantern": Lantern(k=3, delta=delta), "lantern_plus": LanternPlus(k=3, lam=lam), "cool": Cool(omega=omega),
        "grouped": Grouped(group=group),
    }  # fmt: skip


def relaxed() -> dict:
    return rules(0.25, 2.5, 3, 1.5)  # float32 can hold them, so that laws may be compared in float64


def limits() -> dict:
    return rules(0.0, 1.0, 1, 1.0)


def distributions(seed: int, sharpness: float = 1.5):
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(sharpness * torch.randn(2, K, generator=generator, dtype=torch.float64), -1)


def every_child(rule, p, q):
    """f, f* and residuals of all K codes as the only child of the root: the rule's mass put into the formulas."""
    tokens = torch.stack([torch.zeros(K).long(), torch.arange(K)], 1)
    distribution = None if q is None else q.expand(K, 2, K)
    mass = rule.mass(drafted(tokens, CHAIN, distribution), p.expand(K, 2, K))[:, 1].double()
    drawn = torch.ones_like(p) if q is None else q
    exact = (p / drawn).clamp(max=1)
    rest = residual(p, q).expand(K, K) if q is not None else p.expand(K, K) * (1 - torch.eye(K))
    return ((p + mass) / drawn).clamp(max=1).maximum(exact), exact, rest / rest.sum(1, keepdim=True)


def by_definition(name, rule, p, q):
    """f of every code, written from the papers' formulas."""
    f = []
    near = codebook.neighbours(CODES, 3, K).tolist()
    order = p.argsort(descending=True).tolist()
    for x in range(K):
        px, qx = float(p[x]), 1.0 if q is None else float(q[x])
        if name.startswith("lantern"):
            limit, total = 0.25 if name == "lantern" else 1.5 * px, 0.0
            for y in near[x]:
                if total + float(p[y]) > limit:
                    break
                total += float(p[y])
            ratio = (px + total) / qx
        elif name == "grouped":
            rank = order.index(x)
            group = order[max(rank - 1, 0) : rank + 2]
            ratio = float(p[group].sum()) / (1.0 if q is None else float(q[group].sum()))
        else:
            ratio = 1.5 * px / qx
        f.append(max(min(1.0, ratio), min(1.0, px / qx)))
    return torch.tensor(f, dtype=torch.float64)


def enumerated(rule, p, q):
    tokens = torch.tensor([[0, c] for c in range(K)])
    distribution = None if q is None else torch.stack([p, q]).expand(K, 2, K)

    def verify(tokens, parent, p, q, uniforms, draw):
        verdict = rule.judge(drafted(tokens, CHAIN, q), p, uniforms, draw)
        return verdict.path, verdict.length, verdict.next, verdict.drift

    return first_token_law(verify, tokens, torch.tensor([-1, 0]), torch.stack([p, p]), distribution)


def drift_of(rule, p, q):
    """Drift of the round for each of the K codes, accepted (coin 0)."""
    tokens = torch.tensor([[0, c] for c in range(K)])
    distribution = None if q is None else torch.stack([p, q]).expand(K, 2, K)
    zero = torch.zeros(K, 2, dtype=torch.float64)
    return rule.judge(drafted(tokens, CHAIN, distribution), p.expand(K, 2, K), zero, zero[:, 0]).drift.double()


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point"])
@pytest.mark.parametrize("name", list(relaxed()))
def test_law_and_drift_by_formula(name, drawn):
    rule = bound(relaxed()[name])
    p, q = distributions(4)
    tolerance = 1e-6 if name == "grouped" else 1e-12  # group masses come in float32
    f = by_definition(name, rule, p, q if drawn else None)
    _, exact, rest = every_child(rule, p, q if drawn else None)
    assert (f > exact + 1e-3).any()
    output = torch.diag(f) + (1 - f)[:, None] * rest  # row x: the law of the token, given that x was drafted
    result = enumerated(rule, p, q if drawn else None)
    if drawn:
        assert (q @ output - q @ result).abs().max() < tolerance
    assert (output - result).abs().max() < tolerance
    drift = drift_of(rule, p, q if drawn else None)
    assert (drift - (f - exact)).abs().max() < 1e-6
    if drawn:
        assert abs(float(q @ drift) - total_variation(q @ result, p)) < 1e-6
    else:
        assert (drift - 0.5 * (result - p).abs().sum(1)).abs().max() < 1e-6


def random_round(shape, drawn, rows=40, seed=0, vocab=K):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(K, (rows, shape.size), generator=g)
    absent = torch.rand(rows, shape.size, generator=g) < 0.1
    absent[:, 0] = False
    tokens = tokens.masked_fill((absent[:, None] & shape.ancestor).any(-1), -1)
    logits = torch.randn(rows, shape.size, vocab, generator=g) * 2
    q = (logits.roll(1, 1) + torch.randn(logits.shape, generator=g)).softmax(-1) if drawn else None
    return drafted(tokens, shape, q), Scores(Categorical(logits))


def same(a, b):
    return torch.equal(a.path, b.path) and torch.equal(a.length, b.length) and torch.equal(a.next, b.next)


def seeded(rule, rows=40, start=0):
    return rule.make_noise([torch.Generator().manual_seed(start + b) for b in range(rows)], K)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point"])
@pytest.mark.parametrize("shape", [tree.chain(4), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", list(limits()))
def test_exact_at_the_limits(name, shape, drawn):
    rule, exact = bound(limits()[name]), Rejection()
    draft, scores = random_round(shape, drawn)
    verdict = rule(draft, scores, seeded(rule))
    assert same(verdict, exact(draft, scores, seeded(exact)))
    assert float(verdict.drift.abs().max()) == 0.0
    loose = bound(relaxed()[name])(draft, scores, seeded(rule))
    assert float(loose.drift.sum()) > 0  # the control


def two_levels(rule, p, q):
    """Exact rounds of a drawn chain of two, and the expected drift: enumerated drafts, f and residuals by formula."""
    vocab, shape, rounds, drift = len(p(())), tree.chain(2), [], 0.0
    for x in range(vocab):
        for y in range(vocab):
            distribution = torch.stack([p(()), p((x,)), p((x, y))])[None]
            draws = torch.stack([q(()), q(()), q((x,))])[None]
            draft = drafted(torch.tensor([[0, x, y]]), shape, draws)
            chance = torch.stack([draws[0, 1, x], draws[0, 2, y]])
            exact = (torch.stack([distribution[0, 0, x], distribution[0, 1, y]]) / chance).clamp(max=1)
            f = (exact + rule.mass(draft, distribution)[0, 1:].double() / chance).clamp(max=1).maximum(exact)
            weight = float(chance.prod())
            for n, above in ((0, 1.0), (1, float(f[0]))):
                drift += weight * above * float(f[n] - exact[n])
                rest = residual(distribution[0, n], draws[0, n + 1])
                for z in range(vocab):
                    rounds.append((weight * above * float(1 - f[n]) * float(rest[z]), ((), (x,))[n] + (z,)))
            rounds.append((weight * float(f.prod()), (x, y)))
    return rounds, drift


@pytest.mark.parametrize("name", list(relaxed()))
def test_drift_bounds_total_variation(name):
    p, q = context_law(K, 1), context_law(K, 2, 0.8)
    plain = plain_law(p, K, 2)
    rounds, drift = two_levels(bound(relaxed()[name]), p, q)
    assert 1e-3 < total_variation(output_law(p, rounds, K, 2), plain) <= drift + 1e-9
    rounds, drift = two_levels(bound(limits()[name]), p, q)
    assert total_variation(output_law(p, rounds, K, 2), plain) < 1e-7 and abs(drift) < 1e-7  # f's mass is float32


@pytest.mark.parametrize("name", list(relaxed()))
def test_the_drift_meter_is_unbiased(name):
    """Sampled rounds of a drawn chain of two, each with its own law, against the enumerated sum."""
    rule, rows = bound(relaxed()[name]), 6000
    p, q = context_law(K, 1), context_law(K, 2, 0.8)
    g = torch.Generator().manual_seed(0)
    table = torch.stack([torch.stack([p((x,)), q((x,))]) for x in range(K)])
    first = torch.multinomial(q(()), rows, replacement=True, generator=g)
    second = torch.multinomial(table[first, 1], 1, generator=g)[:, 0]
    laws = torch.stack([q(()).expand(rows, K), q(()).expand(rows, K), table[first, 1]], 1)
    draft = drafted(torch.stack([torch.zeros_like(first), first, second], 1), tree.chain(2), laws)
    distribution = torch.stack([p(()).expand(rows, K), table[first, 0], table[second, 0]], 1)
    uniforms, draw = torch.rand(rows, 3, generator=g, dtype=torch.float64), torch.rand(rows, generator=g).double()
    drift = rule.judge(draft, distribution, uniforms, draw).drift.double()
    expected = two_levels(rule, p, q)[1]
    assert abs(float(drift.mean()) - expected) < 3 * float(drift.std()) / rows**0.5


def test_lantern_greedy():
    near = codebook.neighbours(CODES, 1, K)[:, 0].tolist()
    top, x = 0, next(x for x in range(1, K) if near[x] not in (0, x))
    logits = torch.full((1, 2, K), -9.0)
    logits[0, :, top], logits[0, :, x], logits[0, :, near[x]] = 0.5, 0.3, 0.2
    draft = drafted(torch.tensor([[0, x]]), CHAIN)
    verdict = bound(Lantern(k=1, delta=0.5))(draft, Scores(Categorical(logits)), None)
    assert verdict.path.tolist() == [[0, 1]] and verdict.next.item() == top and verdict.drift.item() == 1.0
    verdict = bound(Lantern(k=1, delta=0.1))(
        draft, Scores(Categorical(logits)), None
    )  # the neighbour is too heavy to lend
    assert verdict.length.item() == 1 and verdict.next.item() == top and verdict.drift.item() == 0.0


@pytest.mark.parametrize("shape", [tree.chain(4), TREE], ids=["chain", "tree"])
def test_greedy_limits(shape):
    draft, scores = random_round(shape, False)
    agreeing = scores.distribution.logits.argmax(-1).gather(1, shape.parent.clamp(min=0).expand(40, -1))
    draft = drafted(torch.where(torch.rand(40, shape.size) < 0.7, agreeing, draft.value), shape)
    exact = Exact()(draft, scores, None)
    for rule in (*limits().values(), Grouped(group=3), Cool()):
        verdict = bound(rule)(draft, scores, None)
        assert same(verdict, exact) and (verdict.drift is None or float(verdict.drift.sum()) == 0.0)
    loose = bound(Lantern(k=5, delta=0.9))(draft, scores, None)
    taken = draft.value.gather(1, loose.path.clamp(min=0))
    above = loose.path.roll(1, 1).clamp(min=0)
    expected = scores.distribution.logits.argmax(-1).gather(1, above)
    differs = (taken != expected) & (loose.path > 0)
    assert torch.equal(loose.drift, differs.sum(1).float()) and float(loose.drift.sum()) > 0
    assert ((taken != -1) | (loose.path < 0)).all()


@pytest.mark.parametrize("codes, k, chunk", [(40, 7, 16), (130, 9, 100), (3, 2, 256), (60, 59, 7)])
def test_nearest_codes_by_definition(codes, k, chunk):
    """Equal distances, of which there are many, by index."""
    for ties in (False, True):
        drawn = torch.randn(codes, 5, generator=torch.Generator().manual_seed(codes))
        e = drawn.round() if ties else drawn
        far = (e.double()[:, None] - e.double()).square().sum(2).fill_diagonal_(float("inf"))
        expected = far.sort(dim=1, stable=True).indices[:, :k]
        assert torch.equal(codebook.nearest(e, k, chunk), expected)


def test_grammar_ids():
    vocab = K + 2
    table = codebook.neighbours(CODES, 3, vocab)
    assert table[:K].max() < K and table[K:].tolist() == [[K] * 3, [K + 1] * 3]
    assert codebook.neighbours(CODES.clone(), 3, vocab) is table
    logits = torch.zeros(1, 3, vocab)
    logits[:, 0, :K], logits[:, 1, K + 1] = -torch.inf, -torch.inf
    logits[:, 0, K + 1] = -torch.inf  # the layout wants id K first
    wide = Capabilities(vocab=vocab, codebook=CODES)
    for rule in relaxed().values():
        bound(rule, wide)
        for x, length in ((K, 2), (K + 1, 1)):
            draft, low = drafted(torch.tensor([[0, x]]), CHAIN), torch.zeros(1, 2)
            verdict = rule.judge(draft, logits[:, :2].softmax(-1), low, low[:, 0])
            assert verdict.length.item() == length and verdict.drift.item() == 0


def test_nodes_without_a_law_borrow_nothing():
    rule = Grouped(group=3)
    p, q = distributions(3)
    draft = drafted(torch.tensor([[0, 1, 2]]), tree.chain(2), torch.stack([0 * q, q, 0 * q])[None])
    mass = rule.mass(draft, p.expand(1, 3, K))
    assert mass[0, ::2].tolist() == [0.0, 0.0] and mass[0, 1] != 0


def test_bad_pairings_refused():
    text = Capabilities(vocab=K)
    for rule in (Lantern(), LanternPlus(), Local()):
        with pytest.raises(ValueError, match="codebook"):
            rule.bind(text)
    for rule in (Lantern(k=K), LanternPlus(k=K)):
        with pytest.raises(ValueError, match=rf"k: got {K}?.*expected at most"):
            rule.bind(IMAGE)


def siblings_by_formula(rule, p, tokens, left=True):
    """Law of the token after the root (V,) and drift of point masses. left: borrow from what is left."""
    near = codebook.neighbours(CODES, rule.k, K).tolist()
    rest, lent, alive, output, drift = p, set(), 1.0, torch.zeros_like(p), 0.0
    for x in tokens:
        rest = rest / rest.sum()
        lender = rest.index_fill(0, torch.tensor(sorted(lent), dtype=torch.long), 0.0) if left else p
        limit = rule.value if rule.bound == "delta" else (rule.value - 1) * float((rest if left else p)[x])
        running = lender[near[x]].cumsum(0)
        count = int((running <= limit).sum())
        lent.update(near[x][:count])
        f = min(1.0, float(rest[x]) + (float(running[count - 1]) if count else 0.0))
        drift += alive * (f - float(rest[x]))
        output[x] += alive * f
        alive *= 1 - f
        rest = rest.index_fill(0, torch.tensor(x), 0.0)
    return output + alive * rest / rest.sum(), drift


@pytest.mark.parametrize("kind, value", [(Lantern, 0.375), (LanternPlus, 2.5)])
def test_siblings_borrow_from_residual(kind, value):
    """Four children, uniforms integrated out. At this delta it drifts less than borrowing from p; lam need not."""
    rule, shape, moved, from_p = bound(kind(3, value)), tree.static((-1, 0, 0, 0, 0)), 0.0, 0.0

    def verify(tokens, parent, p, q, uniforms, draw):
        verdict = rule.judge(drafted(tokens, shape), p, uniforms, draw)
        return verdict.path, verdict.length, verdict.next, verdict.drift

    for seed in range(6):
        p = distributions(seed, 1.0)[0]
        tokens = p.topk(4).indices
        every = torch.cat([tokens.new_zeros(1), tokens])[None]
        distribution = first_token_law(verify, every, shape.parent[0], p.expand(5, K), None)
        expected, drift = siblings_by_formula(rule, p, tokens.tolist())
        assert (distribution[0] - expected).abs().max() < 1e-9
        assert total_variation(distribution[0], p) <= drift + 1e-9
        moved += total_variation(distribution[0], p)
        from_p += total_variation(siblings_by_formula(rule, p, tokens.tolist(), left=False)[0], p)
    assert moved < 0.95 * from_p or kind is LanternPlus
