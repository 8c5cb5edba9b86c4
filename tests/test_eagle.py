"""The feature drafter: state after ragged rounds, identity, coupling, trees, images, checkpoints and their refusals."""

import copy

import pytest
import torch

import visspec
from tests.published import judged
from tests.tiny import model_of, prompt, shapes
from visspec.api.captions import prepare
from visspec.api.training.drafter import request_of
from visspec.io import included
from visspec.loop.decode import open_request, retire
from visspec.models.block.trained import BlockDrafter
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle import layer
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.eagle.layer import FeatureMemory
from visspec.models.eagle.sequence import plan
from visspec.models.layers import rotations

CASES = [("llava", "several", 3), ("llava", "ragged", 1), ("qwen2_5_vl", "ragged", 2), ("llama", "ragged", 0)]
NEW = 16


def make(name, latents=1, seed=1, **options):
    """A random drafter, with image weights that matter (they start at zero)."""
    drafter = EagleDrafter.for_model(model_of(name), seed=seed, image_latents=latents, **options)
    if drafter.config.image_latents:
        with torch.no_grad():
            drafter.head.img_fc.weight.add_(0.3 * torch.randn_like(drafter.head.img_fc.weight))
        drafter.refresh()
    return drafter


@torch.inference_mode()
def opened(drafter, request):
    target = HFDecoder(drafter.model, drafter.traits.feature_layers, embeddings=True)
    rule = visspec.Exact()
    state, scores = open_request(target, rule, request)
    drafter.start(state, scores)
    return target, rule, state, scores


def flat(memory):
    return [memory.kv[b, :n] for b, n in enumerate(memory.lengths)]


@torch.inference_mode()
@pytest.mark.parametrize(("name", "shape", "latents"), [*CASES, ("llava", "one", 1), ("qwen2_5_vl", "several", 1)])
def test_memory_after_ragged_rounds(name, shape, latents):
    drafter = make(name, latents)
    model, inputs = model_of(name), prompt(name, shapes(name)[shape])
    answer = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    target, rule, state, _ = opened(drafter, request_of(model, inputs, temperature=0, max_new_tokens=NEW, seed=0))
    length = inputs["input_ids"].shape[1]
    for step in range(3):  # rows accept different numbers: row b gets its next b + 1 tokens right, then a wrong one
        draft = drafter.propose(state, 4)
        tokens = draft.value.clone()
        for b in range(tokens.shape[0]):
            done = len(state.tokens[b])
            tokens[b, 1:] = answer[b, length + done :][:4]
            tokens[b, 1 + (b + step) % 3] = (tokens[b, 1 + (b + step) % 3] + 1) % 90
        judged(target, drafter, rule, state, type(draft)(tokens, draft.tree, draft.q))
        retire(state, target, drafter)
    first = drafter._catch_up(state.memory, 1)
    whole, expected = whole_prefix(drafter, model, inputs, state)
    for mine, fresh in zip(flat(state.memory), flat(whole)):
        torch.testing.assert_close(mine, fresh, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(first, expected, rtol=2e-4, atol=2e-5)


def whole_prefix(drafter, model, inputs, state):
    """The drafter's memory, started afresh with one pass over all answers so far, and its next prediction."""
    request = request_of(model, inputs, temperature=0, max_new_tokens=NEW, seed=0)
    target, _, fresh, _ = opened(drafter, request)
    rows = [torch.tensor(t) for t in state.tokens]
    assert [r[0].item() for r in rows] == fresh.pending.tolist()
    longest = max(map(len, rows))
    tokens = torch.stack([torch.cat([r, r.new_zeros(longest - len(r))]) for r in rows])
    draft = visspec.tree.chain_draft(fresh.pending, tokens[:, 1:])
    scores = target.verify(fresh, draft)  # a chain of the right tokens is a plain forward pass
    counts = [len(r) - 1 for r in rows]
    fresh.memory.add(tokens[:, 1:], scores.features[:, : longest - 1], counts)
    return fresh.memory, drafter._catch_up(fresh.memory, 1)


def test_image_latents_reach_drafts():
    model, rows = model_of("llava"), shapes("llava")["several"]
    features = []
    for seed in (0, 1):
        inputs = prompt("llava", rows, seed=0) | {"pixel_values": prompt("llava", rows, seed=seed)["pixel_values"]}
        for latents in (2, 0):
            drafter = make("llava", latents)
            _, _, state, scores = opened(drafter, request_of(model, inputs, temperature=0, max_new_tokens=4, seed=0))
            with torch.inference_mode():
                scores.features.zero_()  # what the target saw must not tell
                drafter.start(state, scores)
                state.pending.fill_(7)
                state.memory.pending_inputs[0][0].fill_(7)
                features.append(drafter._catch_up(state.memory, 1))
    seen, blind, seen_other, blind_other = features
    assert not torch.allclose(seen, seen_other, atol=1e-4)
    torch.testing.assert_close(blind, blind_other)


@torch.inference_mode()
def test_a_tree_may_keep_one_node():
    drafter, model = EagleDrafter.for_model(model_of("llama"), seed=1, image_latents=0), model_of("llama")
    drafter = EagleDrafter(drafter.head, model, width=3, nodes=1)
    inputs = prompt("llama", shapes("llama")["ragged"])
    _, _, state, _ = opened(drafter, request_of(model, inputs, temperature=0, max_new_tokens=NEW, seed=0))
    draft = drafter.propose(state, 2)
    assert draft.tree.parent.tolist() == [[-1, 0]] * len(state.rows)


@torch.inference_mode()
def test_long_prompts_grow_rotations():
    for last in (255, 256, 257, 258):
        drafter = make("llama", 0)
        config, width = drafter.config, drafter.head.fc.in_features
        layout = plan(config, torch.tensor([[1, 2, 3]]), None)  # two elements
        features = torch.zeros(1, 3, width - config.hidden)
        other = torch.zeros(1, 3, config.hidden)
        _, turn, _ = drafter.elements(layout, other[:, 1:], features, other, torch.tensor([[0, last, last + 1]]))
        expected = rotations(last + 1, config.head_size, config.rope_theta, "cpu")[last]
        torch.testing.assert_close(turn[0, 1], expected)


@torch.inference_mode()
def test_laws_in_float64():
    result = []
    for dtype in (torch.float32, torch.float64):
        model = copy.deepcopy(model_of("llama")).to(dtype)
        drafter = EagleDrafter.for_model(model, seed=1, image_latents=0)
        inputs = prompt("llama", shapes("llama")["ragged"])
        _, _, state, _ = opened(drafter, request_of(model, inputs, temperature=0, max_new_tokens=NEW, seed=0))
        drafter._logits = lambda feature, own=drafter._logits: result[-1].append(own(feature)) or result[-1][-1]
        result.append([])
        drafter.propose(state, 4)
    assert len(result[0]) == len(result[1]) == 4 and drafter.layer.qkv.dtype == torch.float64
    for single, double in zip(*result):
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-3)


def test_folded_weights_equal_network(monkeypatch):
    model = model_of("llava")
    drafter = make("llava")
    head = drafter.head
    token, feature, image = torch.tensor([7, 9]), torch.randn(2, 32), torch.randn(2, 32)
    with torch.no_grad():
        expected = head.join(model.get_input_embeddings()(token), feature, image)
        assert drafter.layer.table is not None
        torch.testing.assert_close(drafter.layer.join(token, feature, head.shift(image)), expected)
        monkeypatch.setattr(layer, "FOLD_LIMIT", 0)
        drafter.refresh()
        assert drafter.layer.table is None
        torch.testing.assert_close(drafter.layer.join(token, feature, head.shift(image)), expected)


def test_half_precision_targets():
    model = copy.deepcopy(model_of("llava")).to(torch.bfloat16)
    inputs = prompt("llava", shapes("llava")["ragged"])
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    for form in ({"image_latents": 2}, {"draft_vocab": 40}, {"fusion": "split", "feature_layers": (1, -1)}):
        drafter = EagleDrafter.for_model(model, **form)
        for width in (1, 3):
            drafter.width = width
            fast = visspec.accelerate(model, drafter, adaptive=False, levels=3)
            fast.generate(**inputs, max_new_tokens=6, do_sample=False)
            assert fast.last_stats.faults == 0


def test_resting_drafter_catches_up():
    """Rounds without drafting leave elements to read; ragged ones are packed row by row."""
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["ragged"])
    drafter = make("llava")
    with torch.inference_mode():
        request = request_of(model, inputs, temperature=0, max_new_tokens=NEW, seed=0)
        target, rule, state, _ = opened(drafter, request)
        answer = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, request.prompt.shape[1] :]
        for levels in (0, 2, 0, 0):
            draft = drafter.propose(state, levels) if levels else visspec.tree.empty_draft(state.pending)
            if levels:  # row 0 accepts both, the others what a random drafter deserves
                draft.value[0, 1:] = answer[0, len(state.tokens[0]) :][:levels]
            judged(target, drafter, rule, state, draft)
        counts = state.memory.pending_inputs[0][2]
        assert len(state.memory.pending_inputs) == 3 and min(counts) < 3 == max(counts)
        first = drafter._catch_up(state.memory, 1)
        _, expected = whole_prefix(drafter, model, inputs, state)
        torch.testing.assert_close(first, expected, rtol=2e-4, atol=2e-5)


def test_included_drafter(captioner):
    model, processor = captioner
    fast = visspec.accelerate(model, "vispec")
    assert fast.name == "vispec" and fast.length_policy.levels == fast.drafter.traits.levels
    images = included.scenes().images(3, first=50)
    inputs = prepare(processor, images, "describe the picture in detail .", model)
    assert torch.equal(fast.generate(**inputs), model.generate(**inputs))
    assert fast.last_stats.faults == 0 and fast.last_stats.tau > 4.0
    with pytest.raises(ValueError, match="does not take"):
        visspec.accelerate(model, "vispec:colour=1")


def test_included_drafter_other_models(captioner):
    other = copy.deepcopy(captioner[0].config)
    other.vision_config.patch_size = 12
    model = copy.copy(captioner[0])
    model.config = other
    with pytest.raises(ValueError, match=r"made for a model with vision_config\.patch_size 16, got 12"):
        visspec.accelerate(model, "vispec")


def test_prompt_in_blocks(monkeypatch):
    from visspec.models.eagle import drafter as eagle

    model = model_of("llava")
    inputs, kept = prompt("llava", shapes("llava")["ragged"]), []
    drafter = EagleDrafter.for_model(model, image_latents=2)
    for size in (512, 3):
        monkeypatch.setattr(eagle, "BLOCK", size)
        quick = visspec.accelerate(model, drafter, adaptive=False)
        seen = []
        monkeypatch.setattr(FeatureMemory, "reserve", lambda memory, slots, seen=seen: seen.append(memory))
        quick.generate(**inputs, max_new_tokens=200, min_new_tokens=200, do_sample=False)
        monkeypatch.undo()
        kept.append((seen[0].kv[:, : max(seen[0].lengths)].clone(), seen[0].kv.shape[1], quick.last_state.tokens))
    torch.testing.assert_close(kept[0][0], kept[1][0])
    assert kept[0][1] == kept[1][1] >= 200 and kept[0][2] == kept[1][2]


@pytest.mark.parametrize("kind", [EagleDrafter, BlockDrafter])
def test_drafter_of_the_language_model(tmp_path, kind):
    """A drafter trained on text also drafts for a model that reads pictures with the same language model."""
    kind.for_model(model_of("llama")).save_pretrained(tmp_path, {})
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["ragged"])
    fast = visspec.accelerate(model, tmp_path, length="fixed", debug=True)
    arguments = {**inputs, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(fast.generate(**arguments), model.generate(**arguments))
    with pytest.raises(ValueError, match="made for a target of family 'llama', got a model of 'qwen2'"):
        visspec.accelerate(model_of("qwen2"), tmp_path)
