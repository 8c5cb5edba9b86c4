"""How large the fields of a tiny configuration are: by name, and for some classes by exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tiny import BOS, EOS, PAD, VOCAB

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD = 2, 64, 48, 4, 2, 16
EXPERTS, ROUTED = 4, 2
WINDOW, LIMIT, POSITIONS = 12, 32, 512  # tokens; prompts and answers of the table cross the first two
SIDE, PATCH = 8, 2  # pixels
SPECIAL = range(81, VOCAB)  # ids of pictures and the like; text has those below


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
    (r"num_filters|num_codebooks|num_code_groups|num_quantizers", _least(4)),
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
    (r"(num_)?(hidden_)?layers|n_layers?|depth|num_blocks|num_\w*layers|\w+_layers|\w*layers_per_stack",
     _least(LAYERS)),
    (r"\w*hidden_size(_\w+)?|hidden_sizes|d_model|n_embd|lru_width|(\w*_)?(embed|embeds|embedding|hidden|output|proj)_dim"
     r"|\w*(embedding|latent|projection)_size|dim|(emb|input|condition|decoder|projection|conv|tdnn)_dim|projector_\w+_dim"
     r"|\w*(output|downsample|conv|latent|base|post_conv_\w+)_channels?|\w*out_channel|\w*(prenet|postnet)_units"
     r"|\w*upsample_initial_channel", _least(WIDTH)),
    (r"num_pos_feats", WIDTH // 2),
    (r"num_position_embeddings", (SIDE // PATCH) ** 2),
    (r"posemb_grid_size|pos_emb_(height|width)", SIDE // PATCH),
)  # fmt: skip

# --- where names don't tell enough, by configuration class -----------------------------------------------------------

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
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8},
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
    "Gemma3nVisionConfig": {"architecture": "test_vit", "hidden_size": WIDTH, "vocab_offset": 90, "vocab_size": 8},
    "Gemma3nAudioConfig": {"vocab_offset": 90, "vocab_size": 8},
    "Gemma4AssistantConfig": {"text_config": {
        "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "num_hidden_layers": 2, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
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
    "HrmTextConfig": {"num_hidden_layers": 16, "num_layers_per_stack": 2},  # two stacks, two cycles of four
    "JanusVQVAEConfig": {"latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1]},
    "Kosmos2_5VisionConfig": {"patch_embed_hidden_size": 3 * PATCH**2},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
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
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
                    "num_hidden_layers": 4},
}  # fmt: skip
# what a field without a default gets where the model wants one
MISSING = {
    "head_dim": HEAD, "num_key_value_heads": KV_HEADS, "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS,
    "num_experts": EXPERTS, "num_experts_per_tok": ROUTED, "n_shared_experts": 1, "num_heads": HEADS,
    "moe_intermediate_size": INNER,
}  # fmt: skip
TOKENS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
PICTURES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # needed for pictures
