"""Draft passes without masks: the layers are told lengths and trees, and answer as with a mask.

`varlen_attn` is torch's on a GPU alone; here stands one in plain torch with the same arguments.
Shapes: B rows, H query heads, K key heads, N nodes, S slots, E head size.
"""

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
from visspec.models.attention import draft_attention, masks, ragged
from visspec.models.decoder import probe
from visspec.models.decoder.target import HFDecoder

GREEDY = {"max_new_tokens": NEW, "do_sample": False}
TOLD = (ragged.VARLEN, ragged.TREE)
FULL = ("llama", "qwen2", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm")


def attended(query, key, value, begin_q, begin_k, used, scale, bottom=True):
    """Sequences in (T, H, E), each causal from its last key on; `bottom` False: from its first, which is wrong."""
    out = torch.empty_like(query)
    for b in range(len(begin_q) - 1):
        rows = slice(int(begin_q[b]), int(begin_q[b + 1]))
        keys = slice(int(begin_k[b]), int(begin_k[b]) + int(used[b]))
        assert keys.stop <= len(key)
        q, k, v = query[rows].transpose(0, 1), key[keys].transpose(0, 1), value[keys].transpose(0, 1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        mask = mask.tril(k.shape[1] - q.shape[1] if bottom else 0)
        share = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
        out[rows] = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)
    return out


def plain_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == torch.int32 and window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert max_q == int(cu_seq_q.diff().max()) and max_k >= int(seqused_k.max())
    assert len(cu_seq_q) == len(cu_seq_k) == len(seqused_k) + 1
    assert all(t.stride(-1) == 1 and t.is_contiguous() for t in (query, cu_seq_q, cu_seq_k, seqused_k))
    return attended(query, key, value, cu_seq_q, cu_seq_k, seqused_k, scale)


def without_gqa(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1),
                seqused_k=None):  # fmt: skip
    assert window_size == (-1, 0)
    return attended(query, key, value, cu_seq_q, cu_seq_k, seqused_k, scale)


def without_lengths(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    return attended(query, key, value, cu_seq_q, cu_seq_k, cu_seq_k.diff(), None)


def from_the_first_key(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), seqused_k=None):
    return attended(query, key, value, cu_seq_q, cu_seq_k, seqused_k, None, bottom=False)


def failing(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), seqused_k=None):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")


@pytest.fixture
def on(monkeypatch):
    """Sets the backend that targets take by themselves, and `varlen_attn`; counts calls: (backend, nodes)."""
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(probe, "_answers", {})
    for name, backend in (("varlen", ragged.VARLEN), ("by_tree", ragged.TREE)):
        plain = getattr(ragged, name)
        call = lambda q, *rest, plain=plain, backend=backend: seen.append((backend, q.shape[2])) or plain(q, *rest)  # noqa: E731
        monkeypatch.setattr(ragged, name, call)

    def take(backend, varlen_attn=plain_varlen):
        monkeypatch.setattr(ragged, "varlen_attn", varlen_attn)
        monkeypatch.setattr(ragged, "of_device", lambda device, dtype: (backend, ""))
        return seen

    return take


def test_masks_stay_where_there_is_no_gpu():
    backend = HFDecoder(model_of("llama")).masks.backend
    assert backend.name == ragged.MASK and str(backend) == "a mask over stored keys (no CUDA device)"


@pytest.mark.parametrize("shape", ["one", "ragged"])
@pytest.mark.parametrize("name", ["llama", "llava", "qwen2_vl"])
@pytest.mark.parametrize("backend", TOLD)
def test_greedy_output_equals_stock(backend, name, shape, on, monkeypatch):
    built_masks, seen, counts = [], on(backend), set()
    monkeypatch.setattr(masks, "visibility", lambda *args: built_masks.append(1) or visibility(*args))
    expected, inputs = stock(name, shape), prompt(name, shapes(name)[shape])
    for drafter in (
        None, Oracle(expected), TreeOracle(expected, 0.3), TreeOracle(expected, 0.3, per_row=True), Grower(expected),
    ):  # fmt: skip
        accelerated = visspec.accelerate(model_of(name), drafter, adaptive=False)
        assert accelerated.target.masks.backend.name == backend
        seen.clear()
        assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected
        assert {way for way, nodes in seen if nodes in (1, 6)} <= {backend}
        assert {way for way, nodes in seen if nodes in (9, 11)} <= {ragged.TREE}
        counts |= {nodes for _, nodes in seen}
    # chains, grown trees, two children a level; single nodes of one row have no mask to be spared
    assert {6, 9, 11} <= counts and not built_masks and (1 in counts) == (shape == "ragged")


@pytest.mark.parametrize("name", FULL)
def test_every_family_is_told(name, on):
    seen = on(ragged.VARLEN)
    expected, inputs = stock(name, "ragged"), prompt(name, shapes(name)["ragged"])
    seen.clear()
    assert new_tokens(fast(name, TreeOracle(expected, 0.3)).generate(**inputs, **GREEDY), inputs) == expected
    assert (ragged.TREE, 11) in seen and (ragged.VARLEN, 4) in seen  # the latter by the probe


@pytest.mark.parametrize(("backend", "rows", "keys"), [
    (backend, rows, keys) for n, backend in enumerate(TOLD) for rows in (["9"], ["9", "4", "12"])
    for keys in ((1, 2, 4) if (len(rows) > 1) == n else (2,))
])  # fmt: skip
def test_head_layouts_and_padding(backend, rows, keys, on):
    seen, model = on(backend), llama(num_key_value_heads=keys)
    inputs = prompt("llama", rows)
    expected = new_tokens(model.generate(**inputs, **GREEDY), inputs)
    for drafter in (None, Oracle(expected), TreeOracle(expected, 0.4)):
        accelerated = visspec.accelerate(model, drafter, adaptive=False)
        seen.clear()
        assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected
        assert bool(seen) == (drafter is not None or len(rows) > 1)
        assert accelerated.target.masks.backend.name == backend


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_rounds_against_masks(data):
    """Random rounds: chains and trees, padding at the left, commits of branches, rows that leave, stores that grow."""
    rows, keys = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2]))
    share, backend = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from(TOLD))
    size, g = 8, torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    slots, told_by = SlotCache(rows, lean=data.draw(st.booleans())), ragged.Backend(backend, keys)
    states = lambda heads, nodes: torch.randn(len(slots.lengths), nodes, heads, size, generator=g).transpose(1, 2)  # noqa: E731
    slots.open(6, "cpu")
    slots.write(0, states(keys, 6), states(keys, 6))
    slots.commit([list(range(6))] * rows)
    if data.draw(st.booleans()):
        slots.padding = torch.tensor([[s >= b for s in range(6)] for b in range(rows)])
    before, ragged.varlen_attn = ragged.varlen_attn, plain_varlen
    try:
        for _ in range(data.draw(st.integers(1, 5))):
            nodes, live = data.draw(st.integers(1, 9)), len(slots.lengths)
            tree = trees.chain(nodes - 1)
            if data.draw(st.booleans()):
                parents = [[-1, *(data.draw(st.integers(0, n)) for n in range(nodes - 1))] for _ in range(live)]
                tree = trees.from_parents(torch.tensor(parents), nodes)
            extent = slots.open(nodes, "cpu")
            layout = told_by(slots, tree, extent)
            key, value = slots.write(0, states(keys, nodes), states(keys, nodes))
            query = states(keys * share, nodes)
            seen = visibility(tree.ancestor, slots.lengths, slots.padding, extent)[:, None]
            mask = seen.expand(live, -1, -1, -1)
            assert torch.equal(ragged.visibility_mask(layout, extent), mask)
            found, _ = ragged.attend(None, query, key, value, layout, True, 0.3)
            wide = [x.repeat_interleave(share, 1) for x in (key, value)]
            wanted = F.scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=0.3).transpose(1, 2)
            assert found.shape == wanted.shape and found.is_contiguous()
            assert torch.allclose(found, wanted, atol=1e-5)
            assert told_by.name == backend
            paths = torch.where(tree.ancestor[:, -1:], torch.arange(nodes), -1)[:, 0].expand(live, -1).tolist()
            slots.commit([[n for n in path if n >= 0] for path in paths])
            if live > 1 and data.draw(st.booleans()):
                slots.select(sorted(data.draw(st.sets(st.integers(0, live - 1), min_size=1))))
    finally:
        ragged.varlen_attn = before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("nodes", [1, 6, 64])
@pytest.mark.parametrize(("heads", "keys", "size"), [(32, 32, 128), (28, 4, 128), (20, 20, 64)])
@pytest.mark.parametrize("backend", TOLD)
def test_what_a_gpu_runs_equals_the_mask(backend, heads, keys, size, nodes):
    """torch's `varlen_attn` and our compiled kernel on a ragged store, in bfloat16."""
    device, g = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
    states = lambda heads, nodes: torch.randn(  # noqa: E731
        3, nodes, heads, size, generator=g, device=device, dtype=torch.bfloat16
    ).transpose(1, 2)
    if ragged.of_device(device, torch.bfloat16)[0] == ragged.TREE and backend == ragged.VARLEN:
        pytest.skip("varlen_attn of this torch takes no lengths")
    slots, told_by = SlotCache(3), ragged.Backend(backend, keys)
    slots.open(700, device)
    slots.write(0, states(keys, 700), states(keys, 700))
    slots.commit([list(range(n)) for n in (700, 350, 41)])
    slots.padding = torch.arange(700, device=device)[None] >= torch.tensor([[0], [33], [7]], device=device)
    tree = trees.chain(nodes - 1, "cuda")
    if backend == ragged.TREE:
        tree = trees.from_parents((torch.arange(nodes, device=device)[None].repeat(3, 1) - 1) // 2, nodes)
    extent = slots.open(nodes, device)
    layout, query = told_by(slots, tree, extent), states(heads, nodes)
    key, value = slots.write(0, states(keys, nodes), states(keys, nodes))
    found, _ = ragged.attend(None, query, key, value, layout, True, size**-0.5)
    mask = visibility(tree.ancestor, slots.lengths, slots.padding, extent)[:, None]
    assert torch.equal(ragged.visibility_mask(layout, extent), mask.expand(3, -1, -1, -1))
    wide = [x.repeat_interleave(heads // keys, 1).float() for x in (key, value)]
    wanted = F.scaled_dot_product_attention(query.float(), *wide, attn_mask=mask).transpose(1, 2)
    assert told_by.name == backend and float((found.float() - wanted).abs().max()) < 2e-2


def test_nothing_of_a_store_is_copied(on):
    """What `varlen_attn` is given of keys and values is the memory of the store."""
    given = []
    on(ragged.VARLEN, lambda q, k, v, *rest, seqused_k, **more: given.append((k, v)) or torch.zeros_like(q))
    slots = SlotCache(3)
    slots.open(5, "cpu")
    slots.write(0, torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8))
    slots.commit([[0, 1, 2, 3, 4], [0, 1], [0, 1, 2]])
    layout = ragged.Backend(ragged.VARLEN, 2)(slots, trees.chain(2), slots.open(3, "cpu"))
    key, value = slots.write(0, torch.randn(3, 2, 3, 8), torch.randn(3, 2, 3, 8))
    query = torch.randn(3, 3, 4, 8).transpose(1, 2)
    ragged.varlen(query, key, value, layout, None)
    (k, v), (keys, values) = given[0], (slots.keys[0], slots.values[0])
    assert k.data_ptr() == keys.data_ptr() and v.data_ptr() == values.data_ptr()
    for b in range(3):
        first = int(layout.tables[1, b])
        assert torch.equal(k[first : first + 3, 1], keys[b, 1, :3])


@pytest.mark.parametrize("older", [without_gqa, without_lengths])
def test_older_forms_of_varlen_attn(older, on):
    seen = on(ragged.VARLEN, older)
    for shape in ("one", "ragged"):
        expected, inputs = stock("llama", shape), prompt("llama", shapes("llama")[shape])
        seen.clear()
        accelerated = visspec.accelerate(model_of("llama"), Oracle(expected), adaptive=False)
        assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected
        by_tree = older is without_lengths and shape == "ragged"  # rows of different length need `seqused_k`
        assert accelerated.target.masks.backend.name == ragged.VARLEN
        assert {ragged.TREE if by_tree else ragged.VARLEN} <= {name for name, _ in seen}


def test_padding_inside_a_prompt_takes_the_mask(on):
    seen = on(ragged.VARLEN)
    model, inputs = model_of("llama"), prompt("llama", ["9", "9"])
    inputs["attention_mask"][:, 4:6] = 0
    expected = new_tokens(model.generate(**inputs, **GREEDY), inputs)
    accelerated = fast("llama", TreeOracle(expected, 0.3))
    seen.clear()
    assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected
    assert not seen and accelerated.target.masks.backend.name == ragged.VARLEN


@pytest.mark.parametrize(("make", "name", "why"), [
    (lambda: model_of("mistral"), ragged.MASK, "layers that do not attend to all keys"),
    (lambda: model_of("gemma3"), ragged.MASK, "layers that do not attend to all keys"),
    (lambda: model_of("gemma2"), ragged.MASK, "attention eager, not sdpa"),
    (lambda: llama(head_dim=12), ragged.TREE, None), (lambda: llama(head_dim=264), ragged.TREE, None),
])  # fmt: skip
def test_models_that_take_another_road(make, name, why, on):
    on(ragged.VARLEN)
    backend = HFDecoder(make()).masks.backend
    assert backend.name == name and why in (None, backend.why)


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
    on(ragged.VARLEN)
    model = built(tf.LlamaForCausalLM, tf.LlamaConfig(**TEXT))
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):  # asked, then known
            decoder = HFDecoder(model)
            assert decoder.masks.backend.name == ragged.MASK and decoder.masks.groups == 2
    inputs, expected = prompt("llama", shapes("llama")["ragged"]), stock("llama", "ragged")
    accelerated = visspec.accelerate(model, TreeOracle(expected, 0.3), adaptive=False)
    assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected


def test_probe_finds_other_varlen(on):
    on(ragged.VARLEN, from_the_first_key)
    with pytest.warns(RuntimeWarning, match="other laws of a draft's nodes without a mask"):
        backend = HFDecoder(model_of("llama")).masks.backend
    assert backend.name == ragged.MASK
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # known by now
        again = HFDecoder(model_of("llama")).masks.backend
    assert again.name == ragged.MASK and "without a mask" in str(again)


def test_failure_falls_back_once(on, monkeypatch):
    on(ragged.VARLEN)
    expected, inputs = stock("llama", "ragged"), prompt("llama", shapes("llama")["ragged"])
    accelerated = fast("llama", Oracle(expected))
    monkeypatch.setattr(ragged, "varlen_attn", failing)
    with pytest.warns(RuntimeWarning, match="attention: got RuntimeError: FlashAttention only supports") as said:
        assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected
    backend = accelerated.target.masks.backend
    assert len(said) == 1 and backend.name == ragged.MASK and "Ampere" in str(backend) and "more" not in str(backend)
    assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected


def test_running_out_of_memory_is_not_hidden(on, monkeypatch):
    on(ragged.TREE)
    accelerated, inputs = fast("llama", None), prompt("llama", ["9", "4"])

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(kernels, "tree_attention", full, raising=False)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        accelerated.generate(**inputs, **GREEDY)
    assert accelerated.target.masks.backend.name == ragged.TREE


def test_more_than_softmax(on):
    """A bias of a layer's own; a scale that an older `varlen_attn` does not take; keys that are of no store."""
    module = nn.Module()
    module.num_key_value_groups = 2
    slots = SlotCache(2)
    slots.open(5, "cpu")
    slots.write(0, torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8))
    slots.commit([[0, 1, 2, 3, 4], [0, 1]])
    extent = slots.open(3, "cpu")
    key, value = slots.write(0, torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8))
    query, bias = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8)
    mask = visibility(trees.chain(2).ancestor, slots.lengths, None, extent)[:, None]
    for function, pair, more, why in (
        (plain_varlen, (key, value), {"position_bias": bias}, "more than a softmax over keys"),
        (without_lengths, (key, value), {"scaling": 0.3}, "scaling: got 0.3"),
        (plain_varlen, (key.contiguous(), value.contiguous()), {}, "key: got strides"),
    ):
        on(ragged.VARLEN, function)
        backend = ragged.Backend(ragged.VARLEN, 2)
        rows = 1 if function is without_lengths else 2
        one = SlotCache(rows)
        one.keys, one.lengths, one.nodes = slots.keys, slots.lengths[:rows], 3
        layout = backend(one, trees.chain(2), extent)
        given = query[:rows], pair[0][:rows], pair[1][:rows]
        with pytest.warns(RuntimeWarning, match=f"attention: got .*{why}"):
            found, _ = draft_attention.draft_attention(module, *given, None, visspec=layout, **more)
        wanted, _ = sdpa_attention_forward(module, *given, mask[:rows], **more)
        assert torch.equal(found, wanted) and backend.name == ragged.MASK


def test_the_road_of_a_device(monkeypatch):
    cuda, half = torch.device("cuda", 0), torch.bfloat16
    monkeypatch.setattr(ragged, "triton", SimpleNamespace())
    monkeypatch.setattr(ragged, "varlen_attn", plain_varlen)
    assert ragged.of_device(cuda, half) == (ragged.VARLEN, "")
    assert ragged.of_device(cuda, torch.float32) == (ragged.MASK, "weights in float32, not in 16 bits")
    assert ragged.of_device(torch.device("cpu"), half) == (ragged.MASK, "no CUDA device")
    for missing in (without_lengths, None):
        monkeypatch.setattr(ragged, "varlen_attn", missing)
        assert ragged.of_device(cuda, half) == (ragged.TREE, "")
    monkeypatch.setattr(ragged, "triton", None)
    assert ragged.of_device(cuda, half) == (ragged.MASK, "no Triton")
    with pytest.raises(ValueError, match="attention: got 'flash', expected one of mask, varlen, tree"):
        HFDecoder(model_of("llama"), attention="flash")


def test_without_the_probe_there_are_masks(on):
    seen = on(ragged.VARLEN)
    accelerated, inputs = visspec.accelerate(model_of("llama"), None, probe=False), prompt("llama", ["9"])
    accelerated.generate(**inputs, **GREEDY)
    assert not seen and accelerated.target.masks.backend.name == ragged.MASK


def test_first_slots_read_once(monkeypatch):
    slots, reads = SlotCache(2), []
    slots.lengths, slots.padding = [4, 4], torch.tensor([[False, True, True, True], [True] * 4])
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or plain(self))
    assert [ragged.starts(slots) for _ in range(3)] == [[1, 0]] * 3 and len(reads) == 1
    slots.select([0])
    assert ragged.starts(slots) == [1] and len(reads) == 2
