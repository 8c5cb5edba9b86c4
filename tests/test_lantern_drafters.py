"""LANTERN's published image drafters: their pickles converted, their network, their drafts, what is refused."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import visspec
from tests import tiny_images as tiny
from tests.doubles import raises_line
from tests.image_cases import TEXTS, llamagen, llamagen_model
from tests.published import Weights, attended, mlp
from visspec import registry
from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.accept.rejection import Rejection
from visspec.api import saving
from visspec.api.images.pipeline import ImagePipeline
from visspec.io.convert_checkpoint import convert
from visspec.loop.decode import open_request
from visspec.models.chameleon.layout import load_lumina
from visspec.models.chameleon.target import PromptStyle
from visspec.models.eagle.lantern import LanternDrafter
from visspec.models.image_codes.family import family_of
from visspec.models.image_codes.target import ImageAR
from visspec.types import Request, Sampling

D, HEADS, WIDE, SCALE = 32, 4, 48, 3.0
COMMON = {
    "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": D,
    "initializer_range": 0.02, "intermediate_size": WIDE, "num_attention_heads": HEADS, "num_hidden_layers": 1,
    "num_key_value_heads": HEADS, "rope_scaling": None, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
CONFIGS = {
    "llamagen": {
        **COMMON, "architectures": ["LlamaForCausalLM"], "caption_dim": 12, "class_dropout_p": 0.0,
        "max_position_embeddings": 2048, "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-6,
        "torch_dtype": "float16", "vocab_size": tiny.CODES,
    },
    "anole": {
        **COMMON, "architectures": ["ChameleonForConditionalGeneration"], "boi_token_id": 8197, "eoi_token_id": 8196,
        "image_token_id": 8711, "max_position_embeddings": 4096, "mlp_bias": False, "model_parallel_size": 1,
        "model_type": "chameleon", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "swin_norm": False,
        "vocab_size": len(tiny.CHAMELEON) + tiny.CODES + 3, "vq_config": {"n_embed": 8192},
    },
}  # fmt: skip


def tensors(name: str) -> dict[str, torch.Tensor]:
    layer, random = "layers.0.", torch.Generator().manual_seed(5)
    vocab = CONFIGS[name]["vocab_size"]
    shapes = {"embed_tokens.weight": (vocab, D), "fc.weight": (D, 2 * D), "fc.bias": (D,)}
    shapes |= {f"{layer}self_attn.{p}_proj.weight": (D, D) for p in "qkvo"}
    shapes |= {f"{layer}mlp.{p}_proj.weight": (WIDE, D) for p in ("gate", "up")}
    shapes |= {f"{layer}mlp.down_proj.weight": (D, WIDE), f"{layer}post_attention_layernorm.weight": (D,)}
    if name == "anole":
        shapes |= {f"{layer}self_attn.{p}_norm.{w}": (HEADS, D // HEADS) for p in "qk" for w in ("weight", "bias")}
        shapes[f"{layer}input_layernorm.weight"] = (D,)
    scale = 1.5 if name == "anole" else 1.2  # nothing normalises the input of the other: larger weights raise rounding
    return {
        name: torch.randn(shape, generator=random) * (scale * shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
        + (1.0 if "norm.weight" in name else 0.0)
        for name, shape in shapes.items()
    }


def published(name: str, folder, change=None, **config):
    """A folder as it is published, and its converted weights. change: of the tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], **config}))
    weights = tensors(name)
    torch.save(weights if change is None else change(weights), folder / "pytorch_model.bin")
    convert(folder / "pytorch_model.bin", folder / "model.safetensors")
    return folder


class Codec:
    codebook, factor = torch.randn(tiny.CODES, 4, generator=torch.Generator().manual_seed(2)), 16


def pipeline(name: str) -> ImagePipeline:
    if name == "llamagen":
        pipe = ImagePipeline(llamagen_model("caption"), llamagen("caption").family.processor, parts={"codec": Codec()})
    else:
        style = PromptStyle("{}", guidance=SCALE, size=64) if name == "anole" else "lumina"
        pipe = ImagePipeline(tiny.chameleon(), tiny.ChameleonTexts(), parts={"style": style})
    return pipe


def drawn(pipe: ImagePipeline, folder, options="", rule="exact", **more):
    size = {"height": 64, "width": 64} if pipe.family.grammar else {}
    drafter = None if folder is None else f"{folder}{options}"
    options = {"output_type": "latent", "seed": 3, "guidance_scale": SCALE, **size, **more}
    with torch.no_grad():
        out = pipe(TEXTS, drafter=drafter, acceptance=rule, **options)
    assert pipe.last_state.trace.faults == 0
    return [image.tolist() for image in out.tokens]


# --- the network ------------------------------------------------------------------------------------------------------


def turned(x_THE, angle_TC, pairs: bool):
    """Channels turned, neighbours as pairs or the two halves."""
    a, b = (x_THE[..., 0::2], x_THE[..., 1::2]) if pairs else x_THE.chunk(2, dim=-1)
    cos, sin = angle_TC.cos()[:, None], angle_TC.sin()[:, None]
    both = [a * cos - b * sin, b * cos + a * sin]
    return torch.stack(both, dim=-1).flatten(-2) if pairs else torch.cat(both, dim=-1)


def predicted(name: str, weights: Weights, ids: list[int], features_Td: torch.Tensor, prefix: int) -> torch.Tensor:
    """The state after the last id: one layer over the features and the ids behind them, (d)."""
    size, eps, layer = D // HEADS, CONFIGS[name]["rms_norm_eps"], "layers.0."
    count = len(features_Td)
    x = weights.linear(torch.cat([weights["embed_tokens.weight"][ids], features_Td], dim=-1), "fc")
    read = x if name == "llamagen" else weights.norm(x, f"{layer}input_layernorm", eps)
    query, key, value = (weights.linear(read, f"{layer}self_attn.{p}_proj").unflatten(-1, (HEADS, size)) for p in "qkv")
    if name == "llamagen":
        place = torch.arange(count) - (prefix - 1)  # of the code whose embedding is read, below 0 in the prefix
        frequency = 10000.0 ** -(torch.arange(0, size // 2, 2) / (size // 2))
        angle = torch.cat([(place // 4)[:, None] * frequency, (place % 4)[:, None] * frequency], dim=-1)
        inside = (place >= 0).float()[:, None, None]
        query, key = (turned(y, angle, True) * inside for y in (query, key))
    else:
        norms = [[weights[f"{layer}self_attn.{p}_norm.{part}"] for part in ("weight", "bias")] for p in "qk"]
        query, key = (F.layer_norm(y, (size,), eps=1e-5) * w + b for y, (w, b) in zip((query, key), norms))
        angle = torch.arange(count)[:, None] * 10000.0 ** -(torch.arange(0, size, 2) / size)
        query, key = turned(query, angle, False), turned(key, angle, False)
    mixed = attended(query, key, value, torch.ones(count, count, dtype=torch.bool).tril())
    x = x + weights.linear(mixed, f"{layer}self_attn.o_proj")
    return (x + mlp(weights, layer, weights.norm(x, f"{layer}post_attention_layernorm", eps)))[-1]


class Described:
    """The described network beside a drafter: what it says after the first code of three ragged rows."""

    def __init__(self, name, folder, guidance=SCALE, rule=None, temperature=0.0, **options):
        self.name, self.guidance, self.weights = name, guidance, Weights(tensors(name))
        self.family = pipeline(name).family
        self.used = LanternDrafter.from_pretrained(published(name, folder), self.family, **options)
        self.used.attach(self.family)
        self.target, layout = ImageAR(self.family, features=True), self.family.layout()
        prompt = self.family.prompt(TEXTS, guidance != 1, layout)
        sampling = Sampling(temperature=temperature, guidance=guidance)
        request = Request(prompt, prompt.ids, layout.positions, sampling)
        if temperature:
            request.generators = [torch.Generator().manual_seed(b) for b in range(3)]
        self.state, scores = open_request(self.target, rule or Exact(), request)
        self.used.start(self.state, scores)
        self.parts, self.length = len(prompt.embeds) // 3, prompt.ids.shape[1]
        self.ids = torch.zeros(3 * self.parts, self.length).long() if prompt.tokens is None else prompt.tokens
        self.seen = torch.ones_like(self.ids).bool() if name == "llamagen" else prompt.attention
        self.features = self.apart(scores.features)
        self.ids = self.extended(self.state.pending)

    def apart(self, features):
        return torch.cat(features.chunk(self.parts, dim=-1))

    def extended(self, codes, ids=None):
        vocabulary = self.family.vocabulary
        codes = codes if vocabulary is None else vocabulary.ids[codes]
        return torch.cat([self.ids if ids is None else ids, codes.repeat(self.parts)[:, None]], dim=1)

    def say(self, ids, features):
        """(mixed logits of the codes (3, V), states (streams * 3, d)) after the last ids."""
        real = F.pad(self.seen, (0, features.shape[1] - self.length), value=True)
        rows = [(i[1:][r].tolist(), f[r]) for i, f, r in zip(ids, features, real)]
        state = torch.stack([predicted(self.name, self.weights, *row, self.length) for row in rows])
        conditional, other = self.family.head(state[:3]), self.family.head(state[-3:])
        return other + self.guidance * (conditional - other), state


@pytest.mark.parametrize("guidance", [SCALE, 1.0])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_the_network_is_the_described_one(name, guidance, tmp_path):
    it = Described(name, tmp_path / "d", guidance)
    used, state, memory = it.used, it.state, it.state.memory
    for _ in range(4):
        ids, features, feature = it.ids, it.features, used._catch_up(memory, 3)
        for level in range(3):
            want, states = it.say(ids, features)
            logits = used._logits(used._mix_features(feature, state))
            torch.testing.assert_close(logits[:, : tiny.CODES], want, rtol=1e-4, atol=1e-4)
            token, turn = logits.argmax(dim=-1), memory.rope(memory.table, 1, level)
            feature = used.layer.step(memory, memory.each(token), feature, None, turn, level)
            ids, features = it.extended(token, ids), torch.cat([features, states[:, None]], dim=1)
        draft = trees.empty_draft(state.pending)
        scores = it.target.verify(state, draft)
        state.pending = scores.distribution.p[:, 0].argmax(dim=-1)
        memory.add(state.pending[:, None], scores.features, [1] * 3)
        it.target.commit(state, draft, type("Paths", (), {"path": [[0]] * 3})())
        it.ids, it.features = it.extended(state.pending), torch.cat([it.features, it.apart(scores.features)], dim=1)
        state.position = state.position + 1
        for b in range(3):
            state.tokens[b].append(int(state.pending[b]))
    used.select(state, [0, 2])  # rows that are left
    logits = used._logits(used._mix_features(used._catch_up(memory, 3), state))
    want = it.say(it.ids, it.features)[0][[0, 2]]
    torch.testing.assert_close(logits[:, : tiny.CODES], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", ["1-1-1", "2-5-6"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_reported_distributions(name, shape, tmp_path):
    """Of chains and of trees without replacement: that of each first child, given what was drawn above it."""
    it = Described(name, tmp_path / "d", rule=Rejection(), temperature=1.0, tree="static", shape=shape)
    draft = it.used.propose(it.state, 3)
    parent = draft.tree.parent[0].tolist()
    firsts = [n for n in range(1, len(parent)) if parent[n] not in parent[1:n]]
    assert len(firsts) == len(set(parent[1:])) > 2
    for node in firsts:
        ids, features = it.ids, it.features
        for n in (n for n in range(1, node) if draft.tree.ancestor[0, node, n]):
            states = it.say(ids, features)[1]
            ids, features = it.extended(draft.value[:, n], ids), torch.cat([features, states[:, None]], dim=1)
        want = it.say(ids, features)[0].softmax(dim=-1)
        torch.testing.assert_close(draft.q.p[:, node, : tiny.CODES], want, rtol=1e-3, atol=1e-5)


# --- drafts -----------------------------------------------------------------------------------------------------------

SHAPES = {"chain": "", "dynamic": ":tree=dynamic,width=3,nodes=9", "static": ":tree=static,shape=3-4-2"}
SHAPES["window"] = ":window=6"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [*CONFIGS, "lumina"])
def test_exact_equals_plain(name, temperature, tmp_path):
    """Chains and trees, with guidance and without, three ragged rows that end in different rounds."""
    pipe, folder = pipeline(name), published("anole" if name == "lumina" else name, tmp_path / "d")
    want = drawn(pipe, None, temperature=temperature)
    assert len({tuple(row) for row in want}) > 1  # the prompts count
    for options in SHAPES.values():
        assert drawn(pipe, folder, options, temperature=temperature) == want


@pytest.mark.parametrize("rule", ["lantern:k=5,delta=0.3", "rejection"])
@pytest.mark.parametrize("name", CONFIGS)
def test_other_rules_draft_too(name, rule, tmp_path):
    pipe, folder = pipeline(name), published(name, tmp_path / "d")
    for options in SHAPES.values():
        drawn(pipe, folder, options, rule, temperature=1.0)
        assert pipe.last_output.stats[0].tau > 1


# --- a target ---------------------------------------------------------------------------------------------------------


def lumina(folder):
    """Lumina-mGPT's layout: norms of queries and keys once for all heads, no VQ weights. And the model they make."""
    folder.mkdir()
    model, random = copy.deepcopy(tiny.chameleon()), torch.Generator().manual_seed(1)
    weights = {name: w for name, w in model.state_dict().items() if "vqmodel" not in name}
    for name in [name for name in weights if "_norm." in name]:
        stored = torch.rand(1, weights[name].shape[1], generator=random) + 0.5
        model.get_parameter(name).data.copy_(stored.expand_as(weights[name]))
        weights[name] = stored
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "mask_image_logits": True}))
    save_file({name: w.clone() for name, w in weights.items()}, folder / "model.safetensors")
    return model


def test_lumina_with_drafter(tmp_path):
    with torch.inference_mode(False):
        want, result = lumina(tmp_path / "m"), load_lumina(tmp_path / "m")
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        hidden, same = (m.model(ids, use_cache=False).last_hidden_state for m in (result, want))
        assert torch.equal(result.lm_head(hidden), want.lm_head(same))
        assert not torch.equal(same, tiny.chameleon().model(ids, use_cache=False).last_hidden_state)
    pipe = ImagePipeline(result, tiny.ChameleonTexts(), parts={"style": "lumina", "codec": Codec()})
    folder = published("anole", tmp_path / "d")
    assert drawn(pipe, folder, temperature=1.0) == drawn(pipe, None, temperature=1.0)
    drawn(pipe, folder, rule="lantern:k=5,delta=0.3", temperature=1.0)


def test_lumina_2_is_refused_by_name():
    model = copy.deepcopy(tiny.chameleon())
    model.model.vocabulary_mapping.vocab_map["<MOVQGAN0>"] = 3
    with pytest.raises(ValueError, match=r"codes of MoVQGAN \(Lumina-mGPT 2.0\), expected Chameleon's own"):
        family_of(model, None)


# --- refusals ---------------------------------------------------------------------------------------------------------


def without(name):
    return lambda weights: {n: w for n, w in weights.items() if n != name}


REFUSED = {
    "family": ("anole", {}, None, "made for a target of family 'chameleon', got 'llamagen'"),
    "size": ("llamagen", {"input_type": "t2i2"}, None, "'t2i2', expected that of 4 x 4 codes"),
    "hidden": ("llamagen", {"hidden_size": 64}, None, "hidden size 64, got a model of 32"),
    "layers": ("llamagen", {"num_hidden_layers": 2}, None, "num_hidden_layers"),
    "missing": ("llamagen", {}, without("layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_target_or_form_refused(what, tmp_path):
    name, config, change, message = REFUSED[what]
    with raises_line(message):
        registry.drafter(str(published(name, tmp_path / "d", change, **config)), llamagen_model("caption"))


def test_text_target_refused(tmp_path):
    with pytest.raises(ValueError, match="target ChameleonForConditionalGeneration, expected that of an ImagePipeline"):
        visspec.accelerate(tiny.chameleon(), str(published("anole", tmp_path / "d")))


def test_saved_with_drafter_files(tmp_path):
    spec = f"{published('anole', tmp_path / 'd')}:tree=dynamic,width=3"
    saved = saving._drafter_entry(spec, tiny.chameleon(), None, tmp_path / "s")
    assert saved == {"folder": "drafter", "options": "tree=dynamic,width=3"}
    again, _ = registry.drafter(str(tmp_path / "s"), tiny.chameleon())
    plain, _ = registry.drafter(spec, tiny.chameleon())
    assert isinstance(again, LanternDrafter) and again.trained.equal(plain.trained)


def test_chameleons_other_layer_is_refused(tmp_path):
    with raises_line("swin_norm"):
        registry.drafter(str(published("anole", tmp_path / "d", swin_norm=True)), tiny.chameleon())
