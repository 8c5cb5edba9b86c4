"""Presets of the feature drafter: each trains, is saved and loaded, and is exact in ragged batches."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image

import visspec
from tests.doubles import raises_line
from tests.published import Weights, begun, edges
from tests.tiny import llama, model_of, prompt, shapes
from visspec import registry
from visspec.api.training import drafter as train_drafter
from visspec.api.training.data import Reader, TrainingData
from visspec.api.training.drafter import Prompts, request_of
from visspec.api.training.presets import focused_state, frequent, of_preset
from visspec.loop.decode import open_request
from visspec.models.block.trained import DECAY, BlockDrafter
from visspec.models.decoder.target import HFDecoder
from visspec.models.drafting.static_tree import EAGLE
from visspec.models.eagle.drafter import EagleDrafter
from visspec.presets import RECIPES
from visspec.testing import check_drafter
from visspec.train.capture import capture
from visspec.train.options import TrainingOptions

NEW = 12
TRAINED = [name for name, entry in registry.table("recipe").items() if entry.needs == "text" and name != "own"]
TINY = {"steps": 2, "rows": 3, "max_new_tokens": 7, "group": 1, "reuse": 1, "validate_every": 2}


@pytest.fixture
def data(tmp_path, monkeypatch):
    for n in range(4):
        Image.new("RGB", (8, 8), (40 * n, 0, 0)).save(tmp_path / f"{n}.png")
    lines = [json.dumps({"image": str(tmp_path / f"{n}.png"), "prompt": "x"}) for n in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    seen = []

    def prepare(processor, chats, media, model):
        seen.append("pictures" if any(media) else "words")
        rows = ["4 i 5", "3 i 2 i 6", "5 i 2"] if any(media) else ["9", "5", "14"]
        return prompt("llava", rows[: len(chats)], seed=len(seen))

    monkeypatch.setattr(train_drafter.targets, "load", lambda *a, **k: (model_of("llava"), None))
    monkeypatch.setattr(train_drafter, "prepare", prepare)
    return tmp_path / "data.jsonl", seen


@pytest.mark.parametrize("name", TRAINED)
def test_preset_trains_and_is_exact(data, tmp_path, name):
    more = {"draft_vocab": 40} if name in ("eagle3", "vispec") else {}
    result = train_drafter.run("x", data[0], tmp_path / "out", preset=name, **TINY, **more)
    assert len(result) == 1 and result[0]["tau_greedy"] >= 1.0
    model, preset = model_of("llava"), RECIPES[name]
    fresh = registry.drafter_class(preset.kind).for_model(model, **of_preset(name, model, more)[0])
    drafter, _ = registry.drafter(tmp_path / "out", model)
    assert drafter.config == fresh.config and type(drafter) is registry.drafter_class(preset.kind)
    assert drafter.config.levels == preset.network.get("levels", 15)
    sizes = {key: value for key, value in preset.draft.items() if key != "tree"}
    assert {key: getattr(drafter, key) for key in sizes} == sizes
    assert not more or not torch.equal(drafter.ids, fresh.ids), "ids are those of the answers"
    assert drafter.paths == (EAGLE if preset.draft.get("tree") else ())
    before = dict(fresh.head.named_parameters())
    moved = [name for name, value in drafter.head.named_parameters() if not torch.equal(value, before[name])]
    still = {"img_fc.bias"} if name == "blind" else set()
    assert set(dict(drafter.head.named_parameters())) - set(moved) <= still
    assert json.loads((tmp_path / "out" / "provenance.json").read_text())["preset"] == name
    fast = check_drafter(drafter, model, prompt("llava", shapes("llava")["ragged"]))
    assert max(r.levels for r in fast.last_state.trace.rounds) > 1


def test_validation_share(data, tmp_path, monkeypatch):
    given, whole = [], train_drafter.Prompts
    monkeypatch.setattr(train_drafter, "Prompts", lambda *a, **k: given.append(a[3].tolist()) or whole(*a, **k))
    lines = [json.dumps(json.loads(data[0].read_text().splitlines()[0]) | {"prompt": str(n)}) for n in range(60)]
    data[0].write_text("\n".join(lines))
    train_drafter.run("x", data[0], tmp_path / "out", **{**TINY, "steps": 1})
    assert [len(items) for items in given] == [57, 3] and not set(given[0]) & set(given[1])


def test_preset_resumes(data, tmp_path):
    options = {"preset": "eagle3", "draft_vocab": 40, **TINY, "steps": 6, "save_every": 2}

    class Stopped(Exception):
        pass

    done = []

    def update(trainer, lesson, before=train_drafter.Trainer.update):
        if len(done) == 5:
            raise Stopped
        done.append(1)
        return before(trainer, lesson)

    data[1].clear()  # the prompts are functions of their number
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(train_drafter.Trainer, "update", update)
        train_drafter.run("x", data[0], tmp_path / "part", **options)
    model = model_of("llava")
    kept = EagleDrafter.from_pretrained(tmp_path / "part", model).ids
    train_drafter.run("x", data[0], tmp_path / "part", **options, resume=True)
    assert torch.equal(EagleDrafter.from_pretrained(tmp_path / "part", model).ids, kept)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "preset", ["features", "features blind", "eagle", "eagle3", "msd", "vispec", "flash", "specvlm", "dream", "blind"]
)
def test_a_rollout_is_what_drafting_says(name, preset):
    """Step k of the rollout at answer token t is level k + 1 of a chain that starts at token t - k."""
    model = model_of(name)
    if preset.startswith("features"):
        drafter = EagleDrafter.for_model(model, image_latents=0 if "blind" in preset else 2)
    else:
        more = {"draft_vocab": 40} if preset in ("eagle3", "vispec") else {}
        drafter = EagleDrafter.for_model(model, **of_preset(preset, model, more)[0])
    taught = partial(drafter.trained_logits, tokens=None)
    target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True, states=True)

    def request():
        inputs = prompt(name, ["4 i 5", "6 i 3 i 2"], seed=2)
        return request_of(model, inputs, temperature=1.0, max_new_tokens=10, seed=7)

    lesson = capture(target, visspec.Exact(), request())
    with torch.no_grad():
        steps = drafter.rollout(lesson, 1 if preset == "flash" else 3)
    with torch.inference_mode():
        state, scores = open_request(target, visspec.Exact(), request())
        drafter.start(state, scores)
        feature = drafter._catch_up(state.memory, 3)
        if preset == "flash":
            for level, ahead in enumerate(drafter.layer.head.spread(feature).unbind(1)):
                torch.testing.assert_close(taught(ahead), taught(steps[level].states[:, level]), rtol=1e-3, atol=1e-4)
            return
        for level in range(3):
            torch.testing.assert_close(taught(feature), taught(steps[level].states[:, level]), rtol=1e-3, atol=1e-4)
            token = lesson.ids[:, lesson.prompt_length + level + 1]
            memory = state.memory
            turn, bias = memory.rope(memory.table, 1, level), memory.context_bias(1, level)
            feature = drafter.layer.step(memory, token, feature, bias, turn, level)


def test_training_draws_by_seed_and_step(tmp_path):
    """SpecVLM's gate: the same weights, whatever else drew from torch's generator."""
    model, ends = model_of("llava"), []
    for n in range(2):
        drafter = EagleDrafter.for_model(model, **of_preset("specvlm", model, {"image_latents": 2})[0])
        target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True, states=True)

        def prompts(number):
            inputs = prompt("llava", ["4 i 5", "6 i 3"], seed=number)
            return request_of(model, inputs, temperature=1.0, max_new_tokens=6, seed=number)

        plan = TrainingOptions(steps=3, batch=2, rows=2, group=1, reuse=1, unroll=1)
        trainer = train_drafter.Trainer(target, drafter, visspec.Exact(), prompts, plan, tmp_path / str(n), {})
        torch.manual_seed(n)
        trainer.run()
        before = torch.get_rng_state()
        torch.manual_seed(n)
        assert torch.equal(before, torch.get_rng_state()) and not drafter.head.training
        ends.append(drafter.head.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not torch.equal(ends[0]["compressor.gate.weight"], EagleDrafter.for_model(
        model, **of_preset("specvlm", model, {"image_latents": 2})[0]).head.compressor.gate.weight)  # fmt: skip


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("head", [{"markov": 5}, {"selector": 4, "candidates": 6}], ids=lambda head: next(iter(head)))
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "llama"])
def test_block_rollout_equals_drafting(name, head, first, monkeypatch):
    """Each tile of an answer is the pass of a drafter that has read the target's states up to its anchor."""
    model, rows = model_of(name), ["9", "11"] if name == "llama" else ["4 i 5", "6 i 3 i 2"]
    drafter = BlockDrafter.for_model(model, layers=2, block=4, **head)
    for name_, p in drafter.head.named_parameters():
        if any(part in name_ for part in ("markov.up", "_conv", "candidate")):
            torch.nn.init.normal_(p)
    target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True, states=True)

    def request():
        return request_of(model, prompt(name, rows, seed=2), temperature=1.0, max_new_tokens=12, seed=7)

    lesson, lengths = capture(target, visspec.Exact(), request()), [12, 8]
    object.__setattr__(lesson, "lengths", lengths)
    drafter.head.train()
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(torch, "randint", lambda *_: torch.tensor(first))
        ((states, weight),) = drafter.rollout(lesson, 1)
        logits = drafter.trained_logits(states, lesson.ids[:, lesson.prompt_length : -1])
        if drafter.config.selector:
            before, after = (lesson.ids[:, lesson.prompt_length + i :][:, :11] for i in (0, 1))
            scores, ids = drafter.head.sequential.scores(logits, states, before, after)
            assert (ids == after[..., None]).any(-1).all()
            logits = torch.full_like(logits, float("-inf")).scatter(-1, ids, scores)
    for b, length in enumerate(lengths):
        want = [DECAY ** ((t - first) % 3) if first <= t < length - 1 else 0.0 for t in range(11)]
        torch.testing.assert_close(weight[b], torch.tensor(want))
    drafter.refresh()
    with torch.inference_mode():
        state, opening = open_request(target, visspec.Exact(), request())
        drafter.start(state, opening)
        start, read = lesson.prompt_length, 0
        for anchor in range(first, 11, 3):
            told = state.memory.placed(state.position)[:, None] + torch.arange(read, anchor)
            known = lesson.features[:, start + read : start + anchor]
            if anchor > read:
                state.memory.pending_inputs.append((told, known, [anchor - read] * 2))
            pending, read = lesson.ids[:, start + anchor], anchor
            hidden = drafter._pass(state.memory, pending, state.memory.placed(state.position) + anchor)
            before = lesson.ids[:, start + anchor : start + anchor + 3]
            below = drafter.form.sequential.logits_function(drafter.lm_head(hidden[:, 1:]), hidden[:, 1:])
            want = torch.cat([below(place, before[:, [place]]) for place in range(3)[: 11 - anchor]], dim=1)
            got = logits[:, anchor : anchor + 3]
            both = want.isfinite() & got.isfinite()  # the answer's own token may be one of the few alone
            assert (both.sum(-1) >= (5 if drafter.config.selector else 96)).all()
            torch.testing.assert_close(got[both], want[both], rtol=1e-3, atol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", [{"markov": 5}, {"selector": 5, "candidates": 6}])
def test_head_conditions_on_token(kind, width):
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["ragged"])
    head = BlockDrafter.for_model(model, layers=1, block=4, **kind).head
    weights = Weights({name.removeprefix("model."): p for name, p in head.named_parameters()})
    for name in ("markov.up.weight", "candidate_selector.successor_codebook"):
        torch.nn.init.normal_(weights.get(name, torch.empty(1)), std=3.0)
    drafter, held, states = BlockDrafter(head, model, width=width, nodes=9), [], []
    _, state, _ = begun(drafter, model, inputs, NEW)
    drafter._laws = lambda hidden: states.append(hidden) or held.append(3 * torch.randn(3, 3, 96)) or held[-1]
    draft = drafter.propose(state, 3)
    parent, depth = (x.expand(3, -1) for x in (draft.tree.parent, draft.tree.depth))
    for b in range(3):
        for node in range(1, draft.tree.size):
            above, level = draft.value[b, parent[b, node]], depth[b, node] - 1
            if "markov" in kind:
                distribution = held[0][b, level] + head.markov.up.weight @ head.markov.down.weight[above]
            else:
                distribution = edges(weights, held[0][b, level], states[0][b, level], above, 6)
            assert (distribution > distribution[draft.value[b, node]]).sum() < width


@pytest.mark.parametrize(("form", "more"), [
    ("dflash", {}), ("dflash2", {"selector": 5}), ("dspark", {"markov": 0, "confidence": True}),
    ("dspark", {"markov": 5, "confidence": True}),
])  # fmt: skip
def test_block_drafter_export(tmp_path, form, more):
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["ragged"])
    drafter = BlockDrafter.for_model(model, layers=2, block=4, **more)
    drafter.export(tmp_path / "out", form, "somewhere/target")
    again, _ = registry.drafter(tmp_path / "out", model)
    head, same = drafter.form.sequential, {"reach": None} | ({"from_anchor": False} if form == "dspark" else {})
    assert replace(again.form, sequential=head, **same) == drafter.form
    assert not isinstance(again, BlockDrafter) and again.traits.levels == drafter.traits.levels == 3
    for one, two in ((drafter.assistant, again.assistant), (head, again.form.sequential))[: 1 if head is None else 2]:
        torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    both = [visspec.accelerate(model, one, adaptive=False) for one in (drafter, again)]
    first, second = (fast.run(**inputs, max_new_tokens=8, do_sample=False).state for fast in both)
    assert [r.committed for r in first.trace.rounds] == [r.committed for r in second.trace.rounds]
    with pytest.raises(ValueError, match="form: got a drafter with a Spark head"):
        BlockDrafter.for_model(model, layers=1, markov=5).export(tmp_path / "no", "dflash")


def test_most_frequent_ids():
    model = model_of("llava")
    target = HFDecoder(model, (-1,), embeddings=True)

    def prompts(number):
        inputs = prompt("llava", ["4 i 5", "9"], seed=number)
        return request_of(model, inputs, temperature=1.0, max_new_tokens=20, seed=number)

    counts, lessons = {}, [capture(target, visspec.Exact(), prompts(number)) for number in range(3)]
    for lesson in lessons:
        for row, length in zip(lesson.ids[:, lesson.prompt_length :].tolist(), lesson.lengths):
            for i in row[:length]:
                counts[i] = counts.get(i, 0) + 1
    best = sorted(range(96), key=lambda i: (-counts.get(i, 0), i))[:12]
    assert frequent(lessons, 96, 12).tolist() == sorted(best)


def test_text_before_pictures(data):
    reader = Reader(TrainingData(data[0]))
    prompts = Prompts(model_of("llava"), None, reader, torch.arange(4), 3, 5, 0, total=1000)
    shown = [prompts.pictures(n) for n in range(1100)]
    assert not any(shown[:500]) and all(shown[975:])
    assert sum(shown[500:650]) < sum(shown[650:800]) < sum(shown[800:950])
    assert shown == [prompts.pictures(n) for n in range(1100)]
    assert all(Prompts(model_of("llava"), None, reader, torch.arange(1), 1, 5, 0).pictures(n) for n in range(4))
    prompts.total = 10
    prompts(1), prompts(10)
    assert data[1] == ["words", "pictures"]


@pytest.mark.parametrize("options,sentence", [
    ({"preset": "eagle4"}, "preset: got 'eagle4', expected a name of `visspec list recipes`, such as eagle"),
    ({"preset": "msd", "image_latents": 3}, "image_latents: got 3 with the preset 'msd', which has no such value"),
    ({"preset": "eagle2", "block": 4}, "block: got 4 with the preset 'eagle2', which has no such value"),
    ({"preset": "vispec", "layers": 2}, "layers: got 2 with the preset 'vispec', which has no such value"),
    ({"preset": "dflash", "block": 1}, "block: got 1, expected a whole number from 2"),
    ({"preset": "dspark", "draft_vocab": 9}, "draft_vocab: got 9 with the preset 'dspark'"),
])  # fmt: skip
def test_preset_without_such_option(data, tmp_path, options, sentence):
    with raises_line(re.escape(sentence)):
        train_drafter.run("x", data[0], tmp_path / "out", **TINY, **options)


def test_number_of_layers():
    model = llama(num_hidden_layers=9)
    assert of_preset("dflash", model, {})[0]["layers"] == 2
    assert of_preset("dflash", model, {"layers": 5})[0]["layers"] == 5


@pytest.mark.parametrize("sharp", [0, 1, 2])
def test_sharpest_attention_layer(sharp):
    """A layer with long queries attends to few tokens; the last layer is not asked, and padding does not count."""
    model = llama(num_hidden_layers=4)
    inputs = prompt("llama", ["9", "5", "14"])
    with torch.no_grad():
        for layer, factor in ((sharp, 8.0), (3, 30.0)):
            model.model.layers[layer].self_attn.q_proj.weight.mul_(factor)
    before = model.config._attn_implementation
    assert focused_state(model, inputs) == sharp + 1
    assert model.config._attn_implementation == before
    model.model.forward = before_attentions(model.model.forward)
    assert focused_state(model, inputs) == 2


def before_attentions(forward):
    def silent(*args, **options):
        result = forward(*args, **options)
        result.attentions = None
        return result

    return silent
