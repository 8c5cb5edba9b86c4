"""Tiny random models of any generating class of transformers, from its shrunk default configuration, and prompts."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from tests.doubles import new_tokens
from tests.tiny import BOS, EOS, PAD, VOCAB, noise

MOST_PARAMETERS = 4_000_000
LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD, EXPERTS, ROUTED = 2, 64, 48, 4, 2, 16, 4, 2
WINDOW, LIMIT, NEW = 12, 32, 30  # tokens; prompts and answers of `NEW` tokens cross the first two
SIDE, PATCH = 8, 2  # pixels
SPECIAL = range(81, VOCAB)  # ids of pictures and the like; text has those below


def most(limit: int) -> Callable[[int], int]:
    return lambda old: min(old, limit)


# the first pattern that is found in the name of a field decides; values are for each number in the field
SIZES: tuple[tuple[str, int | Callable[[int], int]], ...] = (
    (r"upsample_groups", most(WIDTH)), (r"qk_head_dim", 2 * HEAD),
    (r"num_position_embeddings", (SIDE // PATCH) ** 2),
    (r"type_vocab|mels|mel_bins|in_channels|num_channels|chunk_size|audio_channels|kernel|groups$", int),
    (r"codebook_size", most(64)), (r"vocab_size|n_token$|num_embeddings|vocab$", most(VOCAB)),
    (r"vocab_offset|seq_length", most(SPECIAL[0])), (r"original_max_position|initial_context", LIMIT),
    (r"position_embeddings|positions|n_ctx|max_seq|model_max_length|context_length|max_pos|text_tokens", most(512)),
    (r"sliding_window(_size)?$|window_size|local_attention|attention_chunk|keep_window", WINDOW),
    (r"max_ima?ge?_size|max_img_size", 4 * SIDE), (r"image_size|resolution|img_size|crop_size", SIDE),
    (r"patch_size", PATCH), (r"filters|codebooks|code_groups|quantizers|quer|latents", most(4)),
    (r"layer_offset|dense_replace|dense_layers|window_layers|layer_start|shared_exp|(n|topk|expert)_group$", most(1)),
    (r"period|every_n|interval|group_size|pattern|sparse_step|per_tok|(?<!index_)top_?k|moe_k", most(2)),
    (r"linear_num|n_?groups", most(2)), (r"experts|zero_expert", most(EXPERTS)), (r"mamba.*heads", most(8)),
    (r"rotary_dim", most(HEAD // 2)),
    (r"d_state|state_size|rank|d_head|head_dim|dim_head|head_size|d_kv|kv_channels|pre_attn_scalar", HEAD),
    (r"key_value_heads|kv_n_heads|kv_heads", most(KV_HEADS)), (r"heads?$", most(HEADS)),
    (r"(intermediate|ffn|inner|mlp)\w*(size|dim)|d_ff|dff|dim_ff|n_inner|d_inner|feed_forward_size", INNER),
    (r"layers?$|layers_per|depth|num_blocks", most(LAYERS)),
    (r"hidden_size|d_model|n_embd|width|dim$|(embedding|latent|projection)_size|channels?$|units$|_dim_", most(WIDTH)),
    (r"num_pos_feats", WIDTH // 2), (r"grid_size|pos_emb_", SIDE // PATCH),
)  # fmt: skip
ROPE_3 = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
VQ = {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1]}
CODES = 8  # of picture tokens that are ids
TIMM = {"vision_config": {"model_type": "timm_wrapper", "architecture": "test_vit", "hidden_size": WIDTH,
                          "model_args": {"embed_dim": WIDTH}}}  # fmt: skip
EXCEPTIONS: dict[str, dict[str, Any]] = {  # where names don't tell enough, by configuration class
    "ChameleonVQVAEConfig": {**VQ, "channel_multiplier": [1, 1, 1, 1, 1], "num_embeddings": CODES},
    "ChameleonConfig": {"vocabulary_map": {
        "<image>": SPECIAL[0], **{f"IMGIMG{'ABCDEFGH'[i]}Z": 60 + i for i in range(CODES)},
    }},
    "CohereCompassTextConfig": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE_3)},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": ROUTED},
    "AriaConfig": {"projector_patch_to_query_dict": {(SIDE // PATCH) ** 2: 4}},
    "DeepseekV2Config": {"num_experts_per_tok": ROUTED}, "FastVlmConfig": TIMM, "PerceptionLMConfig": TIMM,
    "Dots3NoteAudioConfig": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    "Dots3NoteVisionConfig": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
    "Dots3NoteTextConfig": {"head_dim": 2 * HEAD, "per_layer_config": {}},
    "Emu3Config": {"vocabulary_map": {
        "<image>": SPECIAL[0], "<|extra_200|>": SPECIAL[1],
        **{f"<|visual token {i:06d}|>": 60 + i for i in range(CODES)},
    }},
    "Emu3VQVAEConfig": {**VQ, "codebook_size": CODES, "hidden_size": 32},
    "Ernie4_5_VLMoeTextConfig": {"rope_parameters": ROPE_3}, "FalconH1Config": {"mamba_d_ssm": 128},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": WIDTH // 4},
    "Gemma3nVisionConfig": {"architecture": "test_vit", "hidden_size": WIDTH, "vocab_offset": 90, "vocab_size": 8},
    "Gemma3nAudioConfig": {"vocab_offset": 90, "vocab_size": 8},
    "Gemma3Config": {"mm_tokens_per_image": 4},
    "Gemma4AssistantConfig": {"text_config": {
        "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "num_hidden_layers": 2, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "head_dim": HEAD,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "sliding_window": WINDOW,
    }},
    "Gemma4UnifiedConfig": {"vision_config": {
        "model_type": "gemma4_unified_vision", "patch_size": PATCH, "mm_embed_dim": WIDTH, "mm_posemb_size": 64,
        "output_proj_dims": WIDTH, "pooling_kernel_size": 2,
    }},
    "Granite4VisionConfig": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [1]},
    "Kosmos2_5VisionConfig": {"patch_embed_hidden_size": 3 * PATCH**2},
    "MoonshineStreamingConfig": {"num_key_value_heads": HEADS}, "MuseSparkAudioConfig": {"num_hidden_layers": 4},
    "MuseGlimmerConfig": {"out_hidden_size": 4 * WIDTH}, "MuseSparkConfig": {"out_hidden_size": 4 * WIDTH},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2}, "RadioConfig": {"video_temporal_patch_size": 2},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "ReformerConfig": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32]},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"num_filters": 2, "depths": [1] * 7},
    "VibeVoiceAcousticTokenizerConfig": {"num_filters": 2, "depths": [1] * 7},
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "Gemma4Config": {"vision_config": {
        "model_type": "gemma4_vision", "patch_size": PATCH, "pooling_kernel_size": 2, "hidden_size": WIDTH,
        "intermediate_size": INNER, "head_dim": HEAD, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "position_embedding_size": 64,
    }},
    "Gemma4TextConfig": {"global_head_dim": 2 * HEAD}, "Gemma4UnifiedTextConfig": {"global_head_dim": 2 * HEAD},
    "HrmTextConfig": {"num_hidden_layers": 16, "num_layers_per_stack": 2},  # two stacks, two cycles of four
    "JanusVQVAEConfig": {**VQ, "latent_channels": 32},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2Config": {"num_heads": 8}, "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "MllamaVisionConfig": {"vision_output_dim": 2 * WIDTH, "intermediate_layers_indices": [0]},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": SPECIAL[-1]},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": SPECIAL[-1]},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": INNER},
    "VipLlavaConfig": {"vision_feature_layers": [-2, -1]}, "XmodConfig": {"default_language": "en_XX"},
}  # fmt: skip
# what a field without a default gets where the model wants one
MISSING = {
    "head_dim": HEAD, "num_key_value_heads": KV_HEADS, "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS,
    "num_experts": EXPERTS, "num_experts_per_tok": ROUTED, "n_shared_experts": 1, "num_heads": HEADS,
    "moe_intermediate_size": INNER,
}  # fmt: skip
TOKENS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
PICTURES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # needed for pictures
PER_LAYER = re.compile(r"\w*(types?|layers|layer\w*|pattern|size|heads\w*|multipliers|list|theta|window\w*)")


def generating() -> list[str]:
    """Names of all public classes that generate, aliases left out."""
    kinds = [getattr(tf, name, None) for name in dir(tf) if name[0].isupper() or name[0] == "x"]
    kinds = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, tf.PreTrainedModel)]
    return sorted({kind.__name__ for kind in kinds if issubclass(kind, tf.GenerationMixin) and kind.config_class})


def sized(name: str, old: Any) -> Any:
    """The small value of a field: of a number, of each number of a list, or the value itself."""
    if isinstance(old, (list, tuple)):
        return type(old)(sized(name, item) for item in old)
    if type(old) is not int:
        return old
    size = next((size for pattern, size in SIZES if re.search(pattern, name)), old)
    return size(old) if callable(size) else (size if old > 0 else old)


class Shrinking:
    """One configuration being made small; special ids stay the same ids in all of its parts."""

    def __init__(self, windows: bool, filled: bool):
        self.windows, self.filled, self.ids = windows, filled, {}

    def __call__(self, config: tf.PreTrainedConfig) -> dict[str, Any]:
        """Arguments that make a small configuration of the same kind."""
        config.allow_global_per_layer_attribute_access = True
        old = {f.name: getattr(config, f.name, None) for f in fields(config)}
        changed = {name: self.field(name, value) for name, value in old.items()} | layers(old)
        if self.windows and "sliding_window" in old:  # the first layer slides
            slides = {"sliding_window": WINDOW, "use_sliding_window": True}
            changed |= {name: value for name, value in slides.items() if name in old}
            if set(changed.get("layer_types") or ()) == {"full_attention"}:
                changed["layer_types"] = ["sliding_attention", *changed["layer_types"][1:]]
        heads = next((k for k in old if k in ("num_attention_heads", "n_head", "n_heads")), None)
        same = [k for k in ("num_key_value_heads", "num_kv_heads") if heads and old.get(k) == old[heads]]
        changed |= {k: changed[heads] for k in same}
        if old.get("rope_parameters"):
            source = Path(inspect.getfile(type(config)).replace("configuration_", "modeling_"))
            sections = "vocab_size" in old and source.exists() and "mrope_section" in source.read_text()
            changed["rope_parameters"] = rope(old["rope_parameters"], sections)
        if self.filled:
            changed |= {k: v for k, v in MISSING.items() if k in old and old[k] is None}
        changed = {k: v for k, v in changed.items() if k not in old or v != old[k]}
        return changed | EXCEPTIONS.get(type(config).__name__, {})

    def field(self, name: str, value: Any) -> Any:
        if isinstance(value, tf.PreTrainedConfig):
            return {**given(value), **self(value), "model_type": value.model_type}
        if name == "image_grid_pinpoints":
            return [[2 * SIDE, SIDE]]
        if name in TOKENS:
            return TOKENS[name] if value is not None else None
        if re.fullmatch(r"\w*_(id|ids|index|idx|indices)", name):
            return self.special(name if value is None and name in PICTURES else value)
        return sized(name, value)

    def special(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.special(item) for item in value]
        if value not in PICTURES and (type(value) is not int or value < SPECIAL[0]):
            return value
        return self.ids.setdefault(value, SPECIAL[len(self.ids) % len(SPECIAL)])


def given(config: tf.PreTrainedConfig) -> dict[str, Any]:
    """What the configuration around it gave to a part: fields that differ from the part's own defaults."""
    try:
        default = type(config)()
    except Exception:  # a part that has no defaults
        return {}
    config.allow_global_per_layer_attribute_access = default.allow_global_per_layer_attribute_access = True
    values = {f.name: getattr(config, f.name, None) for f in fields(config)}
    parts = {k for k, v in values.items() if isinstance(v, tf.PreTrainedConfig)}
    return {k: v for k, v in values.items() if k not in parts and v != getattr(default, k, None)}


def layers(old: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry a layer keep the first layer of every kind; lists of layers keep those that are left."""
    counts = [k for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if old.get(k)]
    if not counts or not isinstance(count := old[counts[0]], int):
        return {}
    lists = {k: v for k, v in old.items() if isinstance(v, (list, tuple)) and list(v) != list(range(count))}
    entries = {k: v for k, v in lists.items() if len(v) == count and PER_LAYER.fullmatch(k)}
    kept: list[int] = []
    for i in range(count):
        if any(v[i] not in [v[j] for j in kept] for v in entries.values()):
            kept.append(i)
    kept += [count - 1] * (LAYERS - len(kept))
    shared = {"num_kv_shared_layers": len(kept)} if old.get("num_kv_shared_layers") else {}
    kept *= 2 if shared else 1
    changed = shared | {k: len(kept) for k in counts if old[k] == count}
    changed |= {name: type(value)(sized(name, value[i]) for i in kept) for name, value in entries.items()}
    for name, value in old.items():
        indices = isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value)
        if indices and name not in entries and re.search(r"index|indices|idx|layer", name):
            changed[name] = sorted({min(v, len(kept) - 1) for v in value})
    return changed


def rope(old: Any, sections: bool) -> Any:
    """Rotations of the small head. sections: of time, height and width."""
    if not isinstance(old, dict):
        return old
    new = {k: rope(v, sections) for k, v in old.items()}
    if "rope_type" in new and sections:
        half = int(HEAD * new.get("partial_rotary_factor", 1.0)) // 2
        new["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return new | ({"original_max_position_embeddings": LIMIT} if "original_max_position_embeddings" in new else {})


def tiny_config(kind: type, windows: bool = True, filled: bool = False) -> tf.PreTrainedConfig:
    """A small configuration of a model class. windows: slide where possible. filled: set usual empty fields."""
    try:
        default = kind.config_class()
    except Exception:
        default = kind.config_class(**EXCEPTIONS[kind.config_class.__name__])
    made = Shrinking(windows, filled)(default)
    if hasattr(default, "is_decoder") and not default.is_encoder_decoder:
        made["is_decoder"] = True  # else such models see both ways
    return kind.config_class(**made)


def tiny_model(name: str, seed: int = 0) -> nn.Module:
    """A tiny random model of a class, with windows where it can have them. Raises what its construction raises."""
    kind, model, error = getattr(tf, name), None, ValueError()
    for windows, filled in itertools.product((True, False), (False, True)):
        try:
            model = kind._from_config(tiny_config(kind, windows, filled), dtype=torch.float32)
            break
        except Exception as e:
            error = e if not error.args else error
    if model is None:
        raise error
    if (count := sum(p.numel() for p in model.parameters())) > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.1f} million parameters after shrinking")
    return enliven(model, seed)


def enliven(model: nn.Module, seed: int = 0, gain: float = 3.0) -> nn.Module:
    """Random weights of a useful size, a head of its own with logits of spread `gain`: answers vary, ties are rare."""
    generator, head = torch.Generator().manual_seed(seed), model.get_output_embeddings()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if re.search("gate|alpha", name) and p.numel() and not p.any():
                p.fill_(1.0)  # closed gates would hide the pictures
            if p.dim() < 2 or "A_log" in name or not p.is_floating_point():
                continue
            fan_in = p[0].numel() if p.dim() != 3 else p.shape[-1]
            std = 0.4 if "emb" in name and p.dim() == 2 else 1.2 * fan_in**-0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)
        if getattr(head, "weight", None) is not None and head.weight.dim() == 2:
            weight = torch.randn(head.weight.shape, generator=generator) * gain * head.weight.shape[1] ** -0.5
            head.weight = nn.Parameter(weight)  # a tied head would echo its input
    model.generation_config = tf.GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=None)
    if getattr(model, "speaker_map", None) == {}:
        model.speaker_map = {"Chelsie": {}}  # generate wants its default voice, even where nothing is said aloud
    return model.eval()


# --- prompts --------------------------------------------------------------------------------------------------------

TEXT = {"1": [20], "3": [40, 20, 6]}  # lengths: prompts and answers end before and behind the windows and limits
PICTURED = {"1": [8], "3": [24, 12, 5]}  # tokens of text, a part of them before the picture
IN_STREAM = (0, 2, 1, 2)  # rows of the batch of three, each a prompt of its own
COUNTS = (4, 16, 1, 8, 56, 145)  # tokens of a picture, tried in turn

Batches = dict[str, Any]


def padded(lengths: list[int], picture: list[int] | None = None) -> dict[str, Tensor]:
    """Left-padded rows of text with a repeated motif for n-grams, and a picture behind each row's second token."""
    generator, rows = torch.Generator().manual_seed(0), []
    for length in lengths:
        motif = torch.randint(5, SPECIAL[0], (7,), generator=generator).tolist()
        row = [BOS, *(motif * length)][:length]
        rows.append(row[:2] + (picture or []) + row[2:])
    longest = max(map(len, rows))
    masks = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    ids = [[PAD] * (longest - len(row)) + row for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}


def text(model: nn.Module) -> Batches:
    """Prompts of text, with the grids and the start id of models that draw, and without speech."""
    batches = {batch: padded(lengths) for batch, lengths in TEXT.items()}
    if "images_per_sample" in inspect.signature(model.forward).parameters:
        for inputs in batches.values():
            rows = len(inputs["input_ids"])
            inputs["input_ids"][:, -1] = model.config.image_start_token_id
            inputs["image_grid_thw"] = torch.tensor([[1, 8, 4], [1, 2, 2]] * rows)
            inputs["images_per_sample"] = torch.tensor([2] * rows)
    if "thinker_max_new_tokens" in (accepted := inspect.signature(model.generate).parameters):
        silent = {"return_audio": False} if "return_audio" in accepted else {"generation_mode": "text"}
        batches = {batch: {**inputs, **silent, "thinker_max_new_tokens": NEW} for batch, inputs in batches.items()}
    return batches


def forms(accepted: set[str]) -> Iterator[Callable[..., dict[str, Tensor]]]:
    """Ways to pass n pictures, as functions of n and a seed: patches, whole or tiles, with and without sizes."""
    xy = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), dim=-1).reshape(1, 16, 2)
    patch, side, flat = 3 * PATCH * PATCH, SIDE, "image_grid_thw" in accepted
    cut = flat or {"image_position_ids", "image_token_pooling", "spatial_shapes"} & accepted
    patches = [(16, 2 * patch), (16, patch), (16, 3, PATCH, PATCH), (16, 4 * patch)]
    whole = [(3, side, side), (1, 3, side, side), (3, 3, side, side), (1, 3, 2 * side, 2 * side)]
    shapes = patches if cut else [*whole, (3, 4 * side, 4 * side), *patches]
    bare = [False, True] if {"image_sizes", "pixel_attention_mask"} & accepted else [False]
    for without, shape in itertools.product(bare, shapes):

        def form(n: int, seed: int = 0, shape: Any = shape, without: bool = without) -> dict[str, Tensor]:
            pixels = noise(n, *shape, seed=seed)
            masks = torch.ones(n, 16).long() if shape[0] == 16 else torch.ones(n, 1, side, side).bool()
            masks = torch.ones(n, 1).bool() if without else masks
            more = {
                "image_grid_thw": torch.tensor([[1, 4, 4]] * n), "image_merge_sizes": torch.full((n,), 2),
                "image_sizes": torch.tensor([[side * (1 + (shape[:2] == (3, 3))), side]] * n),
                "spatial_shapes": torch.tensor([[4, 4]] * n), "pixel_attention_mask": masks,
                "image_position_ids": xy.repeat(n, 1, 1),
                "high_res_pixel_values": noise(n, 3, side, side, seed=seed + 50),
                "qformer_input_ids": torch.full((n, 3), 7), "qformer_attention_mask": torch.ones(n, 3).long(),
                # counted through all pictures of a batch
                "image_token_pooling": torch.arange(16 * n).view(4 * n, 4), "image_num_crops": torch.ones(n).long(),
                "image_grids": torch.tensor([[2, 2, 0, 0]] * n),
            }  # fmt: skip
            made = {"pixel_values": pixels.flatten(0, 1) if flat else pixels}
            names = accepted - {"image_sizes"} if without else accepted
            return made | {name: value for name, value in more.items() if name in names}

        yield form


def picture_form(model: nn.Module) -> tuple[Any, int] | None:
    """The first form of pictures that a model takes and that changes what it says, and how many tokens one has."""
    accepted = set(inspect.signature(model.forward).parameters)
    for form, count in itertools.product(forms(accepted) if "pixel_values" in accepted else (), COUNTS):
        logits, inputs = [], placed(model, form, count, PICTURED["1"])
        asked = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        try:
            logits += [model.generate(**inputs | form(1, seed), **asked).logits[0] for seed in (0, 1)]
        except Exception:
            continue  # another form is tried
        if float((logits[0] - logits[1]).abs().max()) > 1e-4:
            return form, count
    return None


def placed(model: nn.Module, form: Any, count: int, lengths: list[int]) -> dict[str, Tensor]:
    """Rows of text of these lengths with a picture of so many tokens in each."""
    names = ("image_token_id", "image_token_index", "image_patch_id", "media_placeholder_token_id")
    sides = [[f"{side}_token_{kind}" for side in ends for kind in ("id", "index")]
             for ends in (("vision_start", "image_start", "boi"), ("vision_end", "image_end", "eoi"))]  # fmt: skip
    image, *around = ([i for name in each if isinstance(i := getattr(model.config, name, None), int)][:1]
                      for each in (names, *sides))  # fmt: skip
    own = (image or [SPECIAL[0]])[0]
    inputs = padded(lengths, [*around[0], *[own] * count, *around[1]])
    kinds = ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")
    accepted = inspect.signature(model.forward).parameters
    inputs |= {name: (inputs["input_ids"] == own).long() for name in kinds if name in accepted}
    return inputs | form(len(lengths))


def lively(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Whether stock generate says more than a few different tokens in every row, or nothing can be said about it."""
    try:
        answers = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        return all(len(set(row)) >= 6 for row in new_tokens(answers, inputs))
    except Exception:
        return True


def cases(name: str) -> list[tuple[str, nn.Module, Batches]]:
    """(inputs, model, batches) of a class, of the first lively random model. Raises what its construction raises."""
    result = None
    for seed in range(5):
        model = tiny_model(name, seed)
        made, result = {"text": text(model)}, result if seed else picture_form(model)
        if result:
            made["pictures"] = {batch: placed(model, *result, lengths) for batch, lengths in PICTURED.items()}
        if all(lively(model, batches["3"]) for batches in made.values()):
            break
    for batches in made.values():
        batches["stream"] = [single_row(batches["3"], b) for b in IN_STREAM]
    return [(inputs, model, batches) for inputs, batches in made.items()]


def single_row(inputs: dict[str, Any], b: int) -> dict[str, Any]:
    """Row b of a batch without its padding. What is no number of each id is an equal part of the whole."""
    mask = inputs["attention_mask"]
    alone = {k: v.chunk(len(mask))[b] if isinstance(v, Tensor) else v for k, v in inputs.items()}
    if "image_token_pooling" in alone:  # patches of the row's own picture
        alone["image_token_pooling"] = alone["image_token_pooling"] - alone["image_token_pooling"].min()
    each = [k for k, v in inputs.items() if isinstance(v, Tensor) and v.shape[:2] == mask.shape]
    return alone | {k: alone[k][:, mask[b].bool()] for k in each}
