"""Sampling with any processor: scores as transformers computes them, tokens that no draft can change."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

from tests.doubles import NEW, Hostile, Oracle, TreeOracle, drafted, fast, new_tokens
from tests.tiny import EOS, VOCAB, model_of, prompt, shapes
from visspec import tree as trees
from visspec.api.text.processors import at_any_prefix
from visspec.distributions import argmax, draw, residual, topk
from visspec.sampling import Gumbel, Uniform, process, warp
from visspec.types import NodeProcessor, Request, Sampling


class NoRepeat(LogitsProcessor):
    """A user's own: bans the newest token, favours the one before it."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        rows = torch.arange(len(scores))
        scores[rows, input_ids[:, -2]] += 2.0
        scores[rows, input_ids[:, -1]] = float("-inf")
        return scores


class Counting(LogitsProcessor):
    """Depends on the length of the history."""

    def __call__(self, input_ids, scores):
        return scores + torch.arange(scores.shape[-1]) * (0.02 * (input_ids.shape[-1] % 3))


def even_then_odd(row, ids):
    """Ids of alternating parity, another set in every row."""
    return [i for i in range(3 + row, VOCAB) if i % 2 == ids.shape[0] % 2]


OPTIONS = {
    "plain": {"top_k": 0},
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8, "top_k": 0},
    "all three": {"temperature": 1.4, "top_k": 12, "top_p": 0.9},
    "min-p": {"min_p": 0.1, "temperature": 1.5},
    "typical-p": {"typical_p": 0.8},
    "epsilon cut": {"epsilon_cutoff": 0.02},
    "eta cut": {"eta_cutoff": 0.02},
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated bigram": {"no_repeat_ngram_size": 2},
    "encoder n-grams": {"encoder_no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[17], [18, 20], [5, 6, 7]]},
    "suppressed": {"suppress_tokens": list(range(10, 40)), "begin_suppress_tokens": list(range(40, 60))},
    "prefix function": {"prefix_allowed_tokens_fn": even_then_odd},
    "sequence bias": {"sequence_bias": [[[17], 4.0], [[17, 17], -9.0]]},
    "length penalty": {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": EOS},
    "minimal length": {"min_new_tokens": 6, "eos_token_id": [EOS, *range(5, 40)]},
    "forced end": {"forced_eos_token_id": EOS},
    "own processor": {"logits_processor": LogitsProcessorList([NoRepeat(), Counting()])},
    "own and repetition": {"repetition_penalty": 1.3, "logits_processor": [NoRepeat()], "top_p": 0.9},
}
WARPERS = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}
GREEDY = {name: {k: v for k, v in options.items() if k not in WARPERS} for name, options in OPTIONS.items()}
GREEDY = {"plain": {}} | {name: options for name, options in GREEDY.items() if options}  # of those that warp, one


@pytest.mark.parametrize("do_sample, option", [
    *((True, name) for name in OPTIONS), *((False, name) for name in GREEDY),
])  # fmt: skip
def test_scores_equal_stock(option, do_sample, monkeypatch):
    """Sampling is plain sampling of the same seed, greedy is stock's, and `output_scores` are transformers' own."""
    inputs = prompt("llava", shapes("llava")["ragged"])
    options = (OPTIONS if do_sample else GREEDY)[option] | {"do_sample": do_sample, "max_new_tokens": 12}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    seeded = {"seed": 3} if do_sample else {}
    plain = fast("llava", None).generate(**inputs, **options, **seeded)
    even = list(OPTIONS).index(option) % 2 == 0
    known = [row + [0] * NEW for row in new_tokens(plain, inputs)]
    for drafter in ("ngram" if even else Hostile(), TreeOracle(known, wrong=0.3, per_row=even)):
        model = fast("llava", drafter)
        ours = model.generate(**inputs, **options, **seeded)
        assert torch.equal(ours.sequences, plain.sequences) and model.last_stats.faults == 0
    assert model.last_stats.tau > 1.3
    length = inputs["input_ids"].shape[1]
    uniforms = iter(ours.sequences[:, length:].T)
    multinomial = torch.multinomial

    def by_hand(*args, **kwargs):  # stock sampling is led along our tokens
        callers = {sys._getframe(above).f_code.co_name for above in range(3)}
        return next(uniforms)[:, None] if "_sample" in callers else multinomial(*args, **kwargs)

    monkeypatch.setattr(torch, "multinomial", by_hand)
    stock = model_of("llava").generate(**inputs, **options)
    assert torch.equal(stock.sequences, ours.sequences)
    assert len(stock.scores) == len(ours.scores)
    done = torch.zeros(3, dtype=torch.bool)
    ends = torch.tensor(OPTIONS[option].get("eos_token_id", [-5])).flatten()
    for t, (a, b) in enumerate(zip(stock.scores, ours.scores)):
        live = ~done
        torch.testing.assert_close(a[live], b[live], atol=2e-4, rtol=1e-4)
        done |= torch.isin(ours.sequences[:, length + t], ends)


class Grammar(LogitsProcessor):
    """Ids of one parity, then of the other; asserts that it is asked about no others, and counts its calls."""

    def __init__(self, length):
        self.length, self.calls = length, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        steps = input_ids[:, self.length :]
        assert (steps % 2 == torch.arange(steps.shape[1]) % 2).all(), "an illegal id"
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 != steps.shape[1] % 2, float("-inf"))


@pytest.mark.parametrize("do_sample", [True, False], ids=["sampled", "greedy"])
def test_banned_ids_not_asked(do_sample):
    inputs = prompt("llava", shapes("llava")["ragged"])
    length, seeded = inputs["input_ids"].shape[1], {"seed": 3} if do_sample else {}

    def ran(drafter):
        grammar = Grammar(length)
        options = {"do_sample": do_sample, "max_new_tokens": NEW, "logits_processor": [grammar], **seeded}
        model = fast("llava", drafter)
        tokens = new_tokens(model.generate(**inputs, **options), inputs)
        return tokens, grammar.calls, model.last_stats.tau

    expected, calls, _ = ran(None)
    assert calls == NEW * len(expected)
    banned = [[token ^ 1 for token in row] for row in expected]
    assert ran(Oracle(banned))[:2] == (expected, calls), "none below a banned id"
    for drafter in (TreeOracle(expected, wrong=0.3), TreeOracle(expected, wrong=0.3, per_row=True), Hostile()):
        tokens, _, tau = ran(drafter)
        assert tokens == expected and (tau > 1.3 or isinstance(drafter, Hostile))


def test_common_processors_once_a_round(monkeypatch):
    """Those of transformers that read nothing but the ids of a prefix as a set: for all nodes of a row, in one call."""
    kind, calls = transformers.RepetitionPenaltyLogitsProcessor, []
    call = kind.__call__

    def counted(self, input_ids, scores):
        calls.append(len(scores))
        return call(self, input_ids, scores)

    monkeypatch.setattr(kind, "__call__", counted)
    inputs = prompt("llava", shapes("llava")["one"])
    options = {"do_sample": False, "max_new_tokens": NEW, "repetition_penalty": 1.7, "min_new_tokens": 2}
    expected = new_tokens(model_of("llava").generate(**inputs, **options), inputs)
    assert calls == [1] * NEW
    calls.clear()
    model = fast("llava", TreeOracle(expected, wrong=0.3))
    assert new_tokens(model.generate(**inputs, **options), inputs) == expected
    assert len(calls) == 1 + model.last_stats.rounds < NEW and max(calls) > 1


NODES = {  # of a prefix of 9 ids and drafts of 3 levels: lengths 9 to 12
    "repetition": lambda n: transformers.RepetitionPenaltyLogitsProcessor(5.0),
    "suppressed": lambda n: transformers.SuppressTokensLogitsProcessor([7]),
    "length": lambda n: transformers.MinLengthLogitsProcessor(n, EOS),
    "new tokens": lambda n: transformers.MinNewTokensLengthLogitsProcessor(8, n - 8, EOS),
}


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("least", range(9, 15))
def test_nodes_scored_in_batches(name, least):
    processor = NODES[name](least)
    node_processor = at_any_prefix(processor, torch.zeros(1, 8))
    assert isinstance(node_processor, NodeProcessor)
    parent, ids = (-1, 0, 0, 1, 1, 2, 3), torch.tensor([[3, 4, 5, 4, 3, 5, 6, 8, 9]])
    draft = drafted(torch.tensor([[9, 10, 11, 12, 7, 10, 13]]), trees.static(parent))
    request = Request(None, ids, 20, sampling=Sampling(temperature=0.0, processors=(node_processor,)))
    state = SimpleNamespace(request=request, rows=[0], ids=lambda b: ids)
    logits = torch.randn(1, 7, VOCAB)
    result = process(logits, draft, state)
    for node, path in enumerate(([], [1], [2], [1, 3], [1, 4], [2, 5], [1, 3, 6])):
        below = torch.cat([ids[0], draft.value[0, path]])
        assert torch.equal(result[0, node], processor(below[None], logits[:, node])[0]), node


def test_seeds():
    inputs = prompt("llava", shapes("llava")["ragged"])
    model = fast("llava", "ngram")
    sample = lambda **how: new_tokens(model.generate(**inputs, do_sample=True, max_new_tokens=NEW, **how), inputs)  # noqa: E731
    assert sample(seed=1) == sample(seed=1) != sample(seed=2)
    assert sample(seed=[1, 2, 3])[1:] == sample(seed=[9, 2, 3])[1:]
    assert sample(seed=[1, 2, 3])[0] != sample(seed=[9, 2, 3])[0]
    assert sample(seed=1) == sample(seed=[1, 2, 3])
    one = lambda s: torch.Generator().manual_seed(s)  # noqa: E731
    assert sample(generator=one(4)) == sample(generator=one(4)) != sample(generator=one(5))
    assert sample(generator=[one(1), one(2), one(3)]) == sample(seed=1)
    torch.manual_seed(8)
    first, second = sample(), sample()
    torch.manual_seed(8)
    assert first == sample() and second == sample() and first != second
    state = torch.get_rng_state()
    sample(seed=1)
    assert torch.equal(state, torch.get_rng_state()), "a seed of our own leaves the global state alone"
    with pytest.raises(ValueError, match="seed: got 2 entries, expected 3"):
        sample(seed=[1, 2])


def test_global_seed():
    inputs = prompt("llava", shapes("llava")["one"])
    result = []
    for drafter in (None, "ngram", Hostile()):
        torch.manual_seed(21)
        result.append(new_tokens(fast("llava", drafter).generate(**inputs, do_sample=True, max_new_tokens=NEW), inputs))
    assert result[0] == result[1] == result[2]


def test_copies_of_a_prompt_are_independent():
    inputs = prompt("llava", shapes("llava")["ragged"])
    options = {"do_sample": True, "max_new_tokens": NEW, "num_return_sequences": 2, "seed": 5}
    expected = new_tokens(fast("llava", None).generate(**inputs, **options), inputs)
    assert len(expected) == 6 and len(set(map(tuple, expected))) == 6
    assert new_tokens(fast("llava", TreeOracle(expected, wrong=0.3)).generate(**inputs, **options), inputs) == expected


def test_warp_equals_transformers(monkeypatch):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    # Which of several equal tokens falls off the nucleus is up to torch's sort, which is stable on some machines only.
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    torch.manual_seed(1)
    logits = torch.randn(50, 40) * 3
    logits[:10] = logits[:10].round()  # ties
    cases = (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.9), (0.9, 12, 0.7), (1.0, 39, 0.99), (2.0, 60, 0.05)
    for temperature, k, p in cases:
        expected = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
        expected = TopKLogitsWarper(k)(None, expected) if k else expected
        expected = TopPLogitsWarper(p)(None, expected) if p < 1 else expected
        assert torch.equal(warp(logits, Sampling(temperature, k, p)), expected)
    assert torch.equal(warp(logits, Sampling()), logits)


@pytest.mark.parametrize("noise", [Uniform, Gumbel])
def test_drafter_numbers_apart(noise):
    """A rule with uniform numbers skips the seed of the drafter's; numbers that are indexed by position stay."""
    own = torch.Generator().manual_seed(3)
    made = noise([own], 4)
    before = own.clone_state()
    seed = torch.randint(2**62, (), generator=before)
    child = made.child_generators()[0]
    expected = torch.Generator().manual_seed(int(seed))
    assert torch.equal(torch.rand(3, generator=child), torch.rand(3, generator=expected))
    assert torch.equal(own.get_state(), before.get_state()) == (noise is Uniform)


def test_draw_and_residual():
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).expand(5, -1)
    u = torch.tensor([0.0, 0.2499, 0.2501, 0.9999, 1.0])
    assert draw(p, u).tolist() == [1, 1, 3, 3, 3], "never an id of probability zero, not even at u = 1"
    assert torch.allclose(residual(p[0], torch.tensor([0.5, 0.5, 0, 0, 0])), torch.tensor([0.0, 0, 0, 1, 0]))
    assert torch.equal(residual(p[0], p[0]), p[0])


@pytest.mark.parametrize(
    "option",
    [{"temperature": -1.0}, {"temperature": 1e-46}, {"top_k": -1}, {"top_p": 1.5}, {"guidance": float("inf")}],
    ids=str,
)
def test_bad_sampling(option):
    with pytest.raises(ValueError, match=rf"^{next(iter(option))}: got .*, expected "):
        Sampling(**option)


def test_argmax_and_topk_equal_torch():
    """Vocabularies large enough for two steps, with ties, -inf and NaN."""
    scores = torch.randn(3, 4, 2**14, generator=torch.Generator().manual_seed(0))
    result, expected = topk(scores, 10), scores.topk(10)
    assert torch.equal(result[0], expected.values) and torch.equal(result[1], expected.indices)
    scores[0, 0, [5, 9000]], scores[1], scores[2, 3, 7] = 99.0, float("-inf"), float("nan")
    assert torch.equal(argmax(scores), scores.argmax(dim=-1))
