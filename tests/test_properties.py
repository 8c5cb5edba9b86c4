"""Properties: arbitrary drafts, limits and stops never show in the output; trees and caches keep their invariants."""

from types import SimpleNamespace as Bag

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles import Double, drafted, fast, new_tokens, stock
from tests.tiny import prompt, shapes
from visspec import tree as trees
from visspec.cache import GROW, SlotCache, visibility
from visspec.loop.draft_length import AdaptiveLength
from visspec.loop.stream import fill_places
from visspec.types import OWN, Round

NEW = 12


@st.composite
def parents(draw, most=8, deepest=4):
    result, depth = [-1], [0]
    for n in range(1, draw(st.integers(1, most))):
        above = draw(st.sampled_from([m for m in range(n) if depth[m] < deepest]))
        result.append(above)
        depth.append(depth[above] + 1)
    return tuple(result)


class Drawn(Double):
    """Drafts whatever hypothesis draws: shapes shared or per row, right tokens mixed with wrong and absent ones."""

    def __init__(self, data, answers, per_row):
        self.data, self.answers, self.per_row = data, answers, per_row

    def propose(self, state, depth):
        shape = self.data.draw(parents(deepest=max(depth, 1)))
        rows, tokens = len(state.rows), []
        below = trees.static(shape).depth[0].tolist()
        kinds = self.data.draw(st.lists(st.integers(0, 9), min_size=rows * len(shape), max_size=rows * len(shape)))
        for b, row in enumerate(state.rows):
            ahead = self.answers[row][len(state.tokens[row]) :] + [-1] * len(shape)
            mine = [
                ahead[d - 1] if kinds[b * len(shape) + n] < 6 else kinds[b * len(shape) + n] - 7
                for n, d in enumerate(below)
            ]
            tokens.append([int(state.pending[b]), *mine[1:]])
        tree = trees.static(shape)
        if self.per_row:
            tree = trees.from_parents(torch.tensor([shape] * rows), max(tree.levels, 1))
        return drafted(torch.tensor(tokens), tree)


def watched(target):
    """For every commit of the target: slots that the cache holds, tokens of each row, and which rows are finished."""
    result, commit = [], target.commit

    def watch(state, draft, outcome):
        commit(state, draft, outcome)
        lengths = [state.request.prompt.shape[1] + len(state.tokens[row]) - 1 for row in state.rows]
        result.append((state.cache.slots.lengths, lengths, [row in state.finished for row in state.rows]))

    target.commit = watch
    return result


@settings(max_examples=60)
@given(
    data=st.data(),
    name=st.sampled_from(["llava", "gemma3", "qwen2_5_vl", "llama"]),
    shape=st.sampled_from(["one", "ragged", "even"]),
    limit=st.integers(1, NEW),
    end=st.one_of(st.none(), st.integers(0, NEW - 1)),
    per_row=st.booleans(),
)
def test_greedy_equals_plain_decoding(data, name, shape, limit, end, per_row):
    """Any drafter, any tree, a stop anywhere, any limit: stock output, and the cache holds what was emitted."""
    inputs, answers = prompt(name, shapes(name)[shape]), stock(name, shape)
    options = {"do_sample": False, "max_new_tokens": limit}
    if end is not None:
        options["eos_token_id"] = answers[data.draw(st.integers(0, len(answers) - 1))][end]
    expected = []
    for row in answers:
        cut = row[:limit]
        stops = [t for t, token in enumerate(cut) if token == options.get("eos_token_id")]
        expected.append(cut[: stops[0] + 1] if stops else cut)
    longest = max(map(len, expected))
    drafter = Drawn(data, answers, per_row)
    model = fast(name, drafter)
    slots_of_rounds = watched(model.target)
    output = new_tokens(model.generate(**inputs, **options), inputs)
    assert output == [row + [0] * (longest - len(row)) for row in expected]
    assert model.last_stats.faults == 0
    for held, emitted, finished in slots_of_rounds:
        for slots, tokens, over in zip(held, emitted, finished):
            cached = slots == tokens or (over and slots >= tokens)
            assert cached, "the prompt and all tokens but the pending one"


@settings(max_examples=12)
@given(order=st.permutations([0, 1, 2]), seed=st.integers(0, 99), drafter=st.sampled_from([None, "ngram"]))
def test_rows_may_be_permuted(order, seed, drafter):
    inputs = prompt("llama", ["19", "12", "3"])
    options = {"do_sample": True, "top_k": 12, "max_new_tokens": NEW}
    seeds = [seed, seed + 1, seed + 2]
    expected = new_tokens(fast("llama", drafter).generate(**inputs, **options, seed=seeds), inputs)
    mixed = {k: v[order] for k, v in inputs.items()}
    output = fast("llama", drafter).generate(**mixed, **options, seed=[seeds[i] for i in order])
    assert new_tokens(output, mixed) == [expected[i] for i in order]


@given(parents(most=14, deepest=13))
def test_tree_invariants(parent):
    tree, grown = trees.static(parent), trees.from_parents(torch.tensor([parent, parent]), max(1, len(parent) - 1))
    above = [[n] for n in range(len(parent))]
    for n, p in enumerate(parent):
        above[n] += above[p] if n else []
    for n, ancestors in enumerate(above):
        assert tree.ancestor[0, n].nonzero()[:, 0].tolist() == sorted(ancestors)
        assert int(tree.depth[0, n]) == len(ancestors) - 1
        assert [i for i in trees.paths(tree)[0, n].tolist() if i >= 0] == sorted(ancestors)
    assert tree.levels == max(map(len, above)) - 1 and tree.size == len(parent)
    assert tree.chain == (list(parent) == list(range(-1, len(parent) - 1)))
    for field in ("parent", "depth", "ancestor"):
        assert torch.equal(getattr(grown, field), getattr(tree, field).expand_as(getattr(grown, field)))


@pytest.mark.parametrize("parent", [(), (0,), (-1, 1), (-1, 0, 3), (-1, -1), (-1, 0, 2)])
def test_trees_that_are_none(parent):
    with pytest.raises(ValueError, match="parent"):
        trees.static(parent)


@given(
    rows=st.integers(1, 3), width=st.integers(1, 4), levels=st.integers(1, 4), nodes=st.integers(1, 20),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_growing_keeps_the_best(rows, width, levels, nodes, seed):
    """Against a naive best-first growth with dictionaries."""
    generator = torch.Generator().manual_seed(seed)

    def distribution(prefix):
        return torch.randn(9, generator=generator.manual_seed(hash((seed, *prefix)) % 2**31)).log_softmax(-1)

    tree_builder = trees.TreeBuilder(torch.arange(rows), width)
    frontier = [[(b,)] for b in range(rows)]
    naive: list[dict[tuple[int, ...], float]] = [{} for _ in range(rows)]
    for _ in range(levels):
        distributions = torch.stack(
            [torch.stack([distribution(prefix) for prefix in frontier[b]]) for b in range(rows)]
        )
        tokens, above = tree_builder.grow(distributions)
        for b in range(rows):
            children = {}
            for i, prefix in enumerate(frontier[b]):
                for token in distributions[b, i].topk(width).indices.tolist():
                    children[(*prefix, token)] = naive[b].get(prefix, 0.0) + float(distributions[b, i, token])
            naive[b] |= children
            best = sorted(children, key=children.get, reverse=True)[:width]
            frontier[b] = [(*frontier[b][int(a)], int(t)) for t, a in zip(tokens[b], above[b])]
            assert set(frontier[b]) == set(best)
    draft = tree_builder.finish(nodes)
    assert draft.tree.size == 1 + min(nodes, sum(len(n) for n in naive[:1]))
    for b in range(rows):
        index = trees.paths(draft.tree)[b].tolist()
        result = {tuple(draft.value[b, [i for i in path if i >= 0]].tolist()) for path in index}
        best = sorted(naive[b], key=naive[b].get, reverse=True)[: draft.tree.size - 1]
        assert result == {(b,), *best}


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(1, 3), layers=st.integers(1, 2))
def test_slot_cache_equals_lists(data, rows, layers):
    """Random rounds of writing, committing and leaving against lists of what each row should hold."""
    cache, model, counter = SlotCache(rows), [[] for _ in range(rows)], iter(range(1, 10**6))
    prompt_length = data.draw(st.integers(1, 5))
    for turn in range(data.draw(st.integers(1, 6))):
        size = prompt_length if turn == 0 else data.draw(st.integers(1, 60))
        written = torch.tensor([[next(counter) for _ in range(size)] for _ in model], dtype=torch.float32)
        key = written[:, None, :, None].expand(-1, 2, -1, 3)
        extent = cache.open(size, "cpu")
        assert extent == max(map(len, model)) + size
        for layer in range(layers):
            keys, values = cache.write(layer, key + layer, -key - layer)
            assert keys.shape == values.shape == (len(model), 2, extent, 3)
            for b, held in enumerate(model):
                row = [x + layer for x in held + written[b].tolist()]
                assert keys[b, 0, : len(row), 0].tolist() == row
                assert values[b, 1, : len(row), 2].tolist() == [-x for x in row]
            assert keys.isfinite().all()
        paths = []
        for held, new in zip(model, written.tolist()):
            some = data.draw(st.sets(st.integers(1, size - 1), max_size=6)) if size > 1 and turn else set()
            paths.append([0, *sorted(some)] if turn else list(range(size)))
            held += [new[n] for n in paths[-1]]
        cache.commit(paths)
        assert cache.lengths == list(map(len, model)) and cache.length == max(cache.lengths)
        if len(model) > 1 and turn and data.draw(st.booleans()):
            stay = data.draw(st.lists(st.booleans(), min_size=len(model), max_size=len(model)).filter(any))
            in_order = [b for b, stays in enumerate(stay) if stays]
            keep = fill_places(stay) if data.draw(st.booleans()) else in_order
            if keep is not None:
                assert sorted(keep) == in_order
                cache.select(keep)
                model = [model[b] for b in keep]
        if turn and data.draw(st.booleans()):
            model += joined(data, cache, layers, counter)


def joined(data, cache, layers, counter) -> list[list[float]]:
    """Rows of another cache, with padding in front, enter a cache. Returns what they hold."""
    rows, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    other = SlotCache(rows, lean=data.draw(st.booleans()))
    written = torch.tensor([[next(counter) for _ in range(size)] for _ in range(rows)], dtype=torch.float32)
    key = written[:, None, :, None].expand(-1, 2, -1, 3)
    other.open(size, "cpu")
    for layer in range(layers):
        other.write(layer, key + layer, -key - layer)
    other.commit([list(range(size))] * rows)
    assert not other.lean or other.keys[0].shape[2] == size
    skip = data.draw(st.lists(st.integers(0, size - 1), min_size=rows, max_size=rows))
    take = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
    cache.join(other, take, skip)
    assert torch.equal(other.keys[0][:, :, :size], key)  # rows that were not taken are still there
    return [written[b, skip[b] :].tolist() for b in take]


@pytest.mark.parametrize("lengths", [(GROW + 4, GROW + 4), (GROW + 4, GROW)], ids=["even", "ragged"])
def test_full_store_grows(lengths):
    cache, written = SlotCache(2), torch.arange(1.0, 2 * (GROW + 4) + 1).view(2, 1, -1, 1)
    for part in written.split([4, GROW], dim=2):
        cache.open(part.shape[2], "cpu")
        cache.write(0, part, -part)
        cache.commit([list(range(min(part.shape[2], n - at))) for n, at in zip(lengths, cache.lengths)])
    assert cache.keys[0].shape[2] == cache.length == GROW + 4
    cache.open(1, "cpu")
    keys, values = cache.write(0, torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1))
    for b, length in enumerate(lengths):
        assert torch.equal(keys[b, :, :length], written[b, :, :length]) and torch.equal(values[b], -keys[b])
        assert keys[b, 0, length] == 0


@given(parents(), st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 3))
def test_visibility(parent, lengths, spare):
    tree, rows, size = trees.static(parent), len(lengths), len(parent)
    extent = max(lengths) + size + spare
    padding = torch.tensor([[s >= b for s in range(min(lengths))] for b in range(rows)])
    seen = visibility(tree.ancestor, lengths, padding, extent)
    assert seen.shape == (rows, size, extent)
    for b, length in enumerate(lengths):
        for n in range(size):
            for s in range(extent):
                committed = s < length and not (s < min(lengths) and s < b)
                drafted = length <= s < length + size and bool(tree.ancestor[0, n, s - length])
                assert bool(seen[b, n, s]) == (committed or drafted)


@settings(max_examples=50)
@given(st.data(), st.integers(1, 6))
def test_pace_asks_within_limits(data, levels):
    """Whatever the times, the depth is within 0 .. min(levels, budget - 1)."""
    pace = AdaptiveLength(levels)
    for _ in range(60):
        budget = data.draw(st.integers(1, 9))
        times = {k: data.draw(st.floats(0, 1)) for k in ("verify", "accept", "draft", "observe")}
        trace = Bag(
            latest=times, gave_up=0, rounds=[], requested=0, structure=OWN, counted=False,
            context=data.draw(st.sampled_from([0, 40, 5000])),
        )  # fmt: skip
        state = Bag(budget=budget, rows=[0], trace=trace)
        depth = pace.depth(state)
        assert 0 <= depth <= min(levels, budget - 1)
        taken, trace.nodes = data.draw(st.integers(0, depth)), depth + 1
        trace.rounds.append(Round(depth, [taken + 1], [taken < depth]))
        pace.observe(trace)


@pytest.mark.parametrize("where", ["verify", "accept"])
def test_pace_wherever_host_waits(where):
    """On a device the pass is queued under `verify` and waited for under `accept`; its price is the same."""
    pace = AdaptiveLength(8)
    for n in range(60):
        levels = n % 5
        times = {"verify": 0.001, "accept": 0.001, "draft": 0.0001 * levels, "observe": 0.0}
        times[where] += 0.02 * levels  # a level costs ten plain passes: nothing drafted can pay
        more = {"context": 0, "requested": levels, "structure": OWN, "counted": False, "nodes": levels + 1}
        pace.observe(Bag(latest=times, rounds=[Round(levels, [levels + 1], [False])], **more))
    assert pace.best(8) == (0, OWN)
