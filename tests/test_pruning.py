"""Token pruning (FastVAR): which tokens run, what the others get, whole shares, the drift by an audit, refusals."""

import pytest
import torch
import torch.nn.functional as F

from tests.doubles import one_sentence
from tests.test_infinity import features_of, parts  # noqa: F401
from tests.test_scale_kv import LONG
from tests.test_scales import network, request, vae
from visspec import ImagePipeline
from visspec.models.infinity.target import InfinityImages
from visspec.models.scales.kv_budget import CacheBudget
from visspec.models.scales.pruning import PrunedState, TokenPruning, resize_grid
from visspec.models.scales.reading import ConditionState
from visspec.models.scales.target import ScaleTarget
from visspec.models.var.drafter import SmallVAR
from visspec.models.var.target import VARImages
from visspec.types import Sampling

GUIDED = Sampling(1.0, guidance=2.5)


@pytest.fixture(scope="module")
def model():
    return network(0, LONG)


def families(model, parts):  # noqa: F811
    """VAR of six scales and Infinity of four, with prompts."""
    infinity, codec = parts
    yield lambda **more: VARImages(model, codec=vae(), **more), ["1", "4"]
    yield lambda **more: InfinityImages(infinity, features_of, codec, **more), ["a red cube", "snow"]


def pipeline(make, **more):
    family = make()
    own = {"codec": family.codec} | more
    return ImagePipeline(family.model, family.processor, parts=own)


def drawn(make, prompts, seed=(1, 2), temperature=1.0, **more):
    options = {"output_type": "latent", "guidance_scale": 2.0, "temperature": temperature}
    return pipeline(make, **more)(list(prompts), seed=list(seed), **options)


def test_shares_of_one_are_bit_identical(model, parts):  # noqa: F811
    for make, prompts in families(model, parts):
        plainly, whole = drawn(make, prompts), drawn(make, prompts, pruning=TokenPruning((1.0, 1.0), audit=True))
        assert all(torch.equal(a, b) for a, b in zip(whole.tokens, plainly.tokens))
        assert whole.stats[0].guarantee == "exact" and whole.stats[0].drift_per_token == 0
        codes, said = torch.zeros(2, 1, max(make().sizes), dtype=torch.long), []
        for more in ({}, {"pruning": (1,)}):
            family = make(**more)
            reading = ScaleTarget(family).reading(family.prompt(prompts, True), GUIDED, family.model)
            said.append([reading.read()[0].logits[0], reading.read(codes)[0].logits[0]])
        assert type(reading) is PrunedState and all(map(torch.equal, *said))


def by_hand(family, given, maps_NS, counts):
    """Logits of every scale of one row by the definition, and the tokens that run; no cache of ours."""
    net, quantizer, scales = family.model, family.codec.quantize, family.scales
    store, features, added, logits, kept = {}, quantizer.blank(1, scales, "cpu"), None, [], []

    def attend(layer, q, k, v):
        old = store.get(layer, (k[:, :, :0], v[:, :, :0]))
        store[layer] = torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)
        return (q @ store[layer][0].mT).softmax(-1) @ store[layer][1]

    def grown(x, k):
        as_map = x.mT.reshape(1, -1, *scales.grids[k - 1])
        return F.interpolate(as_map, scales.grids[k], mode="bilinear").flatten(2).mT

    for k, count in enumerate(counts):
        x, best = net.first(given), list(range(count))
        if k:
            before = quantizer.shrink(features, k - 1, scales)
            codes = maps_NS[None, k - 1, : scales.sizes[k - 1] * quantizer.each]
            features = features + quantizer.part(k - 1, scales, codes)
            now = quantizer.shrink(features, k, scales)
            x = net.embed(now, scales.begins[k])
        out = x.clone()
        if count < x.shape[1]:
            out = x + grown(added, k)
            best = sorted((now - grown(before, k))[0].norm(dim=-1).argsort(descending=True)[:count].tolist())
        if count:
            out[:, best] = net(x[:, best], given, attend, scales.begins[k] + torch.tensor([best]))
        added = out - x
        logits.append(net.logits(out, given))
        kept.append(best)
    return logits, kept


@torch.no_grad()
@pytest.mark.parametrize("shares", [(0.5,), (0.5, 0.25), (0.4, 0.0), (0.0, 0.0)])
def test_tokens_that_changed_most_run_and_the_others_are_restored(model, parts, shares):  # noqa: F811
    """Against the definition, image by image and row by row."""
    for make, prompts in families(model, parts):
        family = make(pruning=shares)
        scales, counts = family.scales, family.pruning.counts(family.scales)
        assert counts[-len(shares) :] == tuple(
            round(s * n) for s, n in zip(shares, scales.sizes[-len(shares) :], strict=True)
        )
        g = torch.Generator().manual_seed(0)
        maps = torch.randint(family.codes, (2, len(scales), max(family.sizes)), generator=g)
        reading = ScaleTarget(family).reading(family.prompt(prompts, True), GUIDED, family.model)
        said = [reading.read()[0].logits[0]]
        for k in range(len(scales) - 1):
            said.append(reading.read(maps[:, k : k + 1])[0].logits[0])
            reading.keep([1, 1])
        given = family.model.given(family.prompt(prompts, True).rows(True))
        for row in range(4):
            logits, kept = by_hand(family, given[torch.tensor([row])], maps[row % 2], counts)
            for own, wanted in zip(said, logits):
                torch.testing.assert_close(own[row], wanted.reshape(own[row].shape), rtol=1e-4, atol=1e-4)
            assert [places[row % 2].tolist() for places in reading.kept] == kept, "rows of an image are pruned alike"
        slots = sum(max(n, 1) for n in counts) + 1
        assert reading.cache.stores[0][0].shape[2] == slots, "pruned tokens are not cached"


def test_what_runs_is_reported(model, parts):  # noqa: F811
    for make, prompts in families(model, parts):
        out, sizes = drawn(make, prompts, pruning=(0.5, 0.0)), make().scales.sizes
        count, stats = make(pruning=(0.5, 0.0)).pruning.counts(make().scales)[-2], out.stats[0]
        assert stats.drift_per_token is None and stats.guarantee == "approximate"
        assert f"the model with {count} of {sizes[-2]}, 0 of {sizes[-1]} tokens of its last scales" in str(stats)
        assert [places.shape for places in out.traces[0].kept] == [(2, n) for n in (*sizes[:-2], count, 0)]


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_the_audit_measures_how_far_the_distribution_is(model, parts, temperature):  # noqa: F811
    """Total variation to the full pass over the same scales, of a mean code, summed over scales."""
    found = []
    for make, prompts in families(model, parts):
        out = drawn(make, prompts, temperature=temperature, pruning=TokenPruning((0.5, 0.0), audit=True))
        silent = drawn(make, prompts, temperature=temperature, pruning=(0.5, 0.0))
        assert all(torch.equal(a, b) for a, b in zip(out.tokens, silent.tokens)), "an audit changes nothing"
        family, sampling = make(pruning=(0.5, 0.0)), Sampling(temperature, guidance=2.0)
        prompt = family.prompt(prompts, True)
        states = [ScaleTarget(family).reading(prompt, sampling, family.model)]
        states.append(ConditionState(family.model, family.codec.quantize, prompt.rows(True), 2))
        maps, drift = torch.stack(out.tokens).split(family.sizes, dim=1), 0.0
        for k in range(len(family.scales)):
            value = None if k == 0 else maps[k - 1][:, None]
            logits = [family.warp(sampling, state.read(value)[0].logits[0], k) for state in states]
            for state in states if k else ():
                state.keep([1, 1])
            p, q = (x.softmax(-1) if temperature else F.one_hot(x.argmax(-1), x.shape[-1]) for x in logits)
            drift += float(0.5 * (p - q).abs().sum(-1).float().mean(-1).sum())
        found.append(out.stats[0].drift_per_token)
        assert found[-1] == pytest.approx(drift / (2 * len(family.scales)), rel=1e-3)
    assert max(found) > 0.005


def test_images_do_not_depend_on_the_others(model, parts):  # noqa: F811
    for make, prompts in families(model, parts):
        both = drawn(make, prompts, pruning=(0.5, 0.25))
        for b in range(2):
            alone = drawn(make, prompts[b : b + 1], seed=[b + 1], pruning=(0.5, 0.25))
            assert torch.equal(alone.tokens[0], both.tokens[b])


def test_rows_that_end_leave(model):
    """A reading of the rows that are left goes on as it would have alone."""
    family = VARImages(model, codec=vae(), pruning=TokenPruning((0.5, 0.0), audit=True))
    codes, said = torch.randint(16, (6, 1, 64), generator=torch.Generator().manual_seed(0)), []
    for classes, rows in (([1, 4], [1]), ([4], [0])):
        asked = request(classes, GUIDED, scales=6)
        reading = ScaleTarget(family).reading(asked.inputs, GUIDED, model)
        reading.read()
        for k in range(5):
            if k == 4:
                reading.select(rows)
            logits = reading.read(codes[k : k + 1].expand(len(reading.count), 1, 64))[0].logits[0]
            reading.keep([1] * len(reading.count))
        said.append((logits, reading.said[0].logits[0]))
    for one, other in zip(*said):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_even_map_stays_even():
    x = torch.ones(1, 6, 2) * torch.tensor([1.0, 2.0])
    assert torch.allclose(resize_grid(x, (2, 3), (4, 5)), torch.tensor([1.0, 2.0]).expand(1, 20, 2))


@pytest.mark.parametrize(
    "more, words",
    [
        ({"pruning": 1.5}, r"pruning: got 1\.5, expected shares in \[0, 1\]"),
        ({"pruning": (0.5, float("nan"))}, "pruning: got .0.5, nan., expected shares"),
        ({"pruning": "half"}, "pruning: got 'half', expected shares"),
        ({"pruning": True}, "pruning: got True, expected shares"),
        ({"pruning": ()}, r"pruning: got \(\), expected 1 to 5 shares"),
        ({"pruning": (1.0,) * 6}, "expected 1 to 5 shares, none larger than the one before"),
        ({"pruning": (0.2, 0.5)}, r"pruning: got \(0\.2, 0\.5\), expected 1 to 5 shares, none larger"),
        ({"pruning": (0.5,), "budget": CacheBudget.full(LONG, 2)}, "pruning: got one beside a budget"),
        ({"pruning": (0.5,), "refiner": network(1, LONG), "handover": 2}, "pruning: got one beside a refiner"),
    ],
)
def test_wrong_shares_are_refused(model, more, words):
    with one_sentence(words):
        VARImages(model, codec=vae(), **more)


def test_a_drafter_is_refused(model):
    with pytest.raises(ValueError, match="drafter: got one beside a refiner, a budget or pruning"):
        SmallVAR(model).attach(VARImages(model, codec=vae(), pruning=(0.5,)))
