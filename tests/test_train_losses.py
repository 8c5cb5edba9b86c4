"""The loss of a training step in chunks, on states that the head reads, is that of whole recorded distributions."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import visspec
from tests.test_image_drafter import drafter as image_drafter
from tests.test_image_drafter import family, prompts
from tests.test_image_drafter import request as image_request
from tests.tiny import model_of, prompt
from visspec.accept.rejection import Rejection
from visspec.api.training.drafter import request_of
from visspec.api.training.presets import of_preset
from visspec.models.block.trained import BlockDrafter
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.eagle.image_drafter import CaptureTarget
from visspec.train import loop, losses
from visspec.train.capture import capture, identity, split
from visspec.train.loop import Step
from visspec.train.options import TrainingOptions


def eagle3(model):
    drafter = EagleDrafter.for_model(model, **of_preset("eagle3", model, {"draft_vocab": 40})[0])
    drafter.keep(torch.arange(20, 60))
    return drafter


def selecting(model):
    drafter = BlockDrafter.for_model(model, layers=1, block=5, selector=4, candidates=6)
    torch.nn.init.normal_(drafter.head.candidate_selector.successor_codebook)
    return drafter


DRAFTERS = {
    "features": (lambda model: EagleDrafter.for_model(model, image_latents=2), {"feature_weight": 3.0}),
    "eagle3": (eagle3, {"unroll": 3}),
    "flash": (lambda model: EagleDrafter.for_model(model, **of_preset("flash", model, {})[0]), {"unroll": 1}),
    "dspark": (lambda model: BlockDrafter.for_model(model, layers=1, block=5, markov=5, confidence=True),
               {"confidence_weight": 2.0}),
    "dflash2": (selecting, {"selector_weight": 2.0}),
}  # fmt: skip


def lessons(name):
    """A drafter and two recordings of the same answers: states, and distributions."""
    if name == "image":
        drafter, (ids, attention) = image_drafter(), prompts(3)
        target = CaptureTarget(family())
        result = [capture(target, Rejection(), image_request(ids, attention))]
        target.law = lambda request: None
        return drafter, *result, capture(target, Rejection(), image_request(ids, attention))
    model = model_of("llava")
    drafter = DRAFTERS[name][0](model)

    def record(states):
        target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True, states=states)
        inputs = prompt("llava", ["4 i 5", "9 i 3", "8"])
        request = request_of(model, inputs, temperature=1.0, max_new_tokens=14, seed=1)
        return dataclasses.replace(capture(target, visspec.Exact(), request), lengths=[14, 9, 11])

    return drafter, record(True), record(False)


def reference(drafter, lesson, plan, kind):
    """The loss by autograd over whole logits."""
    rollout, p_logits = drafter.rollout(lesson, plan.unroll), lesson.states
    (count, start), total, shares = (p_logits.shape[1], lesson.prompt_length), 0.0, []
    before, after = lesson.ids[:, start : start + count], lesson.ids[:, start + 1 : start + 1 + count]
    chosen = p_logits.argmax(-1)
    scale = sum(plan.decay**k for k in range(len(rollout)))
    for k, (states, weight) in enumerate(rollout):
        q_logits, p = drafter.trained_logits(states, before), p_logits
        if drafter.ids is not None:
            weight = weight * (chosen[..., None] == drafter.ids).any(-1)
            p = p[..., drafter.ids]
        P, Q = p.softmax(-1), q_logits.softmax(-1)
        each = {
            "tv": (P - Q).abs().sum(-1) / 2,
            "soft_ce": -(P * q_logits.log_softmax(-1)).sum(-1),
            "kl": F.kl_div(q_logits.log_softmax(-1), P, reduction="none").sum(-1),
        }[kind]
        if plan.feature_weight:
            feature = lesson.features[:, start : start + count, -states.shape[-1] :]
            each = each + plan.feature_weight * F.smooth_l1_loss(states, feature, reduction="none").mean(-1)
        each = each * plan.decay**k / scale
        if k == 0 and plan.confidence_weight:
            rate = torch.minimum(P, Q).sum(-1).detach()
            message = drafter.head.sequential.expected(states, before)
            each = each + plan.confidence_weight * F.binary_cross_entropy(message.sigmoid(), rate, reduction="none")
        if k == 0 and plan.selector_weight:
            scores, ids = drafter.head.sequential.scores(q_logits, states, before, after)
            few = p.gather(-1, ids).softmax(-1)
            each = each - plan.selector_weight * (few * scores.log_softmax(-1)).sum(-1)
        total = total + (each * weight).sum() / weight.sum()
        shares.append(((q_logits.argmax(-1) == p.argmax(-1)) * weight).sum() / weight.sum())
    return total, torch.stack(shares)


@pytest.mark.parametrize(("name", "kind"), [
    *(("features", kind) for kind in ("tv", "soft_ce", "kl")), ("eagle3", "kl"), ("flash", "soft_ce"),
    ("dspark", "tv"), ("dflash2", "kl"), ("image", "soft_ce"),
])  # fmt: skip
def test_chunks_equal_whole(name, kind, monkeypatch):
    drafter, states, whole = lessons(name)
    assert states.law is not identity and whole.law is identity and states.states.shape[-1] in (32, 64)
    torch.testing.assert_close(states.logits.softmax(-1), whole.logits.softmax(-1), rtol=1e-4, atol=1e-6)
    plan = TrainingOptions(**{"unroll": 3} | DRAFTERS.get(name, (None, {}))[1])
    drafter.head.train()
    result, sizes, measure = [], [], losses.KINDS[kind]
    monkeypatch.setattr(losses, "ELEMENTS", 4 * (whole.width if drafter.ids is None else len(drafter.ids)))
    monkeypatch.setattr(loop, "LAW_ROWS", 3)
    monkeypatch.setitem(losses.KINDS, kind, lambda q, p: sizes.append(len(q)) or measure(q, p))
    for loss_of, lesson in ((Step(drafter, plan), states), (None, whole)):
        torch.manual_seed(0)  # of anchors
        loss, agreed = loss_of(lesson, kind) if loss_of else reference(drafter, lesson, plan, kind)
        drafter.head.zero_grad()
        (2.0 * loss).backward()
        result.append((loss.detach(), agreed.detach(), {n: p.grad for n, p in drafter.head.named_parameters()}))
    assert max(sizes) == 5 and len(sizes) >= 4
    (loss, agreed, grads), (wanted, shares, expected) = result
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(agreed, shares)
    assert sum(g is not None for g in expected.values()) > 3
    for parameter, gradient in expected.items():
        assert (gradient is None) == (grads[parameter] is None)
        if gradient is not None:
            torch.testing.assert_close(grads[parameter], gradient, rtol=1e-4, atol=1e-5)


def test_forbidden_tokens():
    q, p = torch.randn(2, 3, 21, generator=torch.Generator().manual_seed(3))
    q[:, 7], p[:, 7], q[1, 4] = (float("-inf"),) * 3
    q.requires_grad_()
    P, Q = p.softmax(-1), q.softmax(-1)
    result = {kind: measure(q, P) for kind, measure in losses.KINDS.items()}
    torch.testing.assert_close(result["tv"], (P - Q).abs().sum(-1) / 2)
    some = P.log().isfinite() & torch.arange(21).ne(7)
    for kind, expected in (("soft_ce", -P * Q.log()), ("kl", P * (P.log() - Q.log()))):
        torch.testing.assert_close(result[kind], expected.where(some, torch.zeros(())).sum(-1))
        assert result[kind].isinf().tolist() == [False, True, False]
    sum(loss[::2].sum() for loss in result.values()).backward()
    assert q.grad[::2].isfinite().all() and not q.grad[:, 7].any()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", losses.KINDS)
def test_compiled_formulas_are_the_formulas(kind):
    """As on a GPU, with distributions that were recorded in inference mode."""
    own = losses.KINDS[kind]
    compiled = losses._per_token(losses._compiled(own.__wrapped__))
    with torch.inference_mode():
        fixed = torch.randn(5, 9).softmax(-1)
    for rows in (5, 3):
        q = torch.randn(rows, 9, requires_grad=True)
        expected, result = own(q, fixed[:rows]), compiled(q, fixed[:rows])
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), q)[0] for loss in (result, expected)))


def head_of(**entries):
    """A target whose configuration says something of its logits, which they follow."""
    model = model_of("llava")
    target = HFDecoder(model, (-1,), embeddings=True, states=True)
    config = SimpleNamespace(**entries)
    text = SimpleNamespace(get_text_config=lambda: config)
    target.model = SimpleNamespace(config=text, get_output_embeddings=model.get_output_embeddings)
    return target


def test_head_as_configured():
    request = request_of(model_of("llava"), prompt("llava", ["9"]), temperature=0.5, max_new_tokens=4, seed=1)
    states = torch.randn(2, 3, 32)
    raw = model_of("llava").get_output_embeddings()(states)
    for entries, logits in (
        ({}, raw),
        ({"final_logit_softcapping": 2.0}, 2 * (raw / 2).tanh()),
        ({"logits_scaling": 8.0}, raw / 8),
        ({"logit_scale": 0.25, "lm_head_multiplier": 2.0}, raw / 2),
    ):
        torch.testing.assert_close(head_of(**entries).law(request)(states), logits / 0.5)
    bare = HFDecoder(model_of("llava"), (-1,), embeddings=True)
    assert bare.law(request) is None
    request.sampling = dataclasses.replace(request.sampling, processors=(lambda ids, scores: scores,))
    assert head_of().law(request) is None


def test_recorded_distributions():
    """A target that adds something behind its head, which no configuration says."""
    model = model_of("llava")
    target = HFDecoder(model, (-1,), embeddings=True, states=True)

    def request():
        return request_of(model, prompt("llava", ["4 i 5", "9"]), temperature=1.0, max_new_tokens=6, seed=1)

    law = target.law(request())
    target.law = lambda request: lambda states: 1.5 * law(states)
    lesson = capture(target, visspec.Exact(), request())
    assert lesson.law is identity and lesson.states.shape[-1] == lesson.width == 96
    assert torch.equal(lesson.best, lesson.logits.argmax(-1))
    part = split(lesson, 1)[0]
    assert part.width == 96 and part.best.shape == part.states.shape[:2]


def test_recorded_states_dtype():
    model = copy.deepcopy(model_of("llava")).bfloat16()
    target = HFDecoder(model, (-1,), embeddings=True, states=True)
    request = request_of(model, prompt("llava", ["4 i 5"]), temperature=1.0, max_new_tokens=6, seed=1)
    lesson = capture(target, visspec.Exact(), request)
    assert lesson.states.dtype == lesson.features.dtype == torch.bfloat16 and lesson.law is not identity
