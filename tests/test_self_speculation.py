"""Drafters that need no training: those of the context (more in test_context), and the target's own layers."""

import pytest
import torch

import visspec
from tests.doubles import NEW, fast, opened, raises_line
from tests.image_cases import made
from tests.registry_cases import janus_pair
from tests.tiny import llama, model_of, prompt, shapes
from tests.tiny_classes import tiny_model
from visspec import registry
from visspec import tree as trees
from visspec.models.decoder.layer_skip import LayerSkip, SkipPlan, candidates
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle.feature_drafting import FeatureDrafting


@pytest.mark.parametrize("name", ["context:nodes=32", "context:sources=answers", "recycling:nodes=32"])
def test_shared_between_requests(name):
    inputs = prompt("llama", ["9", "14"])
    rounds = {}
    for shared in (False, True):
        quick = fast("llama", f"{name},shared={str(shared).lower()}")
        rounds[shared] = []
        for _ in range(2):
            quick.generate(**inputs, max_new_tokens=NEW, do_sample=False)
            rounds[shared].append(quick.last_stats.rounds)
    (first, again), (_, known) = rounds[False], rounds[True]
    assert first == again and known < 0.8 * first
    assert min(quick.last_state.trace.rounds[0].committed) > 1, "an answer is known from its first token on"


# --- layers -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen2_vl", "gemma2"])
def test_all_layers_equal_target(family):
    """Without a layer left out the chain's laws are those of a pass over it, and the cache's rows stay."""
    for shape in ("one", "ragged"):
        target, state, _ = opened(family, shapes(family)[shape])
        lengths, before = list(state.cache.slots.lengths), [store.clone() for store in state.cache.slots.keys]
        token, drafted, distributions = state.pending, [], []
        for level in range(4):
            distributions.append(target.partial(state, token, level, frozenset()))
            token = distributions[-1].argmax(dim=-1)
            drafted.append(token)
        assert state.cache.slots.lengths == lengths
        for old, new in zip(before, state.cache.slots.keys):
            for b, length in enumerate(lengths):
                assert torch.equal(old[b, :, :length], new[b, :, :length])
        scores = target.verify(state, trees.chain_draft(state.pending, torch.stack(drafted, dim=1)))
        result, expected = scores.distribution.logits[:, :4], torch.stack(distributions, dim=1)
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_skipped_layer():
    model = llama(num_hidden_layers=4, seed=5)
    target, ran = HFDecoder(model), []
    modules, hooks = dict(model.named_modules()), []
    for n, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_hook(lambda *_, n=n: ran.append(n)))
    ids = torch.arange(5, 12)[None]
    want = model.model.norm(model.model.layers[0](*first_layer(model, ids)))
    ran.clear()
    view = target.layer_subset(frozenset({1, 2, 3}))
    assert [len(layer._forward_hooks) for layer in model.model.layers] == [1] * 4, "those above alone"
    ran.clear()
    with torch.no_grad():
        torch.testing.assert_close(view(input_ids=ids, use_cache=False).logits, model.lm_head(want))
    assert ran == [0] and view is target.layer_subset(frozenset({1, 2, 3}))
    for hook in hooks:
        hook.remove()
    assert dict(model.named_modules()) == modules


def first_layer(model, ids):
    """What a Llama's first layer is called with, under plain causal attention."""
    seen = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    hook.remove()
    (args, kwargs) = seen[0]
    return (args or (kwargs.pop("hidden_states"),)) + (
        kwargs["attention_mask"], kwargs.get("position_ids"), None, False, kwargs["position_embeddings"],
    )  # fmt: skip


def test_layer_choice():
    cheap, dear = SkipPlan(frozenset({1, 2, 3}), 0.25), SkipPlan(frozenset({3}), 0.75)
    assert cheap.worth > dear.worth  # what costs less is tried first
    for _ in range(20):
        cheap.learn([1, 1], 4)
        dear.learn([5, 5], 4)
    assert dear.worth > 1.0 > cheap.worth - 0.1
    drafter = LayerSkip()
    drafter.attach(llama(num_hidden_layers=8))
    assert [choice.skip for choice in drafter.choices] == candidates(8)
    assert all(0 < len(skip) < 8 for skip in candidates(8)) and candidates(1) == []


def test_bad_options():
    for name, message in (
        ("recycling:nodes=0", "nodes must be at least 1"),
        ("context:levels=0", "levels must be at least 1"),
        ("context:sources=prompt", "sources: unknown 'prompt'"),
        ("layers:exit=2", "exit: got 2"),
        ("layers:every=1", "exit: got 0 with every 1"),
        ("layers:every=2,exit=1", "every: got 2 with exit 1"),
    ):
        with raises_line(message):
            visspec.accelerate(model_of("llama"), name)
    for option, most in (("width", 32), ("nodes", 1023)):
        with pytest.raises(ValueError, match=rf"^{option}: got 100000, expected a whole number from 1 to {most}\.$"):
            FeatureDrafting(None, None, None, torch.zeros(1), **{"width": 1, "nodes": 1, option: 100000})
    with pytest.raises(ValueError, match="drafter: got Janus, expected a text model"):
        janus_pair(LayerSkip(), registry.rule("exact"))
    assert made("janus") is not None


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "HrmTextForCausalLM"])
def test_unskippable_models_refused(name):
    model = tiny_model(name)
    with pytest.raises(ValueError, match=rf"^drafter: (the last layer of {name}|got {name})"):
        visspec.accelerate(model, "layers", probe=False).run(input_ids=torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6)
    assert visspec.accelerate(model, "ngram", probe=False).drafter is not None
