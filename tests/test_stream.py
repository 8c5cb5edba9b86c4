"""Continuous batching: whoever shares the batch, a row's tokens are those it has alone; a failing row fails alone."""

import functools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as tf

import visspec
from tests import tiny_classes
from tests.doubles import Double, drafted, fast
from tests.test_eagle import make
from tests.tiny import DISTINCT, llama, model_of, prompt, shapes, single_row
from visspec import tree as trees
from visspec.loop.stream import Stream
from visspec.models.decoder import probe
from visspec.models.decoder.small_model import SmallModel
from visspec.types import DrafterTraits

LIMITS = (5, 1, 9, 3, 7, 2)


def prompts(name, shape="ragged", count=2, **common):
    """Prompts of different length and images, with a limit and a seed each."""
    rows = shapes(name)[shape]
    result = []
    for seed in range(count):
        inputs = prompt(name, rows, seed)
        result += [single_row(name, rows, inputs, b) for b in range(len(rows))]
    limits = (LIMITS * len(result))[: len(result)]
    return [p | {"max_new_tokens": n, "seed": 100 + i} | common for i, (p, n) in enumerate(zip(result, limits))]


def alone(quick, entries, **options):
    """Each prompt by itself: (tokens, drift)."""
    results = [quick.run(**{**options, **entry}) for entry in entries]
    return [(r.state.tokens[0], 0.0 if r.state.drift is None else float(r.state.drift[0])) for r in results]


def together(quick, entries, slots=3, **options):
    answers = list(quick.stream(entries, slots=slots, **options))
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    assert sorted(a.id for a in answers) == list(range(len(entries)))
    return [(a.tokens, a.drift) for a in sorted(answers, key=lambda a: a.id)]


class Guesser(Double):
    """Trees of three chains, right or wrong by the token before them: the same whoever is in the batch."""

    traits = DrafterTraits(levels=3, joins=True)

    def propose(self, state, depth):
        depth = min(depth, 3)
        parent = (-1, 0, 0, 1, 2, 3)[: 1 + 2 * depth]
        steps = torch.tensor([1, 3, 7, 2, 5][: len(parent) - 1])
        nodes = torch.cat([state.pending[:, None], 5 + (state.pending[:, None] * 3 + steps) % 80], dim=1)
        return drafted(nodes, trees.static(parent))


@pytest.mark.parametrize("name", DISTINCT)
def test_rows_are_as_alone_in_every_family(name):
    quick, entries = fast(name, "ngram"), prompts(name, count=1)
    assert together(quick, entries, slots=2) == alone(quick, entries)


@pytest.mark.parametrize(
    "rule, kind", [("typical:epsilon=0.3", "feature"), ("rejection", "small"), ("cool:omega=1.2,nu=0.8", "feature")]
)
def test_relaxed_rules_by_row(rule, kind):
    drafter = make("llava") if kind == "feature" else SmallModel(model_of("llava"), model_of("llava"))
    quick = fast("llava", drafter, acceptance=rule)
    entries = prompts("llava", do_sample=True, temperature=1.0, top_k=0)
    got, expected = together(quick, entries), alone(quick, entries)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert [drift for _, drift in got] == pytest.approx([drift for _, drift in expected], abs=1e-4)


def test_own_end_processors_and_stop():
    quick = fast("llava", "ngram")
    entries = prompts("llava", max_new_tokens=12)
    plain = [tokens for tokens, _ in alone(quick, entries)]
    entries[0] |= {"eos_token_id": plain[0][4]}
    entries[1] |= {"repetition_penalty": 5.0}
    entries[2] |= {"min_new_tokens": 8, "eos_token_id": plain[2][2]}
    entries[3] |= {"logits_processor": tf.LogitsProcessorList([tf.NoRepeatNGramLogitsProcessor(1)])}
    entries[4] |= {"stopping_criteria": [lambda ids, scores: torch.tensor([len(ids[0]) % 7 == 0])]}
    entries[5] |= {"suppress_tokens": [plain[5][0]]}
    expected = alone(quick, entries)
    assert together(quick, entries) == expected
    assert sum(tokens != was for (tokens, _), was in zip(expected, plain)) >= 5
    ends = {a.id: a.ended for a in quick.stream(entries[:5], slots=2)}
    assert ends[0] == "eos" and ends[4] == "stop" and ends[1] == "length"


def test_lanes_by_temperature():
    quick = fast("llava", "ngram")
    entries = prompts("llava")
    for i, entry in enumerate(entries):
        entry |= [{}, {"do_sample": True, "temperature": 0.7, "top_k": 5}, {"do_sample": True}][i % 3]
    assert together(quick, entries, slots=4) == alone(quick, entries)


def test_dynamic_rope_counts_each_row_alone():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = llama(max_position_embeddings=16, rope_parameters=rope)
    quick = visspec.accelerate(model, "ngram", adaptive=False)
    entries = [{"input_ids": torch.arange(5, 5 + n)[None], "max_new_tokens": 12} for n in (4, 14, 20, 9)]
    for entry, pad in zip(entries, (3, 0, 2, 5)):  # a prompt may come with padding: the second and fourth are as long
        entry["input_ids"] = torch.nn.functional.pad(entry["input_ids"], (pad, 0), value=1)
        entry["attention_mask"] = (torch.arange(entry["input_ids"].shape[1]) >= pad).long()[None]
    assert together(quick, entries) == alone(quick, entries)


@pytest.mark.parametrize("name, padded", [("llama", True), ("whisper", False), ("paligemma", False)])
def test_padded_prompts(name, padded):
    """Whisper's positions count padding; PaliGemma's text without token types sees more beside padded rows."""
    model = tiny_classes.tiny_model("WhisperForCausalLM") if name == "whisper" else model_of(name)
    quick = visspec.accelerate(model, "ngram")
    assert quick.target.pads == padded
    entries = [{"input_ids": torch.arange(5, 5 + n)[None], "max_new_tokens": 8} for n in (14, 4, 9, 4)]
    assert together(quick, entries) == alone(quick, entries)
    for entry, pads in zip(entries, (5, 0, 6, 3)):  # padding is dropped where rows join, which is no shorter reach
        entry["attention_mask"] = (torch.arange(entry["input_ids"].shape[1] + pads) >= pads).long()[None]
        entry["input_ids"] = torch.nn.functional.pad(entry["input_ids"], (pads, 0))
    assert together(quick, entries) == alone(quick, entries)


def test_results_in_order_of_end():
    quick, read = fast("llava", None), []
    entries = [p | {"max_new_tokens": n} for p, n in zip(prompts("llava"), (14, 2, 2, 2, 2, 2))]

    def queue():
        for i, entry in enumerate(entries):
            read.append(i)
            yield entry | {"id": f"row {i}"}

    stream = quick.stream(queue(), slots=2)
    assert next(stream).id == "row 1" and len(read) <= 4
    rest = [a.id for a in stream]
    assert rest[-1] == "row 0" or rest.index("row 0") > 2
    assert len(rest) == 5


def test_interrupted_stream():
    quick = fast("llava", "ngram")
    entries = prompts("llava")
    expected = alone(quick, entries)
    stream = quick.stream(entries, slots=2)
    first = next(stream)
    stream.close()
    assert (first.tokens, first.drift) == expected[first.id]
    assert together(quick, entries) == expected


def test_waiting_queue():
    quick, entries = fast("llava", "ngram"), prompts("llava")
    queue = [x for entry in entries for x in (entry, None, None)]
    answers = {a.id: a.tokens for a in quick.stream([None, *queue], slots=2)}
    assert [answers[i] for i in range(len(entries))] == [tokens for tokens, _ in alone(quick, entries)]


def raising(*_):
    raise RuntimeError("made up")


def test_a_prompt_at_fault_fails_alone():
    quick = fast("llava", "ngram")
    entries = prompts("llava", count=3, max_new_tokens=4)
    expected = alone(quick, entries[1:2])
    bad = {
        0: entries[0] | {"pixel_values": entries[0]["pixel_values"][:1, :, :4, :4]},
        2: entries[2] | {"max_new_tokens": 0},
        3: entries[3] | {"pixel_values": entries[3]["pixel_values"][:1]},
        4: entries[4] | {"logits_processor": tf.LogitsProcessorList([raising])},
        5: entries[5] | {"stopping_criteria": tf.StoppingCriteriaList([raising])},
        6: entries[6] | {"num_beams": 2},
        7: {"max_new_tokens": 3},
        8: 17,
    }
    answers = {a.id: a for a in quick.stream([bad.get(i, e) for i, e in enumerate(entries)], slots=3)}
    assert len(answers) == len(entries)
    assert all((answers[i].error is None) == (i not in bad) for i in answers)
    assert (answers[1].tokens, 0.0) == expected[0]
    assert "made up" in str(answers[4].error) and "made up" in str(answers[5].error)
    assert "num_beams" in str(answers[6].error) and "input_ids" in str(answers[7].error)
    assert all(a.ended is None for a in answers.values() if a.error)


def test_retried_row():
    quick = fast("llava", "ngram")
    entries = prompts("llava", do_sample=True)
    expected = alone(quick, entries)
    entries[0] |= {"pixel_values": entries[0]["pixel_values"][:1]}  # the group fails in its prefill
    answers = {a.id: a.tokens for a in quick.stream(entries, slots=3)}
    assert [answers[i] for i in range(1, len(entries))] == [tokens for tokens, _ in expected[1:]]


def test_generators_copied():
    quick = fast("llava", "ngram")
    own = [torch.Generator().manual_seed(i) for i in range(6)]
    entries = [entry | {"generator": [g]} for entry, g in zip(prompts("llava", do_sample=True), own)]
    entries = [{name: value for name, value in entry.items() if name != "seed"} for entry in entries]
    assert together(quick, entries) == together(quick, entries)


class Failing(Guesser):
    """Fails in every fourth proposal."""

    calls = 0

    def propose(self, state, depth):
        self.calls += 1
        if self.calls % 4 == 0:
            raise RuntimeError("made up")
        return super().propose(state, depth)


@pytest.mark.filterwarnings("ignore:drafter")
def test_failing_drafter():
    entries = prompts("llava")
    expected = alone(fast("llava", None), entries)
    drafter = Failing()
    assert together(fast("llava", drafter), entries, slots=2) == expected
    assert drafter.calls > 4  # rows that came later were drafted for


class Unjoined(Guesser):
    traits = DrafterTraits(levels=3)


class Breaking(Guesser):
    def join(self, state, other, take):
        raise RuntimeError("made up")


@pytest.mark.filterwarnings("ignore:drafter")
def test_drafters_that_take_no_rows():
    with pytest.raises(ValueError, match="Unjoined cannot be used for streaming: implement `join` and set `joins="):
        fast("llava", Unjoined()).stream([])
    entries = prompts("llava")
    assert together(fast("llava", Breaking()), entries) == alone(fast("llava", None), entries)


@pytest.mark.parametrize("options, words", [
    ({"slots": 0}, "slots: got 0"), ({"slots": True}, "slots: got True"), ({"ahead": -1}, "ahead: got -1"),
    ({"seed": [1, 2]}, "seed: got 2 seeds"), ({"num_beams": 4}, "num_beams: got 4"),
])  # fmt: skip
def test_arguments_checked_first(options, words):
    with pytest.raises(ValueError, match=words):
        fast("llava", None).stream(iter([raising]), **options)


def test_seed_of_stream():
    quick = fast("llava", None)
    entries = [{k: v for k, v in e.items() if k != "seed"} for e in prompts("llava")]
    expected = [quick.run(**e, do_sample=True, seed=7 + i).state.tokens[0] for i, e in enumerate(entries)]
    answers = {a.id: a.tokens for a in quick.stream(entries, slots=4, do_sample=True, seed=7)}
    assert [answers[i] for i in range(len(entries))] == expected


def test_streamers_get_their_own_row():
    class Kept:
        def __init__(self):
            self.values, self.ended = [], False

        def put(self, value):
            self.values += value.flatten().tolist()

        def end(self):
            self.ended = True

    quick = fast("llava", "ngram")
    entries = prompts("llava")
    streamers = [Kept() for _ in entries]
    answers = {a.id: a for a in quick.stream([e | {"streamer": s} for e, s in zip(entries, streamers)], slots=3)}
    for i, (entry, kept) in enumerate(zip(entries, streamers)):
        assert kept.ended and kept.values == entry["input_ids"][0].tolist() + answers[i].tokens
    for same in ("one", ["unhashable"]):  # ids of the caller may be equal, or anything
        streamers = [Kept() for _ in entries]
        given = [e | {"streamer": s, "id": same} for e, s in zip(entries, streamers)]
        result = list(quick.stream(given, slots=3))
        assert [a.id for a in result] == [same] * len(entries) and not any(a.error for a in result)
        assert all(s.ended and len(s.values) > 1 for s in streamers)


def test_on_tokens():
    quick = fast("llava", "ngram")
    entries = prompts("llava", max_new_tokens=9)
    expected, seen = [tokens for tokens, _ in alone(quick, entries)], [[] for _ in entries]

    def watch(i):
        def told(tokens):
            seen[i] += tokens
            if i == 3:
                raise RuntimeError("made up")
            return i % 2 and len(seen[i]) > 3

        return told

    answers = {a.id: a for a in quick.stream([e | {"on_tokens": watch(i)} for i, e in enumerate(entries)], slots=3)}
    for i, tokens in enumerate(expected):
        assert answers[i].tokens == seen[i] == tokens[: len(seen[i])]
        assert len(seen[i]) == 9 if i % 2 == 0 else len(seen[i]) < 9
        assert answers[i].ended == (None if i == 3 else "stop" if i % 2 else "length")
    assert "made up" in str(answers[3].error) and len(seen[3]) == 1


def test_levels_of_rows(monkeypatch):
    quick, entries = fast("llava", "ngram"), prompts("llava", max_new_tokens=12)
    counted, verify = Counter(), quick.target.verify

    def counting(state, draft):
        for b, row in enumerate(state.rows):
            real = draft.tree.size - 1 if draft.real is None else int(draft.real[b, 1:].sum())
            counted[tuple(state.request.each[row].prompt[0].tolist())] += real
        return verify(state, draft)

    monkeypatch.setattr(quick.target, "verify", counting)
    result = {a.id: sum(r.levels for r in a.rounds) for a in quick.stream(entries, slots=4)}
    assert result == {i: counted[tuple(e["input_ids"][0].tolist())] for i, e in enumerate(entries)}
    assert len({*result.values()}) > 1


def test_options_read_once(monkeypatch):
    from visspec.api.text import requests

    quick, calls, real = fast("llava", "none"), [], requests.of_generate
    entries = [{k: v for k, v in e.items() if k != "seed"} for e in prompts("llava", count=4)]  # six limits
    expected = alone(quick, entries)
    assert together(quick, entries, slots=12) == expected  # the probe of joined pictures makes requests of its own
    monkeypatch.setattr(requests, "of_generate", lambda *a, **o: calls.append(o) or real(*a, **o))
    assert together(quick, entries, slots=12) == expected
    assert len(calls) < len(entries) and {o["max_new_tokens"] for o in calls} == set(LIMITS)


def test_a_row_knows_its_rounds_and_origins():
    quick = fast("llava", "ngram")
    entries = prompts("llava")
    for answer in quick.stream(entries, slots=3):
        result = quick.run(**entries[answer.id])
        assert answer.origin == result.state.trace.origin[0]
        assert [r.committed for r in answer.rounds] == [r.committed for r in result.state.trace.rounds]
        assert answer.tau == pytest.approx(result.stats.tau) or not answer.rounds


def test_finished_rows_leave_nothing(monkeypatch):
    """Rows take the places of others in every list of the state."""
    kept, plain = [], Stream._round
    monkeypatch.setattr(Stream, "_round", lambda self, lane: kept.append(lane.state) or plain(self, lane))
    list(fast("llava", "ngram").stream(prompts("llava", count=3, max_new_tokens=4), slots=3))
    state = kept[-1]
    sizes = [len(x) for x in (state.tokens, state.trace.origin, state.request.each, state.memory.rows)]
    assert max(sizes) <= 3 and not state.trace.rounds and not state.request.media
    assert all(store.shape[0] <= 3 for store in state.cache.slots.keys)


def test_stream_beside_generate():
    quick = fast("llava", "ngram")
    entries = prompts("llava")
    expected, pool = alone(quick, entries), ThreadPoolExecutor(2)
    streams = [pool.submit(together, quick, entries, slots=2 + n) for n in range(2)]
    assert alone(quick, entries) == expected and [stream.result() for stream in streams] == [expected] * 2


MOLMO = "Molmo2ForConditionalGeneration"  # patch indices of a picture count through the whole batch


@functools.cache
def pictured(name):
    """A model and three prompts with three different pictures, the second again, and their answers alone."""
    if name == MOLMO:
        model = tiny_classes.tiny_model(name)
        form, count = tiny_classes.picture_form(model)
        entries = [tiny_classes.placed(model, lambda n, b=b: form(n, b), count, [9 + 3 * b]) for b in range(3)]
    else:
        model = model_of(name)
        entries = [prompt(name, [row], seed) for seed, row in enumerate(["3 i 4 i 9", "12 i 4", "6 i 5"])]
    entries = [{**each, "max_new_tokens": 6} for each in [*entries, entries[1]]]
    return model, entries, [tokens for tokens, _ in alone(visspec.accelerate(model, None, adaptive=False), entries)]


@pytest.mark.parametrize("room", [0, 1 << 29])
@pytest.mark.parametrize("name", [MOLMO, "llava", "qwen2_vl", "smolvlm"])
def test_three_pictures_in_a_batch(name, room):
    model, entries, expected = pictured(name)
    quick = visspec.accelerate(model, None, adaptive=False)
    assert [tokens for tokens, _ in together(quick, entries, prefix_cache=room)] == expected
    assert set(quick.target.joins.values()) == {name != MOLMO}


def test_pictures_that_look_alike():
    """The first two rows show the same picture, so that a mix-up changes no logits; the third shows another one."""
    model, entries, expected = pictured(MOLMO)
    quick = visspec.accelerate(model, None, adaptive=False)
    same, other = [entries[1], entries[3]], [entries[0], entries[1]]
    assert [tokens for tokens, _ in together(quick, same, prefix_cache=0)] == [expected[1]] * 2
    assert set(quick.target.joins.values()) == {False}
    assert [tokens for tokens, _ in together(quick, other)] == expected[:2]


def test_pictures_that_move_no_logits(monkeypatch):
    model, entries, expected = pictured("llava")
    quick, asked = visspec.accelerate(model, None, adaptive=False), []
    joins = probe.joins
    monkeypatch.setattr(probe, "reflect", lambda values: values)
    monkeypatch.setattr(probe, "joins", lambda *given: asked.append(joins(*given)) or asked[-1])
    result = together(quick, [entries[1], entries[3]] * 5, slots=2, prefix_cache=0)
    assert [tokens for tokens, _ in result] == [expected[1], expected[3]] * 5
    assert asked == [None] * 3 and set(quick.target.joins.values()) == {False}
