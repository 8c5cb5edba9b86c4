"""The folded pass of a block drafter is that of transformers' module, and follows its weights."""

import pytest
import torch
from torch import nn

import visspec
from tests.doubles import NEW
from tests.test_assistants import block_assistant, muse_glimmer, pair_of
from tests.test_assistants import prompt as of_lengths
from tests.tiny import model_of, prompt, shapes
from visspec.models.attention.slot_layers import CACHE, SlotLayers
from visspec.models.block import fused_pass as block_pass
from visspec.models.block.dflash2 import DFlash2Model, GroupedConv, with_convolutions
from visspec.models.block.drafter import BlockModel
from visspec.models.block.fused_pass import BlockPass, foldable
from visspec.models.block.trained import BlockDrafter

K = 5


def network(selector=False, **changes):
    """A random network whose norms scale: a fold that leaves one out is seen. selector: of DFlash 2, with kernels."""
    made = block_assistant(**changes)
    if selector:
        torch.manual_seed(2)
        made.config.block_size = K
        made = DFlash2Model(with_convolutions(made.config, 2, 8)).eval()
        for conv in (m for m in made.modules() if isinstance(m, GroupedConv)):
            [nn.init.normal_(p, std=0.5) for p in conv.parameters()]
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() == 1:
                p.copy_(0.5 + torch.rand(p.shape, generator=generator))
    return made


def passes(run, network, counts, masked):
    generator, cache, found = torch.Generator().manual_seed(1), SlotLayers(2, 40), []
    like = next(network.parameters())
    for count in counts:
        extent = cache.slots.open(count + K, "cpu")
        mask = torch.zeros(2, 1, K, extent, dtype=like.dtype)
        if masked:
            mask[1, :, :, 0] = torch.finfo(like.dtype).min
            mask[:, :, 0, extent - 1] = torch.finfo(like.dtype).min
        near = mask.clone()
        near[:, :, :, extent // 2] = torch.finfo(like.dtype).min
        given = {
            "noise_embeds": torch.randn(2, K, 32, generator=generator).to(like),
            "context_hidden_states": torch.randn(2, count, 64, generator=generator).to(like),
            "attention_mask": {"full_attention": None if not masked else mask, "sliding_attention": near},
            "position_ids": torch.stack([torch.arange(count + K) + 3, torch.arange(count + K) * 2]),
            "cache" if isinstance(run, BlockPass) else CACHE: cache,
        }
        out = run(**given)
        found.append(getattr(out, "last_hidden_state", out))
        cache.slots.lengths = [n + count for n in cache.slots.lengths]
    return found


CASES = {
    "grouped": {}, "all heads": {"num_key_value_heads": 4}, "one head": {"num_key_value_heads": 1},
    "three layers": {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "eps": {"rms_norm_eps": 0.3},
    "selector": {"selector": True},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_fused_pass_is_the_module(name, masked):
    module = network(**CASES[name])
    assert foldable(module)
    for want, got in zip(*(passes(run, module, (6, 0, 1, 3), masked) for run in (module, BlockPass(module)))):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_is_not_to_be_fused(monkeypatch):
    assert foldable(network()) and foldable(network(selector=True))
    hooked, wrapped, packed, dynamic, mixed = (network() for _ in range(5))
    hooked.layers[0].mlp.register_forward_hook(lambda *_: None)
    wrapped.layers[1].self_attn.forward = wrapped.layers[1].self_attn.forward
    packed.layers[0].mlp.up_proj = nn.Sequential(packed.layers[0].mlp.up_proj)
    dynamic.rotary_emb.rope_type = "dynamic"
    mixed.layers[0].mlp.to(torch.bfloat16)
    acting = network(hidden_act="gelu")
    kin, conv = network(), network(selector=True)
    conv.layers[1].mlp_conv.kernel_projection = nn.Sequential(conv.layers[1].mlp_conv.kernel_projection)
    kin.__class__ = type("Kin", (type(kin),), {})
    for module in (hooked, wrapped, packed, dynamic, mixed, acting, kin, conv):
        assert not foldable(module)
    monkeypatch.setattr(block_pass, "LIMIT", 100)
    assert not foldable(network())


@pytest.mark.parametrize("kind", ["dflash", "trained", "trained dflash2"])
def test_drafts_are_those_of_the_module(kind, monkeypatch):
    if kind == "dflash":
        (target, assistant), inputs = pair_of("dflash"), of_lengths((19, 12, 3))
        make = lambda: BlockModel(assistant, target)  # noqa: E731
    else:
        target, inputs = model_of("llava"), prompt("llava", shapes("llava")["ragged"])
        more = {"selector": 5} if "2" in kind else {}
        make = lambda: BlockDrafter.for_model(target, layers=2, block=4, **more)  # noqa: E731
    found = []
    for fuse in (True, False):
        drafter = make()
        if not fuse:
            monkeypatch.setattr(drafter, "_fused_pass", lambda: None)
        fast = visspec.accelerate(target, drafter, adaptive=False)
        fast.generate(**inputs, max_new_tokens=NEW, do_sample=True, seed=[1, 2, 3])
        found.append([(r.levels, r.committed) for r in fast.last_state.trace.rounds])
        assert fast.last_stats.faults == 0 and (drafter._fold[1] is not None) == fuse
    assert found[0] == found[1]


def test_the_prompt_is_read_before_the_first_draft(monkeypatch):
    target, inputs = model_of("llava"), prompt("llava", shapes("llava")["ragged"])
    drafter, found = BlockDrafter.for_model(target, layers=2, block=4), []
    inner = drafter._pass

    def read(memory, pending, position_B, places=None):
        found.append((places, sum(features.shape[1] for _, features, _ in memory.pending_inputs)))
        return inner(memory, pending, position_B, places)

    monkeypatch.setattr(drafter, "_pass", read)
    visspec.accelerate(target, drafter, adaptive=False).generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert found[0] == (0, inputs["input_ids"].shape[1]) and found[1] == (None, 0)
    assert all(places is None and 0 < count <= 4 for places, count in found[2:]) and len(found) > 2


def test_a_fold_follows_the_weights():
    drafter = BlockModel(block_assistant(), muse_glimmer())
    first = drafter._fused_pass()
    assert first is drafter._fused_pass()
    with torch.no_grad():
        next(drafter.assistant.parameters()).mul_(1.5)
    assert drafter._fused_pass() is not first
    drafter.assistant = network()
    torch.testing.assert_close(drafter._fused_pass().last, drafter.assistant.norm.weight.detach())
    drafter.assistant.layers[0].mlp.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        next(drafter.assistant.parameters()).mul_(1.5)
    assert drafter._fused_pass() is None


def test_fold_after_fused_optimizer():
    drafter = BlockDrafter.for_model(model_of("llava"), layers=1, block=4)
    weight = drafter.head.model.encoder.fc.weight
    first = drafter._fused_pass().read
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    drafter.refresh()
    assert torch.equal(drafter._fused_pass().read, weight.T) and not torch.equal(first, weight.T)
