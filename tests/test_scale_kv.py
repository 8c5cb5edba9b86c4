"""ScaleKV: budgets of the cache by layer and scale, their calibration, and what is kept."""

import pytest
import torch

from tests.doubles import raises_line
from tests.test_scales import SCALES, images, network, plain, vae
from visspec.models.scales import kv_budget as scale_kv
from visspec.models.scales.kv_budget import BudgetedCache, CacheBudget, attention, centres, pool_scores, selectivity
from visspec.models.scales.multiscale import ScaleSizes
from visspec.models.scales.reading import ConditionState
from visspec.models.scales.target import ScaleTarget
from visspec.models.var.drafter import SmallVAR
from visspec.models.var.target import VARImages
from visspec.types import Sampling

LONG = ScaleSizes.square(1, 2, 3, 4, 6, 8)  # caches of 1, 5, 14, 30, 66 tokens


@pytest.fixture(scope="module")
def model():
    return network(0, LONG)


def target(model, budget=None):
    return ScaleTarget(VARImages(model, codec=vae(), budget=budget))


WHOLE = 1 << 20  # as many tokens as there are


def uniform(tokens, scales=LONG, depth=2, window=4):
    return CacheBudget(tuple(tuple(min(tokens, have) for have in scales.begins[1:-1]) for _ in range(depth)), window)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, guidance=2.5)])
def test_a_whole_budget_is_bit_identical(model, sampling):
    kept, distributions = [], []
    for budget in (None, uniform(WHOLE)):
        made = target(model, budget)
        kept.append(images(plain(made, [1, 4, 0], sampling, scales=6)))
        reading = made.initial_state(plain(made, [1], sampling, scales=6).request.inputs, sampling, model)
        message, codes = [reading.read()[0].logits[0]], torch.zeros(1, 1, 64, dtype=torch.long)
        for _ in range(5):
            message.append(reading.read(codes)[0].logits[0])
            reading.keep([1])
        distributions.append(message)
    assert torch.equal(kept[0], kept[1]) and all(torch.equal(a, b) for a, b in zip(*distributions))
    assert target(model, uniform(WHOLE)).capabilities.guarantee == "exact"


def test_bytes_stay_within_the_budget(model):
    budget, each = uniform(12), 2 * 32 * 2 * 4  # bytes of a token in a layer: keys and values, width, rows, float32
    state = plain(target(model, budget), [1, 4], Sampling(1.0), scales=6)
    assert state.trace.memory == {"cache": 2 * 12 * each, "pass": (2 * 12 + 64) * each}
    assert budget.tokens == ((1, 5, 12, 12, 12),) * 2
    whole = plain(target(model), [1, 4], Sampling(1.0), scales=6).trace.memory
    assert whole["cache"] > 5 * state.trace.memory["cache"]


class Noted(BudgetedCache):
    """Keeps what the layers asked and had."""

    def __init__(self, *args):
        super().__init__(*args)
        self.noted, self.full = [], {}

    def attend(self, layer, q, k, v):
        before = self.places[layer]
        out = super().attend(layer, q, k, v)
        self.noted.append((self.scale, layer, q, k, before, self.places[layer], self.stores[layer]))
        return out


def read_all(model, cache, rows=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    reading = ConditionState(model, vae().quantize, torch.tensor([1, 4])[:rows], rows, cache)
    codes = torch.randint(16, (rows, 6, 64), generator=g)
    message = [reading.read()[0].logits[0]]
    for n in range(5):
        message.append(reading.read(codes[:, n : n + 1])[0].logits[0])
        reading.keep([1] * rows)
    return message


@torch.no_grad()
def test_a_row_that_stays_keeps_its_places(model):
    codes = torch.randint(16, (2, 6, 64), generator=torch.Generator().manual_seed(0))
    result = []
    for classes in ([1, 4], [4]):
        cache = BudgetedCache(LONG, uniform(12))
        reading = ConditionState(model, vae().quantize, torch.tensor(classes), len(classes), cache)
        reading.read()
        for n in range(5):
            last = reading.read(codes[-len(reading.count) :, n : n + 1])[0].logits[0]
            reading.keep([1] * len(last))
            if n == 2 and len(classes) == 2:
                reading.select([1])
        result.append(last)
    torch.testing.assert_close(*result)


@torch.no_grad()
def test_kept_tokens(model):
    """Against the attention of the layer's own queries and keys, written out."""
    cache = Noted(LONG, uniform(12))
    read_all(model, cache)
    keys = {layer: [] for layer in range(2)}  # all that a layer ever made, by position
    dropped = 0
    for scale, layer, q, k, before, places, store in cache.noted:
        keys[layer].append(k)
        every, begin = torch.cat(keys[layer], dim=2), LONG.begins[scale]
        if scale == 5:
            assert store is None, "nothing follows the last scale"
            continue
        if places is None:
            assert LONG.begins[scale + 1] <= 12 and torch.equal(store[0], every)
            continue
        dropped += 1
        at = places[..., None].expand(-1, -1, -1, q.shape[-1])
        assert torch.equal(store[0], every.gather(2, at)), "kept keys are the layer's own"
        window = begin + torch.tensor(centres(LONG.grids[scale], 4))
        assert places.shape[2] == 12 and bool((places.diff(dim=2) > 0).all())
        assert bool((places[..., None] == window).any(dim=2).all()), "the window stays"
        known = torch.arange(begin).expand(2, 2, -1) if before is None else before
        had = torch.cat([known, torch.arange(begin, LONG.begins[scale + 1]).expand(2, 2, -1)], dim=2)
        for row in range(2):
            for head in range(2):
                own = had[row, head]
                logits = q[row, head, window - begin] @ every[row, head, own].T
                weight = logits.softmax(-1).mean(0)
                smooth = pool_scores(weight[None, None], own[None, None], LONG, scale)[0, 0]
                smooth[(own[:, None] == window).any(1)] = torch.inf
                best = own[smooth.topk(12).indices].sort().values
                assert torch.equal(best, places[row, head])
    assert dropped == 2 * 3


def test_attention_pooling():
    places = torch.arange(14)[None, None]
    scores = torch.zeros(1, 1, 14)
    scores[..., 4] = 1.0  # the last of the second scale
    result = pool_scores(scores, places, LONG, 2)[0, 0]
    assert result[0] == 0 and not result[5:].any(), "not over the borders"
    torch.testing.assert_close(result[1:5], torch.full((4,), 0.25))
    kept = torch.tensor([[[0, 1, 4]]])  # of two neighbours that are left
    result = pool_scores(torch.tensor([[[0.3, 0.0, 1.0]]]), kept, LONG, 1)[0, 0]
    torch.testing.assert_close(result, torch.tensor([0.3, 0.5, 0.5]))


@torch.no_grad()
def test_selectivity_by_attention(model):
    """With all earlier tokens counted, the two shares are one together; and by hand at one place."""
    classes = torch.tensor([1, 4, 0])
    whole = selectivity(model, vae().quantize, classes, torch.Generator().manual_seed(0), share=1.0)
    assert whole.shape == (2, 6) and not whole[:, 0].any() and bool((whole[:, 1:] > 0).all())
    assert float(whole.max()) <= 0.25 + 1e-6  # x (1 - x)
    seen = []

    class Spy(scale_kv.AttentionMeter):
        def attend(self, layer, q, k, v):
            out = super().attend(layer, q, k, v)
            if (layer, self.scale) == (1, 3):
                weight = attention(q, self.stores[1][0][:, :, :30])
                top = weight[..., :14].sort(dim=-1, descending=True).values[..., :2]
                seen.append(weight[..., 14:].sum(-1).mean() * top.sum(-1).mean())
            return out

    original, scale_kv.AttentionMeter = scale_kv.AttentionMeter, Spy
    try:
        result = selectivity(model, vae().quantize, classes, torch.Generator().manual_seed(0))
    finally:
        scale_kv.AttentionMeter = original
    torch.testing.assert_close(result[1, 3], seen[0])
    again = selectivity(model, vae().quantize, classes, torch.Generator().manual_seed(0))
    assert torch.equal(result, again)


def test_budget_allotment():
    torch.manual_seed(0)
    message = torch.rand(5, len(LONG))
    message[3, 3], message[1, 4] = -5.0, -5.0  # the drafters
    budget = CacheBudget.allot(message, LONG, share=0.3, window=4, drafters=0.2, decay=0.5)
    budget.check(LONG, 5)
    average = round(0.3 * 66)
    assert [row[:3] for row in budget.tokens] == [(1, 5, 14)] * 5, "what fits is whole"
    for k, drafter in ((3, 3), (4, 1)):
        column = [row[k] for row in budget.tokens]
        assert sum(column) <= 5 * average and column[drafter] == max(column) > average > min(column) >= 4
    assert min(row[4] for row in budget.tokens) < min(row[3] for row in budget.tokens), "refiners have less and less"
    assert CacheBudget.allot(message, LONG, share=1.0).whole(LONG)


def allot(share):
    return CacheBudget.allot(torch.rand(2, 6), LONG, share=share)


def checked(*row):
    CacheBudget((row,) * 2).check(LONG, 2)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: allot(0.01), r"share: got 0.01, 1 tokens, expected at least the window of 16"),
        (lambda: allot(1.5), r"share: got 1.5, expected a share in \[0, 1\]"),
        (lambda: checked(1, 5), r"budget: got 2 layers of \[2\] scales, expected 2 layers of 5"),
        (lambda: uniform(WHOLE, depth=3).check(LONG, 2), "budget: got 3 layers"),
        (lambda: VARImages(network(0), codec=vae(), budget=uniform(WHOLE)), "budget: got 2 layers of"),
        (lambda: VARImages(network(0), codec=vae(), refiner=network(1), handover=1, budget=uniform(WHOLE, SCALES)),
         "budget: got a budget and a refiner"),
        (lambda: SmallVAR(network(0)).attach(VARImages(network(0), codec=vae(), budget=uniform(WHOLE, SCALES))),
         "drafter: got one with a refiner or a budget"),
    ],
)  # fmt: skip
def test_wrong_budgets_are_refused(make, words):
    with raises_line(words):
        make()
