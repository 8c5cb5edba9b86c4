"""The output law of the exact rule, by enumeration; controls that must fail; Gumbel noise, by chi-square."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import visspec
from tests.distributions import chi_square, choice_rounds, context_law, output_law, plain_law, total_variation
from tests.doubles import new_tokens
from tests.tiny import model_of, prompt
from visspec import sampling
from visspec import tree as trees
from visspec.accept.exact import follow
from visspec.distributions import Categorical
from visspec.sampling import Gumbel

V, K = 4, 3
EXACT = 1e-12
DRAFTS = {
    "chain": ((-1, 0, 1, 2), (0, 1, 2, 3)), "short chain": ((-1, 0, 1, 2), (0, 1, -1, -1)),
    "siblings": ((-1, 0, 0, 0), (0, 2, 1, 3)), "tree": ((-1, 0, 0, 1, 1, 2, 3), (0, 1, 3, 0, 2, 2, 1)),
    "twins": ((-1, 0, 0, 1, 2, 4, 0), (0, 1, 1, 2, 3, 0, 2)),
    "absent inside": ((-1, 0, 0, 1, 2, 4), (0, -1, 2, 2, 1, 0)),
}  # fmt: skip


def variation(p, parent, tokens, **options):
    """Total variation between plain sampling and one round of the rule, over the next K + 1 tokens."""
    rounds = choice_rounds(p, parent, tokens, V, **options)
    return total_variation(output_law(p, rounds, V, K + 1), plain_law(p, V, K + 1))


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("seed", range(3))
def test_exact_law(kind, seed):
    assert variation(context_law(V, seed), *DRAFTS[kind]) < EXACT


@settings(max_examples=40)
@given(st.data())
def test_exact_law_of_any_tree(data):
    size = data.draw(st.integers(2, 5))
    parent = (-1, *(data.draw(st.integers(max(0, n - 3), n - 1)) for n in range(1, size)))
    tokens = (0, *(data.draw(st.integers(-1, V - 1)) for _ in range(1, size)))
    assert variation(context_law(V, data.draw(st.integers(0, 9))), parent, tokens) < EXACT


def test_exact_law_with_zeros():
    """Laws with cut entries (top-k): a drafted token of probability zero is never kept."""

    def p(context):
        distribution = context_law(V)(context).clone()
        distribution[distribution.argmin()] = 0
        return distribution / distribution.sum()

    for parent, tokens in DRAFTS.values():
        assert variation(p, parent, tokens) < EXACT
        for _, emitted in filter(lambda r: r[0] > 0, choice_rounds(p, parent, tokens, V)):
            assert all(p(emitted[:t])[token] > 0 for t, token in enumerate(emitted))


# Controls: known ways to get it wrong. Each must be seen by the enumeration.


def likely(p):
    """The chain of the most likely tokens, after the root's."""
    tokens = [0]
    for _ in range(K):
        tokens.append(int(p(tuple(tokens[1:])).argmax()))
    return tuple(tokens)


def raw_bonus(p):
    """The bonus after a full path is drawn before temperature and cuts are applied."""
    raw = lambda context: (p(context) ** 0.5) / (p(context) ** 0.5).sum()  # noqa: E731
    return {"at_node": lambda n: p if n < K else raw}


def skipping(draft, chosen):
    """A rejected first node is passed over: its child is tried as if it had been accepted."""
    tokens = draft.value.clone()
    tokens[:, 1] = chosen[:, 0]
    return follow(dataclasses.replace(draft, value=tokens), chosen)


def second_child(draft, chosen):
    """Agreement with the first child is booked to its sibling."""
    tokens = draft.value.clone()
    tokens[:, [1, 2]] = tokens[:, [2, 1]]
    return follow(dataclasses.replace(draft, value=tokens), chosen)


def inflated(p, by=1.01):
    """Drafted tokens are accepted with 1.01 times their probability."""
    tokens = likely(p)

    def at_node(n):
        def distribution(context):
            distribution = p(context).clone()
            if n < K:
                distribution[tokens[n + 1]] *= by
            return distribution / distribution.sum()

        return distribution

    return {"at_node": at_node}


def resampled(draft, chosen):
    """After a rejection the token is drawn afresh from the whole law: here, from the law of another node."""
    verdict = follow(draft, chosen)
    return dataclasses.replace(verdict, next=chosen[:, 0])


@pytest.mark.parametrize("kind,options,at_least", [
    ("chain", raw_bonus, 1e-3), ("chain", inflated, 1e-3), ("chain", lambda p: {"rule": skipping}, 1e-2),
    ("tree", lambda p: {"rule": second_child}, 1e-2), ("tree", lambda p: {"rule": resampled}, 1e-2),
], ids=["raw bonus", "inflated by a hundredth", "skipping", "second child", "resampled"])  # fmt: skip
def test_wrong_rules_are_seen(kind, options, at_least):
    p = context_law(V)
    parent, tokens = DRAFTS[kind]
    assert variation(p, parent, likely(p) if kind == "chain" else tokens, **options(p)) > at_least


# Noise: the choices that the enumeration takes for granted.


def test_choices_share_noise():
    generators = [torch.Generator().manual_seed(s) for s in (1, 2)]
    noise = Gumbel(generators, V)
    window = noise.window(3)
    logits = torch.randn(2, 4, V)
    distribution = Categorical(logits)
    tree = trees.static((-1, 0, 0, 1))
    chosen = sampling.choose(distribution, tree.depth, noise, tree.levels)
    for n, depth in enumerate((0, 1, 1, 2)):
        assert torch.equal(chosen[:, n], (logits[:, n] + window[:, depth]).argmax(-1))
    per_row = trees.from_parents(torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]]), 3)
    chosen = sampling.choose(distribution, per_row.depth, noise, 3)
    assert torch.equal(chosen[1, 3], (logits[1, 3] + noise.window(4)[1, 3]).argmax(-1))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 40))
def test_noise_by_position(steps, peek):
    whole = Gumbel([torch.Generator().manual_seed(7)], 3).window(sum(steps) + 1)[0]
    noise, at = Gumbel([torch.Generator().manual_seed(s) for s in (6, 7)], 3), 0
    noise.select([1])
    for step in steps:
        if peek:
            noise.window(peek)
        assert torch.equal(noise.window(step)[0], whole[at : at + step])
        noise.advance([step])
        at += step


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_sampled_pairs_follow_the_model(drafter):
    """End to end: 2048 samples of two tokens against the model's own laws, top-k and temperature applied."""
    model, rows, k, temperature = model_of("llama"), 2048, 5, 1.3
    inputs = prompt("llama", ["9"])
    fast = visspec.accelerate(model, drafter, adaptive=False)
    options = {"do_sample": True, "top_k": k, "temperature": temperature, "max_new_tokens": 3}
    output = fast.generate(**inputs, **options, num_return_sequences=rows, seed=0)
    pairs = torch.tensor(new_tokens(output, inputs))[:, :2]

    def distribution(ids):
        with torch.no_grad():
            logits = model(ids).logits[:, -1].double() / temperature
        cut = logits < logits.topk(k).values[:, -1:]
        return logits.masked_fill(cut, float("-inf")).softmax(-1)

    first = distribution(inputs["input_ids"])[0]
    firsts = first.nonzero()[:, 0]
    ids = torch.cat([inputs["input_ids"].expand(len(firsts), -1), firsts[:, None]], 1)
    joint = torch.zeros(96, 96, dtype=torch.float64)
    joint[firsts] = first[firsts][:, None] * distribution(ids)
    counts = torch.zeros(96, 96)
    for a, b in pairs.tolist():
        counts[a, b] += 1
    flatter = joint.sqrt() / joint.sqrt().sum()
    assert chi_square(counts, joint) > 1e-4 > chi_square(counts, flatter)
