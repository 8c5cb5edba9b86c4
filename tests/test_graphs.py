"""Passes recorded as graphs give the tokens and logits of passes that are not, with a stand-in that needs no GPU."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from types import SimpleNamespace

import pytest
import torch

import visspec
from tests import image_cases as images
from tests import test_compiled as compiling
from tests import test_stream as streaming
from tests.doubles import Grower, Hostile, Oracle, TreeOracle, fast, new_tokens, stock, together
from tests.replays import Standin, recording
from tests.test_block_heads import blocks
from tests.test_recurrent import model_of as recurrent
from tests.tiny import DISTINCT, FAMILIES, llama, model_of, prompt, shapes
from visspec import kernels
from visspec.accept.exact import Exact
from visspec.accept.graphed_rule import GraphedRule
from visspec.api.images.pipeline import ImagePipeline
from visspec.loop.draft_length import FixedLength
from visspec.models.attention import draft_attention, pass_inputs
from visspec.models.attention.pass_inputs import CACHE, Masks
from visspec.models.decoder import probe
from visspec.models.eagle import layer
from visspec.models.eagle import levels as drafts
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.eagle.head import EagleHead
from visspec.models.image_codes.target import ImageAR
from visspec.models.jacobi.drafter import Jacobi
from visspec.models.runner import buffer_pool
from visspec.types import Target

NEW = 24
IMAGES = sorted(images.CASES)


@pytest.fixture
def standin(monkeypatch) -> Standin:
    monkeypatch.setattr(buffer_pool, "MIN_NEW_TOKENS", 1)
    monkeypatch.setattr(buffer_pool, "FIRST", 16)
    return recording(monkeypatch)


def greedy(model, name, shape, **options):
    inputs = prompt(name, shapes(name)[shape])
    return new_tokens(model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options), inputs)


DRAFTERS = {
    "none": lambda answers: None, "ngram": lambda answers: "ngram", "chain": lambda answers: Oracle(answers),
    "tree": lambda answers: TreeOracle(answers, wrong=0.3),
    "tree a row": lambda answers: TreeOracle(answers, wrong=0.3, per_row=True),
    "grown": lambda answers: Grower(answers, seed=1), "hostile": lambda answers: Hostile(),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_tokens(kind, standin):
    for shape in ("one", "ragged"):
        model = fast("llama", DRAFTERS[kind](stock("llama", shape)))
        assert greedy(model, "llama", shape) == stock("llama", shape)
        recorder = model.target.recorder
        assert recorder.graphs > 0 and not recorder.refused
        assert standin.replays > len(model.last_state.trace.rounds)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", ["one", "ragged"])
@pytest.mark.parametrize("kind", ["none", "chain", "tree a row"])
def test_tree_attention_in_recordings(kind, shape, standin, monkeypatch):
    """On a GPU, in 16 bits: no mask over the slots of the stores. Padding before prompts is told by first slots."""
    told, plain, answers = [], kernels.tree_attention, stock("llama", shape)
    monkeypatch.setattr(draft_attention, "of_device", lambda device, dtype: (pass_inputs.TREE, ""))
    monkeypatch.setattr(probe, "_answers", {})
    monkeypatch.setattr(Masks, "whole", lambda *args: pytest.fail("a mask was made"))
    monkeypatch.setattr(kernels, "tree_attention", lambda *args: told.append(args[1].shape[2]) or plain(*args))
    model = fast("llama", DRAFTERS[kind](answers))
    assert greedy(model, "llama", shape) == answers
    recorder = model.target.recorder
    assert recorder.graphs > 0 and not recorder.refused
    assert set(recorder.buckets) & set(told)  # over whole stores: in a recording


@pytest.mark.filterwarnings("error")
def test_similar_drafts_share_recording(standin):
    answers = stock("llama", "one")
    model = fast("llama", Oracle(answers))
    assert greedy(model, "llama", "one") == answers
    for levels in (6, 4, 3, 2):
        model.setup.length_policy.levels = levels
        assert greedy(model, "llama", "one") == answers
    recorder = model.target.recorder
    assert {key[2] for key in recorder.recordings} == {2, 4, 8}


RECORDED = sorted(set(FAMILIES) - {"gemma2"})


def eager_passes(target) -> list[int]:
    seen, inner = [], target._eager
    target._eager = lambda state, draft: seen.append(draft.tree.size) or inner(state, draft)
    return seen


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [each for each in DISTINCT if each.values[0] in RECORDED])
def test_every_family(name, standin):
    """Pictures, videos, padding and windows; one row and several in turn. Eager passes are compared with recordings."""
    for shape in sorted(set(shapes(name)) & {("ragged", "one")[RECORDED.index(name) % 2], "video"}):
        model = fast(name, TreeOracle(stock(name, shape), wrong=0.3))
        seen, recorder = eager_passes(model.target), model.target.recorder
        assert greedy(model, name, shape) == stock(name, shape), shape
        assert len(seen) == recorder.graphs > 0 and not recorder.refused
        assert recorder in model.setup.passes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name, temperature", [*((name, 1.0) for name in IMAGES), ("janus", 0.0), ("emu3", 0.0)])
def test_every_image_family(name, temperature, standin, monkeypatch):
    case, seen, used = images.made(name), [], []

    def recorded(family):
        target = ImageAR(family)
        target.record(None)
        seen.append(eager_passes(target))
        used.append(target.recorder)
        return target

    plain = images.draw(case, [0, 1, 2], Jacobi(5), temperature=temperature)[0]
    monkeypatch.setattr(images, "ImageAR", recorded)
    monkeypatch.setattr(case.family, "recorder", None)
    for rule in ("exact", GraphedRule(Exact())):
        assert images.draw(case, [0, 1, 2], Jacobi(5), rule, temperature)[0] == plain
        assert images.draw(case, [2], Jacobi(5), rule, temperature)[0] == plain[2:]
    assert len(set(used)) == 1 and not used[0].refused  # the family's
    assert sum(map(len, seen)) == used[0].graphs > 0 and not seen[2]


# --- what else a request is -------------------------------------------------------------------------------------------


def both(model, drafter, *options, **more):
    plain, quick = (visspec.accelerate(model, drafter(), adaptive=False, graphs=g, **more) for g in (False, None))
    assert plain.target.recorder is None
    return [[fast.run(**o) for o in options] for fast in (plain, quick)], quick


def test_logits_features_and_what_is_kept(standin):
    """Of trees that are drafted from features, with padding; the cache goes on after other requests."""
    model = llama(seed=3)
    inputs = prompt("llama", shapes("llama")["ragged"])
    asked = {**inputs, "max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    drafter = lambda: EagleDrafter(EagleDrafter.for_model(model).head, model, width=2, nodes=6)  # noqa: E731
    another = {**asked, **prompt("llama", shapes("llama")["ragged"], seed=1)}
    options = [asked | {"output_logits": True}, another, asked]
    ((plain, *_), (first, _, *others)), quick = both(model, drafter, *options)
    assert torch.equal(plain.output.sequences, first.output.sequences)
    torch.testing.assert_close(torch.stack(first.output.logits), torch.stack(plain.output.logits), rtol=1e-5, atol=1e-5)
    assert first.state.trace.rounds == plain.state.trace.rounds
    for other in (first, *others):
        for mine, theirs in zip(other.output[CACHE].layers, plain.output[CACHE].layers):
            torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(mine.values, theirs.values, rtol=1e-5, atol=1e-5)
    assert quick.target.recorder.graphs > 0 and quick.last_stats.faults == 0


def test_sampling_with_seeds(standin):
    model = llama(seed=3)
    inputs = prompt("llama", shapes("llama")["ragged"])
    asked = [{**inputs, "max_new_tokens": 20, "do_sample": True, "seed": seed} for seed in (1, 2)]
    (plain, result), quick = both(model, lambda: Hostile(seed=1), *asked, acceptance="rejection")
    assert [r.state.tokens for r in plain] == [r.state.tokens for r in result]
    assert plain[0].state.tokens != plain[1].state.tokens
    assert isinstance(quick.rule, GraphedRule) and quick.rule.recordings and quick.last_stats.acceptance == "Rejection"


def test_rows_leave_one_after_the_other(standin):
    answers = stock("llama", "ragged")
    ends = [answers[0][15], answers[1][5], answers[2][10]]
    inputs = prompt("llama", shapes("llama")["ragged"])
    options = {**inputs, "max_new_tokens": NEW, "do_sample": False, "eos_token_id": ends}
    for drafter in (None, "ngram", TreeOracle(answers, wrong=0.2, per_row=True)):
        quick = fast("llama", drafter)
        assert torch.equal(quick.generate(**options), model_of("llama").generate(**options))
        assert len({key[1] for key in quick.target.recorder.recordings}) > 1  # other numbers of rows


@pytest.mark.parametrize("learned", [False, True], ids=["ngram", "features"])
def test_rows_join_later(learned, standin):
    """In spare rows of the stores as long as there are some, and in larger ones then."""
    model = model_of("llava")
    quick = visspec.accelerate(model, compiling.features(model) if learned else "ngram", adaptive=False)
    rows = [streaming.prompts("llava")[n] | {"max_new_tokens": 30, "do_sample": False} for n in (0, 1, 2, 0, 1)]
    want = [quick.run(**row).state.tokens[0] for row in rows]
    quick = visspec.accelerate(model, compiling.features(model) if learned else "ngram", adaptive=False)
    recorders = [quick.target.recorder, *([quick.drafter.recorder] if learned else [])]
    moved = []
    for recorder in recorders:
        free_ones = recorder._free
        number = recorders.index(recorder)
        recorder._free = lambda kind, n=number, free_ones=free_ones: moved.append((n, *kind[:2])) or free_ones(kind)

    def queue():
        for waiting, row in zip((0, 0, 0, 2, 2), rows):  # three rows at once, and two that come later
            yield from [None] * waiting
            yield row

    answers = sorted(quick.stream(queue(), slots=5), key=lambda answer: answer.id)
    assert [answer.tokens for answer in answers] == want
    assert {capacity for _, capacity, _ in moved} == {4, 8} and not any(recorder.refused for recorder in recorders)
    assert len(set(moved)) == len(moved)  # nothing moves for a row that there is room for


@pytest.mark.filterwarnings("error")
def test_buckets(standin, monkeypatch):
    model = llama(seed=7)
    inputs = {"input_ids": torch.randint(5, 60, (1, 9), generator=torch.Generator().manual_seed(0))}
    asked = {**inputs, "max_new_tokens": 90, "do_sample": False}
    quick = visspec.accelerate(model, None)
    recorder = quick.target.recorder
    want = model.generate(**asked)
    for _ in range(3):
        assert torch.equal(quick.generate(**asked), want)
        assert recorder.graphs == 4 and standin.count == 4 + len(quick.rule.recordings)
        assert sorted(held for held in map(slots_of, free(recorder))) == [16, 32, 64, 128]
    assert recorder.buckets == [16, 32, 64, 128, 256, 512]
    monkeypatch.setattr(buffer_pool, "LARGEST", 32)  # beyond the largest bucket it runs eager
    quick = visspec.accelerate(model, None)
    seen = eager_passes(quick.target)
    assert torch.equal(quick.generate(**asked), want)
    assert quick.target.recorder.graphs == 2 and len(seen) == 2 + (9 + 90 - 1) - 32
    assert len(free(quick.target.recorder)) == 2


def free(recorder):
    return [*recorder.idle, *recorder.returned]


def slots_of(stores):
    assert all(store.shape[2] == stores.slots for store in stores.tensors)
    return stores.slots


def test_stores_of_other_requests(standin):
    """Masked slots are multiplied by 0: what is no number must not stand there."""
    model = llama(seed=9)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    quick, asked = visspec.accelerate(model, None), {**inputs, "max_new_tokens": 20, "do_sample": False}
    want = quick.generate(**asked)
    for stores in free(quick.target.recorder):
        for tensor in stores.tensors:
            with torch.inference_mode():
                tensor.fill_(float("nan"))
    made = quick.target.recorder.graphs
    assert torch.equal(quick.generate(**asked), want) and quick.target.recorder.graphs == made
    layer = quick.generate(**asked, return_dict_in_generate=True)[CACHE].layers[0]  # a copy
    want = layer.keys.clone(), layer.values.clone()
    quick.generate(input_ids=torch.tensor([[8, 9, 10]]), max_new_tokens=20, do_sample=False)
    assert torch.equal(layer.keys, want[0]) and torch.equal(layer.values, want[1])


def test_stores_are_returned(standin):
    quick = visspec.accelerate(llama(seed=9), None)
    asked = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 20, "do_sample": False}
    quick.generate(**asked)
    recorder, verify = quick.target.recorder, quick.target.verify
    number, made = {stores.number for stores in free(recorder)}, recorder.graphs
    calls = []

    def failing(state, draft):
        calls.append(draft)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return verify(state, draft)

    quick.target.verify = failing
    with pytest.raises(KeyboardInterrupt):
        quick.generate(**asked)
    del quick.target.verify
    gc.collect()
    assert {stores.number for stores in free(recorder)} == number
    quick.generate(**asked)
    assert recorder.graphs == made


def test_few_stores_and_recordings_are_kept(standin, monkeypatch):
    monkeypatch.setattr(buffer_pool, "MAX_IDLE", 1)
    model = llama(seed=9)
    quick = visspec.accelerate(model, None)
    recorder = quick.target.recorder
    recorder.most = 2
    for rows, length in ((1, 3), (2, 20), (3, 40), (9, 5), (1, 3)):
        asked = {"input_ids": torch.full((rows, length), 7), "max_new_tokens": 6, "do_sample": False}
        asked["attention_mask"] = torch.ones_like(asked["input_ids"])
        assert torch.equal(quick.generate(**asked), model.generate(**asked))
        assert len(recorder.recordings) <= 2 and len(recorder.idle) <= 2
        alive = {stores.number for stores in free(recorder)}
        assert {key[0] for key in recorder.recordings} <= alive
    assert recorder.graphs > 4


def test_short_requests(standin, monkeypatch):
    monkeypatch.setattr(buffer_pool, "MIN_NEW_TOKENS", 8)
    model = llama(seed=9)
    quick = visspec.accelerate(model, None)
    recorder, seen = quick.target.recorder, eager_passes(quick.target)
    asked = {"input_ids": torch.tensor([[5, 6, 7]]), "do_sample": False}
    for new, graphs_made, eager in ((7, 0, 6), (12, 1, 7), (7, 1, 7)):
        result = quick.generate(**asked, max_new_tokens=new)
        assert torch.equal(result, model.generate(**asked, max_new_tokens=new))
        assert (recorder.graphs, len(seen)) == (graphs_made, eager), new
    two = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]), "do_sample": False, "max_new_tokens": 7}
    assert torch.equal(quick.generate(**two), model.generate(**two)) and recorder.graphs == 1


# --- drafts -----------------------------------------------------------------------------------------------------------


GREEDY = {"max_new_tokens": 15, "do_sample": False}
SAMPLED = {"max_new_tokens": 15, "do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 3}


def with_drafts(fast, inputs, **options) -> tuple:
    """Also the ids and parents of all drafts, few of which are accepted."""
    seen, propose = [], fast.drafter.propose
    fast.drafter.propose = lambda *args: seen.append(propose(*args)) or seen[-1]
    result = compiling.drafted(fast, inputs, **options)
    del fast.drafter.propose
    return result, [(draft.value.tolist(), draft.tree.parent.tolist()) for draft in seen]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("options", "levels"), [({}, 8), ({"table": None}, 6)])
def test_drafts_are_those_of_the_drafter(options, levels, standin, monkeypatch):
    """Of a round two calls, of which one reads what was accepted: greedy and sampled, ragged rows and such that end."""
    if "table" in options:  # as for a large vocabulary
        monkeypatch.setattr(layer, "FOLD_LIMIT", 0)
    model = model_of("llava")
    drafter = compiling.features(model, **{k: v for k, v in options.items() if k != "table"})
    eager = visspec.accelerate(model, drafter, adaptive=False, levels=levels, graphs=False)
    quick = visspec.accelerate(model, copy.copy(drafter), adaptive=False, levels=levels)
    own, want = quick.drafter.recorder, {}
    for rows in ("one", "ragged", "one"):
        inputs = prompt("llava", shapes("llava")[rows])
        for kind, more in enumerate((GREEDY, SAMPLED)):
            if (rows, kind) not in want:
                want[rows, kind] = with_drafts(eager, inputs, **more)
            assert with_drafts(quick, inputs, **more) == want[rows, kind], rows
    made, replays = own.graphs, standin.replays
    assert made and not own.refused and quick.setup.passes == [quick.target.recorder, own]
    result = compiling.drafted(quick, inputs, **GREEDY)
    assert result == want["one", 0][0] and own.graphs == made
    launches = [2 + -(-depth // 4) for depth, _ in result[1]]
    assert standin.replays - replays == sum(launches) + 1  # with the verdict on the prompt's token
    assert max(launches) == 4
    assert len(free(own)) == len({stores.number for stores in free(own)})
    assert quick.last_state.memory.slots.lease is None


def test_drafts_in_threads(standin, hurried):
    model = model_of("llava")
    made = [compiling.features(model) for _ in range(2)]
    quick, eager = (visspec.accelerate(model, d, adaptive=False, graphs=g) for d, g in zip(made, (None, False)))
    jobs = []
    for i in range(6):
        inputs = prompt("llava", shapes("llava")[("one", "ragged", "several")[i % 3]])
        more = (GREEDY, SAMPLED)[i % 2]
        want = compiling.drafted(eager, inputs, **more)[0]

        def job(inputs=inputs, more=more, want=want):
            result = quick.run(**inputs, **more)
            assert result.state.tokens == want and result.stats.faults == 0

        jobs.append(job)
    together(jobs)
    for recorder in (quick.target.recorder, quick.drafter.recorder):
        assert recorder.graphs and not recorder.refused


TREES = {
    "dynamic": {"levels": 5}, "opt": {"levels": 3, "tree": "opt"}, "vocabulary": {"levels": 3, "own": True},
    "eagle": {"tree": "eagle"}, "counts": {"tree": "3-2"},
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", TREES)
def test_trees(kind, standin, monkeypatch):
    """A whole tree is one launch: greedy, and sampled of all tokens and of few; one row and ragged ones."""
    shape = TREES[kind]
    if shape.get("own"):
        monkeypatch.setattr(layer, "FOLD_LIMIT", 0)
    model, top = model_of("llava"), SAMPLED | {"top_k": 5}
    head = compiling.features(model, **({"draft_vocab": 40} if shape.get("own") else {})).head
    drafter = EagleDrafter(head, model, width=3, nodes=7).shaped(tree=shape.get("tree", ""))
    eager, quick = (
        visspec.accelerate(model, copy.copy(drafter), adaptive=False, levels=shape.get("levels"), graphs=g)
        for g in (False, None)
    )
    own = quick.drafter.recorder
    for uses in (1, 0):  # in the first half, some are drafted eagerly first
        monkeypatch.setattr(drafts, "USES", uses)
        for rows in ("one", "ragged"):
            inputs = prompt("llava", shapes("llava")[rows])
            for more in (GREEDY, SAMPLED, top):
                assert with_drafts(quick, inputs, **more) == with_drafts(eager, inputs, **more), rows
    made, replays = own.graphs, standin.replays
    assert made and not own.refused
    rounds = compiling.drafted(quick, inputs, **top)[1]
    assert own.graphs == made and quick.last_state.memory.slots.lease is None
    assert standin.replays - replays == 2 * len(rounds) + sum(depth > 0 for depth, _ in rounds) + 1


def test_structures_of_trees(standin, monkeypatch):
    """Of one request: chains, and trees of two widths, each recorded for itself; rows join and leave."""
    monkeypatch.setattr(drafts, "USES", 0)
    model = model_of("llava")
    drafter = EagleDrafter(compiling.features(model).head, model, width=6, nodes=9)
    chosen = [drafter.structures[i % 3] for i in (0, 1, 2, 0, 2, 1)] * 20

    class Turns(FixedLength):
        def depth(self, state):
            state.trace.structure = chosen[len(state.trace.rounds)]
            return super().depth(state)

    rows = [streaming.prompts("llava")[n] | {"max_new_tokens": 12 + n, "do_sample": False} for n in (0, 1, 2, 0, 1)]
    results = []
    for graphs in (False, None):
        fast = visspec.accelerate(model, copy.copy(drafter), length=Turns(3), graphs=graphs)
        results.append([with_drafts(fast, row) for row in rows])
        streamed = sorted(fast.stream(rows, slots=3), key=lambda answer: answer.id)
        assert [[answer.tokens] for answer in streamed] == [tokens for (tokens, _, _), _ in results[0]]
    assert results[0] == results[1]
    own = fast.drafter.recorder
    kinds = {key[1][1] for key in own.recordings if key[1]}
    assert kinds == set(drafter.structures[1:]) and any(not key[1] for key in own.recordings) and not own.refused


def test_drafts_that_are_not_recorded(standin):
    model = model_of("llava")
    inputs = prompt("llava", shapes("llava")["one"])
    head = EagleHead(EagleDrafter.config_for(model))
    for drafter, more in (
        (EagleDrafter(head, model), {"do_sample": True, "top_k": 5, "seed": 1}),
        (blocks("flash"), {"do_sample": False}),
        (EagleDrafter(head, model, width=2), {"do_sample": False}),  # not yet
    ):
        eager, quick = (visspec.accelerate(model, copy.copy(drafter), adaptive=False, graphs=g) for g in (False, None))
        result = compiling.drafted(quick, inputs, max_new_tokens=6, **more)
        assert result == compiling.drafted(eager, inputs, max_new_tokens=6, **more)
        own = quick.drafter.recorder
        assert quick.target.recorder.graphs and (own is None or own.graphs == 0)


@pytest.mark.parametrize(("last", "width"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_draft_capture_failure(last, width, monkeypatch):
    monkeypatch.setattr(buffer_pool, "MIN_NEW_TOKENS", 1)
    monkeypatch.setattr(drafts, "USES", 0)
    recording(monkeypatch)
    model = model_of("llava")
    drafter, inputs = compiling.features(model), prompt("llava", shapes("llava")["ragged"])
    drafter = EagleDrafter(drafter.head, model, width=width, nodes=7)
    eager, quick = (visspec.accelerate(model, copy.copy(drafter), adaptive=False, graphs=g) for g in (False, None))
    own = quick.drafter.recorder
    own.record = Standin({last - 1: RuntimeError("no graphs here")})
    message, result = warned(lambda: [compiling.drafted(quick, inputs, **GREEDY) for _ in range(2)])
    assert message == ["graphs: drafts of EagleDrafter run without CUDA graphs: RuntimeError: no graphs here"]
    assert result == [compiling.drafted(eager, inputs, **GREEDY)] * 2 and own.record.count == last
    assert not own.recordings and not free(own) and not quick.target.recorder.refused


def test_recorded_again_after_learning(standin):
    drafter = compiling.features(model_of("llava"))
    drafter.record()
    first = drafter.recorder
    blocks = {n: first._block(torch.ones(2, n).long(), torch.ones(2, n, 4)) for n in (1, 2, 3, 5)}
    assert {n: (token.tolist()[0], len(feature[0])) for n, (token, feature) in blocks.items()} == {
        1: ([1], 1), 2: ([1, 1], 2), 3: ([1, 1, 1, 0], 4), 5: ([1, 1, 1, 1, 1, 0, 0, 0], 8)
    }  # fmt: skip
    drafter.record()
    assert drafter.recorder is first and copy.copy(drafter).recorder is None
    drafter.refresh()
    assert drafter.recorder is not first and drafter.recorder.layer is drafter.layer


# --- what can't be recorded -------------------------------------------------------------------------------------------


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return [str(w.message) for w in caught if str(w.message).startswith(("graphs:", "acceptance:"))], result


ASKED = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 20, "do_sample": False}


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("CUDA: no room")])
def test_a_capture_that_fails(at, error, monkeypatch):
    """At once or later, of a pass or of a verdict: said once, the same tokens, and nothing is kept of it."""
    monkeypatch.setattr(buffer_pool, "MIN_NEW_TOKENS", 1)
    monkeypatch.setattr(buffer_pool, "FIRST", 8)
    made = recording(monkeypatch, {at: error})
    model = llama(seed=9)
    quick = visspec.accelerate(model, "ngram", adaptive=False)
    message, outputs = warned(lambda: [quick.generate(**ASKED) for _ in range(3)])
    assert all(torch.equal(output, model.generate(**ASKED)) for output in outputs)
    recorder, seen = quick.target.recorder, eager_passes(quick.target)
    assert len(message) == 1 and str(error) in message[0] and made.count > at
    if message[0].startswith("graphs:"):
        assert message[0].startswith("graphs: passes of LlamaForCausalLM run without CUDA graphs: ")
        assert recorder.refused and not recorder.recordings and not free(recorder) and not recorder.shared
        quick.generate(**ASKED)
        assert len(seen) == len(quick.last_state.trace.rounds)
    else:
        assert not recorder.refused and not quick.rule.most


def test_no_memory_for_stores(standin, monkeypatch):
    allocated, calls, kept = buffer_pool.allocated_bytes, [], []

    def short(kind):
        calls.append(kind)
        if len(calls) in (2, 3 if kept else 0):
            raise torch.OutOfMemoryError("CUDA: no room")
        return allocated(kind)

    monkeypatch.setattr(buffer_pool, "allocated_bytes", short)
    model = llama(seed=9)
    quick = visspec.accelerate(model, None)
    assert torch.equal(quick.generate(**ASKED), model.generate(**ASKED))  # outgrows the first stores: the second try
    assert len(calls) == 3 and not quick.target.recorder.refused
    calls.clear()
    kept.append(True)
    quick = visspec.accelerate(model, None)
    message, output = warned(lambda: quick.generate(**ASKED))
    assert torch.equal(output, model.generate(**ASKED)) and len(message) == 1 and "no room" in message[0]
    assert quick.target.recorder.refused and not free(quick.target.recorder)


class Counting(torch.nn.Module):
    """An MLP that looks at the length of the cache on the host, which a graph can't follow."""

    def __init__(self, inner, cache):
        super().__init__()
        self.inner, self.cache = inner, cache

    def forward(self, x):
        return self.inner(x) * (1 + 0.2 * (self.cache[0].get_seq_length() % 5))


def test_control_host_counter(standin):
    model, cache = llama(seed=9), []
    layer = model.model.layers[0]
    layer.mlp = Counting(layer.mlp, cache)
    plainly = type(model.model).forward

    class Noting(type(model.model)):
        @functools.wraps(plainly)
        def forward(self, *args, **kwargs):
            cache[:] = [kwargs[CACHE]]
            return plainly(self, *args, **kwargs)

    model.model.__class__ = Noting
    plain, quick = (visspec.accelerate(model, None, probe=False, graphs=graph) for graph in (False, None))
    want = plain.generate(**ASKED)
    message, output = warned(lambda: quick.generate(**ASKED))
    assert torch.equal(output, want)
    assert len(message) == 1 and "its output differs by" in message[0]


def asking(model):
    """The model, with a layer that reads a number of its input on the host."""
    mlp = model.model.layers[1].mlp
    inner = mlp.forward

    class Asking(type(mlp)):
        def forward(self, x):
            return inner(x) if float(x.abs().sum()) > -1 else x

    mlp.__class__ = Asking
    return model


def test_a_pass_that_waits_is_noticed(standin):
    model = asking(llama(seed=9))
    quick = visspec.accelerate(model, None)
    message, output = warned(lambda: quick.generate(**ASKED))
    assert len(message) == 1 and "a synchronizing operation" in message[0]
    assert torch.equal(output, model.generate(**ASKED))


@pytest.mark.parametrize("where", ["", "model", "model.layers.0.mlp", "lm_head"])
def test_a_hook_is_called(where, standin):
    model, seen = llama(seed=9), []
    quick = visspec.accelerate(model, None)
    assert torch.equal(quick.generate(**ASKED), model.generate(**ASKED)) and quick.target.recorder.recordings
    hook = model.get_submodule(where).register_forward_hook(lambda *call: seen.append(call))
    message, _ = warned(lambda: quick.generate(**ASKED))
    assert len(seen) == ASKED["max_new_tokens"]
    hook.remove()
    name = where or "LlamaForCausalLM"
    why = f"graphs: got LlamaForCausalLM with hooks on {name}, expected one without: they would not be called"
    assert message == [why]
    if where == "":  # of what no pass goes through, nothing is said
        hook = model_of("llava").model.vision_tower.register_forward_hook(lambda *call: None)
        quick = fast("llava", None)
        message, _ = warned(lambda: greedy(quick, "llava", "one"))
        hook.remove()
        assert not message and quick.target.recorder.graphs


def test_changed_weights_and_modes(standin):
    model = llama(seed=9)
    quick = visspec.accelerate(model, None)
    with torch.autocast("cpu", torch.bfloat16):
        message, _ = warned(lambda: quick.generate(**ASKED))
    model.train()
    message += warned(lambda: quick.generate(**ASKED))[0]
    model.eval()
    assert not message and quick.target.recorder.graphs == 0
    quick.generate(**ASKED)
    assert (made := quick.target.recorder.graphs) > 0
    model.model.layers[0].mlp.down_proj.weight.data *= -3.0  # in place: what is recorded reads it
    assert torch.equal(quick.generate(**ASKED), model.generate(**ASKED)) and quick.target.recorder.graphs == made
    model.lm_head.weight = torch.nn.Parameter(llama(seed=10).lm_head.weight.detach())
    assert torch.equal(quick.generate(**ASKED), model.generate(**ASKED)) and quick.target.recorder.graphs > made


def offloaded():
    model = llama()
    model._hf_hook = SimpleNamespace(execution_device="cpu")
    return model


REFUSED = {
    "eager attention": (lambda: model_of("gemma2"), "Gemma2ForCausalLM with attention of 'eager', expected 'sdpa'"),
    "float64": (lambda: llama().double(), "LlamaForCausalLM of torch.float64, expected one of torch.float16, torch."),
    "rope": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}),
        "LlamaForCausalLM with rotary frequencies that depend on the length, expected one without",
    ),
    "states": (lambda: recurrent("qwen3_5"), "Qwen3_5ForCausalLM with layers that keep a state, expected one without"),
    "offloaded": (offloaded, "LlamaForCausalLM with weights that are moved or on several devices, expected all of"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_are_not_recorded(what, standin):
    make, words = REFUSED[what]
    model = make()
    for asked in (None, True, False):
        message, quick = warned(lambda asked=asked: visspec.accelerate(model, None, graphs=asked))
        assert quick.target.recorder is None and not isinstance(quick.rule, GraphedRule)
        assert [sentence.startswith(f"graphs: got {words}") for sentence in message] == [True] * bool(asked), message
        assert torch.equal(quick.generate(**ASKED), model.generate(**ASKED))


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiling", [False, True])
def test_no_graphs_on_cpu(compiling):
    model, why = llama(seed=9), "graphs: got a model on cpu, expected one on a CUDA device; it runs eager"
    for asked in (None, False, True):
        message, quick = warned(lambda asked=asked: visspec.accelerate(model, None, graphs=asked, compile=compiling))
        assert quick.target.recorder is None and (quick.target.passes is not None) == compiling
        if not compiling:
            message += warned(lambda quick=quick: quick.generate(**ASKED))[0]
        assert message == [why] * bool(asked)


def test_a_small_model_is_recorded_too(standin):
    model, small = llama(seed=9), llama(seed=10)
    quick = visspec.accelerate(model, small, adaptive=False)
    seen = eager_passes(quick.drafter.target)
    assert torch.equal(quick.generate(**ASKED), model.generate(**ASKED)) and quick.last_stats.faults == 0
    own = quick.drafter.recorder
    assert own.graphs == len(seen) > 0 and quick.setup.passes == [quick.target.recorder, own]


def test_images(standin, pipe):
    made = ImagePipeline(**{**pipe.components, "graphs": None})
    asked = {"prompt": ["a photo of a circle", "a photo of two stars"], "seed": 3, "output_type": "latent"}
    for drafter in ("jacobi", None):
        off = ImagePipeline(**{**pipe.components, "graphs": False})
        plain, result = (each(**asked, drafter=drafter) for each in (off, made))
        assert all(torch.equal(a, b) for a, b in zip(plain.tokens, result.tokens))
        assert off.family.recorder is None
    assert made.family.recorder.graphs > 0 and not made.family.recorder.refused


def test_targets_that_record_nothing_say_so():
    with pytest.warns(RuntimeWarning, match="graphs: Target does not support CUDA graphs"):
        Target().record(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Target().record(None)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_graphs_equal_eager(dtype, monkeypatch):
    """Over three buckets, with rows of different length; again, without a new recording; and in eight threads."""
    monkeypatch.setattr(buffer_pool, "FIRST", 32)
    model = llama(seed=9).to("cuda", dtype)
    inputs = {name: x.cuda() for name, x in prompt("llama", shapes("llama")["ragged"]).items()}
    asked = [{**inputs, "max_new_tokens": 80, **how} for how in ({"do_sample": False}, {"do_sample": True, "seed": 3})]
    plain, quick = (visspec.accelerate(model, "ngram", adaptive=False, graphs=g) for g in (False, True))
    want = [plain.generate(**each) for each in asked]
    recorder = quick.target.recorder
    if dtype == torch.float32:  # others round by the number of slots
        assert all(torch.equal(quick.generate(**each), one) for each, one in zip(asked, want))
    result = [quick.generate(**each) for each in asked]
    made = recorder.graphs
    assert made > 2 and not recorder.refused and quick.rule.recordings

    def job():
        assert all(torch.equal(quick.generate(**each), one) for each, one in zip(asked, result))

    job()
    assert recorder.graphs == made
    together([job] * 8)
    assert not recorder.refused and quick.rule.most


@gpu
@pytest.mark.gpu
def test_control_waiting_pass():
    model = asking(llama(seed=9).cuda())
    quick, asked = visspec.accelerate(model, None), {**ASKED, "input_ids": ASKED["input_ids"].cuda()}
    asked["max_new_tokens"] = 40
    message, output = warned(lambda: quick.generate(**asked))
    assert len(message) == 1 and "a synchronizing operation" in message[0]
    assert torch.equal(output, model.generate(**asked))
