"""Our attention by name; other calls stay stock. B rows, H query heads, K key heads, N nodes, S slots, E head size."""

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import visspec
from tests.doubles import NEW, Grower, TreeOracle, fast, new_tokens, stock
from tests.tiny import TEXT, built, llama, model_of, prompt, shapes
from visspec import tree as trees
from visspec.cache import SlotCache, visibility
from visspec.models.attention import draft_attention, pass_inputs
from visspec.models.attention.draft_attention import switch_attention
from visspec.models.attention.pass_inputs import NAME
from visspec.models.decoder.target import HFDecoder

GREEDY = {"max_new_tokens": NEW, "do_sample": False}
ENTRY = tf.AttentionInterface()[NAME]
GROUPED = ("llama", "qwen2", "mistral", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm")


@pytest.fixture
def calls(monkeypatch):
    """Nodes of every folded attention call, and slots of every call that repeats keys."""
    seen, plain, repeat = {"folded": [], "repeated": []}, draft_attention.folded_attention, sdpa_attention.repeat_kv

    def folded(query, *rest):
        seen["folded"].append(query.shape[2])
        return plain(query, *rest)

    def repeated(states, *rest):
        seen["repeated"].append(states.shape[2])
        return repeat(states, *rest)

    monkeypatch.setattr(draft_attention, "folded_attention", folded)
    monkeypatch.setattr(sdpa_attention, "repeat_kv", repeated)
    return seen


FOLDED = [("llama", "one"), ("qwen2_vl", "one"), *((name, "ragged") for name in GROUPED)]


@pytest.mark.parametrize("name, shape", FOLDED)
def test_greedy_equals_stock_sdpa(name, shape, calls):
    assert HFDecoder(model_of(name)).masks.groups == 2 > HFDecoder(model_of("gemma2")).masks.groups  # soft caps
    expected, inputs = stock(name, shape), prompt(name, shapes(name)[shape])
    drafters = [TreeOracle(expected, 0.3)]
    if name in ("llama", "qwen2_vl"):
        drafters += [None, TreeOracle(expected, 0.3, per_row=True), Grower(expected)]
    for drafter in drafters:
        accelerated = visspec.accelerate(model_of(name), drafter, adaptive=False)
        calls["repeated"].clear()
        assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected
        # the prompt's pass is transformers' own
        assert set(calls["repeated"]) <= {inputs["input_ids"].shape[1]}, "a draft's pass has repeated keys"
    # nodes: two children a level, plain decoding, grown trees
    assert set(calls["folded"]) >= ({11} if len(drafters) == 1 else {1, 9, 11})


def test_padding_inside_the_prompt():
    model, inputs = model_of("llama"), prompt("llama", ["9", "9"])
    inputs["attention_mask"][1, 4:6] = 0
    expected = new_tokens(model.generate(**inputs, **GREEDY), inputs)
    for drafter in (None, TreeOracle(expected, 0.3)):
        assert new_tokens(fast("llama", drafter).generate(**inputs, **GREEDY), inputs) == expected


@settings(max_examples=60)
@given(st.data())
def test_folded_equals_repeated(data):
    rows, keys, nodes = (data.draw(st.integers(1, 3)) for _ in range(3))
    share, extent = data.draw(st.integers(2, 4)), data.draw(st.integers(4, 40))
    size, value_size = data.draw(st.sampled_from([(8, 8), (8, 4), (16, 24)]))  # of another width: as in MLA
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    query = torch.randn(rows, nodes, keys * share, size, generator=g).transpose(1, 2)
    key = torch.randn(rows, keys, extent, size, generator=g)
    value = torch.randn(rows, keys, extent, value_size, generator=g)
    mask = torch.randn(data.draw(st.sampled_from([1, rows])), 1, nodes, extent, generator=g)
    module = nn.Module()
    module.num_key_value_groups = share
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    # rows for more heads than this layer has to a key head are left alone
    rows = mask.repeat(1, 1, share + data.draw(st.integers(0, 2)), 1)
    result, weights = ENTRY(module, query, key, value, None, scaling=0.3, visspec=rows)
    assert weights is None and result.shape == expected.shape and result.is_contiguous()
    assert torch.allclose(result, expected, atol=1e-5)


def test_stock_calls_are_stock():
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8)
    for queries, slots in ((5, 9), (1, 9), (5, 5)):
        for mask in (
            None, torch.rand(2, 1, queries, slots) < 0.8, torch.randn(1, 1, queries, slots),
            torch.randn(1, 1, 1, slots), torch.randn(2, 4, queries, slots),
        ):  # fmt: skip
            given = (module, query[:, :, :queries], key[:, :, :slots], key[:, :, :slots], mask)
            for more in (
                {},
                {"scaling": 0.2, "is_causal": False},
                {"position_bias": torch.randn(1, 4, queries, slots)},
            ):
                assert torch.equal(ENTRY(*given, **more)[0], sdpa_attention_forward(*given, **more)[0])


def test_more_than_a_softmax_goes_to_stock():
    """Biases of a layer's own are added by transformers' function, soft caps are refused by it."""
    module = nn.Module()
    module.num_key_value_groups = 2
    query, key, mask = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 1, 3, 9)
    bias = torch.randn(1, 4, 3, 9)
    expected, _ = sdpa_attention_forward(module, query, key, key, mask, position_bias=bias)
    rows = mask.repeat(1, 1, 2, 1)
    result, _ = ENTRY(module, query, key, key, mask, position_bias=bias, visspec=rows)
    assert torch.equal(result, expected)
    with pytest.raises(ValueError, match="softcap"):
        ENTRY(module, query, key, key, mask, softcap=30.0, visspec=rows)


def test_unwrapped_model_untouched(monkeypatch):
    """Two models in one process: `sdpa` stays transformers' own, and ours is called by passes of the wrapped one."""
    seen, wrapped, other = [], model_of("llama"), llama()

    def spy(module, *args, **kwargs):
        seen.append(module)
        return draft_attention.draft_attention(module, *args, **kwargs)

    monkeypatch.setitem(tf.AttentionInterface._global_mapping, NAME, spy)
    expected, inputs = stock("llama", "ragged"), prompt("llama", shapes("llama")["ragged"])
    accelerated = visspec.accelerate(wrapped, TreeOracle(expected, 0.3), adaptive=False)
    for registry, own in ((ALL_ATTENTION_FUNCTIONS, sdpa_attention_forward), (ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask)):
        assert registry["sdpa"] is own
    assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected and seen
    seen.clear()
    other.generate(**inputs, **GREEDY)
    assert new_tokens(wrapped.generate(**inputs, **GREEDY), inputs) == expected
    assert not seen and {model.config._attn_implementation for model in (wrapped, other)} == {"sdpa"}


def test_attention_restored_after_error(monkeypatch):
    inputs, model, names = prompt("llama", ["9", "4"]), llama(), []
    accelerated = visspec.accelerate(model, None, probe=False)

    def failing(*args):
        names.append(model.config._attn_implementation)
        raise RuntimeError("no attention")

    monkeypatch.setattr(draft_attention, "folded_attention", failing)
    with pytest.raises(RuntimeError, match="no attention"):
        accelerated.generate(**inputs, **GREEDY)
    assert names == [NAME] and model.config._attn_implementation == "sdpa" and not draft_attention._switched


def test_passes_of_two_threads_may_overlap():
    configs = draft_attention.configurations(model_of("llama"))
    first, second = switch_attention(configs), switch_attention(configs)
    for step, name in ((first.__enter__, NAME), (second.__enter__, NAME)):
        step()
        assert configs[0]._attn_implementation == name and draft_attention.implementation(configs[0]) == "sdpa"
    first.__exit__(None, None, None)
    assert configs[0]._attn_implementation == NAME
    second.__exit__(None, None, None)
    assert configs[0]._attn_implementation == "sdpa"


@pytest.mark.parametrize("shape", ["one", "ragged"])
def test_stock_calls_under_our_name(shape):
    """What another thread computes while a pass runs: prompts with padding, and single steps."""
    model, inputs = model_of("llama"), prompt("llama", shapes("llama")[shape])
    with switch_attention(draft_attention.configurations(model)):
        assert new_tokens(model.generate(**inputs, **GREEDY), inputs) == stock("llama", shape)
        result = model(**inputs).logits
    assert torch.equal(result, model(**inputs).logits)


class Swallows(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, attention_mask, cache)


class Refuses(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, position_ids=None,
                use_cache=None):  # fmt: skip
        return super().forward(hidden_states, position_embeddings, attention_mask, cache)


@pytest.mark.parametrize("kind", [Swallows, Refuses])
def test_mask_without_keyword(kind, calls):
    model = built(tf.LlamaForCausalLM, tf.LlamaConfig(**TEXT))
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    expected, inputs = stock("llama", "ragged"), prompt("llama", shapes("llama")["ragged"])
    accelerated = visspec.accelerate(model, TreeOracle(expected, 0.3), adaptive=False)
    assert accelerated.target.masks.groups == (2 if kind is Swallows else 1)
    assert new_tokens(accelerated.generate(**inputs, **GREEDY), inputs) == expected and not calls["folded"]


@settings(max_examples=60)
@given(st.data())
def test_a_kept_mask_equals_a_new_one(data):
    """Random rounds of rows of different length, padding, trees of changing size and shape, rows that leave."""
    rows, padded = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    groups = data.draw(st.integers(1, 3))
    made, slots = pass_inputs.Masks(torch.float32, groups=groups), SlotCache(rows)
    slots.lengths = [6] * rows
    if padded:
        slots.padding = torch.tensor([[s >= b for s in range(6)] for b in range(rows)])
    for _ in range(data.draw(st.integers(2, 7))):
        size, live = data.draw(st.integers(1, 9)), len(slots.lengths)
        parents = [[-1, *(data.draw(st.integers(0, n)) for n in range(size - 1))] for _ in range(live)]
        tree = trees.from_parents(torch.tensor(parents), size) if data.draw(st.booleans()) else trees.static(
            tuple(parents[0])
        )  # fmt: skip
        extent = slots.open(size, "cpu")
        inputs = made(slots, tree, extent)
        plain, folded = inputs["attention_mask"], inputs.get(NAME, inputs["attention_mask"])
        seen = visibility(tree.ancestor, slots.lengths, slots.padding, extent)
        if plain is None:
            assert groups == 1 and size == 1 and bool(seen.all())
        else:
            assert plain.shape[2:] == (size, extent) and folded.shape[2:] == (groups * size, extent)
            assert torch.equal(plain.expand(live, -1, -1, -1), made.additive(seen))
            assert torch.equal(folded.expand(live, -1, -1, -1), made.additive(seen, groups))
        slots.commit([list(range(data.draw(st.integers(1, size)))) for _ in range(live)])
        if live > 1 and data.draw(st.booleans()):
            slots.select(sorted(data.draw(st.sets(st.integers(0, live - 1), min_size=1))))


def test_cached_mask_outgrown(monkeypatch):
    monkeypatch.setattr(pass_inputs, "GROW", 0)
    made, slots = pass_inputs.Masks(torch.float32), SlotCache(2)
    slots.lengths = [6, 4]
    for _ in range(4):
        extent = slots.open(6, "cpu")
        seen = visibility(trees.chain(5).ancestor, slots.lengths, None, extent)
        assert torch.equal(made(slots, trees.chain(5), extent)["attention_mask"], made.additive(seen))
        slots.commit([list(range(6)), [0, 1, 2]])


@pytest.mark.parametrize("wrong", [None, 0.3])
def test_ragged_rows_reuse_mask(wrong, monkeypatch):
    built_masks, expected = [], stock("llama", "ragged")
    monkeypatch.setattr(pass_inputs, "visibility", lambda *args: built_masks.append(1) or visibility(*args))
    accelerated = fast("llama", None if wrong is None else TreeOracle(expected, wrong))
    built_masks.clear()
    rounds = accelerated.run(**prompt("llama", shapes("llama")["ragged"]), **GREEDY).state.trace.rounds
    assert len(rounds) > 6 and len(built_masks) <= len(expected)  # the first, and one where rows leave


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 3), (4, 8)])
def test_heads_must_divide(heads, key_heads):
    model = llama(num_attention_heads=heads, num_key_value_heads=key_heads)
    with pytest.raises(ValueError, match=r"^model: LlamaForCausalLM can't run a draft \(RuntimeError: The size of ten"):
        visspec.accelerate(model, "ngram")
