"""Draft passes with and without masks are equal. B rows, H query heads, K key heads, N nodes, S slots, E head size."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import visspec
from tests.doubles import NEW, Grower, Oracle, TreeOracle, fast, new_tokens, stock
from tests.tiny import TEXT, built, llama, model_of, prompt, shapes
from visspec import kernels
from visspec import tree as trees
from visspec.cache import SlotCache, visibility
from visspec.models.attention import draft_attention, pass_inputs
from visspec.models.attention.pass_inputs import MASK, TREE
from visspec.models.decoder import probe
from visspec.models.decoder.target import HFDecoder

GREEDY = {"max_new_tokens": NEW, "do_sample": False}
OTHERS = ("qwen2", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm")  # than those with every drafter


@pytest.fixture
def on(monkeypatch):
    """Makes targets take `tree_attention` by themselves; collects the number of nodes of each call of it."""
    seen: list[int] = []
    monkeypatch.setattr(probe, "_answers", {})
    plain = draft_attention.by_tree
    monkeypatch.setattr(draft_attention, "by_tree", lambda q, *rest: seen.append(q.shape[2]) or plain(q, *rest))
    monkeypatch.setattr(draft_attention, "of_device", lambda device, dtype: (TREE, ""))
    return seen


def test_masks_stay_where_there_is_no_gpu():
    backend = HFDecoder(model_of("llama")).masks.backend
    assert backend.name == MASK and str(backend) == "a mask over stored keys (no CUDA device)"


@pytest.mark.parametrize("shape", ["one", "ragged"])
@pytest.mark.parametrize("name", ["llama", "llava", "qwen2_vl"])
def test_greedy_output_equals_stock(name, shape, on, monkeypatch):
    built_masks, counts = [], set()
    monkeypatch.setattr(pass_inputs, "visibility", lambda *args: built_masks.append(1) or visibility(*args))
    expected, inputs = stock(name, shape), prompt(name, shapes(name)[shape])
    for drafter in (
        None, Oracle(expected), TreeOracle(expected, 0.3), TreeOracle(expected, 0.3, per_row=True), Grower(expected),
    ):  # fmt: skip
        accelerated = visspec.accelerate(model_of(name), drafter, adaptive=False)
        assert accelerated.target.masks.backend.name == TREE
        on.clear()
        assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected
        counts |= {*on}
    # chains, grown trees, two children a level; single nodes of one row have no mask to be spared
    assert {6, 9, 11} <= counts and not built_masks and (1 in counts) == (shape == "ragged")


@pytest.mark.parametrize("name", OTHERS)
def test_every_family_is_told(name, on):
    expected, inputs = stock(name, "ragged"), prompt(name, shapes(name)["ragged"])
    assert new_tokens(fast(name, TreeOracle(expected, 0.3)).generate(**inputs, **GREEDY), inputs) == expected
    assert 11 in on


@pytest.mark.parametrize(("rows", "keys"), [(["9"], 2), *((["9", "4", "12"], keys) for keys in (1, 2, 4))])
def test_head_layouts_and_padding(rows, keys, on):
    model, inputs = llama(num_key_value_heads=keys), prompt("llama", rows)
    expected = new_tokens(model.generate(**inputs, **GREEDY), inputs)
    for drafter in (None, Oracle(expected), TreeOracle(expected, 0.4)):
        accelerated = visspec.accelerate(model, drafter, adaptive=False)
        on.clear()
        assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected
        assert bool(on) == (drafter is not None or len(rows) > 1)
        assert accelerated.target.masks.backend.name == TREE


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_rounds_against_masks(data):
    """Random rounds: chains and trees, padding at the left, commits of branches, rows that leave, stores that grow."""
    rows, keys = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2]))
    share = data.draw(st.sampled_from([1, 2, 4]))
    size, g = 8, torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    slots, told_by = SlotCache(rows, lean=data.draw(st.booleans())), pass_inputs.Backend(TREE)
    states = lambda heads, nodes: torch.randn(len(slots.lengths), nodes, heads, size, generator=g).transpose(1, 2)  # noqa: E731
    slots.open(6, "cpu")
    slots.write(0, states(keys, 6), states(keys, 6))
    slots.commit([list(range(6))] * rows)
    if data.draw(st.booleans()):
        slots.padding = torch.tensor([[s >= b for s in range(6)] for b in range(rows)])
    for _ in range(data.draw(st.integers(1, 5))):
        nodes, live = data.draw(st.integers(1, 9)), len(slots.lengths)
        tree = trees.chain(nodes - 1)
        if data.draw(st.booleans()):
            parents = [[-1, *(data.draw(st.integers(0, n)) for n in range(nodes - 1))] for _ in range(live)]
            tree = trees.from_parents(torch.tensor(parents), nodes)
        extent = slots.open(nodes, "cpu")
        layout = told_by(slots, tree)
        key, value = slots.write(0, states(keys, nodes), states(keys, nodes))
        query = states(keys * share, nodes)
        seen = visibility(tree.ancestor, slots.lengths, slots.padding, extent)[:, None]
        mask = seen.expand(live, -1, -1, -1)
        assert torch.equal(draft_attention.visibility_mask(layout, extent), mask)
        result, _ = draft_attention.attend_by_tree(None, query, key, value, layout, True, 0.3)
        wide = [x.repeat_interleave(share, 1) for x in (key, value)]
        expected = F.scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=0.3).transpose(1, 2)
        assert result.shape == expected.shape and result.is_contiguous()
        assert torch.allclose(result, expected, atol=1e-5)
        assert told_by.name == TREE
        paths = torch.where(tree.ancestor[:, -1:], torch.arange(nodes), -1)[:, 0].expand(live, -1).tolist()
        slots.commit([[n for n in path if n >= 0] for path in paths])
        if live > 1 and data.draw(st.booleans()):
            slots.select(sorted(data.draw(st.sets(st.integers(0, live - 1), min_size=1))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("nodes", [1, 6, 64])
@pytest.mark.parametrize(("heads", "keys", "size"), [(32, 32, 128), (28, 4, 128), (20, 20, 64)])
def test_what_a_gpu_runs_equals_the_mask(heads, keys, size, nodes):
    """Our compiled kernel on a ragged store, in bfloat16."""
    device, g = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
    states = lambda heads, nodes: torch.randn(  # noqa: E731
        3, nodes, heads, size, generator=g, device=device, dtype=torch.bfloat16
    ).transpose(1, 2)
    slots, told_by = SlotCache(3), pass_inputs.Backend(TREE)
    slots.open(700, device)
    slots.write(0, states(keys, 700), states(keys, 700))
    slots.commit([list(range(n)) for n in (700, 350, 41)])
    slots.padding = torch.arange(700, device=device)[None] >= torch.tensor([[0], [33], [7]], device=device)
    tree = trees.from_parents((torch.arange(nodes, device=device)[None].repeat(3, 1) - 1) // 2, nodes)
    extent = slots.open(nodes, device)
    layout, query = told_by(slots, tree), states(heads, nodes)
    key, value = slots.write(0, states(keys, nodes), states(keys, nodes))
    result, _ = draft_attention.attend_by_tree(None, query, key, value, layout, True, size**-0.5)
    mask = visibility(tree.ancestor, slots.lengths, slots.padding, extent)[:, None]
    assert torch.equal(draft_attention.visibility_mask(layout, extent), mask.expand(3, -1, -1, -1))
    wide = [x.repeat_interleave(heads // keys, 1).float() for x in (key, value)]
    expected = F.scaled_dot_product_attention(query.float(), *wide, attn_mask=mask).transpose(1, 2)
    assert told_by.name == TREE and float((result.float() - expected).abs().max()) < 2e-2


def test_padding_inside_prompt(on):
    model, inputs = model_of("llama"), prompt("llama", ["9", "9"])
    inputs["attention_mask"][:, 4:6] = 0
    expected = new_tokens(model.generate(**inputs, **GREEDY), inputs)
    accelerated = fast("llama", TreeOracle(expected, 0.3))
    on.clear()
    assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected
    assert not on and accelerated.target.masks.backend.name == TREE


@pytest.mark.parametrize(("name", "why"), [
    ("mistral", "layers that do not attend to all keys"), ("gemma3", "layers that do not attend to all keys"),
    ("gemma2", "attention eager, not sdpa"),
])  # fmt: skip
def test_models_that_take_masks(name, why, on):
    backend = HFDecoder(model_of(name)).masks.backend
    assert backend.name == MASK and backend.why == why


class Own(tf.models.llama.modeling_llama.LlamaAttention):
    """Attention that hands no keywords on."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, attention_mask, cache)


class Exacting(tf.models.llama.modeling_llama.LlamaAttention):
    """Attention that wants a mask over all slots."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.shape[3] < hidden_states.shape[1]:
            raise RuntimeError("mask")
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


@pytest.mark.parametrize("kind", [Own, Exacting])
def test_own_attention_takes_mask(kind, on):
    model = built(tf.LlamaForCausalLM, tf.LlamaConfig(**TEXT))
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):  # asked, then known
            decoder = HFDecoder(model)
            assert decoder.masks.backend.name == MASK and decoder.masks.groups == 2
    inputs, expected = prompt("llama", shapes("llama")["ragged"]), stock("llama", "ragged")
    accelerated = visspec.accelerate(model, TreeOracle(expected, 0.3), adaptive=False)
    assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected


def test_probe_finds_other_attention(on, monkeypatch):
    """A kernel that does not see a node's ancestors."""
    plain = kernels.tree_attention
    blind = lambda q, k, v, length, mask, ancestor, *rest: plain(  # noqa: E731
        q, k, v, length, mask, torch.eye(ancestor.shape[-1], dtype=torch.bool).expand_as(ancestor), *rest
    )
    monkeypatch.setattr(kernels, "tree_attention", blind, raising=False)
    with pytest.warns(RuntimeWarning, match="different logits without a mask"):
        backend = HFDecoder(model_of("llama")).masks.backend
    assert backend.name == MASK
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # known by now
        again = HFDecoder(model_of("llama")).masks.backend
    assert again.name == MASK and "without a mask" in str(again)


def test_failure_falls_back_once(on, monkeypatch):
    expected, inputs = stock("llama", "ragged"), prompt("llama", shapes("llama")["ragged"])
    accelerated = fast("llama", Oracle(expected))

    def failing(*args):
        raise RuntimeError("This kernel only supports Ampere GPUs or newer.\nmore")

    monkeypatch.setattr(kernels, "tree_attention", failing, raising=False)
    with pytest.warns(
        RuntimeWarning, match=r"attention: .* because of RuntimeError: This kernel only supports"
    ) as message:
        assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected
    backend = accelerated.target.masks.backend
    assert len(message) == 1 and backend.name == MASK and "Ampere" in str(backend) and "more" not in str(backend)
    assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected


def test_running_out_of_memory_is_not_hidden(on, monkeypatch):
    accelerated, inputs = fast("llama", None), prompt("llama", ["9", "4"])

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(kernels, "tree_attention", full, raising=False)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        accelerated.generate(**inputs, **GREEDY)
    assert accelerated.target.masks.backend.name == TREE


def test_more_than_softmax():
    """A bias of a layer's own."""
    module = nn.Module()
    module.num_key_value_groups = 2
    slots = SlotCache(2)
    slots.open(5, "cpu")
    slots.write(0, torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8))
    slots.commit([[0, 1, 2, 3, 4], [0, 1]])
    extent = slots.open(3, "cpu")
    given = torch.randn(2, 4, 3, 8), *slots.write(0, torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8))
    mask, bias = visibility(trees.chain(2).ancestor, slots.lengths, None, extent)[:, None], torch.randn(2, 4, 3, 8)
    backend = pass_inputs.Backend(TREE)
    layout = backend(slots, trees.chain(2))
    with pytest.warns(RuntimeWarning, match=r"attention: .*more than a softmax over keys"):
        result, _ = draft_attention.draft_attention(module, *given, None, visspec=layout, position_bias=bias)
    expected, _ = sdpa_attention_forward(module, *given, mask, position_bias=bias)
    assert torch.equal(result, expected) and backend.name == MASK


def test_the_road_of_a_device(monkeypatch):
    cuda, half = torch.device("cuda", 0), torch.bfloat16
    monkeypatch.setattr(draft_attention, "triton", SimpleNamespace())
    assert draft_attention.of_device(cuda, half) == (TREE, "")
    assert draft_attention.of_device(cuda, torch.float32) == (
        MASK,
        "weights in float32, not in 16 bits",
    )
    assert draft_attention.of_device(torch.device("cpu"), half) == (MASK, "no CUDA device")
    monkeypatch.setattr(draft_attention, "triton", None)
    assert draft_attention.of_device(cuda, half) == (MASK, "no Triton")
    with pytest.raises(ValueError, match="attention: got 'flash', expected one of mask, tree"):
        HFDecoder(model_of("llama"), attention="flash")


def test_without_the_probe_there_are_masks(on):
    accelerated, inputs = visspec.accelerate(model_of("llama"), None, probe=False), prompt("llama", ["9"])
    accelerated.generate(**inputs, **GREEDY)
    assert not on and accelerated.target.masks.backend.name == MASK


def test_first_slots_read_once(monkeypatch):
    slots, reads = SlotCache(2), []
    slots.lengths, slots.padding = [4, 4], torch.tensor([[False, True, True, True], [True] * 4])
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or plain(self))
    assert [pass_inputs.starts(slots) for _ in range(3)] == [[1, 0]] * 3 and len(reads) == 1
    slots.select([0])
    assert pass_inputs.starts(slots) == [1] and len(reads) == 2
