"""Block drafters whose passes are recorded draft what they draft without, with a stand-in that needs no GPU."""

from __future__ import annotations

import copy

import pytest
import torch

import visspec
from tests import test_assistants as assistants
from tests import test_stream as streaming
from tests.published import begun, one_round
from tests.replays import Standin, recording
from tests.test_block_heads import dspark
from tests.test_compiled import GREEDY, SAMPLED, drafted
from tests.test_graphs import free, warned, with_drafts
from tests.test_merged import Promised
from tests.test_published import BLOCKS, saved
from tests.tiny import llama, model_of, prompt, shapes
from visspec import registry
from visspec.models.block import graphed
from visspec.models.block.drafter import BlockModel
from visspec.models.block.trained import BlockDrafter
from visspec.models.eagle import levels as eagle
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.lookup.context import ContextDrafter
from visspec.models.lookup.merged import MergedDrafter
from visspec.models.runner import buffer_pool


@pytest.fixture
def standin(monkeypatch) -> Standin:
    monkeypatch.setattr(buffer_pool, "MIN_NEW_TOKENS", 1)
    monkeypatch.setattr(buffer_pool, "FIRST", 32)
    return recording(monkeypatch)


def dflash(**options):
    return BlockDrafter.for_model(model_of("llava"), layers=2, block=5, seed=3, **options)


def pair(drafter, **options):
    """The drafter without recordings, and with them."""
    made = (copy.copy(drafter), False), (copy.copy(drafter), None)
    model = model_of("llava")
    return [visspec.accelerate(model, each, adaptive=False, graphs=graphs, **options) for each, graphs in made]


@torch.inference_mode()
def drafts(drafter, model, inputs, gaps=(1, 1, 1, 1)):
    """Its drafts, with so many rounds after each, in which rows accept different numbers of tokens."""
    target, state, answer = begun(drafter, model, inputs, 4 * sum(gaps))
    drafts = []
    for gap in gaps:
        drafts.append(drafter.propose(state, drafter.traits.levels))
        for _ in range(gap):
            one_round(target, drafter, state, answer)
    drafter.finish(state)
    return [draft.value.tolist() for draft in drafts], [draft.real for draft in drafts if draft.real is not None]


def check_drafts(drafter, model, inputs):
    quick = copy.copy(drafter)
    quick.record()
    values, real = drafts(drafter, model, inputs)
    own, recorded = quick.recorder, []
    run = own.run
    own.run = lambda *args: recorded.append(run(*args)) or recorded[-1]
    for _ in range(2):
        again, also_real = drafts(quick, model, inputs)
        assert again == values and all(map(torch.equal, real, also_real))
    assert [outputs is None for outputs in recorded] == [True, False, False, False] * 2  # prompts are read eagerly
    assert own.graphs == len(own.recordings) <= 3 and not own.refused
    assert len(free(own)) == len({stores.number for stores in free(own)}) > 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", BLOCKS)
def test_published_forms(name, standin, tmp_path):
    causal = ["causal=true"] * (name in ("z-lab-windows", "dspark-windows"))  # unsaid, which warns
    options = ":".join(["", ",".join(["confidence=0.2"] * name.startswith("dspark") + causal)]).rstrip(":")
    spec = f"{saved(tmp_path / 'head', *BLOCKS[name][0]())}{options}"
    drafter, _ = registry.drafter(spec, model_of("llava"))
    check_drafts(drafter, model_of("llava"), prompt("llava", shapes("llava")["ragged"]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("width", [1, 2])
def test_assistant_with_windows(width, standin):
    """As transformers loads it, with windows that the answer outgrows; chains and trees."""
    target, network = assistants.pair_of("dflash")
    check_drafts(BlockModel(network, target, width=width), target, assistants.prompt(assistants.LENGTHS))


HEADS = {
    "dflash": dflash, "dspark": lambda: dspark().shaped(confidence=0.3), "trees": lambda: dflash().shaped(tree="3-2"),
    "dflash2": lambda: dflash(selector=4, candidates=6),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", HEADS)
def test_answers_and_reuse(kind, standin):
    """Greedy and sampled answers are the same; later requests need no recordings, and a round is three launches."""
    eager, quick = pair(HEADS[kind]())
    own = quick.drafter.recorder
    for rows in ("one", "ragged"):
        inputs = prompt("llava", shapes("llava")[rows])
        for more in (GREEDY, SAMPLED):
            assert with_drafts(quick, inputs, **more) == with_drafts(eager, inputs, **more), rows
    made, replays = own.graphs, standin.replays
    assert made and not own.refused and quick.setup.passes == [quick.target.recorder, own]
    rounds = drafted(quick, inputs, **GREEDY)[1]
    assert own.graphs == made == len(own.recordings)
    asked = sum(levels > 0 for levels, _ in rounds)
    assert standin.replays - replays == 2 * len(rounds) + asked  # a verdict on the prompt's token, but no first pass
    assert quick.last_state.memory.cache.slots.lease is None


def test_more_to_read(standin, monkeypatch):
    """After rounds without it, as beside the drafter `context`; what is too long is read eagerly."""
    drafter, model, inputs = dflash(), model_of("llava"), prompt("llava", shapes("llava")["ragged"])
    want, widths = drafts(drafter, model, inputs, gaps := (1, 5, 1, 2, 1)), []
    for widest in (64, 8):
        monkeypatch.setattr(graphed, "WIDEST", widest)
        drafter.record()
        assert drafts(drafter, model, inputs, gaps) == want and not drafter.recorder.refused
        widths.append({recorded.inputs[-1].shape[1] for recorded in drafter.recorder.recordings.values()})
        drafter.recorder = None
    assert widths == [{8, 16}, {8}]


def test_merged_with_the_context(standin):
    inputs, results = prompt("llava", shapes("llava")["ragged"]), []
    for graphs in (False, None):
        drafter = MergedDrafter(dflash(), ContextDrafter())
        fast = visspec.accelerate(model_of("llava"), drafter, length=Promised(), graphs=graphs)
        results.append([drafted(fast, inputs, **(GREEDY | {"max_new_tokens": new})) for new in (30, 40)])
    own = fast.drafter.recorder
    assert results[0] == results[1] and own.graphs and not own.refused
    assert fast.setup.passes == [fast.target.recorder, own]


def test_rows_join_and_leave(standin):
    eager, quick = pair(dflash())
    rows = streaming.prompts("llava", do_sample=False)[:3] * 2
    rows = [row | {"max_new_tokens": new} for row, new in zip(rows, (30, 4, 17, 9, 30, 12))]
    want = [eager.run(**row).state.tokens[0] for row in rows]

    def queue():
        for waiting, row in zip((0, 0, 0, 2, 2, 0), rows):  # three rows at once, and others that come later
            yield from [None] * waiting
            yield row

    answers = sorted(quick.stream(queue(), slots=4), key=lambda answer: answer.id)
    own = quick.drafter.recorder
    assert [answer.tokens for answer in answers] == want and own.graphs and not own.refused
    assert len({len(recorded.inputs[0]) for recorded in own.recordings.values()}) > 1


@pytest.mark.parametrize("last", [1, 2])
def test_capture_failure(last, standin):
    eager, quick = pair(dflash())
    inputs, own = prompt("llava", shapes("llava")["ragged"]), quick.drafter.recorder
    own.record = Standin({last - 1: RuntimeError("no graphs here")})
    message, result = warned(lambda: [drafted(quick, inputs, **each) for each in (GREEDY, SAMPLED)])
    assert message == ["graphs: drafts of BlockDrafter run without CUDA graphs: RuntimeError: no graphs here"]
    assert result == [drafted(eager, inputs, **each) for each in (GREEDY, SAMPLED)] and own.record.count == last
    assert not own.recordings and not free(own) and not quick.target.recorder.refused


def test_nothing_is_left_of_other_requests(standin):
    """Padding is multiplied by 0: what is no number must not stand there."""
    drafter, model = dflash(), model_of("llava")
    drafter.record()
    inputs = prompt("llava", shapes("llava")["ragged"])
    want = drafts(drafter, model, inputs)
    with torch.inference_mode():
        for recorded in drafter.recorder.recordings.values():
            recorded.inputs[-1].fill_(float("nan"))
        for stores in free(drafter.recorder):
            [tensor.fill_(float("nan")) for tensor in stores.tensors]
    made = drafter.recorder.graphs
    assert drafts(drafter, model, inputs) == want and drafter.recorder.graphs == made


def test_changed_drafter_is_recorded_again(standin):
    eager, quick = pair(dflash())
    inputs, own = prompt("llava", shapes("llava")["one"]), quick.drafter.recorder
    quick.run(**inputs, **GREEDY)
    before = own.graphs
    with torch.no_grad():
        for weight in quick.drafter.head.parameters():  # shared with the other
            weight.data = weight * 1.5
    assert drafted(quick, inputs, **GREEDY) == drafted(eager, inputs, **GREEDY) and own.graphs > before
    seen, before = [], own.graphs
    hook = quick.drafter.assistant.norm.register_forward_hook(lambda *call: seen.append(call))
    rounds = drafted(quick, inputs, **GREEDY)[1]
    hook.remove()
    assert len(seen) == sum(levels > 0 for levels, _ in rounds) and own.graphs == before
    assert copy.copy(quick.drafter).recorder is None


def test_drafters_that_are_not_recorded(standin, monkeypatch):
    drafter = dflash()
    drafter.assistant.config._attn_implementation = "eager"
    drafter.record()
    assert drafter.recorder is None
    monkeypatch.setattr(buffer_pool, "MIN_NEW_TOKENS", 99)
    _, quick = pair(dflash())
    quick.run(**prompt("llava", shapes("llava")["one"]), **GREEDY)
    assert quick.drafter.recorder.graphs == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2", "dynamic tree", "static tree"])
def test_recorded_drafts_on_a_gpu(kind, monkeypatch):
    """Captured without a failure, with the same tokens: block drafters, and trees of EAGLE drafters."""
    monkeypatch.setattr(eagle, "USES", 0)
    model = llama(seed=9).cuda()
    heads = {"dspark": {"markov": 5, "confidence": True}, "dflash2": {"selector": 4, "candidates": 6}}
    if kind.endswith("tree"):
        drafter = EagleDrafter(EagleDrafter.for_model(model).head, model, width=3, nodes=7)
        drafter.shaped(tree="eagle" if kind == "static tree" else "")
    else:
        drafter = BlockDrafter.for_model(model, layers=2, block=5, **heads.get(kind, {}))
    plain, quick = (visspec.accelerate(model, copy.copy(drafter), adaptive=False, graphs=g) for g in (False, True))
    inputs = {name: x.cuda() for name, x in prompt("llama", shapes("llama")["ragged"]).items()}
    for more in (GREEDY, SAMPLED):
        asked = inputs | more | {"max_new_tokens": 40}
        assert quick.run(**asked).state.tokens == plain.run(**asked).state.tokens
    assert quick.drafter.recorder.graphs and not quick.drafter.recorder.refused
