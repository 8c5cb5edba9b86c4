"""MAR through the loop: laws of its nodes, whole images, drafts of a smaller network, and the parallel baseline."""

import math
from dataclasses import replace

import pytest
import torch

from tests.doubles import generators
from tests.layouts import mar_conditions
from visspec import tree as trees
from visspec.accept.coupled import Coupled
from visspec.accept.surrogate import Surrogate
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.models.mar.drafter import SmallMAR
from visspec.models.mar.network import MAR, UNCONDITIONAL, MARConfig
from visspec.models.mar.parallel import ParallelMAR, revealed_counts
from visspec.models.mar.target import ClassPrompt, MARImages, MARTarget
from visspec.models.vectors.diffusion_head import schedule
from visspec.models.vectors.target import unpatchify
from visspec.types import Draft, DrafterTraits, Request, Sampling

TOKENS, SIZE, STEPS = 9, 4, 8
PLAIN = Sampling(temperature=1.0)
SMALL = MARConfig(32, 1, 4, head_width=24, head_depth=1, size=SIZE, tokens=TOKENS, buffer=3, classes=5)


# a head that has learned nothing stays near its point: estimates from a predicted velocity, unlike noise, are finite
PLAN = replace(schedule(STEPS, learned=True), predicts="velocity")


def network(seed, scale=0.08):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MAR(SMALL).eval()
        for name, weight in model.named_parameters():
            if "norm" not in name and "_ln" not in name:
                weight.data.normal_(0, scale)
        return model


@pytest.fixture(scope="module")
def model():
    return network(0)


@pytest.fixture(scope="module")
def target(model):
    return MARTarget(MARImages(model, plan=PLAN))


def request(classes, sampling=PLAIN, seed=0, **options):
    given = generators(len(classes), seed)
    prompt = ClassPrompt(torch.tensor(classes))
    return Request(prompt, prompt.ids, TOKENS, sampling, generators=given, **options)


def ruled(target, **options):
    rule = Coupled(**{"window": 1} | options)
    rule.bind(target.capabilities)
    return rule


def images(state):
    return torch.stack([state.output.values(row) for row in range(len(state.tokens))])


def plain(target, *args, **options):
    return decode(target, None, ruled(target), request(*args, **options), FixedLength(1))


# --- laws of nodes ---------------------------------------------------------------------------------------------------


def outputs(distribution):
    """What a law says at some points, for every chain."""
    g = torch.Generator().manual_seed(5)
    count = distribution.shape[0] * distribution.shape[1]
    x, step = torch.randn(count, 3, SIZE, generator=g), torch.tensor([1, 4, STEPS - 1]).expand(count, -1)
    mean, log_sigma, _ = distribution.kernel(x, step)
    return x, step, mean, log_sigma


def by_hand(model, values, order, count, label, x, t, guidance, scale, plan):
    """(mean, log sigma) of a chain of token number `count`, from the network alone."""
    known = torch.zeros(1, TOKENS, dtype=torch.bool)
    known[0, order[:count]] = True
    place, raster_values = order[min(count, TOKENS - 1)], torch.zeros(1, TOKENS, SIZE)
    raster_values[0, order[:count]] = values[:count]
    time = plan.times[t]
    given = model.head(x, time, mar_conditions(model, raster_values, known, torch.tensor([label]))[:, place])
    eps, share = given.chunk(2, dim=-1)
    if guidance != 1.0:
        without = model.head(
            x, time, mar_conditions(model, raster_values, known, torch.tensor([UNCONDITIONAL]))[:, place]
        )
        eps = without[:, :SIZE] + scale * (eps - without[:, :SIZE])
    signal, noise = plan.signal[t, None], plan.noise[t, None]
    value = (x - noise * eps) / signal if plan.predicts == "noise" else signal * x - noise * eps
    steps, share = plan.steps, (share + 1) / 2
    mean = steps.keep[t, None] * x + steps.move[t, None] * value
    return mean.float(), (1 - share) * steps.low[t, None] + share * steps.high[t, None]


@torch.no_grad()
@pytest.mark.parametrize("guidance, kind", [(1.0, "linear"), (2.9, "linear"), (2.9, "constant")])
@pytest.mark.parametrize("predicts", ["noise", "velocity"])
def test_law_of_nodes(model, guidance, kind, predicts):
    torch.manual_seed(0)
    plan = replace(PLAN, predicts=predicts)
    target = MARTarget(MARImages(model, plan=plan, scale=kind))
    asked = request([1, 4, UNCONDITIONAL], Sampling(1.0, guidance=guidance))
    state, scores = target.prefill(asked)
    drafts = torch.randn(3, TOKENS + 1, SIZE)
    gained = [2, 0, 5]  # rows are not equally far
    for row, count in enumerate(gained):
        state.tokens[row].extend(range(count + 1))
    state.position = torch.tensor(gained)
    state.cache.put(torch.arange(TOKENS + 1).expand(3, -1), drafts)
    nodes = 5
    value = torch.stack([drafts[b, c : c + nodes] for b, c in enumerate(gained)])
    result = target.verify(state, Draft(value, trees.chain(nodes - 1, "cpu"))).distribution
    for distribution, counts in (
        (scores.distribution, [[0]] * 3),
        (result, [[c + n + 1 for n in range(nodes)] for c in gained]),
    ):
        x, step, mean, log_sigma = outputs(distribution)
        for chain, (row, count) in enumerate((b, count) for b in range(3) for count in counts[b]):
            if count >= TOKENS:
                continue  # beyond the end
            after = min(count + 1, TOKENS - 1)
            scale = guidance if kind == "constant" else 1 + (guidance - 1) * after / TOKENS
            label = int(asked.inputs.classes[row])
            hand = by_hand(model, drafts[row], asked.inputs.order[row], count, label, x[chain], step[chain], guidance,
                           scale, plan)  # fmt: skip
            torch.testing.assert_close(mean[chain], hand[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(log_sigma[chain], hand[1], rtol=1e-4, atol=1e-4)


# --- whole images ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance, temperature", [(1.0, 1.0), (2.9, 0.9)])
def test_parallel_one_by_one_is_plain(target, guidance, temperature):
    sampling = Sampling(temperature, guidance=guidance)
    state = plain(target, [1, 4], sampling)
    result = ParallelMAR(TOKENS).decode(target, None, ruled(target), request([1, 4], sampling), None)
    torch.testing.assert_close(images(result), images(state), rtol=0, atol=1e-5)
    assert result.trace.calls == state.trace.calls == {"head": TOKENS * STEPS}


def test_steps_reveal_tokens_as_published():
    def published(tokens, iterations):
        known, hidden = [], tokens
        for step in range(iterations):
            mask = max(1, min(hidden - 1, math.floor(tokens * math.cos(math.pi / 2 * (step + 1) / iterations))))
            hidden = 0 if step == iterations - 1 else mask
            known.append(tokens - hidden)
        return known

    for tokens in (9, 64, 256):
        for iterations in {1, 2, 5, 8, tokens - 1, tokens}:
            assert revealed_counts(tokens, iterations) == published(tokens, iterations)
    assert revealed_counts(256, 256) == list(range(1, 257))  # one token a step


# --- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_target_as_drafter(model, target, guidance):
    sampling = Sampling(1.0, guidance=guidance)
    drafter = SmallMAR(MARImages(model, plan=PLAN))
    drafter.attach(target.family)
    state = decode(target, drafter, ruled(target), request([1, 4, 0], sampling), FixedLength(3))
    other = plain(target, [1, 4, 0], sampling)
    order, index = state.request.inputs.order[:, :4], torch.arange(3)[:, None]
    # the numbers of a bonus token are used in another way
    torch.testing.assert_close(images(state)[index, order], images(other)[index, order], rtol=0, atol=1e-4)
    assert [r.committed for r in state.trace.rounds] == [[4, 4, 4], [4, 4, 4]]


@pytest.mark.parametrize("rule", [Coupled, Surrogate])
def test_what_is_known_is_what_was_drawn(rule):
    target = MARTarget(MARImages(network(0), plan=PLAN))
    drafter, rule = SmallMAR(MARImages(network(1, 0.15), plan=PLAN)), rule()
    rule.bind(target.capabilities)
    state = decode(target, drafter, rule, request([1, 4, 0], Sampling(1.0, guidance=2.0)), FixedLength(3))
    index, order = torch.arange(3)[:, None], state.request.inputs.order
    drawn = images(state)[index, order]
    rows = slice(None) if len(state.cache.values) == 3 else state.rows
    assert torch.equal(state.cache.values[:, : TOKENS - 1], drawn[rows, :-1])
    assert torch.equal(state.memory.values[:, : TOKENS - 1], drawn[rows, :-1])


def test_wrong_settings_are_refused(model, target):
    quiet = schedule(STEPS, learned=True, noisy=False)
    for message, make in (
        ("scale: got 'cosine', expected one of linear, constant", lambda: MARImages(model, scale="cosine")),
        ("schedule: its deviations are not the head's", lambda: MARImages(model, plan=schedule(STEPS))),
        ("drafter: got 9 tokens of 4 numbers .* expected 9 of 3",
         lambda: SmallMAR(target.family).attach(MARImages(MAR(replace(SMALL, size=3))))),
        ("needs noise in the target's last step", lambda: ruled(MARTarget(MARImages(model, plan=quiet)))),
        ("temperature: got 0, expected", lambda: target.prefill(request([1], Sampling(0.0)))),
        ("reads hidden states", lambda: target.family.make_target(DrafterTraits(feature_layers=(1,)), False)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()


def test_tokens_become_latents_as_published():
    """Channels first within a token, then the rows and columns of its patch."""
    latents = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6).float()
    tokens = [latents[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].reshape(2, 12) for i in range(2) for j in range(3)]
    assert torch.equal(unpatchify(torch.stack(tokens, dim=1), (2, 3), 2), latents)
    assert torch.equal(unpatchify(latents.flatten(2).transpose(1, 2), (4, 6)), latents)
