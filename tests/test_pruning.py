"""Token pruning (FastVAR): which tokens run, what the others get, whole shares, the drift by an audit, refusals."""

import pytest
import torch
import torch.nn.functional as F

from tests.test_image_nets import one_sentence
from tests.test_infinity import features_of, parts  # noqa: F401
from tests.test_scale_kv import LONG
from tests.test_scales import network, request, vae
from visspec import ImagePipeline
from visspec.models.infinity.target import InfinityImages
from visspec.models.scales.kv_budget import CacheBudget
from visspec.models.scales.multiscale import ScaleSizes
from visspec.models.scales.pruning import PrunedState, TokenPruning, enlarged
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


def drawn(make, prompts, seed=(1, 2), **more):
    return pipeline(make, **more)(list(prompts), seed=list(seed), output_type="latent", guidance_scale=2.0)


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


def by_hand(family, prompts, maps_BNS, counts):
    """Logits of every scale by the definition, one image and one row at a time, no cache of ours."""
    net, quantizer, scales = family.model, family.codec.quantize, family.scales

    def grown(x, k):
        as_map = x.mT.reshape(1, -1, *scales.grids[k - 1])
        return F.interpolate(as_map, scales.grids[k], mode="bilinear").flatten(2).mT

    found = [[] for _ in counts]
    kept = [[] for _ in counts]
    for image in range(len(prompts)):
        for rows in torch.arange(2 * len(prompts)).view(2, -1)[:, image : image + 1]:
            given = net.given(family.prompt(prompts, True).rows(True))[rows]
            store, features, added = {}, quantizer.blank(1, scales, "cpu"), None

            def attend(layer, q, k, v):
                old = store.get(layer, (k[:, :, :0], v[:, :, :0]))
                store[layer] = torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)
                weights = (q @ store[layer][0].transpose(2, 3)).softmax(-1)
                return weights @ store[layer][1]

            for k, count in enumerate(counts):
                x, changed = net.first(given), torch.zeros(scales.sizes[0])
                if k:
                    codes = maps_BNS[image : image + 1, k - 1, : scales.sizes[k - 1] * net.config.each]
                    before = quantizer.shrink(features, k - 1, scales)
                    features = features + quantizer.part(k - 1, scales, codes)
                    now = quantizer.shrink(features, k, scales)
                    x, changed = net.embed(now, scales.begins[k]), (now - grown(before, k))[0].norm(dim=-1)
                out = x.clone()
                if count < x.shape[1]:
                    out = x + grown(added, k)
                best = sorted(changed.argsort(descending=True, stable=True)[:count].tolist())
                if count == x.shape[1]:
                    best = list(range(count))
                if count:
                    out[:, best] = net(x[:, best], given, attend, scales.begins[k] + torch.tensor([best]))
                added = out - x
                found[k].append(net.logits(out, given))
                kept[k].append(best)
    order = torch.arange(2 * len(prompts)).view(-1, 2).T.flatten()
    return [torch.cat(part)[order] for part in found], kept


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
        wanted, kept = by_hand(family, prompts, maps, counts)
        for own, hand in zip(said, wanted):
            torch.testing.assert_close(own, hand.reshape(own.shape), rtol=1e-4, atol=1e-4)
        for own, hand in zip(reading.kept, kept):
            assert own.tolist() == hand[::2] == hand[1::2], "rows of an image are pruned alike"
        slots = sum(max(n, 1) for n in counts) + 1
        assert reading.cache.stores[0][0].shape[2] == slots, "pruned tokens are not cached"
    assert "wrong" not in shares


@torch.no_grad()
def test_the_law_is_another_and_the_audit_measures_how_far(model, parts):  # noqa: F811
    """Drift: total variation to the full pass over the same scales, of a mean code, summed over scales."""
    for make, prompts in families(model, parts):
        out = drawn(make, prompts, pruning=TokenPruning((0.5, 0.0), audit=True))
        silent = drawn(make, prompts, pruning=(0.5, 0.0))
        assert all(torch.equal(a, b) for a, b in zip(out.tokens, silent.tokens)), "an audit changes nothing"
        assert silent.stats[0].drift_per_token is None and silent.stats[0].guarantee == "approximate"
        family, scales = make(pruning=(0.5, 0.0)), make().scales
        count = family.pruning.counts(scales)[-2]
        words = f"the model with {count} of {scales.sizes[-2]}, 0 of {scales.sizes[-1]} tokens of its last scales"
        assert words in str(silent.stats[0]) and [len(k[0]) for k in silent.traces[0].kept][-2:] == [count, 0]
        sampling = Sampling(1.0, guidance=2.0)
        rows, quantizer = family.prompt(prompts, True).rows(True), family.codec.quantize
        states = [ScaleTarget(family).reading(family.prompt(prompts, True), sampling, family.model)]
        states.append(ConditionState(family.model, quantizer, rows, 2))
        maps, drift = torch.stack(out.tokens).split(family.sizes, dim=1), 0.0
        for k in range(len(scales)):
            value = None if k == 0 else maps[k - 1][:, None]
            p, q = (family.warped(sampling, s.read(value)[0].logits[0], k).softmax(-1) for s in states)
            for state in states if k else ():
                state.keep([1, 1])
            drift += float(0.5 * (p - q).abs().sum(-1).mean(-1).sum())
        assert drift > 0.01
        assert out.stats[0].drift_per_token == pytest.approx(drift / (2 * len(scales)), rel=1e-3)


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
    assert torch.allclose(enlarged(x, (2, 3), (4, 5)), torch.tensor([1.0, 2.0]).expand(1, 20, 2))


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
    with pytest.raises(ValueError, match=words) as error:
        VARImages(model, codec=vae(), **more)
    one_sentence(error)


def test_a_drafter_is_refused(model):
    with pytest.raises(ValueError, match="drafter: got one beside a refiner, a budget or pruning"):
        SmallVAR(model).attach(VARImages(model, codec=vae(), pruning=(0.5,)))
    assert ScaleSizes is type(LONG)
