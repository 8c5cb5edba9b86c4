"""`visspec_tree` as an attention backend: unmodified models answer as under sdpa, without a mask over the slots."""

import copy

import pytest

import visspec
from tests.doubles import NEW, Grower, TreeOracle, new_tokens, stock
from tests.tiny import model_of, prompt, shapes
from visspec import kernels
from visspec.models.targets import tree_attention

GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def with_our_attention(name):
    tree_attention.register()
    model = copy.deepcopy(model_of(name))
    model.set_attn_implementation(tree_attention.NAME)
    assert model.config.get_text_config()._attn_implementation == tree_attention.NAME
    return model


@pytest.mark.parametrize("shape", ["one", "ragged"])
@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_greedy_output_equals_stock_under_sdpa(name, shape, monkeypatch):
    expected = stock(name, shape)
    model, inputs = with_our_attention(name), prompt(name, shapes(name)[shape])
    assert new_tokens(model.generate(**inputs, **GREEDY), inputs) == expected  # transformers' own loop
    used, plain = [], kernels.tree_attention
    monkeypatch.setattr(
        "visspec.kernels.attention.tree_attention", lambda q, *rest: used.append(q.shape[2]) or plain(q, *rest)
    )
    for drafter in (None, TreeOracle(expected, 0.3), TreeOracle(expected, 0.3, per_row=True), Grower(expected)):
        fast = visspec.accelerate(model, drafter, adaptive=False)
        assert new_tokens(fast.generate(**inputs, **GREEDY), inputs) == expected
    assert {1, 9, 11} <= set(used)  # nodes: plain decoding, grown trees, two children a level


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_windows_keep_their_masks(name):
    model, inputs = with_our_attention(name), prompt(name, shapes(name)["ragged"])
    fast = visspec.accelerate(model, TreeOracle(stock(name, "ragged"), 0.3), adaptive=False)
    assert new_tokens(fast.generate(**inputs, **GREEDY), inputs) == stock(name, "ragged")


def test_a_draft_pass_is_given_relations_of_nodes_only():
    model, inputs, seen = with_our_attention("llama"), prompt("llama", ["19", "12"]), []
    model.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    visspec.accelerate(model, TreeOracle(stock("llama", "even"), 0.3), adaptive=False).generate(**inputs, **GREEDY)
    passes = [kwargs for kwargs in seen if "tree_lengths" in kwargs]
    sizes = [(k["attention_mask"].shape[1:], k["input_ids"].shape[1]) for k in passes]
    assert len(passes) == len(seen) - 1 and all(shape == (1, nodes, nodes) for shape, nodes in sizes)
    assert passes[0]["tree_lengths"].tolist() == [20, 20] and passes[0]["tree_starts"].tolist() == [0, 7]


def test_padding_that_is_no_prefix_is_refused():
    inputs = prompt("llama", ["6", "6"])
    inputs["attention_mask"][1, -1] = 0
    with pytest.raises(ValueError, match="attention_mask: got padding inside or after"):
        visspec.accelerate(with_our_attention("llama"), None).generate(**inputs, **GREEDY)


def test_soft_caps_are_refused():
    model = copy.deepcopy(model_of("gemma2"))
    tree_attention.register()
    model.set_attn_implementation(tree_attention.NAME)
    with pytest.raises(ValueError, match="softcap"):
        model.generate(**prompt("gemma2", ["6"]), **GREEDY)
