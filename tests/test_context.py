"""The context drafter, which merges matches with the target's earlier candidates, and the policy that counts nodes."""

from types import SimpleNamespace as Bag

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

import visspec
from tests.tiny import model_of, prompt, shapes
from visspec.api.sources import Record
from visspec.cli import bench_text
from visspec.cli.bench_caption import bench_prompts
from visspec.loop.draft_length import SIZES, VAIN, AdaptiveLength, CostTable, FixedLength
from visspec.models.lookup import context, text_index
from visspec.models.lookup.context import FIRST_ANSWER, LENGTHS, MATCHES, ContextDrafter, Memory, RowContext, Shared
from visspec.types import Round

TEXT = [1, 2, 3, 4, 5, 1, 2, 3, 9, 5, 1, 2, 3]


def row(text, candidates=None):
    return RowContext(text, Shared(candidates or {}))


def tokens(tree):
    return [node.token for node in tree[1:]]


def test_longest_newest_match_first():
    result = row(TEXT).matches()
    assert [TEXT[place] for _, _, place in result] == [9, 4]  # both followed 1 2 3
    assert [LENGTHS[source // MATCHES] for source, _, _ in result] == [3, 3]
    longer = row([8, 6, 5, 1, 2, 3, 9, 1, 2, 3, 4, 8, 6, 5, 1, 2, 3]).matches()
    assert [LENGTHS[source // MATCHES] for source, _, _ in longer] == [5, 3]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_matches_are_those_of_a_search(text):
    result = row(text).matches()

    def length(place):
        return next((n for n in range(place) if text[place - n - 1] != text[-n - 1]), place)

    longest = max((length(place) for place in range(1, len(text))), default=0)
    assert len({place for _, _, place in result}) == len(result) <= MATCHES
    for source, ids, place in result:
        bucket = LENGTHS[source // MATCHES]
        assert ids == text and length(place) >= bucket, (bucket, place)
    if longest <= text_index.INDEXED:
        assert (longest > 0) == (len(result) > 0)
        assert not result or length(result[0][2]) == longest


def test_follows_finished_answers():
    shared = Shared()
    first = RowContext([7, 8, 9], shared)
    first.extend([1, 2, 3])
    first.end()
    second = RowContext([5, 8, 9], shared)
    assert [node.token for node in second.grow(nodes=8, depth=8)[1:]] == [1, 2, 3], "it ends where the answer ended"
    assert [source for source, _, _ in second.matches()] == [FIRST_ANSWER + MATCHES * LENGTHS.index(2)]
    assert not RowContext([5, 8, 9], Shared()).matches() and not RowContext([5, 8, 9], shared, ["matches"]).matches()


def test_what_requests_share_is_bounded(monkeypatch):
    monkeypatch.setattr(context, "MOST_ANSWERS", 100)
    monkeypatch.setattr(context, "MOST_CANDIDATES", 20)
    shared, memory = Shared(), Memory([])
    for n in range(50):
        shared.add([n, n + 1, n + 2])
        memory.send([(shared.candidates, (n, n + 1), True)], *torch.zeros(1, 4).topk(4))
        memory.receive()
        assert len(shared.answers.ids) <= 104 and len(shared.candidates) <= 22


def test_tree_of_matches_and_candidates():
    one = row(TEXT, {3: [7]})
    tree = one.grow(nodes=32, depth=3)
    assert {4, 7, 9} <= {node.token for node in tree if node.depth == 1}
    assert all(tree[node.parent].depth == node.depth - 1 for node in tree[1:])
    assert [node.reach for node in tree] == sorted((node.reach for node in tree), reverse=True)
    assert max(node.depth for node in tree) <= 3
    small = one.grow(nodes=2, depth=3)
    assert tokens(small) == tokens(tree)[:2]
    assert one.widen(nodes=32, depth=3) == tree, "a tree may grow in steps"


def test_a_chain_has_one_node_a_level():
    tree = row(TEXT, {3: [7]}).grow(nodes=32, depth=4, chain=True)
    assert [node.parent for node in tree] == list(range(-1, len(tree) - 1)) and len(tree) > 2


def test_sources_that_agree():
    alone = row(TEXT).grow(nodes=32, depth=1)
    both = row(TEXT, {3: [9]}).grow(nodes=32, depth=1)
    reach = [next(node.reach for node in tree if node.token == 9) for tree in (alone, both)]
    assert reach[1] > reach[0]


def test_rates_of_undrafted_proposals():
    one = row(TEXT, {3: [7]})
    rates = one.rates
    one.grow(nodes=1, depth=1)
    before = list(rates.rate)
    one.learn([9])
    raised = [key for key, rate in enumerate(rates.rate) if rate > before[key]]
    assert len(raised) == 1 and sum(a != b for a, b in zip(before, rates.rate)) == 3
    one.learn([9])  # a tree teaches once
    assert rates.rate != before and sum(rates.tries) == 3


def test_candidates_by_pair_and_token():
    memory, candidates = Memory([]), {}
    memory.send([(candidates, (1, 2), True)], *torch.tensor([[0.0, 3.0, 2.0, float("-inf")]]).topk(4))
    memory.receive()
    assert candidates == {(1, 2): [1, 2, 0], 2: [1, 2, 0]}
    places = [(candidates, (1, 2), False), (candidates, (4, 2), False)]
    memory.send(places, *torch.tensor([[9.0, 3.0, 2.0, float("-inf")], [0.0, 3.0, 9.0, float("-inf")]]).topk(4))
    memory.receive()
    rejected = "they replace no pair that text has shown"
    assert candidates == {(1, 2): [1, 2, 0], (4, 2): [2, 1, 0], 2: [2, 1, 0]}, rejected


def test_every_drafted_node_has_candidates():
    one = row(TEXT, {3: [7, 8], 7: [6]})
    tree = one.grow(nodes=8, depth=4)
    result = one.pairs(5, added=0)
    assert result[0] == (2, 3) and len(result) == 5
    assert result[1:] == [(tree[node.parent].token, node.token) for node in tree[1:5]]
    one.extend([9, 9])
    assert one.pairs(1, added=2) == result[:1], "the root, once its round has added tokens"


def test_candidates_are_the_targets_own(monkeypatch):
    model, inputs, sent = model_of("llama"), {"input_ids": torch.arange(5, 25)[None]}, []
    send = Memory.send
    monkeypatch.setattr(Memory, "send", lambda self, *given: (sent.append(given[:2]), send(self, *given)))
    fast = visspec.accelerate(model, ContextDrafter(nodes=6), length="fixed")
    ids = fast.generate(**inputs, max_new_tokens=24)
    with torch.no_grad():
        plain = model(ids).logits[0]
    start, checked = inputs["input_ids"].shape[1], 0
    for (places, values), done in zip(sent, fast.last_state.trace.rounds):
        n = done.committed[0]  # the root and the accepted nodes come last
        want = plain[start : start + n]
        assert [pair[1] for _, pair, accepted in places[-n:] if accepted] == ids[0, start : start + n].tolist()
        assert torch.allclose(values[-n:], want.topk(values.shape[1]).values, atol=1e-4)
        start, checked = start + n, checked + n
    rounds = zip(sent, fast.last_state.trace.rounds)
    assert checked > 12 and any(len(places) > done.committed[0] for (places, _), done in rounds)


def test_rejection_ignores_earlier_requests():
    inputs = prompt("llama", shapes("llama")["ragged"])
    options = {"do_sample": True, "temperature": 1.0, "seed": 3, "max_new_tokens": 24}
    fast = visspec.accelerate(model_of("llama"), ContextDrafter(), acceptance="rejection", adaptive=False)
    assert torch.equal(fast.generate(**inputs, **options), fast.generate(**inputs, **options))


# --- the cost of a pass -----------------------------------------------------------------------------------------------


def test_cost_interpolation():
    costs = CostTable()
    for size, seconds in ((1, 1.0), (4, 1.6), (8, 1.4)):
        costs.add(size, seconds)
    assert [costs.at(n) for n in (1, 4, 8, 16)] == [1.0, 1.6, 1.4, 1.4]
    assert 1.0 < costs.at(2) < costs.at(3) < 1.6 and 1.4 < costs.at(6) < 1.5
    costs.add(4, 100.0)  # an outlier counts as one and a half times what is known
    assert costs.at(4) == pytest.approx((1.6 + 2.4) / 2)


def test_costs_scaled_to_new_shapes():
    costs = CostTable({1: 1.0, 8: 1.5})
    costs.add(1, 2.0)
    assert (costs.at(1), costs.at(8)) == (2.0, 3.0)
    costs.add(4, 2.2)
    costs.forget_unused(1)
    assert costs.seconds == {1: 2.0, 4: 2.2}, "what was not measured since"


def test_a_draft_is_padded_to_a_cheaper_size():
    costs = CostTable({1: 1.0, 2: 1.6, 3: 1.9, 4: 1.3, 8: 1.5, 16: 1.2})
    assert [costs.padded(n) for n in (1, 2, 3, 4, 8)] == [1, 4, 4, 4, 16]
    plain = visspec.accelerate(model_of("llama"), None)
    policy = Padded(8)
    fast = visspec.accelerate(model_of("llama"), "context", length=policy)
    inputs = prompt("llama", shapes("llama")["ragged"])
    assert torch.equal(*(m.generate(**inputs, max_new_tokens=24, do_sample=False) for m in (plain, fast)))
    assert fast.length_policy.seen > {8} and min(fast.length_policy.seen) >= 8


class Padded(FixedLength):
    def __init__(self, levels=8):
        super().__init__(levels)
        self.seen = set()

    def pad(self, state, nodes):
        return max(nodes, 8)

    def observe(self, trace):
        self.seen |= {trace.nodes} if trace.nodes > 1 else set()


def drafted(policy, seconds, expected, rounds=200):
    """Seconds a token of rounds that commit what is expected, and how many of them drafted."""
    time = made = drafts = 0.0
    policy.counts_nodes = True
    for _ in range(rounds):
        trace = Bag(context=40, gave_up=0, nodes=1)
        state = Bag(trace=trace, budget=64, rows=[0], worth=len)
        if policy.depth(state):
            trace.nodes = state.worth(expected)
        trace.latest = {"verify": seconds(trace.nodes), "accept": 0.0, "draft": 0.002, "observe": 0.001}
        gained = expected[min(trace.nodes, len(expected)) - 1]
        trace.rounds = [Round(trace.nodes - 1, [gained], [True])]
        policy.observe(trace)
        time, made = time + sum(trace.latest.values()), made + gained
        drafts += trace.nodes > 1
    return time / made, drafts


def test_the_policy_finds_the_best_size():
    expected = [1 + 0.4 * n**0.5 for n in range(33)]
    for seconds in (lambda n: 1.0, lambda n: 1 + 0.02 * n, lambda n: 1 + 0.3 * (n > 1) + 0.05 * n, lambda n: float(n)):
        best = min((seconds(n) + 0.003) / expected[n - 1] for n in SIZES if n <= 33)
        assert drafted(AdaptiveLength(), seconds, expected)[0] < 1.04 * best


def test_sizes_that_cannot_pay_are_not_tried():
    """The costs of a batch of eight on a CPU, where three nodes pay and sixteen cost three plain passes."""
    tried = set()

    def seconds(n):
        tried.add(n)
        return 0.87 + 0.13 * n

    expected = [1.0, 1.27, 1.41, 1.53, 1.6, 1.65, 1.7, 1.74, *(1.74 + 0.03 * n for n in range(25))]
    assert drafted(AdaptiveLength(), seconds, expected, rounds=600)[1] > 580 and max(tried) <= 8


def test_pads_to_cheaper_size():
    """The table of a CPU's float32 products; a line through passes of two and three nodes would end drafting."""
    table = {1: 1.0, 2: 1.58, 3: 1.94, 4: 1.32, 6: 1.5, 8: 1.58, 12: 1.75, 16: 1.98}
    expected = [1.0, 1.4, 1.6, 1.75, 1.8, 1.85, 1.9, 1.95, *[1.95] * 8]
    result, drafts = drafted(AdaptiveLength(), lambda n: table.get(n, n / 8), expected, rounds=400)
    assert drafts > 300 and result < 1.04 * 1.32 / 1.75


def test_rests_where_nothing_pays():
    result, drafts = drafted(AdaptiveLength(), lambda n: float(n), [1.0 + 0.1 * n for n in range(33)], rounds=400)
    assert result < 1.02 and drafts <= 4 and VAIN < 400


# --- bench text -------------------------------------------------------------------------------------------------------


def test_prompts_are_of_ten_kinds(tmp_path):
    prompts = bench_text.read_prompts(None)
    assert len(prompts) == 48 and len({prompt.category for prompt in prompts}) == 10
    own = tmp_path / "prompts.jsonl"
    own.write_text('{"prompt": "Hello"}\n{"prompt": "Hi", "kind": "greeting"}\n')
    read = [(prompt.prompt, prompt.category) for prompt in bench_text.read_prompts(own)]
    assert read == [("Hello", ""), ("Hi", "greeting")]
    own.write_text('{"text": "Hi"}\n')
    with pytest.raises(ValueError, match="jsonl:1: got a line without a prompt, expected an object with one"):
        bench_text.read_prompts(own)


def asked(text, category):
    return Record(text, prompt=text, category=category)


class Letters:
    chat_template = None

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def __call__(self, text, return_tensors, padding):
        width = max(map(len, text))
        rows = [[0] * (width - len(one)) + [ord(letter) % 50 + 3 for letter in one] for one in text]
        ids = torch.tensor(rows)
        return BatchEncoding({"input_ids": ids, "attention_mask": (ids > 0).long()})


def bench(texts, tokenizer=None, **options):
    prompts = [asked(text, category) for text, category in texts]
    options = bench_text.Options(model="tiny", max_new_tokens=12, drafter=["context"], **options)
    warm = [asked(f"warm up {i}", "") for i in range(2)]
    return bench_prompts("text", model_of("llama"), tokenizer or Letters(), prompts, warm, options)


def test_bench_text_has_categories():
    result = bench([("abcabcabc", "a"), ("hello hello", "b")])
    assert [*result["baselines"]] == ["transformers_generate", "plain", "transformers_prompt_lookup"]
    assert {name: row["identical"] for name, row in result["categories"].items()} == {"a": 1, "b": 1}
    assert result["bench"] == "text" and result["identical"] == result["compared"] == 2 and not result["failures"]


def test_bench_text_in_batches_and_a_stream():
    result = bench([(text, "a") for text in ("abcabcabc", "hello hello", "a b c")], batch_size=2, stream=True)
    assert [*result["baselines"]] == ["transformers_generate", "plain"] and "categories" not in result
    assert result["identical"] == result["compared"] == 2
    assert result["items_per_second"] > 0 and result["over_transformers"] > 0


def test_bench_text_measures_no_prompt_twice():
    """A drafter that remembers answers would repeat its own answer of the warm-up."""
    asked = []

    class Listening(Letters):
        def __call__(self, text, **more):
            asked.extend(text)
            return super().__call__(text, **more)

    result = bench([("abcdefgh", ""), ("the quick brown fox", "")], Listening())
    assert asked[:2] == ["abcdefgh", "the quick brown fox"] and len(set(asked)) == len(asked) > 2
    assert result["n_prompts"] == 2
