"""One-layer drafters of published forms: exact in ragged batches, and equal to the formulas of `published.py`."""

import re

import pytest
import torch

import visspec
from tests.doubles import raises_line
from tests.published import NEW, Watched, begun, check_drafts, eagle_logits, known
from tests.tiny import model_of, prompt, shapes, single_row
from visspec.models.eagle.config import EagleConfig
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.eagle.head import frequencies
from visspec.models.eagle.image_compression import SpecVLMBranches

SUM = {"fusion": "sum", "positions": "index"}
SPLIT = {"fusion": "split", "feature_layers": (1, 0, -1), "fc_bias": False, "kv_heads": 2}
FORMS = {
    "eagle": SUM | {"images": "slots"},
    "eagle-gqa": SUM | {"images": "slots", "kv_heads": 2, "qkv_bias": True, "fc_bias": False},
    "eagle-normed": SUM | {"images": "slots", "norm_input": True, "norm_output": True},
    "msd": SUM | {"images": "embeddings"},
    "vispec": SUM | {"images": "latents", "image_latents": 1},
    "vispec-3": SUM | {"images": "latents", "image_latents": 3, "qkv_bias": True},
    "flash": SUM | {"images": "queries", "image_latents": 3, "block": 2},
    "flash-wide": SUM | {"images": "queries", "image_latents": 6, "block": 5},
    "specvlm": SUM | {"images": "gated", "image_latents": 3, "norm_input": True},
    "dream": {"fusion": "cross", "positions": "index", "images": "slots", "feature_layers": (1, -1), "kv_heads": 2},
    "dream-last": {"fusion": "cross", "images": "none"},
    "hivis": SUM | {"images": "none"},
    "blind": SUM | {"images": "blind"},
    "eagle3": SPLIT | {"images": "placeholders", "draft_vocab": 40},
    "eagle3-whole": SPLIT | {"images": "slots", "draft_vocab": 96, "own_embedding": True},
    "eagle3-normed": SPLIT | {
        "images": "none", "draft_vocab": 50, "norm_before_residual": True, "fc_norm": True, "norm_output": True,
        "qk_norm": True,
    },
    "eagle3-input-norm": SPLIT | {"images": "placeholders", "norm_before_fc": True, "draft_vocab": 33, "head_size": 12},
    "eagle3-narrow": SPLIT
    | {"images": "placeholders", "draft_vocab": 40, "hidden": 20, "head_size": 6, "own_embedding": True},
    "eagle3-blind": SPLIT | {"images": "blind", "draft_vocab": 40},
}  # fmt: skip


# every kind of images with every kind of positions that it comes with
WITH_MROPE = "eagle msd vispec-3 flash specvlm dream-last eagle3 eagle3-whole eagle3-blind".split()


def make(name, form, seed=1, width=1, **more):
    """A random drafter of a form, with every weight drawn, also those that start as nothing."""
    drafter = EagleDrafter.for_model(model_of(name), seed=seed, **FORMS[form] | more)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.head.parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.2
            weight.add_(scale * torch.randn(weight.shape, generator=generator) + (weight.shape == (1,)))
    if drafter.head.ids is not None:
        drafter.head.keep(torch.randperm(90, generator=generator)[: len(drafter.head.ids)].sort().values)
    drafter.refresh()
    if width > 1:
        drafter.width, drafter.nodes = width, 9
    return drafter


@pytest.mark.parametrize(("name", "form"), [
    *(("llava", form) for form in FORMS), *(("qwen2_5_vl", form) for form in WITH_MROPE),
    *(("llama", form) for form in ("eagle", "eagle3", "flash", "dream")),
])  # fmt: skip
def test_drafts_equal_published_forms(name, form):
    drafter = make(name, form)
    table = drafter.head.embed_tokens.weight if drafter.config.own_embedding else drafter.embed.weight
    depth = 5 if form == "flash" else 3  # three passes
    check_drafts(drafter, model_of(name), name, drafter.config, drafter.head.state_dict(), table, depth)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "form"),
    [("llava", form) for form in ("eagle", "eagle3", "vispec", "dream")] + [("llama", "eagle"), ("llama", "dream")],
)
def test_tree_nodes_from_own_paths(name, form, monkeypatch):
    drafter, model, rows = make(name, form, width=3), model_of(name), shapes(name)["ragged"]
    inputs, seen, grown = prompt(name, rows), [], []
    target, state, answer = begun(drafter, model, inputs, NEW)

    class TreeBuilder(visspec.tree.TreeBuilder):
        def grow(self, logp):
            grown.append(super().grow(logp))
            return grown[-1]

    monkeypatch.setattr(visspec.tree, "TreeBuilder", TreeBuilder)
    Watched(drafter, seen).propose(state, 3)
    for b in range(len(rows)):
        whole = known(target, model, single_row(name, rows, inputs, b), answer[b, : len(state.tokens[b])])
        table, weights, paths = drafter.embed.weight, drafter.head.state_dict(), [[]]
        for level, (token, parent) in enumerate(grown[:2]):
            pairs = zip(token[b].tolist(), parent[b].tolist())
            paths = [paths[above] + [child] for child, above in pairs]
            for node, path in enumerate(paths):
                want = eagle_logits(drafter.config, weights, table, drafter.lm_head, whole, path)[-1]
                got = seen[level + 1][b, node]
                torch.testing.assert_close(got.log_softmax(-1), want.log_softmax(-1), rtol=1e-3, atol=1e-3)


def test_wave_lengths_of_llama3():
    import transformers as tf
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    drafter = make("llama", "eagle3", rope_scaling=scaling, rope_theta=500.0)
    rope = scaling | {"rope_theta": 500.0}
    theirs = tf.LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=rope)
    want, factor = ROPE_INIT_FUNCTIONS["llama3"](theirs)
    result, ours = frequencies(drafter.config, "cpu")
    torch.testing.assert_close(result, want)
    assert factor == ours == 1.0


@torch.inference_mode()
def test_interleaved_rotary_sections():
    from visspec.models.eagle.head import turns, turns_at

    config = make("qwen3_vl", "eagle3").config
    assert config.mrope_interleaved and config.mrope_section
    position = torch.randint(0, 50, (3, 2, 7))
    result = turns_at(turns(config, 60, "cpu"), position, config.mrope_section, True)
    rotary = model_of("qwen3_vl").model.language_model.rotary_emb
    cos, sin = rotary(torch.zeros(1), position)
    half = config.head_size // 2
    torch.testing.assert_close(result.real, cos[..., :half])
    torch.testing.assert_close(result.imag, sin[..., :half])


@pytest.mark.parametrize("changes,sentence", [
    ({"fusion": "both"}, "fusion: got 'both', expected one of sum, split"),
    ({"images": "all"}, "images: got 'all', expected one of slots"),
    ({"block": 0}, "block: got 0, expected a whole number from 1"),
    ({"eps": 0}, "eps: got 0, expected a finite number above 0"),
    ({"fc_bias": 1}, "fc_bias: got 1, expected true or false"),
    ({"feature_layers": (9,)}, "feature_layers: got 9, expected a whole number from -3 to 3"),
    *(({name: value, **more}, f"{name}: got ") for name, value, more in (
        ("image_latents", 2, {}), ("image_latents", 0, {"images": "gated"}),
        ("images", "embeddings", {"fusion": "split"}), ("norm_input", True, {"fusion": "split"}),
        ("images", "queries", {"image_latents": 3, "fusion": "split"}), ("qk_norm", True, {}),
        ("feature_layers", (-1, 1), {"fusion": "cross"}),
        ("norm_output", True, {"fusion": "cross"}), ("feature_layers", (0, 1), {}), ("mrope_section", (1, 1), {}),
    )),
])  # fmt: skip
def test_forms_that_do_not_go_together(changes, sentence):
    """What the network would ignore or read as something else."""
    sizes = {"family": "llava", "vocab": 96, "hidden": 32, "target_hidden": 32, "target_layers": 2, "heads": 4,
             "kv_heads": 4, "head_size": 8, "intermediate": 48}  # fmt: skip
    EagleConfig(**sizes)
    with raises_line(re.escape(sentence)):
        EagleConfig(**sizes | changes)


@pytest.mark.parametrize("branch", range(4))
def test_branches_of_a_gate(branch):
    config = make("llava", "specvlm").config
    network = SpecVLMBranches(config).eval()
    with torch.no_grad():
        network.gate.weight.zero_()
        network.gate.bias.copy_(torch.eye(4)[branch])
    x, real = torch.randn(3, 11, 32), torch.arange(11) < torch.tensor([[11], [2], [7]])
    result = network(x, x, real, torch.randn(3, 32))
    for run, length, got in zip(x, real.sum(1), result):
        alone = run[:length].T
        middle = [(2 * i + 1) * int(length) // 6 for i in range(3)]
        want = (
            alone.T[middle],
            torch.nn.functional.adaptive_avg_pool1d(alone, 3).T,
            network.convolution(alone).T[middle],
            network.resampler(alone.T[None], torch.ones(1, int(length), dtype=torch.bool))[0],
        )
        torch.testing.assert_close(got, want[branch])


def test_gate_in_training():
    network, x, real = SpecVLMBranches(make("llava", "specvlm").config), torch.randn(1, 6, 32), torch.ones(1, 6).bool()
    question = torch.randn(1, 32)
    with torch.no_grad():
        network.gate.weight.zero_()
        network.gate.bias.zero_()
    fixed = []
    for branch in torch.eye(4):
        network.gate.bias.data.copy_(branch)
        fixed.append(network.eval()(x, x, real, question))
    network.gate.bias.data.zero_()
    network.train()
    drawn = [network(x, x, real, question) for _ in range(60)]
    counts = [sum(torch.allclose(one, f, atol=1e-5) for one in drawn) for f in fixed]
    assert min(counts) > 3 and sum(counts) == 60
    drawn[0].square().sum().backward()
    assert network.gate.weight.grad.abs().sum() > 0


def test_trees_end_with_the_tokens_of_a_pass():
    drafter = make("llava", "flash-wide")
    wide = EagleDrafter(drafter.head, drafter.model, width=3)
    assert (drafter.traits.levels, wide.traits.levels) == (8, 5)
