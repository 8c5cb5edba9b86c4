"""VAR through the loop: laws of nodes, whole images, drafted scales, compositions (CoDe), and the pipeline."""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch

from tests.distributions import chi_square
from tests.doubles import generators, raises_line
from tests.test_var_nets import TINY, Published
from visspec import ImagePipeline
from visspec import tree as trees
from visspec.accept.scales import Repaired
from visspec.accept.scales import Scales as Exact
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.scales.multiscale import MultiScaleShape, MultiScaleVAE, ScaleSizes
from visspec.models.scales.reading import ConditionState
from visspec.models.scales.target import ScaleTarget
from visspec.models.var.drafter import SmallVAR
from visspec.models.var.network import VAR, VARConfig
from visspec.models.var.target import ScalePrompt, VARImages
from visspec.types import Draft, DrafterTraits, Request, Sampling

SIDES = (1, 2, 3, 4)
SCALES = ScaleSizes.square(*SIDES)
CLASSES = 5


def network(seed, scales=SCALES, codes=16, scale=0.25, depth=2):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = VAR(VARConfig(32, depth, 2, scales, codes=codes, code_size=4, classes=CLASSES)).eval()
        for weight in model.parameters():
            weight.data.normal_(0, scale)
        return model


def moved(model, size, seed=9):
    """A copy whose laws are near."""
    other = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for weight in other.parameters():
            weight.data.add_(torch.randn_like(weight) * size)
    return other


@functools.cache
def vae(codes=16):
    with torch.random.fork_rng(), torch.inference_mode(False):  # kept for tests that are not in inference mode
        torch.manual_seed(1)
        return MultiScaleVAE(MultiScaleShape(**{**vars(TINY), "codes": codes})).eval()


@pytest.fixture(scope="module")
def model():
    return network(0)


def request(classes, sampling, seed=0, scales=None):
    scales = len(SIDES) if scales is None else scales
    given = torch.tensor(classes)
    prompt = ScalePrompt(given, torch.full_like(given, CLASSES))
    own = None if sampling.greedy else generators(len(given), seed)
    return Request(prompt, prompt.ids, scales, sampling, generators=own)


def ruled(target, rule=None):
    rule = rule or Exact()
    rule.bind(target.capabilities)
    return rule


def plain(target, classes, sampling, rule=None, **options):
    return decode(target, None, ruled(target, rule), request(classes, sampling, **options), FixedLength(1))


def images(state):
    return torch.stack([state.output.values(row) for row in range(len(state.tokens))])


def drafted(target, small, classes, sampling, levels=3, rule=None, **options):
    drafter = SmallVAR(small)
    drafter.attach(target.family)
    rule = ruled(target, rule)
    guarded = SafeDrafter(drafter, target.capabilities, "cpu", True)
    return decode(target, guarded, rule, request(classes, sampling, **options), FixedLength(levels))


# --- laws of nodes ----------------------------------------------------------------------------------------------------


def by_formula(model, codes, label):
    """Logits (L, V) of an image's codes (L,), from the published formulas."""
    scales, tensors = model.config.scales, dict(model.state_dict())
    level = torch.arange(len(scales)).repeat_interleave(torch.tensor(scales.sizes))
    tensors["lvl_1L"] = level[None]
    tensors["attn_bias_for_masking"] = torch.where(level[:, None] >= level, 0.0, -math.inf)[None, None]
    quantizer, features, result = vae(model.config.codes).quantize, 0, []
    for k, own in enumerate(codes[None].split(scales.sizes, dim=1)[:-1]):
        features = features + quantizer.part(k, scales, own)
        result.append(quantizer.shrink(features, k + 1, scales))
    return Published(tensors, model.config.heads).logits(torch.cat(result, dim=1)[0], label)


def cut(logits, temperature, top_k, top_p):
    """Distribution (V,) by the definitions of temperature, top-k and top-p."""
    order = logits.argsort(descending=True)
    kept = order[: top_k or len(order)]
    p = (logits[kept] / temperature).softmax(-1)
    inside = p.cumsum(0) - p < top_p
    distribution = torch.zeros_like(logits)
    distribution[kept[inside]] = p[inside] / p[inside].sum()
    return distribution


@torch.no_grad()
@pytest.mark.parametrize("guidance, ramp", [(1.0, "linear"), (2.5, "linear"), (2.5, "constant")])
def test_law_of_nodes(model, guidance, ramp):
    """Rows at different scales, chains of drafts."""
    torch.manual_seed(0)
    target = ScaleTarget(VARImages(model, codec=vae(), ramp=ramp))
    classes, gained = [1, 4, CLASSES], [1, 0, 2]  # scales that were read before
    codes = torch.randint(16, (3, 30))
    maps = torch.zeros(3, 4, 16, dtype=torch.long)
    for k, own in enumerate(codes.split(SCALES.sizes, dim=1)):
        maps[:, k, : own.shape[1]] = own
    state, first = target.prefill(request(classes, Sampling(1.3, 9, 0.9, guidance)))
    state.cache.read(maps[:, :2])
    state.cache.keep(gained)
    state.output.tokens = [list(range(count + 1)) for count in gained]
    value = torch.stack([maps[b, [min(count + n, 3) for n in range(2)]] for b, count in enumerate(gained)])
    result = target.verify(state, Draft(value, trees.chain(1, "cpu"))).distribution
    for b, label in enumerate(classes):
        message = [by_formula(model, codes[b], label), by_formula(model, codes[b], CLASSES)]
        for distribution, node, scale in (
            (first.distribution, 0, 0),
            (result, 0, gained[b] + 1),
            (result, 1, gained[b] + 2),
        ):
            if scale == len(SCALES):
                assert int(distribution.count[b, node]) == 0
                continue
            begin, end = SCALES.begins[scale], SCALES.begins[scale + 1]
            assert int(distribution.count[b, node]) == end - begin
            grown = guidance if ramp == "constant" else 1 + (guidance - 1) * scale / 3
            mixed = message[1] + grown * (message[0] - message[1])
            expected = torch.stack([cut(row, 1.3, 9, 0.9) for row in mixed[begin:end]])
            torch.testing.assert_close(distribution.p[b, node, : end - begin], expected, rtol=1e-3, atol=1e-4)


# --- drafted scales ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(0.8, top_k=6, guidance=2.0)])
def test_drafted_equals_plain(model, sampling):
    target, classes = ScaleTarget(VARImages(model, codec=vae())), [1, 4, 0, 2, 3, 1, 0, 4]
    expected = images(plain(target, classes, sampling))
    itself = drafted(target, model, classes, sampling)
    near = drafted(target, moved(model, 0.003), classes, sampling)
    far = drafted(target, network(7), classes, sampling)
    for state in (itself, near, far):
        assert torch.equal(images(state), expected) and state.trace.faults == 0
    assert [r.committed for r in itself.trace.rounds] == [[3] * 8], "the draft of the last scale is its own bonus"
    gained = [count for r in near.trace.rounds for count in r.committed]
    assert min(gained) < max(gained) == 3, "rows are at different scales"
    assert len(far.trace.rounds) <= 3


TOY = ScaleSizes(((1, 1), (1, 2), (1, 2)))


def joint(first, second, scales, codes, handover, label=1):
    """The law of all codes, in order, of a composition; by full passes."""
    distribution = torch.ones(1, dtype=torch.float64)
    context = torch.zeros(1, 0, dtype=torch.long)
    for k, size in enumerate(scales.sizes):
        net = first if k < handover else second
        count = len(context)
        reading = ConditionState(net, vae(codes).quantize, torch.full((count,), label), count)
        maps = None
        if k:
            maps = torch.zeros(count, k, max(scales.sizes), dtype=torch.long)
            for j, own in enumerate(context.split(scales.sizes[:k], dim=1)):
                maps[:, j, : own.shape[1]] = own
        p = reading.read(maps)[0].logits[-1].double().softmax(-1)
        every = torch.tensor(list(itertools.product(range(codes), repeat=size)))
        here = torch.stack([p[:, i, every[:, i]] for i in range(size)]).prod(0)
        distribution = (distribution[:, None] * here).flatten()
        context = torch.cat([context.repeat_interleave(len(every), 0), every.repeat(count, 1)], dim=1)
    return distribution


def counted(state, codes):
    result = images(state)
    place = sum(result[:, i] * codes ** (result.shape[1] - 1 - i) for i in range(result.shape[1]))
    return torch.bincount(place, minlength=codes ** result.shape[1]).double()


@torch.no_grad()
def test_drafted_law():
    """Of repaired scales; those under the target's own noise are the scales of plain decoding."""
    large, small = network(0, TOY, codes=3, scale=0.15), network(5, TOY, codes=3, scale=0.15)
    target = ScaleTarget(VARImages(large, codec=vae(3)))
    state = drafted(target, small, [1] * 6000, Sampling(1.0), levels=2, rule=Repaired(), scales=3)
    counts = counted(state, 3)
    assert chi_square(counts, joint(large, large, TOY, 3, 3)) > 1e-3
    assert chi_square(counts, joint(small, small, TOY, 3, 3)) < 1e-6, "the test sees a wrong law"
    gained = [count for r in state.trace.rounds for count in r.committed]
    assert {1, 2} <= set(gained) and state.trace.faults == 0


def test_repaired_scales_in_the_loop(model):
    target, classes = ScaleTarget(VARImages(model, codec=vae())), [1, 4, 0, 2]
    state = drafted(target, moved(model, 0.003), classes, Sampling(1.0, guidance=2.0), rule=Repaired())
    assert images(state).shape == (4, 30) and state.trace.faults == 0
    assert max(count for r in state.trace.rounds for count in r.committed) == 3
    greedy = drafted(target, moved(model, 0.003), classes, Sampling(0.0), rule=Repaired())
    assert torch.equal(images(greedy), images(plain(target, classes, Sampling(0.0))))


# --- compositions -----------------------------------------------------------------------------------------------------


def composed(large, small, handover, codes=16):
    return ScaleTarget(VARImages(large, codec=vae(codes), refiner=small, handover=handover))


@torch.no_grad()
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_refiner_against_full_pass(model, guidance):
    small, sampling, last = network(3, depth=1), Sampling(1.0, guidance=guidance), 2
    target = composed(model, small, last)
    kept = []

    class Watching(Exact):
        def __call__(self, draft, scores, noise):
            kept.append(scores.distribution)
            return super().__call__(draft, scores, noise)

    state = plain(target, [1, 4], sampling, Watching())
    family, result = target.family, images(state)
    for k, distribution in enumerate(kept):
        net = model if k < last else small
        for b, label in enumerate((1, 4)):
            message = [by_formula(net, result[b], c) for c in (label, CLASSES)]
            own = [part[SCALES.begins[k] : SCALES.begins[k + 1]] for part in message]
            expected = own[1] + family.guidance(guidance, k) * (own[0] - own[1])
            torch.testing.assert_close(distribution.logits[b, 0], expected, rtol=1e-4, atol=1e-4)
    assert state.cache.net is small and all(store is not None for store in state.cache.cache.stores)


def test_cache_of_model_freed(model):
    small, passes = network(3, depth=1), []
    hooks = [net.register_forward_hook(lambda net, x, y: passes.append((net, x[0].shape[1]))) for net in (model, small)]
    heads = [net.head.register_forward_hook(lambda net, x, y: passes.append(x[0].shape[1])) for net in (model, small)]
    state = plain(composed(model, small, 2), [1, 4], Sampling(1.0))
    for hook in hooks + heads:
        hook.remove()
    assert passes == [(model, 1), 1, (model, 4), 4, (small, 14), 9, (small, 16), 16]
    each = 2 * 2 * 2 * 16 * 4  # keys and values, rows, heads, head size, bytes
    freed, memory = each * 2 * (5 + 1), state.trace.memory
    assert memory["freed"] == freed and memory["cache"] == max(freed, each * (30 + 1))


@torch.no_grad()
def test_composition_law():
    """1 + 4 codes of 4 ids: 1,024 cells."""
    toy = ScaleSizes.square(1, 2)
    large, small = network(0, toy, codes=4, scale=0.12), network(5, toy, codes=4, scale=0.12)
    target = composed(large, small, 1, codes=4)
    counts = counted(plain(target, [1] * 12000, Sampling(1.0), scales=2), 4)
    declared, model = joint(large, small, toy, 4, 1), joint(large, large, toy, 4, 2)
    assert chi_square(counts, declared) > 1e-3 and declared.shape == (1024,)
    assert chi_square(counts, model) < 1e-6, "the composition is not the model"
    assert 0.5 * float((declared - model).abs().sum()) > 0.05  # total variation


def test_wrong_compositions_are_refused(model):
    small, family = network(3), VARImages(model, codec=vae())
    for words, make in (
        ("handover: got 5, expected 0..4", lambda: composed(model, small, 5)),
        ("handover: got None, expected a refiner and", lambda: composed(model, small, None)),
        ("handover: got 2, expected a refiner and", lambda: composed(model, None, 2)),
        (r"refiner: got scales \[1, 4\], expected", lambda: composed(model, network(3, ScaleSizes.square(1, 2)), 1)),
        ("refiner: got codes 8, expected 16 as in the model", lambda: composed(model, network(3, codes=8), 1)),
        ("drafter: got one with a refiner", lambda: SmallVAR(small).attach(composed(model, small, 2).family)),
        ("drafter: got codes 8, expected 16 as in the model", lambda: SmallVAR(network(3, codes=8)).attach(family)),
        ("codec: got NoneType, expected VAR's", lambda: VARImages(model)),
        ("codec: got 4 codes of 4, expected the model's 16", lambda: VARImages(model, codec=vae(4))),
        ("ramp: got 'cosine'", lambda: VARImages(model, codec=vae(), ramp="cosine")),
        ("reads hidden states", lambda: family.make_target(DrafterTraits(feature_layers=(1,)), False)),
        ("compile: got True", lambda: family.make_target(DrafterTraits(), True)),
    ):  # fmt: skip
        with raises_line(words):
            make()


# --- the pipeline -----------------------------------------------------------------------------------------------------


def test_var_in_the_pipeline(model):
    pipe = ImagePipeline(model, None, parts={"codec": vae()})
    out = pipe(["1", "3"], seed=[1, 2], output_type="np")
    assert [image.shape for image in out.images] == [(8, 8, 3)] * 2
    decoded = pipe.family.codec.decode(torch.stack(out.tokens), SCALES).permute(0, 2, 3, 1).clamp(-1, 1)
    np.testing.assert_allclose(2 * np.stack(out.images) - 1, decoded, atol=1e-5)
    assert out.stats[0].guarantee == "exact" and [m.shape for m in out.maps] == [(1, 4)] * 2
    assert [p.tolist() for p in out.passes] == [[[0, 1, 2, 3]]] * 2
    alone = pipe("3", seed=2, output_type="latent")
    assert torch.equal(alone.images[0], out.tokens[1]) and alone.images[0].shape == (30,)
    against = pipe("3", seed=2, output_type="latent", negative_prompt="1").images[0]
    assert not torch.equal(against, alone.images[0])
    assert torch.equal(pipe("3", seed=2, output_type="latent", negative_prompt="").images[0], alone.images[0])
    drafting = ImagePipeline(model, None, SmallVAR(moved(model, 0.003)), parts={"codec": vae()}, levels=3)
    result = drafting(["1", "3"], seed=[1, 2], output_type="np")
    np.testing.assert_allclose(result.images, out.images, atol=1e-5)
    assert result.stats[0].rounds < out.stats[0].rounds and result.traces[0].faults == 0
    assert max(m.max() for m in result.maps) > 0, "some scales are drafted"


def test_callback_and_abort(model):
    parts, seen = {"codec": vae()}, []
    pipe = ImagePipeline(model, None, parts=parts)

    def look(pipe, round, tokens, given):
        seen.append(given["latents"][0].clone())
        pipe.interrupt = len(seen) == 2
        return given

    out = pipe("1", seed=1, callback_on_step_end=look, callback_on_step_end_tensor_inputs=["latents"])
    assert not out.images and [int((codes >= 0).sum()) for codes in seen] == [5, 14]
    whole = ImagePipeline(model, None, parts=parts)("2", seed=3, output_type="latent").images[0]
    assert torch.equal(pipe("2", seed=3, output_type="latent").images[0], whole)
    assert torch.equal(pipe("1", seed=1, output_type="latent").images[0][:14], seen[1][:14])


def test_var_refuses_what_it_can_not_draw(model):
    pipe = ImagePipeline(model, None, parts={"codec": vae()})
    for change, words in (
        ({"prompt": "a cat"}, "prompt: got 'a cat', expected a class number 0..4"),
        ({"negative_prompt": "a cat"}, "negative_prompt: got 'a cat', expected a class number 0..4"),
        ({"height": 64}, "height, width: got 64 x None, expected 8 x 8"),
        ({"acceptance": "exact"}, "Exact judges Categorical distributions, expected Maps"),
        ({"order": "islands"}, "order: got RejectedRegions for Categorical, expected raster or"),
        ({"drafter": "jacobi"}, "drafter: Jacobi drafts for Categorical distributions, expected Maps"),
    ):
        with raises_line(words):
            pipe(**{"prompt": "1", "seed": 0, "output_type": "latent"} | change)
