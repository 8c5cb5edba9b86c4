"""The confidence head of a block drafter, and the structure of drafts of those that fill blocks."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import visspec
from tests.distributions import SIZE, context_law, plain_law, process_law, total_variation
from tests.distributions import PositionalChain as Drafted
from tests.published import begun
from tests.tiny import model_of, prompt, shapes
from visspec.api.training.drafter import request_of
from visspec.api.training.presets import of_preset
from visspec.distributions import Categorical
from visspec.models.block.sequential import CandidateSelector, Confidence
from visspec.models.block.trained import BlockDrafter
from visspec.models.decoder.target import HFDecoder
from visspec.models.drafting import static_tree as feature_tree
from visspec.models.drafting.base import Chain
from visspec.models.eagle.drafter import EagleDrafter
from visspec.sampling import Uniform
from visspec.train.capture import capture
from visspec.train.loop import Step
from visspec.train.options import TrainingOptions
from visspec.types import Sampling

NEW = 12


def dspark(block=5, markov=5, **more):
    head = BlockDrafter.for_model(model_of("llava"), layers=1, block=block, markov=markov, confidence=True).head
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p, scale in [(head.confidence.linear.weight, 0.1), *([(head.markov.up.weight, 1.0)] if markov else [])]:
            p.copy_(scale * torch.randn(p.shape, generator=generator))
    return BlockDrafter(head, model_of("llava"), **more)


def lesson_for(drafter):
    target = HFDecoder(model_of("llava"), drafter.traits.feature_layers, embeddings=True, states=True)
    inputs = prompt("llava", ["4 i 5", "6 i 3 i 2"], seed=2)
    request = request_of(model_of("llava"), inputs, temperature=1.0, max_new_tokens=12, seed=7)
    return capture(target, visspec.Exact(), request)


# --- drafting ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("markov", [0, 5])
@pytest.mark.parametrize("confidence", [0.1, 0.3, 0.6])
def test_confidence_ends_chains(markov, confidence):
    """Products of what the head says of each place, below the token before it; the first level is always there."""
    inputs, held = prompt("llava", shapes("llava")["ragged"]), []
    drafter = dspark(markov=markov).shaped(confidence=confidence)
    _, state, _ = begun(drafter, model_of("llava"), inputs, NEW)
    drafter._laws = lambda hidden: held.append(hidden) or BlockDrafter._laws(drafter, hidden)
    draft, head = drafter.propose(state, 4), drafter.head
    weight, bias = head.confidence.linear.weight[0], head.confidence.linear.bias
    for b in range(3):
        product, want = 1.0, [True]
        for level in range(4):
            seen = held[0][b, level]
            if markov:
                seen = torch.cat([seen, head.markov.down.weight[draft.value[b, level]]])
            product *= float(torch.sigmoid(weight @ seen + bias))
            want.append(want[-1] and (level == 0 or product >= confidence))
        assert draft.real[b].tolist() == want
    del drafter._laws
    _, state, _ = begun(whole := dspark(markov=markov), model_of("llava"), inputs, NEW)
    assert torch.equal(whole.propose(state, 4).value, draft.value)


def test_confidence_bounds_the_next_draft():
    """A product below 0.999 ends every chain behind its first level: rounds after the first draft two. Not of draws."""
    drafter = dspark().shaped(confidence=0.999)
    for rule, most in (("exact", 2), ("rejection", drafter.traits.levels)):
        fast = visspec.accelerate(model_of("llava"), drafter, acceptance=rule, adaptive=False)
        fast.generate(**prompt("llava", ["4 i 5"]), max_new_tokens=NEW, do_sample=True, temperature=1.5, seed=1)
        levels = [r.levels for r in fast.last_state.trace.rounds]
        assert levels[0] == drafter.traits.levels and max(levels[1:-1]) <= most and len(levels) > 4
        assert rule == "exact" or max(levels[1:3]) > 2


def test_refuses_confidence():
    drafter = lambda **more: BlockDrafter.for_model(model_of("llava"), layers=1, block=5, **more)  # noqa: E731
    with pytest.raises(ValueError, match="for a drafter without a head that predicts acceptance rates"):
        drafter().shaped(confidence=0.3)
    with pytest.raises(ValueError, match="for trees"):
        drafter(confidence=True).shaped(tree="3-2", confidence=0.3)
    with pytest.raises(ValueError, match="expected a probability below 1"):
        dspark().shaped(confidence=1)


class Expecting(Drafted):
    """The chains of `test_positions`, with a head that sees what stands above a level; `own`: its own token too."""

    own = False

    def __init__(self, q, confidence=0.5):
        super().__init__(q)
        self.confidence = confidence

    def draft(self, committed, numbers, depth):
        window = torch.tensor(numbers, dtype=torch.float64)[None, :, None]
        state = SimpleNamespace(
            noise=Uniform.of(window), request=SimpleNamespace(sampling=Sampling(temperature=1.0)),
            pending=torch.tensor([committed[-1]]),
        )  # fmt: skip
        chain = Chain(state, self.confidence)
        for level in range(depth):
            above = (*committed, *(int(t) for t in chain.tokens))
            distribution = self.q(above).log()[None]
            if self.own:
                above = (*above, int(state.noise.draft(Categorical(distribution), level)[0]))
            chain.add(distribution, 0.35 + 0.6 * self.q((*above, 1))[:1])
        return chain.finish()


@pytest.mark.parametrize("confidence", [0.5, 0.35])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_head_keeps_the_law_of_draws(confidence, seed, unwarped):
    p, drafter = context_law(2, seed), Expecting(context_law(2, seed + 7), confidence)
    assert total_variation(process_law(drafter, p), plain_law(p, 2, SIZE)) < 1e-12


def test_a_head_that_sees_the_token_is_seen(unwarped):
    p, drafter = context_law(2, 0), Expecting(context_law(2, 7))
    drafter.own = True
    assert total_variation(process_law(drafter, p), plain_law(p, 2, SIZE)) > 1e-3


@torch.inference_mode()
@pytest.mark.parametrize("places", [1, 2, 7, 16])
def test_selector_greedy_chain(places):
    torch.manual_seed(places)
    head, token = CandidateSelector(50, 8, 4, 5), torch.tensor([3, 49, 0])
    [torch.nn.init.normal_(p) for p in head.parameters()]
    logits, hidden = torch.randn(3, places, 50), torch.randn(3, places, 8)
    result, below = head.likeliest(logits, hidden, token), head.logits_function(logits, hidden)
    for place in range(places):
        token = below(place, token[:, None])[:, 0].argmax(-1)
        assert torch.equal(result[:, place], token)
    assert places == 1 or not torch.equal(result, logits.argmax(-1))


# --- training ---------------------------------------------------------------------------------------------------------


def test_confidence_loss():
    drafter = dspark()
    lesson = lesson_for(drafter)
    torch.manual_seed(0)  # the first anchor
    loss, _ = Step(drafter, TrainingOptions(unroll=1, opening=1.0, confidence_weight=2.0))(lesson, "soft_ce")
    torch.manual_seed(0)
    plain, _ = Step(drafter, TrainingOptions(unroll=1, opening=1.0))(lesson, "soft_ce")
    torch.manual_seed(0)
    ((hidden, weight),) = drafter.rollout(lesson, 1)
    logits = drafter.trained_logits(hidden, lesson.ids[:, lesson.prompt_length : -1])
    p, q = lesson.logits.softmax(-1), logits.softmax(-1)
    rate = torch.minimum(p, q).sum(-1).detach()
    before = drafter.head.markov.down(lesson.ids[:, lesson.prompt_length : -1])
    message = drafter.head.confidence.linear(torch.cat([hidden, before], dim=-1))[..., 0].sigmoid()
    each = F.binary_cross_entropy(message, rate, reduction="none")
    torch.testing.assert_close(loss - plain, 2 * (each * weight).sum() / weight.sum())
    (loss - plain).backward()
    others = [p for n, p in drafter.head.named_parameters() if not n.startswith("confidence")]
    assert all(p.grad is None or p.grad.abs().max() < 1e-6 for p in others)
    assert drafter.head.confidence.linear.weight.grad.abs().max() > 1e-4
    assert bool((Confidence(8, 0)(torch.randn(5, 8), None) == 0).all()), "an untrained one says one half of everything"


# --- structure and length of blocks -----------------------------------------------------------------------------------


def blocks(name):
    model = model_of("llava")
    if name == "flash":
        return EagleDrafter.for_model(model, **of_preset("flash", model, {"block": 3, "image_latents": 2})[0])
    return BlockDrafter.for_model(model, layers=1, block=6)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["flash", "dflash"])
def test_what_blocks_draft_with_a_shape(name):
    inputs = prompt("llava", shapes("llava")["ragged"])
    drafter = blocks(name).shaped(tree="3-2")
    _, state, _ = begun(drafter, model_of("llava"), inputs, NEW)
    draft = drafter.propose(state, 5)
    assert draft.tree.size == 6 and draft.tree.levels == 2
    assert torch.equal(draft.tree.parent, feature_tree.plan(drafter.paths, "cpu")[0].parent)
