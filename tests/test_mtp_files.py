"""The layer that predicts further tokens, in the target's own files: names, network, drafts."""

import functools

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from safetensors.torch import load_file, save_file

import visspec
from tests import test_recurrent as hybrids
from tests.doubles import raises_line
from tests.tiny import IMAGE, MROPE, PAD, TEXT, VISION_IDS, built, llama, model_of, packed_pixels
from visspec.api.text.accelerate import default_drafter
from visspec.models.decoder import mtp, mtp_layer
from visspec.testing import check_drafter

NEW = 24
LENGTHS = (9, 4, 2)
TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2}
QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0.")
OCR = [f"model.language_model.layers.2.{n}" for n in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "")]


def moe():
    sizes = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    config = tf.Qwen3_5MoeConfig(
        text_config={**hybrids.HYBRID, **sizes, "num_experts": 4, "num_experts_per_tok": 2},
        vision_config={**TOWER, "out_hidden_size": 32, "num_position_embeddings": 16, "temporal_patch_size": 2},
        **VISION_IDS,
    )
    return built(tf.Qwen3_5MoeForConditionalGeneration, config)


def glm_ocr():
    config = tf.GlmOcrConfig(
        text_config={**TEXT, "rope_parameters": MROPE}, image_start_token_id=92, image_end_token_id=93,
        vision_config={**TOWER, "out_hidden_size": 32, "image_size": 8}, image_token_id=IMAGE, video_token_id=91,
    )  # fmt: skip
    return built(tf.GlmOcrForConditionalGeneration, config)


def exaone():
    kinds = ["sliding_attention", "full_attention"]
    text = {**TEXT, "model_type": "exaone4_5_text", "sliding_window": 4, "layer_types": kinds}
    tower = {**TOWER, "out_hidden_size": 32, "window_size": 8, "fullatt_block_indexes": [1], "num_key_value_heads": 2}
    config = tf.Exaone4_5_Config(text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=91)
    return built(tf.Exaone4_5_ForConditionalGeneration, config)


FORMS = {"qwen3_5": (hybrids.qwen3_5_vl, QWEN), "moe": (moe, QWEN), "glm_ocr": (glm_ocr, OCR), "exaone": (exaone, QWEN)}
each_form = pytest.mark.parametrize("name", FORMS)


def published(model, names):
    """Random tensors by the published names: those of a layer of the target, two norms before, one behind."""
    generator = torch.Generator().manual_seed(7)
    *fixed, layer = names
    made = {f"{fixed[0]}.weight": torch.Size((32, 64))} | {f"{name}.weight": torch.Size((32,)) for name in fixed[1:]}
    made |= {layer + n: p.shape for n, p in model.get_decoder().layers[-1].state_dict().items()}
    tensors = {n: torch.randn(s, generator=generator) * (0.3 if len(s) < 2 else s[-1] ** -0.5) for n, s in made.items()}
    if names is OCR:
        copies = {"embed_tokens": model.get_input_embeddings(), "shared_head.head": model.get_output_embeddings()}
        tensors |= {f"{layer}{n}.weight": m.weight.detach().clone() for n, m in copies.items()}
    return tensors


def saved(folder, model, tensors):
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    return type(model).from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    @functools.cache
    def of(name):
        with torch.inference_mode(False):
            make, names = FORMS[name]
            model = make()
            return saved(tmp_path_factory.mktemp(name), model, published(model, names))

    return of


def prompt(lengths, images=(1, 2, 1), seed=0):
    """Left-padded rows, each with pictures of different sizes in front."""
    generator, grids, rows = torch.Generator().manual_seed(seed), [], []
    for n, count in zip(lengths, images):
        row = []
        for i in range(count):
            grids.append([1, 4, 4 + 4 * i])
            row += [92, *[IMAGE] * (4 + 4 * i), 93]
        rows.append([1, *row, *torch.randint(5, 88, (n,), generator=generator).tolist()])
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "mm_token_type_ids": (ids == IMAGE).int()}
    return inputs | packed_pixels(grids, seed, "image")


def inputs_of(name, lengths=LENGTHS, **options):
    inputs = prompt(lengths, **options)
    if name == "exaone":
        del inputs["mm_token_type_ids"]
    return inputs


@each_form
@pytest.mark.parametrize("spec", ["mtp", "mtp:width=3,nodes=8"])
def test_ragged_pictures_exact(name, spec, reloaded):
    quick = check_drafter(spec, reloaded(name), inputs_of(name), NEW)
    assert max(round.levels for round in quick.last_state.trace.rounds) == mtp.LEVELS
    assert mtp_layer.in_files(reloaded(name))


def test_default_drafter(reloaded, caplog):
    caplog.set_level("INFO", logger="visspec.api.text.accelerate")
    assert visspec.accelerate(reloaded("qwen3_5")).setup.name == "mtp"
    assert "drafter: mtp:copies=true, because the model's files have such a layer" in caplog.text
    assert default_drafter(model_of("llava"))[0] == "context" and "nothing was made for the model" in caplog.text


def norm(x, weight, eps, one=0.0):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + one)


def turned(x_THE, cos_TE, sin_TE):
    width = cos_TE.shape[-1]
    turn, rest = x_THE[..., :width], x_THE[..., width:]
    half = torch.cat([-turn[..., width // 2 :], turn[..., : width // 2]], -1)
    return torch.cat([turn * cos_TE[:, None] + half * sin_TE[:, None], rest], -1)


def qwen_pass(tensors, config, ahead_Td, hidden_Td, rope):
    """Qwen3.5's layer as described: gated attention with norms of queries and keys, SwiGLU, norms of 1 + weight."""
    eps, w = config.rms_norm_eps, {n.removeprefix("mtp."): t for n, t in tensors.items()}
    block = {n.removeprefix("layers.0."): t for n, t in w.items()}
    both = [
        norm(ahead_Td, w["pre_fc_norm_embedding.weight"], eps, 1),
        norm(hidden_Td, w["pre_fc_norm_hidden.weight"], eps, 1),
    ]
    x = torch.cat(both, -1) @ w["fc.weight"].T
    read = norm(x, block["input_layernorm.weight"], eps, 1)
    project = lambda kind: (read @ block[f"self_attn.{kind}_proj.weight"].T).unflatten(-1, (-1, 8))  # noqa: E731
    query, gate = (read @ block["self_attn.q_proj.weight"].T).unflatten(-1, (-1, 16)).chunk(2, -1)
    query = turned(norm(query, block["self_attn.q_norm.weight"], eps, 1), *rope)
    key = turned(norm(project("k"), block["self_attn.k_norm.weight"], eps, 1), *rope)
    key, value = (t.repeat_interleave(2, dim=1) for t in (key, project("v")))
    scores = torch.einsum("qhe,khe->hqk", query, key) * 8**-0.5
    hidden = torch.ones(len(x), len(x)).triu(1).bool()
    mixed = torch.einsum("hqk,khe->qhe", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
    x = x + (mixed * gate.sigmoid()).flatten(1) @ block["self_attn.o_proj.weight"].T
    read = norm(x, block["post_attention_layernorm.weight"], eps, 1)
    up = F.silu(read @ block["mlp.gate_proj.weight"].T) * (read @ block["mlp.up_proj.weight"].T)
    return norm(x + up @ block["mlp.down_proj.weight"].T, w["norm.weight"], eps, 1)


def expected_logits(model, layer_pass, hidden_Td, embeds_Td, places_PT, token, path):
    """Logits of a row behind a drafted path; each of its tokens is read anew behind the prompt and those before it."""
    embed, head, rotary = model.get_input_embeddings(), model.get_output_embeddings(), model.get_decoder().rotary_emb
    ahead = torch.cat([embeds_Td[1:], embed(token)[None]])
    for level in range(len(path) + 1):
        cos, sin = rotary(ahead[None], places_PT[:, None] if len(places_PT) == 3 else places_PT)
        out = layer_pass(ahead, hidden_Td, (cos[0], sin[0]))[-1:]
        if level < len(path):
            ahead = torch.cat([ahead, embed(torch.tensor(path[level : level + 1]))])
            hidden_Td, places_PT = torch.cat([hidden_Td, out]), torch.cat([places_PT, places_PT[:, -1:] + 1], 1)
    return head(out[0])


def stock_pass(layer, window):
    """The fusion as described around the target's own kind of layer, without a cache."""

    def run(ahead, hidden, rope):
        x = layer.fc(torch.cat([layer.pre_fc_norm_embedding(ahead), layer.pre_fc_norm_hidden(hidden)], -1))[None]
        far = torch.arange(len(ahead))[:, None] - torch.arange(len(ahead))
        mask = torch.zeros(len(ahead), len(ahead)).masked_fill((far < 0) | (far >= window), -torch.inf)[None, None]
        rope = tuple(t[None] for t in rope)
        return layer.norm(layer.layers[0](x, attention_mask=mask, position_embeddings=rope)[0])

    return run


@each_form
@pytest.mark.parametrize("width", [1, 3])
@torch.no_grad()
def test_drafts_against_description(name, width, reloaded):
    """In a ragged batch with pictures: their embeddings and M-RoPE positions, a node at a time."""
    model, inputs, result, seen, frontiers = reloaded(name), inputs_of(name), [], [], []
    layer = mtp_layer.load_layer(model)
    run = stock_pass(layer, 4 if name == "exaone" else 99)
    if name == "qwen3_5":
        run = functools.partial(qwen_pass, published(model, QWEN), layer.config)
    drafter = mtp.MultiToken(levels=4, width=width)
    fast = visspec.accelerate(model, drafter, adaptive=False)
    start, project, tree_builder = drafter.start, drafter.heads._project_to_logits, drafter.tree_builder

    def watched(state, depth):
        builder = tree_builder(state, depth)
        grow = builder.grow
        builder.grow = lambda logits: frontiers.append(grow(logits)) or frontiers[-1]
        return builder

    drafter.start = lambda state, scores: (seen.append((scores, state.pending.clone())), start(state, scores))
    drafter.heads._project_to_logits = lambda hidden: result.append(project(hidden)) or result[-1]
    drafter.tree_builder = watched
    fast.generate(**inputs, max_new_tokens=6, do_sample=False)
    if width == 1:
        frontiers = [(logits_B1V.argmax(-1), torch.zeros(len(logits_B1V), 1).long()) for logits_B1V in result]
    scores, pending = seen[0]
    places = scores.aux["positions"]
    places_PBL = (places[-3:] if places.dim() == 3 else places[None]).expand(-1, len(pending), -1)
    for b, real_L in enumerate(inputs["attention_mask"].bool()):
        given = scores.features[b, real_L], scores.aux["embeddings"][b, real_L], places_PBL[:, b, real_L], pending[b]
        paths = [[]]
        for logits_BWV, (token_BW, parent_BW) in zip(result[:4], frontiers):
            for logits_V, path in zip(logits_BWV[b], paths, strict=True):
                expected = expected_logits(model, run, *given, path)
                torch.testing.assert_close(logits_V, expected, atol=1e-4, rtol=1e-4)
            paths = [paths[p] + [token] for token, p in zip(token_BW[b].tolist(), parent_BW[b].tolist())]


def test_hub_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model, root = hybrids.qwen3_5_vl(), tmp_path / "models--owner--name"
    model = saved(root / "snapshots" / ("a" * 40), model, published(model, QWEN))
    model.config.name_or_path, model.config._commit_hash = "owner/name", "a" * 40
    assert mtp_layer.in_files(model) and mtp_layer.load_layer(model).norm.weight.dtype == torch.float32
    model.config._commit_hash = "b" * 40
    assert not mtp_layer.in_files(model)


def test_a_model_of_text(tmp_path):
    model = built(tf.Qwen3_5ForCausalLM, tf.Qwen3_5TextConfig(**hybrids.HYBRID))
    target = saved(tmp_path, model, published(model, QWEN))
    check_drafter("mtp:levels=2", target, hybrids.prompt("qwen3_5", LENGTHS), NEW)


def test_experts_may_be_single(tmp_path):
    model = moe()
    tensors, single = published(model, QWEN), {}
    for name, stack in tensors.items():
        prefix, _, kind = name.rpartition(".")
        for i, expert in enumerate(stack if prefix.endswith(".experts") else ()):
            parts = {"gate": expert[:8], "up": expert[8:]} if kind == "gate_up_proj" else {"down": expert}
            single |= {f"{prefix}.{i}.{k}_proj.weight": v.clone() for k, v in parts.items()}
    rest = {n: t for n, t in tensors.items() if ".experts." not in n}
    layer = mtp_layer.load_layer(saved(tmp_path, model, rest | single))
    for kind in ("gate_up_proj", "down_proj"):
        result = layer.state_dict()[f"layers.0.mlp.experts.{kind}"]
        torch.testing.assert_close(result, tensors[f"mtp.layers.0.mlp.experts.{kind}"])


def minimax():
    """Its lightning indexer keeps keys of its own, which no draft of ours could be taken back from."""
    kinds = {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]}
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 24, "index_head_dim": 8}
    config = tf.MiniMaxM3VLConfig(
        text_config={**TEXT, **kinds, **sizes, "shared_intermediate_size": 24, "rotary_dim": 4, "index_n_heads": 2},
        vision_config={**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8},
    )
    return tf.MiniMaxM3SparseForConditionalGeneration(config)


def test_what_is_refused(tmp_path):
    model = hybrids.qwen3_5_vl()
    tensors = published(model, QWEN)
    bare = saved(tmp_path / "bare", model, {})
    whole = {n: t for n, t in tensors.items() if n != "mtp.norm.weight"}
    changed = {
        "lacks tensor 'mtp.norm.weight'": whole,
        "unknown tensor 'mtp.layers.1.x'": tensors | {"mtp.layers.1.x": torch.zeros(1)},
        "'mtp.fc.weight' of": tensors | {"mtp.fc.weight": torch.zeros(32, 32)},
    }
    cases = [(bare, "has no tensors of an MTP layer"), (llama(), "expected a model with MTP layers")]
    sparse = saved(tmp_path / "sparse", minimax(), {"mtp.fc.weight": torch.zeros(32, 64)})
    cases += [(sparse, "has minimax_m3_sparse, expected full or sliding attention")]
    cases += [(saved(tmp_path / str(i), model, result), message) for i, (message, result) in enumerate(changed.items())]
    for target, message in cases:
        with raises_line(message):
            visspec.accelerate(target, "mtp")
        assert not mtp_layer.in_files(target)
    with pytest.raises(ValueError, match="levels: got 0"):
        visspec.accelerate(bare, "mtp:levels=0")
