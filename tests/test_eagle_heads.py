"""Drafters of the published one-layer forms: exact in ragged batches, and what they draft is what their papers say.

The expected features are computed here, without a cache and without the drafter, from the published descriptions.
"""

import pytest
import torch
import torch.nn.functional as F

import visspec
from tests.tiny import model_of, prompt, shapes, single_row
from visspec.loop.decode import open_request
from visspec.models.drafters.eagle_heads import EagleDrafter
from visspec.models.nets.eagle_head import EagleConfig, frequencies
from visspec.models.targets.hf_decoder import HFDecoder
from visspec.recipes.train_drafter import request_of

NEW = 14
SUM = {"fusion": "sum", "positions": "index"}
SPLIT = {"fusion": "split", "feature_layers": (1, 0, -1), "fc_bias": False, "kv_heads": 2}
FORMS = {
    "eagle": SUM | {"images": "slots"},
    "eagle-gqa": SUM | {"images": "slots", "kv_heads": 2, "qkv_bias": True, "fc_bias": False},
    "msd": SUM | {"images": "embeddings"},
    "vispec": SUM | {"images": "latents", "image_latents": 1},
    "vispec-3": SUM | {"images": "latents", "image_latents": 3, "qkv_bias": True},
    "hivis": SUM | {"images": "none"},
    "blind": SUM | {"images": "blind"},
    "eagle3": SPLIT | {"images": "placeholders", "draft_vocab": 40},
    "eagle3-whole": SPLIT | {"images": "slots", "draft_vocab": 96, "own_embedding": True},
    "eagle3-normed": SPLIT | {
        "images": "none", "draft_vocab": 50, "norm_before_residual": True, "fc_norm": True, "norm_output": True,
        "qk_norm": True,
    },
    "eagle3-input-norm": SPLIT | {"images": "placeholders", "norm_before_fc": True, "draft_vocab": 33, "head_size": 12},
    "eagle3-blind": SPLIT | {"images": "blind", "draft_vocab": 40},
}  # fmt: skip


def make(name, form, seed=1, width=1, **more):
    """A random drafter of a form, with every weight drawn, also those that start as nothing."""
    drafter = EagleDrafter.for_model(model_of(name), seed=seed, **FORMS[form] | more)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.head.parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.2
            weight.add_(scale * torch.randn(weight.shape, generator=generator))
    if drafter.head.ids is not None:
        drafter.head.keep(torch.randperm(90, generator=generator)[: len(drafter.head.ids)].sort().values)
    drafter.refresh()
    drafter.width, drafter.nodes = width, 9
    return drafter


EXACT = [("llava", form) for form in FORMS] + [("qwen2_5_vl", "eagle3"), ("qwen2_5_vl", "vispec"), ("llama", "eagle")]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("name", "form"), EXACT)
def test_ragged_batches_greedy_and_seeded(name, form, width):
    model, inputs = model_of(name), prompt(name, shapes(name)["ragged"])
    fast = visspec.accelerate(model, make(name, form, width=width), adaptive=False, levels=4)
    plain = visspec.accelerate(model, None)
    greedy = {"max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(fast.generate(**inputs, **greedy), model.generate(**inputs, **greedy))
    assert fast.last_stats.faults == 0
    sampled = {
        "max_new_tokens": NEW,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "seed": [3, 4, 5],
    }
    assert torch.equal(fast.generate(**inputs, **sampled), plain.generate(**inputs, **sampled))
    assert fast.last_stats.faults == 0


# --- the published descriptions ---------------------------------------------------------------------------------------


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def expected(drafter, ids, embedded, features, positions, chain, raw=None):
    """(T, d) features predicted at the elements of one sequence, without padding, and `chain` further ids drafted.

    ids (L), embedded (L, d) the target's input embeddings, features (L, F), positions (3, L); the last id is pending
    and has no feature. Returns the logits after each drafted element, (1 + len(chain), V).
    """
    config, weights = drafter.config, drafter.head.state_dict()
    at = lambda name: weights[name]  # noqa: E731
    linear = lambda x, name: F.linear(x, at(f"{name}.weight"), weights.get(f"{name}.bias"))  # noqa: E731
    table = weights.get("embed_tokens.weight", drafter.embed.weight)
    length, d, images = len(ids) - 1, config.hidden, config.images
    picture = [n < len(embedded) and int(i) in config.image_ids for n, i in enumerate(ids)]

    reduced = features
    if config.fusion == "split":
        if config.norm_before_fc:
            reduced = norm(reduced, at("input_norm.weight"), config.eps)
        if config.fc_norm:
            parts = reduced.chunk(config.parts, dim=-1)
            reduced = torch.cat([norm(p, at(f"fc_norm.{i}.weight"), config.eps) for i, p in enumerate(parts)], dim=-1)
        reduced = linear(reduced, "fc")
    if images == "blind":
        reduced = torch.zeros(length, d)

    def joined(embedding, feature, image):
        if config.fusion == "split":
            return torch.cat([embedding, feature])
        if images == "latents":
            feature = linear(torch.cat([feature, image]), "img_fc")
        return linear(torch.cat([embedding, feature]), "fc")

    def compressed(run):
        def heads(name):
            return linear(embedded[run], f"imadpt.{name}").unflatten(-1, (config.heads, -1))

        score = torch.einsum("qhe,she->hqs", at("imadpt.q"), heads("k_proj")) * config.head_size**-0.5
        mixed = torch.einsum("hqs,she->qhe", score.softmax(-1), heads("v_proj"))
        return linear(mixed.flatten(1), "imadpt.o_proj")

    sequence, places, image, t = [], [], torch.zeros(d), 0
    while t < length:
        if not picture[t + 1] or images in ("slots", "placeholders"):
            after = embedded[t + 1] if images == "slots" and t + 1 < len(embedded) else table[ids[t + 1]]
            sequence.append(joined(after, reduced[t], image))
            places.append(t)
        elif images == "embeddings":
            sequence.append(embedded[t + 1])
            places.append(t)
        elif images == "latents":
            end = next(s for s in range(t + 1, len(ids)) if s + 1 == len(ids) or not picture[s + 1])
            outputs = compressed(slice(t + 1, end + 1))
            sequence += list(outputs[:-1])
            places += [max(end - len(outputs[:-1]) + i, t) for i in range(len(outputs) - 1)]
            image, t = outputs[-1], end - 1
        t += 1
    where = torch.arange(length)[None].expand(3, -1) if config.positions == "index" else positions
    turns = [where[:, t] for t in places]

    logits = []
    for step in range(1 + len(chain)):
        feature = layer(drafter, torch.stack(sequence), torch.stack(turns))[-1]
        read = norm(feature, at("norm.weight"), config.eps) if config.fusion == "split" else feature
        if config.norm_output:
            feature = read
        if config.draft_vocab:
            own, few = torch.full((config.vocab,), float("-inf")), linear(read, "lm_head")
            own[drafter.head.ids if drafter.head.ids is not None else slice(None)] = few
            logits.append(own)
        else:
            logits.append(drafter.lm_head(read))
        if step < len(chain):
            sequence.append(joined(table[chain[step]], feature, image))
            turns.append(turns[-1].max() + 1 - torch.zeros(3, dtype=torch.long))
    return torch.stack(logits)


def layer(drafter, x, turns):
    """The Llama layer over a whole sequence (T, ...): (T, d). turns: (T, 3) positions."""
    config, weights = drafter.config, drafter.head.state_dict()
    linear = lambda x, name: F.linear(  # noqa: E731
        x, weights[f"layers.0.{name}.weight"], weights.get(f"layers.0.{name}.bias")
    )
    scaled = lambda x, name: norm(x, weights[f"layers.0.{name}.weight"], config.eps)  # noqa: E731
    read, rest = x, x
    if config.fusion == "split":
        embedding, rest = x.chunk(2, dim=-1)
        hidden = scaled(rest, "hidden_norm")
        read = torch.cat([scaled(embedding, "input_layernorm"), hidden], dim=-1)
        rest = hidden if config.norm_before_residual else rest
    parts = [linear(read, f"self_attn.{p}_proj").unflatten(-1, (-1, config.head_size)) for p in "qkv"]
    query, key, value = parts
    if config.qk_norm:
        query, key = scaled(query, "self_attn.q_norm"), scaled(key, "self_attn.k_norm")
    half = config.head_size // 2
    section = config.mrope_section or (half, 0, 0)
    row = [r for r, n in enumerate(section) for _ in range(n)]
    angle = turns[:, row].float() * config.rope_theta ** -(torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rotated(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    group = config.heads // config.kv_heads
    key, value = (p.repeat_interleave(group, dim=1) for p in (rotated(key), value))
    score = torch.einsum("the,she->hts", rotated(query), key) * config.head_size**-0.5
    score = score.masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), float("-inf"))
    rest = rest + linear(torch.einsum("hts,she->the", score.softmax(-1), value).flatten(1), "self_attn.o_proj")
    inner = scaled(rest, "post_attention_layernorm")
    return rest + linear(F.silu(linear(inner, "mlp.gate_proj")) * linear(inner, "mlp.up_proj"), "mlp.down_proj")


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in ("llava", "qwen2_5_vl") for form in FORMS] + [("llama", "eagle"), ("llama", "eagle3")],
)
def test_drafts_are_those_of_the_published_description(name, form):
    """First drafts, and those after a round in which rows accepted different numbers."""
    drafter, model = make(name, form), model_of(name)
    rows = shapes(name)["ragged"]
    inputs = prompt(name, rows)
    request = request_of(model, inputs, temperature=0, max_new_tokens=NEW, seed=0)
    target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True)
    state, scores = open_request(target, visspec.Exact(), request)
    drafter.start(state, scores)
    answer = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    seen = []
    for _ in range(2):
        draft = Watched(drafter, seen).propose(state, 3)
        for b in range(len(rows)):
            alone, done = single_row(name, rows, inputs, b), len(state.tokens[b])
            assert state.tokens[b] == answer[b, :done].tolist()
            whole = known(target, model, alone, answer[b, :done])
            want = expected(drafter, *whole, draft.value[b, 1:3].tolist())
            got = torch.stack([level[b] for level in seen[-3:]])
            torch.testing.assert_close(got.log_softmax(-1), want.log_softmax(-1), rtol=1e-3, atol=1e-3)
        one_round(target, drafter, state, answer)


class Watched:
    """Keeps the logits of every level of a drafter."""

    def __init__(self, drafter, seen):
        self.drafter, self.seen = drafter, seen

    def propose(self, state, depth):
        logits = self.drafter._logits

        def watched(feature):
            self.seen.append(logits(feature))
            return self.seen[-1]

        self.drafter._logits = watched
        try:
            return self.drafter.propose(state, depth)
        finally:
            del self.drafter._logits


def known(target, model, inputs, answer):
    """(ids, input embeddings, features, positions) of one prompt and its answer so far, from one pass of the target."""
    length = inputs["input_ids"].shape[1]
    request = request_of(model, inputs, temperature=0, max_new_tokens=NEW, seed=0)
    state, scores = open_request(target, visspec.Exact(), request)
    chain = visspec.tree.chain_draft(state.pending, answer[None, 1:])
    after = target.verify(state, chain)
    features = torch.cat([scores.features[0], after.features[0]])[: length + len(answer) - 1]
    positions = scores.aux["positions"]
    positions = positions[-3:, :1] if positions.dim() == 3 else positions[None, :1].expand(3, -1, -1)
    more = positions[..., -1:] + torch.arange(1, len(answer))
    ids = torch.cat([inputs["input_ids"][0], answer])
    embedded = scores.aux["embeddings"]  # a text decoder takes ids
    embedded = model.get_input_embeddings()(inputs["input_ids"]) if embedded is None else embedded
    return ids, embedded[0], features, torch.cat([positions, more], dim=-1)[:, 0]


def one_round(target, drafter, state, answer):
    """Verify a chain of which row b has its next b + 1 tokens right."""
    from visspec.loop.decode import retire, settle

    tokens = torch.stack([answer[b, len(t) - 1 :][:4] for b, t in enumerate(state.tokens)])
    for b in range(len(tokens)):
        tokens[b, 1 + b % 3] = (tokens[b, 1 + b % 3] + 1) % 88
    draft = visspec.tree.chain_draft(state.pending, tokens[:, 1:])
    scores = target.verify(state, draft)
    verdict = visspec.Exact()(draft, scores, None)
    outcome = settle(state, draft, scores, verdict)
    target.commit(state, draft, outcome)
    drafter.observe(state, draft, scores, verdict, outcome)
    retire(state, target, drafter)


def test_wave_lengths_of_llama3():
    """Those of transformers' own initialiser, which was written from the same description."""
    import transformers as tf
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    drafter = make("llama", "eagle3", rope_scaling=scaling, rope_theta=500.0)
    theirs = tf.LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=scaling | {"rope_theta": 500.0}
    )
    want, factor = ROPE_INIT_FUNCTIONS["llama3"](theirs)
    torch.testing.assert_close(frequencies(drafter.config, "cpu"), want)
    assert factor == 1.0


@torch.inference_mode()
def test_interleaved_rotary_sections_are_those_of_the_target():
    from visspec.models.nets.eagle_head import turns, turns_at

    config = make("qwen3_vl", "eagle3").config
    assert config.mrope_interleaved and config.mrope_section
    position = torch.randint(0, 50, (3, 2, 7))
    found = turns_at(turns(config, 60, "cpu"), position, config.mrope_section, True)
    rotary = model_of("qwen3_vl").model.language_model.rotary_emb
    cos, sin = rotary(torch.zeros(1), position)
    half = config.head_size // 2
    torch.testing.assert_close(found.real, cos[..., :half])
    torch.testing.assert_close(found.imag, sin[..., :half])


@pytest.mark.parametrize("changes,sentence", [
    ({"fusion": "both"}, "fusion: got 'both', expected one of sum, split"),
    ({"images": "all"}, "images: got 'all', expected one of slots"),
    ({"kv_heads": 3}, "kv_heads: got 3, expected a divisor of the 4 heads"),
    ({"image_latents": 2}, "image_latents: got 2 with images 'slots'"),
    ({"fusion": "split", "images": "embeddings"}, "expected fusion 'sum'"),
    ({"norm_output": True}, "norm_output: got true with fusion 'sum'"),
    ({"hidden": 48}, "fusion: got 'sum' with hidden size 48"),
    ({"hidden": 48, "fusion": "split"}, "expected an embedding and a head of the drafter's own"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling: got {'rope_type': 'yarn'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: got"),
    ({"draft_vocab": 97}, "draft_vocab: got 97, expected a whole number from 0 to 96"),
    ({"eps": 0}, "eps: got 0, expected a finite number above 0"),
    ({"fc_bias": 1}, "fc_bias: got 1, expected true or false"),
    ({"feature_layers": (0, 1)}, "expected the target's 32 and its last layer"),
])  # fmt: skip
def test_forms_that_do_not_go_together(changes, sentence):
    sizes = {"family": "llava", "vocab": 96, "hidden": 32, "target_hidden": 32, "target_layers": 2, "heads": 4,
             "kv_heads": 4, "head_size": 8, "intermediate": 48}  # fmt: skip
    EagleConfig(**sizes)
    with pytest.raises(ValueError) as caught:
        EagleConfig(**sizes | changes)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
