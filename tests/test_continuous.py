"""Acceptance between denoising chains: laws of the output against closed forms, with negative controls that fail."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from visspec import tree as trees
from visspec.accept import denoise
from visspec.accept.coupled import Coupled
from visspec.accept.denoise import candidate_coupling, reflection_coupling
from visspec.accept.surrogate import Surrogate
from visspec.distributions import Denoising, DenoisingSteps, Trajectory
from visspec.loop.decode import VectorBuffer, decode
from visspec.loop.draft_length import FixedLength
from visspec.models.vectors.diffusion_head import schedule
from visspec.sampling import Normals
from visspec.types import Capabilities, Drafter, DrafterTraits, Request, Sampling, Scores, State, Target

KS_LIMIT = 1.95  # times 1/sqrt(N): a level of 0.001; distances of 0.011 are seen in 30,000 numbers, 0.014 in 20,000


class Gaussian:
    """A head for data N(centre, scale^2 I): its estimate of the value is linear, so the chain's law is known."""

    def __init__(self, sch, size, scale=0.5, widen=0.0, last=None):
        """widen: added to all log deviations; last: that of the last step in place of the schedule's."""
        self.sch, self.size, self.scale = sch, size, scale
        low = sch.steps.low.clone()
        if last is not None:
            low[-1] = np.log(last)
        low += widen
        self.steps = DenoisingSteps(sch.steps.keep, sch.steps.move, low, low)
        signal, noise = sch.signal.float(), sch.noise.float()
        self.slope = signal * scale**2 / (signal**2 * scale**2 + noise**2)  # of the estimate in x
        self.signal = signal

    def distribution(self, centre_BNd, shares=None, steps=None):
        centre_Md = centre_BNd.flatten(0, 1)

        def predict(x, step, chains):
            centre = (centre_Md if chains is None else centre_Md[chains])[:, None]
            value = centre + self.slope[step][..., None] * (x - self.signal[step][..., None] * centre)
            return value, None if shares is None else torch.full_like(x, shares)

        return Denoising(predict, steps or self.steps, tuple(centre_BNd.shape[:2]), self.size, Counter())

    def exact(self, steps=None, share=None):
        """(factor of the centre, deviation) of the chain's end."""
        steps = steps or self.steps
        mean, variance = 0.0, 1.0
        log_sigma = steps.low if share is None else steps.low + share * (steps.high - steps.low)
        for i in range(len(steps)):
            keep, move, slope, signal = (float(t[i]) for t in (steps.keep, steps.move, self.slope, self.signal))
            factor = keep + move * slope
            mean = factor * mean + move * (1 - slope * signal)
            variance = factor**2 * variance + float(log_sigma[i].exp()) ** 2
        return mean, variance**0.5


def generators(rows, seed=0):
    return [torch.Generator().manual_seed(seed * 1_000_003 + row) for row in range(rows)]


class Together:
    """One generator for many rows: the numbers of all rows in one draw, for tests of many samples."""

    def __new__(cls, rows, steps, size, candidates=(0, 0), positions=2, seed=0):
        noise = Normals([torch.Generator()], steps, size, candidates)
        g = torch.Generator().manual_seed(seed)
        normals = torch.randn(rows, positions, sum(noise.parts[:2]), generator=g)
        uniforms = torch.rand(rows, positions, sum(noise.parts[2:]), generator=g)
        made = Normals.of(torch.cat([normals, uniforms], dim=2))
        made.generators = [None] * rows
        made.steps, made.size, made.candidates, made.parts = noise.steps, noise.size, noise.candidates, noise.parts
        return made


def ks(values, mean, deviation):
    return stats.kstest((np.asarray(values) - mean) / deviation, "norm").statistic * len(values) ** 0.5


def check_normal(values, mean, deviation):
    count, size = values.shape
    for axis in range(min(size, 4)):
        assert ks(values[:, axis], mean, deviation) < KS_LIMIT
    squares = (((values - mean) / deviation) ** 2).sum(dim=1).numpy()
    assert stats.kstest(squares, stats.chi2(size).cdf).statistic * count**0.5 < KS_LIMIT


@pytest.mark.parametrize("size", [1, 16])
def test_reflection_is_a_maximal_coupling(size):
    g = torch.Generator().manual_seed(0)
    count = 100_000
    normal = torch.randn(count, size, generator=g)
    uniform = torch.rand(count, generator=g).log()
    other, mean, log_sigma = torch.zeros(size), torch.full((size,), 0.4 / size**0.5), torch.full((1,), -0.3)
    drawn, same = reflection_coupling(normal, other, mean, log_sigma, uniform)
    point = other + log_sigma.exp() * normal
    x = torch.where(same[:, None], point, drawn)
    sigma = float(log_sigma.exp())
    for axis in range(size):
        assert ks(x[:, axis], float(mean[axis]), sigma) < KS_LIMIT
    assert ks(x.sum(dim=1), float(mean.sum()), sigma * size**0.5) < KS_LIMIT
    overlap = 2 * stats.norm.cdf(-0.4 / sigma / 2)
    assert abs(float(same.float().mean()) - overlap) < 0.006


@pytest.mark.parametrize(("size", "K"), [(1, 1), (16, 1), (2, 2), (1, 8), (16, 8)])
def test_candidate_coupling_is_exact(size, K):
    g = torch.Generator().manual_seed(1)
    count = 100_000
    log_q, log_p = torch.full((size,), 0.1), torch.linspace(-0.2, 0.1, size)
    mean_q, mean_p = torch.zeros(size), torch.full((size,), 0.3 / size**0.5)
    y = mean_q + log_q.exp() * torch.randn(count, size, generator=g)
    drawn, same = candidate_coupling(
        y, mean_q, log_q, mean_p, log_p, torch.rand(count, generator=g).log(),
        torch.randn(count, K, size, generator=g), torch.rand(count, K, generator=g).log(),
    )  # fmt: skip
    x = torch.where(same[:, None], y, drawn)
    for axis in range(size):
        assert ks(x[:, axis], float(mean_p[axis]), float(log_p[axis].exp())) < KS_LIMIT
    whitened = (x - mean_p) / log_p.exp()
    assert stats.kstest((whitened**2).sum(dim=1).numpy(), stats.chi2(size).cdf).statistic * count**0.5 < KS_LIMIT
    swapped = torch.where(same[:, None], drawn, y)  # a control: the other way round
    assert ks(swapped[:, 0], float(mean_p[0]), float(log_p[0].exp())) > KS_LIMIT


WRONG = (2.0, 0.0)  # forecasts that fail for a head of deviation 0.5, so that points are replaced


OF_CHAINS = [
    *itertools.product([8], [denoise.SPREADS, WRONG], [1], ["none", "near"]),
    (1, denoise.SPREADS, 1, "far"), (8, WRONG, 1, "far"), (8, denoise.SPREADS, 16, "far"),
]  # fmt: skip


@pytest.mark.parametrize(("window", "spreads", "size", "drafts"), OF_CHAINS)
def test_law_of_coupled_chains(size, window, spreads, drafts, monkeypatch):
    monkeypatch.setattr(denoise, "SPREADS", spreads)
    count, steps = 30_000 if size == 1 else 15_000, 20  # 16 numbers each
    sch = schedule(steps)
    head, shift = Gaussian(sch, size), {"none": 0.0, "near": 0.05, "far": 0.6}[drafts]
    shift, centre = shift / size**0.5, torch.full((count, 1, size), 0.7)
    noise = Together(count, steps, size, positions=1, seed=window)
    numbers, drafted = noise.numbers(1), None
    if drafts != "none":
        path = head.distribution(centre + shift).sample(numbers.start, numbers.steps)
        drafted = denoise.DraftTrajectories(path.points, path.mean, path.log_sigma, torch.ones(count, dtype=torch.bool))
    values, equal = denoise.run(head.distribution(centre), numbers, drafted, 1, window, merge=20)
    factor, deviation = head.exact()
    check_normal(values, 0.7 * factor, deviation)
    if drafted is not None:
        assert bool((values == drafted.points[:, -1]).all(dim=1).eq(equal).all())
        distance = shift * factor * size**0.5 / deviation
        bound = 2 * stats.norm.cdf(-distance / 2)
        rate = float(equal.float().mean())
        assert rate < bound + 0.01 and (rate > 0.8 * bound if drafts == "near" else rate > 0)


A, B = 0.6, 0.3  # centre of a vector's law, given the one before: A x + B


@pytest.mark.parametrize("window, spreads, drafts", [
    (1, denoise.SPREADS, True), *itertools.product([6], [denoise.SPREADS, WRONG], [False, True]),
])  # fmt: skip
def test_law_with_predicted_deviations(window, spreads, drafts, monkeypatch):
    monkeypatch.setattr(denoise, "SPREADS", spreads)
    count, size, steps = 20_000, 2, 12
    sch = schedule(steps, learned=True)
    head = Gaussian(schedule(steps), size)
    centre = torch.full((count, 1, size), 0.7)
    noise = Together(count, steps, size, candidates=(steps, 4), positions=1, seed=window)
    numbers, drafted = noise.numbers(1), None
    if drafts:
        path = head.distribution(centre + 0.02, shares=0.6, steps=sch.steps).sample(numbers.start, numbers.steps)
        drafted = denoise.DraftTrajectories(path.points, path.mean, path.log_sigma, torch.ones(count, dtype=torch.bool))
    distribution = head.distribution(centre, shares=0.3, steps=sch.steps)
    values, equal = denoise.run(distribution, numbers, drafted, 1, window, merge=steps)
    factor, deviation = head.exact(sch.steps, 0.3)
    check_normal(values, 0.7 * factor, deviation)
    assert (float(equal.float().mean()) > 0.1) == drafts


def test_coins_of_both_couplings_are_apart(monkeypatch):
    """Proposals are coupled with the drafted points, draws with the proposals: one coin for both would show here."""
    monkeypatch.setattr(denoise, "SPREADS", WRONG)
    count, steps = 100_000, 10
    head, centre = Gaussian(schedule(steps), 1, last=0.2), torch.full((100_000, 1, 1), 0.7)
    numbers = Together(count, steps, 1, positions=1, seed=3).numbers(1)
    path = head.distribution(centre + 0.3).sample(numbers.start, numbers.steps)
    drafted = denoise.DraftTrajectories(path.points, path.mean, path.log_sigma, torch.ones(count, dtype=torch.bool))
    values, _ = denoise.run(head.distribution(centre), numbers, drafted, 1, 5, merge=steps)
    factor, deviation = head.exact()
    assert ks(values[:, 0], 0.7 * factor, deviation) < KS_LIMIT


@pytest.mark.parametrize("window", [2, 8])
def test_chains_are_independent(window):
    """One without a draft, beside drafted ones that part and meet again: the same points, the same passes."""
    count, size, steps = 6, 4, 60
    head = Gaussian(schedule(steps), size)
    centre = torch.linspace(0, 1, count)[:, None, None].expand(-1, 1, size)
    numbers = Together(count, steps, size, positions=1).numbers(1)
    path = head.distribution(centre + 0.3).sample(numbers.start, numbers.steps)
    there = torch.tensor([True, False, True, False, True, True])
    drafted = denoise.DraftTrajectories(path.points, path.mean, path.log_sigma * there[:, None, None], there)
    values, equal = denoise.run(head.distribution(centre), numbers, drafted, 1, window, merge=40)
    for row in range(count):
        own = type(numbers)(*(part[row : row + 1] for part in numbers))
        distribution = head.distribution(centre[row : row + 1])
        alone = denoise.DraftTrajectories(*(part[row : row + 1] for part in drafted)) if there[row] else None
        value, same = denoise.run(distribution, own, alone, 1, window, merge=40)
        torch.testing.assert_close(value[0], values[row], atol=1e-4, rtol=1e-4)
        assert bool(same[0]) == bool(equal[row])


class Line(Target):
    """A target of vectors whose law is known: each is drawn around A times the one before, plus B."""

    def __init__(self, head):
        self.head = head
        self.capabilities = Capabilities(trees=False, distribution=Denoising, steps=head.steps, size=head.size)

    @property
    def device(self):
        return torch.device("cpu")

    def prefill(self, request):
        rows = len(request.prompt)
        pending, position = torch.zeros(rows, self.head.size), torch.zeros(rows, dtype=torch.long)
        state = State(request, pending, position, None, list(range(rows)), VectorBuffer(request, rows))
        return state, Scores(self.head.distribution(A * pending[:, None] + B))

    def verify(self, state, draft):
        return Scores(self.head.distribution(A * draft.value + B))


class Shadow(Drafter):
    traits = DrafterTraits(levels=2, samples=True)

    def __init__(self, head, shift):
        self.head, self.shift = head, shift

    def propose(self, state, depth):
        now, values, paths = state.pending, [], []
        for level in range(depth):
            now, path = state.noise.draft(self.head.distribution((A * now + B + self.shift)[:, None]), level)
            values.append(now)
            paths.append(path)
        return trees.chain_draft(state.pending, torch.stack(values, dim=1), Trajectory.chain(paths))


def with_numbers(rule, seed=0):
    class Ruled(rule):
        def make_noise(self, generators, width):
            noise = super().make_noise([torch.Generator()], width)
            return Together(len(generators), noise.steps, noise.size, noise.candidates, 10, seed)

    return Ruled


def joint(rule, rows=10_000, size=1, steps=10, shift=0.1, widen=0.0, last=None, length=4, seed=0, **options):
    """Vectors (rows, length, d) that the loop decodes, whitened by the exact laws of the target; and its state."""
    sch = schedule(steps)
    target = Line(Gaussian(sch, size, last=last))
    made = with_numbers(rule, seed)(**options)
    made.bind(target.capabilities)
    ids, own = torch.zeros(rows, 1, dtype=torch.long), [torch.Generator()] * rows
    request = Request(None, ids, length, Sampling(1.0), generators=own)
    state = decode(target, Shadow(Gaussian(sch, size, widen=widen, last=last), shift), made, request, FixedLength(2))
    values = torch.stack([state.output.values(row) for row in range(rows)])
    factor, deviation = target.head.exact()
    before = torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)
    return (values - factor * (A * before + B)) / deviation, state


def failing(whitened):
    """KS statistics above the limit: of every vector's residual and of sums over pairs of neighbours."""
    columns = [whitened[:, t].flatten() for t in range(whitened.shape[1])]
    pairs = list(itertools.pairwise(columns))
    columns += [(a + sign * b) / 2**0.5 for a, b in pairs for sign in (1, -1)]
    return [round(ks(column, 0.0, 1.0), 2) for column in columns if ks(column, 0.0, 1.0) >= KS_LIMIT]


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("window", [1, 4])
def test_joint_law_through_the_loop(size, window):
    whitened, state = joint(Coupled, rows=10_000 // size, size=size, window=window, merge=10)
    assert not failing(whitened)
    assert state.trace.rounds[0].levels == 2 and 0.2 < np.mean(state.trace.rounds[0].committed) / 3 < 1


def test_joint_law_with_other_deviations():
    """A drafter of other deviations is judged exactly too; its drafts are never equal under fixed ones."""
    assert not failing(joint(Coupled, widen=0.2)[0])


def test_published_ratio_without_product():
    whitened, state = joint(Surrogate, last=0.3)  # equal deviations: the product is one
    assert not failing(whitened) and float(state.drift.abs().max()) < 1e-4


@pytest.mark.parametrize("rule, p, q, weight", [
    (Surrogate(), (0.0, 1.0), (0.5, 1.0), 0.7), (Surrogate(), (0.0, 1.0), (0.5, 1.3), 1.3),
    (Surrogate(2), (0.0, 1.0), (1.0, 1.0), 1.5), (Surrogate(1), (0.0, 1.0), (0.7, 1.2), 1.0),
])  # fmt: skip
def test_published_ratio_drift_bound(rule, p, q, weight):
    """One number, two steps of laws that no point changes: TV by a histogram of the output, less its own noise."""
    count, bins = 60_000, 30
    value, zero, one = torch.tensor([[0.0, p[0]], [0.0, q[0]]]), torch.zeros(2), torch.ones(2)
    distributions = []
    for mean, low in zip(value, (torch.tensor([1.0, p[1]]).log(), torch.tensor([weight, q[1]]).log())):
        predict = lambda x, step, chains, mean=mean: (mean[step].expand(x.shape), None)  # noqa: E731
        distributions.append(Denoising(predict, DenoisingSteps(zero, one, low, low), (count, 1), 1))
    noise = Together(count, 2, 1, (1, rule.tries))
    first = noise.numbers(1)
    path = distributions[1].sample(first.start, first.steps)
    draft = trees.chain_draft(torch.zeros(count, 1), path.points[:, None, -1], Trajectory.chain([path]))
    verdict = rule(draft, Scores(Denoising(distributions[0].predict, distributions[0].steps, (count, 2), 1)), noise)
    kept = (verdict.length == 2)[:, None]
    result = torch.where(kept, draft.value[:, 1], verdict.next)[:, 0]
    edges = stats.norm.ppf(np.linspace(0, 1, bins + 1), *p)
    variation = 0.5 * np.abs(np.histogram(result, edges)[0] / count - 1 / bins).sum()
    drift, noise = float(verdict.drift.mean()), 0.5 * (bins / count) ** 0.5
    assert drift == 0.0 and variation < 1.5 * noise if weight == 1.0 else variation - noise < drift < 3 * variation


def test_published_ratio_other_deviations():
    assert failing(joint(Surrogate, rows=5000, widen=0.3, last=0.3)[0])


# --- figures of the documentation -------------------------------------------------------------------------------------


def mixture(sch, size, deviation=0.3):
    signal, noise = sch.signal.float(), sch.noise.float()
    centres = torch.randn(8, size, generator=torch.Generator().manual_seed(0))

    def predict(x, step, chains):
        s, n = signal[step][..., None], noise[step][..., None]
        variance = (s * deviation) ** 2 + n**2
        squares = ((x[..., None, :] - s[..., None] * centres) ** 2).sum(dim=-1)
        mean = (-squares / (2 * variance)).softmax(dim=-1) @ centres
        return mean + s * deviation**2 / variance * (x - s * mean), None

    return predict


@pytest.mark.parametrize("window,shares", [(8, (0.3, 0.35, 0.4)), (32, (0.15, 0.15, 0.2))])
@pytest.mark.parametrize("size", [4, 16, 64])
def test_calls_of_a_mixture(size, window, shares):
    """Share of the sequential calls of the head that are left: 100 steps, eight Gaussians."""
    sch, calls = schedule(100), Counter()
    predict = mixture(sch, size)
    for seed in range(12):
        numbers = Normals([torch.Generator().manual_seed(seed)], 100, size).numbers(1)
        denoise.run(Denoising(predict, sch.steps, (1, 1), size, calls), numbers, None, 1, window, 0)
    assert calls["head"] / 12 / 100 < shares[(4, 16, 64).index(size)]


@pytest.mark.parametrize("scale", [0.15, 0.35, 1.0])
def test_a_gaussian_is_foretold(scale):
    """Once the deviation is known, whole windows are kept: 100 steps in hardly more than four passes of 32."""
    distribution = Gaussian(schedule(100), 8, scale).distribution(torch.full((20, 1, 8), 0.7))
    numbers = Together(20, 100, 8, positions=1).numbers(1)
    denoise.run(distribution, numbers, None, 1, 32, 0)
    assert distribution.calls["head"] <= 8  # of the slowest of 20 chains


def test_law_of_a_mixture():
    """Windows of 8 and one step at a time differ by no more than two halves of a sample; unreplaced points do."""
    count, steps = 20_000, 12
    sch = schedule(steps)

    def ends(window, seed, accept=False):
        distribution = Denoising(mixture(sch, 2, 0.15), sch.steps, (count, 1), 2)
        numbers = Together(count, steps, 2, positions=1, seed=seed).numbers(1)
        if accept:
            numbers = numbers._replace(uniforms=torch.full_like(numbers.uniforms, -torch.inf))
        return denoise.run(distribution, numbers, None, 1, window, 0)[0]

    plain = ends(1, 1)
    directions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.7, 0.7], [0.7, -0.7]])

    def far(values):
        return max(
            stats.ks_2samp((values @ d).numpy(), (plain @ d).numpy()).statistic * (count / 2) ** 0.5 for d in directions
        )

    assert far(ends(8, 2)) < KS_LIMIT + 0.3  # the largest of four
    assert far(ends(8, 2, accept=True)) > 3 * KS_LIMIT


def test_a_forecast_is_its_steps_one_by_one():
    steps = schedule(40).steps
    ahead, g, start = denoise.forecast(steps), 3, 11
    x, mean = torch.randn(4), torch.randn(4)
    noise = torch.randn(6, 4) * steps.low[start : start + 6, None].exp()
    result = [
        ahead.point[g, start, k] * x + ahead.mean[g, start, k] * mean + ahead.noise[g, start, k, :6] @ noise
        for k in range(6)
    ]
    for k in range(6):
        value = ahead.of_x[g, start + k] * x + ahead.of_mean[g, start + k] * mean
        x = steps.keep[start + k] * x + steps.move[start + k] * value + noise[k]
        torch.testing.assert_close(result[k], x, atol=1e-5, rtol=1e-4)
    frozen = denoise.SPREADS.index(0.0)
    assert bool((ahead.of_x[frozen] == 0).all()) and bool((ahead.of_mean[frozen] == 1).all())


# --- chains -----------------------------------------------------------------------------------------------------------


def test_temperature_scales_deviations():
    low, high = torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -1.0])
    one = torch.ones(2)
    for steps in (DenoisingSteps(one, one, low, high), DenoisingSteps(one, one, low, low)):
        cold = steps.warmer(0.5)
        assert cold.fixed == steps.fixed
        for name in ("low", "high"):
            torch.testing.assert_close(getattr(cold, name).exp(), getattr(steps, name).exp() / 2)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_last_step_without_noise(noisy, learned):
    low = torch.tensor([-1.0, -2.0, -3.0])
    steps = DenoisingSteps(torch.full((3,), 0.5), torch.ones(3), low, low + 1.0 if learned else low, noisy=noisy)
    distribution = Denoising(
        lambda x, step, chains: (x + 1, torch.full_like(x, 0.25) if learned else None), steps, (5, 1), 2
    )
    start, normal = torch.randn(5, 2), torch.randn(5, 3, 2)
    path, x = distribution.sample(start, normal), start
    for i in range(3):
        mean = 0.5 * x + x + 1
        x = mean + (low[i] + 0.25 * learned).exp() * normal[:, i] * (noisy or i < 2)
        torch.testing.assert_close(path.mean[:, i], mean)
        torch.testing.assert_close(path.points[:, i + 1], x)
    torch.testing.assert_close(distribution.value(start, normal), x)


def test_trajectory_ends_at_draft():
    """And one that does not, or is not finite somewhere, is no law of it."""
    points, mean, log_sigma = torch.randn(1, 5, 4, 2), torch.randn(1, 5, 3, 2), torch.randn(1, 5, 3, 1)
    value, limits = points[:, :, -1].clone(), torch.empty(3, 2)
    value[0, 1, 0] += 0.5
    points[0, 2, 0, 1], mean[0, 3, 1, 0], log_sigma[0, 4, 2] = torch.inf, torch.nan, -torch.inf
    _, lawful = Trajectory(points, mean, log_sigma).sanitize(value, limits)
    assert lawful.tolist() == [[True, False, False, False, False]]
