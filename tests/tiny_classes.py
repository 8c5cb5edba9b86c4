"""Every class of transformers that generates, as a tiny random model: its default configuration made small by the names
of its fields. Prompts of text and, where the configuration tells how, of pictures. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import nn

from tests.tiny import BOS, EOS, PAD, VOCAB

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD = 2, 64, 48, 4, 2, 16
EXPERTS, ROUTED = 4, 2
WINDOW, LIMIT, POSITIONS = 12, 32, 512  # tokens; prompts and answers of the table cross the first two
SIDE, PATCH = 8, 2  # pixels
MOST_PARAMETERS = 4_000_000
SPECIAL = range(81, VOCAB)  # ids of pictures and the like; text has those below


def generating() -> list[str]:
    """Names of all public classes that generate, aliases left out."""
    found = {}
    for name in dir(tf):
        kind = getattr(tf, name, None) if name[0].isupper() or name[0] == "x" else None
        if inspect.isclass(kind) and issubclass(kind, tf.PreTrainedModel) and issubclass(kind, tf.GenerationMixin):
            found[kind.__name__] = kind
    return sorted(name for name, kind in found.items() if kind.config_class is not None)


# --- configurations -------------------------------------------------------------------------------------------------


def _least(limit: int) -> Callable[[int], int]:
    return lambda old: min(old, limit)


# the first pattern that matches the whole name of a field decides; values are for each number in the field
SIZES: tuple[tuple[str, int | Callable[[int], int]], ...] = (
    (r"type_vocab_size|.*n_mels|num_mel_bins|in_channels|num_channels|.*chunk_size_feed_forward|audio_channels", int),
    (r".*codebook_size", _least(64)),
    (r".*vocab_size\w*|n_token|num_embeddings|.*vocab", _least(VOCAB)),
    (r"vocab_offset|.*image_seq_length|.*video_seq_length", _least(SPECIAL[0])),
    (r"original_max_position_embeddings|initial_context_length", LIMIT),
    (r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|max_\w*positions|model_max_length|context_length"
     r"|max_pos_emb|\w*max_text_tokens|max_sequence_length", _least(POSITIONS)),
    (r"sliding_window(_size)?|attention_window_size|local_attention(_window_len)?|attention_chunk_size"
     r"|keep_window_size", WINDOW),
    (r"image_size|resolution|img_size|crop_size", SIDE),
    (r"patch_size", PATCH),
    (r"max_ima?ge?_size|max_img_size", 4 * SIDE),
    (r"num_filters", _least(4)),
    (r"num_query_tokens|latent_query_num|resampler_n_latents|num_latents", _least(4)),
    (r"upsample_groups", _least(WIDTH)),
    (r"\w*_layer_period|global_attn_every_n_layers|no_rope_layer_interval|layer_group_size|\w*sliding_window_pattern"
     r"|\w*sparse_step|cross_layer_interval", _least(2)),
    (r"\w*_layer_offset|first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index", _least(1)),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|topk_group|num_expert_group", _least(1)),
    (r"\w*experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts", _least(ROUTED)),
    (r"num_local_experts|n_routed_experts|\w*num_experts|zero_expert_num", _least(EXPERTS)),
    (r"linear_num_(key|value)_heads|n_groups|mamba_n_groups|mamba_ngroups", _least(2)),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", _least(8)),
    (r"(mamba_)?d_state|mamba_d_state|\w*state_size|time_step_rank|mamba_dt_rank|mamba_d_head|mamba_head_dim", 16),
    (r"\w*lora_rank|\w*_rank", HEAD),
    (r"qk_head_dim", 2 * HEAD),
    (r"rotary_dim", _least(HEAD // 2)),
    (r"\w*head_dim|attention_head_size|d_head|d_kv|kv_channels|dim_head|\w*dim_head|query_pre_attn_scalar", HEAD),
    (r"\w*(num_key_value_heads|kv_n_heads|num_kv_heads)", _least(KV_HEADS)),
    (r"\w*num_(\w+_)?heads|\w*attention_heads|n_heads?|\w*_n_heads|resampler_heads", _least(HEADS)),
    (r"\w*(intermediate|ffn|inner|mlp)\w*(size|dim)|d_ff|dff|dim_ff|n_inner|d_inner|feed_forward_size", INNER),
    (r"(num_)?(hidden_)?layers|n_layers?|depth|num_blocks|num_\w*layers|\w+_layers|\w*layers_per_stack", _least(LAYERS)),
    (r"\w*hidden_size(_\w+)?|d_model|n_embd|\w*embed(ding)?_dim|\w*embeds?_dim|\w*embedding_size|dim|emb_dim|\w*hidden_dim"
     r"|projection_dim|projector_\w+_dim|\w*output_dim|input_dim|word_embed_proj_dim|text_hidden_size|lru_width"
     r"|embedding_size|condition_dim|\w*_proj_dim|vision_output_dim|latent_channels|base_channels|decoder_dim"
     r"|conv_dim|tdnn_dim|\w*output_channels|\w*downsample_channels|\w*conv_channels|\w*out_channel|\w*prenet_units|\w*postnet_units"
     r"|hidden_sizes|post_conv\w*_channels|\w*latent_size|thinker_hidden_size|projection_size|\w*upsample_initial_channel", _least(WIDTH)),
    (r"num_pos_feats", WIDTH // 2),
    (r"num_position_embeddings", (SIDE // PATCH) ** 2),
    (r"posemb_grid_size|pos_emb_(height|width)", SIDE // PATCH),
)  # fmt: skip
# where names don't tell enough, by configuration class; None takes a field away
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = {**ROPE, "mrope_section": [3, 3, 2]}
CODES = 8  # of picture tokens that are ids
CHAMELEON = {"<image>": SPECIAL[0], **{f"IMGIMG{'ABCDEFGH'[i]}Z": 60 + i for i in range(CODES)}}
EMU3 = {"<image>": SPECIAL[0], "<|extra_200|>": SPECIAL[1],
        **{f"<|visual token {i:06d}|>": 60 + i for i in range(CODES)}}  # fmt: skip
TIMM = {"architecture": "test_vit", "hidden_size": WIDTH, "model_args": {"embed_dim": WIDTH}}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "AriaConfig": {"projector_patch_to_query_dict": {(SIDE // PATCH) ** 2: 4}},
    "ChameleonVQVAEConfig": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 1], "num_embeddings": CODES},
    "ChameleonConfig": {"vocabulary_map": CHAMELEON},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": SECTIONS, "sliding_attention": SECTIONS}},
    "DbrxAttentionConfig": {"rope_theta": 10000.0},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": ROUTED},
    "Dots3NoteAudioConfig": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    "Dots3NoteVisionConfig": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
    "DeepseekV2Config": {"num_experts_per_tok": ROUTED},
    "Dots3NoteTextConfig": {"head_dim": 2 * HEAD, "per_layer_config": {}},
    "Emu3Config": {"vocabulary_map": EMU3},
    "Emu3VQVAEConfig": {
        "base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "codebook_size": CODES, "hidden_size": 32,
    },
    "Ernie4_5_VLMoeTextConfig": {"rope_parameters": SECTIONS},
    "FalconH1Config": {"mamba_d_ssm": 128},
    "FastVlmConfig": {"vision_config": {**TIMM, "model_type": "timm_wrapper"}},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": WIDTH // 4},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "Gemma3nVisionConfig": {"architecture": "test_vit", "hidden_size": WIDTH, "vocab_offset": 90, "vocab_size": 4},
    "Gemma3nAudioConfig": {"vocab_offset": 90, "vocab_size": 4},
    "Gemma4AssistantConfig": {"text_config": {
        "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "head_dim": HEAD,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "sliding_window": WINDOW,
    }},
    "Gemma4Config": {"vision_config": {
        "model_type": "gemma4_vision", "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD, "patch_size": PATCH,
        "position_embedding_size": 64, "pooling_kernel_size": 2,
    }},
    "Gemma4UnifiedConfig": {"vision_config": {
        "model_type": "gemma4_unified_vision", "patch_size": PATCH, "mm_embed_dim": WIDTH, "mm_posemb_size": 64,
        "output_proj_dims": WIDTH, "pooling_kernel_size": 2,
    }},
    "Gemma4TextConfig": {"global_head_dim": 2 * HEAD},
    "Gemma4UnifiedTextConfig": {"global_head_dim": 2 * HEAD},
    "Granite4VisionConfig": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [1]},
    "JanusVQVAEConfig": {"latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1]},
    "Kosmos2_5VisionConfig": {"patch_embed_hidden_size": 3 * PATCH**2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2Config": {"num_heads": 8},
    "MllamaVisionConfig": {"vision_output_dim": 2 * WIDTH, "intermediate_layers_indices": [0]},
    "MuseGlimmerConfig": {"out_hidden_size": 4 * WIDTH},
    "MuseSparkConfig": {"out_hidden_size": 4 * WIDTH},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "MoonshineStreamingConfig": {"num_key_value_heads": HEADS},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4},
    "PerceptionLMConfig": {"vision_config": {**TIMM, "model_type": "timm_wrapper"}},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": INNER},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": SPECIAL[-1]},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": SPECIAL[-1]},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "RadioConfig": {"video_temporal_patch_size": 2},
    "ReformerConfig": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32]},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"num_filters": 2, "depths": [1] * 7},
    "VibeVoiceAcousticTokenizerConfig": {"num_filters": 2, "depths": [1] * 7},
    "VipLlavaConfig": {"vision_feature_layers": [-2, -1]},
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
                    "num_hidden_layers": 4},
}  # fmt: skip
# what a field without a default gets where the model wants one
MISSING = {
    "head_dim": HEAD, "num_key_value_heads": KV_HEADS, "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS,
    "num_experts": EXPERTS, "num_experts_per_tok": ROUTED, "n_shared_experts": 1, "num_heads": HEADS, "moe_intermediate_size": INNER,
}  # fmt: skip
TOKENS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
PICTURES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # needed for pictures
PER_LAYER = re.compile(r"\w*(types?|layers|layer\w*|pattern|size|heads\w*|multipliers|list|theta|window\w*)")


def _sized(name: str, old: Any) -> Any:
    """The small value of a field: of a number, of each number of a list, or the value itself."""
    if isinstance(old, bool) or old is None:
        return old
    if isinstance(old, (list, tuple)):
        return type(old)(_sized(name, item) for item in old)
    if not isinstance(old, int):
        return old
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return size(old) if callable(size) else (size if old > 0 else old)
    return old


class _Shrinking:
    """One configuration being made small; special ids stay the same ids in all of its parts."""

    def __init__(self, windows: bool, filled: bool):
        self.windows, self.filled, self.ids = windows, filled, {}

    def __call__(self, config: tf.PreTrainedConfig) -> dict[str, Any]:
        """Arguments that make a small configuration of the same kind."""
        config.allow_global_per_layer_attribute_access = True
        old = {f.name: getattr(config, f.name, None) for f in fields(config)}
        changed = {name: self.field(name, value) for name, value in old.items()}
        changed |= self.layers(config, old)
        if self.windows and "sliding_window" in old:
            changed["sliding_window"] = WINDOW
            changed |= {"use_sliding_window": True} if "use_sliding_window" in old else {}
        heads = [k for k in old if k in ("num_attention_heads", "n_head", "n_heads")]
        for name in ("num_key_value_heads", "num_kv_heads"):
            if heads and old.get(name) == old[heads[0]]:
                changed[name] = changed[heads[0]]
        if old.get("rope_parameters"):
            changed["rope_parameters"] = _rope(old["rope_parameters"], "vocab_size" in old and _sectioned(config))
        if self.filled:
            changed |= {k: v for k, v in MISSING.items() if k in old and old[k] is None}
        changed = {k: v for k, v in changed.items() if k not in old or v != old[k]}
        return changed | EXCEPTIONS.get(type(config).__name__, {})

    def field(self, name: str, value: Any) -> Any:
        if isinstance(value, tf.PreTrainedConfig):
            return {**_given(value), **self(value), "model_type": value.model_type}
        if name == "image_grid_pinpoints":
            return [[2 * SIDE, SIDE]]
        if name in TOKENS:
            return TOKENS[name] if value is not None else None
        if re.fullmatch(r"\w*_(id|ids|index|idx|indices)", name):
            return self.special(name if value is None and name in PICTURES else value)
        return _sized(name, value)

    def special(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.special(item) for item in value]
        if value not in PICTURES and (type(value) is not int or value < SPECIAL[0]):
            return value
        return self.ids.setdefault(value, SPECIAL[len(self.ids) % len(SPECIAL)])

    def layers(self, config: Any, old: dict[str, Any]) -> dict[str, Any]:
        """Lists with an entry a layer keep the first layer of every kind; lists of layers keep those that are left."""
        count = next((old[k] for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if old.get(k)), 0)
        if not isinstance(count, int) or not count:
            return {}
        lists = {
            k: v for k, v in old.items() if isinstance(v, (list, tuple)) and len(v) == count and PER_LAYER.fullmatch(k)
        }
        lists = {k: v for k, v in lists.items() if list(v) != list(range(count))}
        kept: list[int] = []
        for i in range(count):
            if any(v[i] not in [v[j] for j in kept] for v in lists.values()):
                kept.append(i)
        while len(kept) < LAYERS:
            kept.append(count - 1)
        if old.get("num_kv_shared_layers"):
            kept = kept * 2
        names = [k for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if old.get(k) == count]
        changed: dict[str, Any] = {k: len(kept) for k in names}
        if old.get("num_kv_shared_layers"):
            changed["num_kv_shared_layers"] = len(kept) // 2
        for name, value in lists.items():
            changed[name] = type(value)(_sized(name, value[i]) for i in kept)
        for name, value in old.items():
            indices = isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value)
            if indices and name not in lists and re.search(r"index|indices|idx|layer", name):
                changed[name] = sorted({min(v, len(kept) - 1) for v in value})
        return changed


def _given(config: tf.PreTrainedConfig) -> dict[str, Any]:
    """What the configuration around it gave to a part: fields that differ from the part's own defaults."""
    try:
        default = type(config)()
    except Exception:  # a part that has no defaults
        return {}
    config.allow_global_per_layer_attribute_access = default.allow_global_per_layer_attribute_access = True
    values = {f.name: getattr(config, f.name, None) for f in fields(config)}
    return {
        k: v for k, v in values.items()
        if not isinstance(v, tf.PreTrainedConfig) and v != getattr(default, k, None)
    }  # fmt: skip


def _sectioned(config: tf.PreTrainedConfig) -> bool:
    """Whether the model of a configuration rotates by time, height and width."""
    path = Path(inspect.getfile(type(config)))
    model = path.with_name(path.name.replace("configuration_", "modeling_"))
    return model.exists() and "mrope_section" in model.read_text()


def _rope(rope: Any, sections: bool) -> Any:
    """Rotations of the small head."""
    if not isinstance(rope, dict):
        return rope
    new = {k: _rope(v, sections) if isinstance(v, dict) else v for k, v in rope.items()}
    if "rope_type" in new and sections:
        half = int(HEAD * new.get("partial_rotary_factor", 1.0)) // 2
        new["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if "original_max_position_embeddings" in new:
        new["original_max_position_embeddings"] = LIMIT
    return new


def tiny_config(kind: type, windows: bool = True, filled: bool = False) -> tf.PreTrainedConfig:
    """A small configuration of a model class, with sliding windows where there is a field for them, and with values
    where the default configuration leaves usual fields empty.
    """
    try:
        default = kind.config_class()
    except Exception:
        default = kind.config_class(**EXCEPTIONS[kind.config_class.__name__])
    made = _Shrinking(windows, filled)(default)
    if hasattr(default, "is_decoder") and not default.is_encoder_decoder:
        made["is_decoder"] = True  # else such models see both ways
    return kind.config_class(**made)


# --- models ---------------------------------------------------------------------------------------------------------


def enliven(model: nn.Module, seed: int = 0, gain: float = 3.0) -> nn.Module:
    """Random weights of a useful size, a head of its own with logits of spread `gain`: answers vary, ties are rare."""
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
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
    return model.eval()


def tiny_model(name: str, seed: int = 0) -> nn.Module:
    """A tiny random model of a class, with windows where it can have them. Raises what its construction raises."""
    kind = getattr(tf, name)
    error: Exception | None = None
    for windows, filled in itertools.product((True, False), (False, True)):
        try:
            model = kind._from_config(tiny_config(kind, windows, filled), dtype=torch.float32)
            break
        except Exception as e:
            error = error or e
    else:
        raise error
    count = sum(p.numel() for p in model.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.1f} million parameters after shrinking")
    return enliven(model, seed)
