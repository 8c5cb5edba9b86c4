"""Tiny random models of every stock family, made from configurations, and prompts for them made by hand.

Weights are scaled so that laws are far from ties and answers vary. Nothing is downloaded. Each family is one function
that returns a model; `FAMILIES` is the table the contract tests run over. Shapes: B rows, L prompt, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

VOCAB = 96
PAD, BOS, EOS = 0, 1, 2
IMAGE, VIDEO, VISION_START, VISION_END = 90, 91, 92, 93
TEXT_IDS = (5, 88)  # ordinary ids

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": PAD, "bos_token_id": BOS,
    "eos_token_id": EOS,
}  # fmt: skip
WITHOUT_HEAD_DIM = {k: v for k, v in TEXT.items() if k != "head_dim"}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
         "patch_size": 2}  # fmt: skip
VISION_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START,
              "vision_end_token_id": VISION_END}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def enliven(model: nn.Module, seed: int, gain: float = 3.0) -> nn.Module:
    """Random weights of a useful size: matrices of unit gain, embeddings of unit size, logits of spread `gain`."""
    generator = torch.Generator().manual_seed(seed)
    head, norm = model.get_output_embeddings().weight, getattr(model.get_decoder(), "norm", None)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2:
                continue
            fan_in = p[0].numel() if p.dim() > 1 else 1
            std = 1.0 if "embed" in name and p.dim() == 2 else 1.3 * fan_in**-0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)
        head.copy_(torch.randn(head.shape, generator=generator) * gain * head.shape[1] ** -0.5)
        # random signs, as a tied head must not echo its input; Gemma adds 1 to the weight
        if norm is not None:
            signs = torch.randn(norm.weight.shape, generator=generator)
            norm.weight.copy_(signs - (norm.weight.mean() == 0).float())
    model.generation_config = tf.GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=None)
    return model.eval()


def built(kind: type, config: Any, seed: int = 0, attention: str = "sdpa") -> nn.Module:
    """The same weights whoever asks first: what `enliven` leaves alone (CLIP's class embedding) is drawn by torch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind._from_config(config, dtype=torch.float32, attn_implementation=attention)
    return enliven(model, seed)


# --- pixels: what a family's processor would hand to the model, for `images` pictures per row -----------------------


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flat_pixels(images: list[int], seed: int, size: int = 8) -> dict[str, Tensor]:
    return {"pixel_values": noise(sum(images), 3, size, size, seed=seed)}


def per_row_pixels(images: list[int], seed: int) -> dict[str, Tensor]:
    pixels = torch.zeros(len(images), max(images), 3, 8, 8)  # rows with fewer pictures are padded with black ones
    for b, n in enumerate(images):
        pixels[b, :n] = noise(n, 3, 8, 8, seed=seed + b)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(len(images), max(images), 8, 8).bool()}


def sized_pixels(images: list[int], seed: int) -> dict[str, Tensor]:
    return {**flat_pixels(images, seed), "image_sizes": torch.tensor([[8, 8]] * sum(images))}


def anyres_pixels(images: list[int], seed: int) -> dict[str, Tensor]:
    """LLaVA-NeXT: the whole picture and its tiles, 16 by 8 pixels on the pinpoint (16, 8)."""
    sizes = torch.tensor([[16, 8]] * sum(images))
    return {"pixel_values": noise(len(sizes), 3, 3, 8, 8, seed=seed), "image_sizes": sizes}


def packed_pixels(grids: list[list[int]], seed: int, what: str) -> dict[str, Tensor]:
    """Qwen-VL: patches of all pictures in one list, and each picture's grid (time, height, width) in patches."""
    count = sum(t * h * w for t, h, w in grids)
    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}[what]
    return {names[0]: noise(count, 3 * 2 * 2 * 2, seed=seed), names[1]: torch.tensor(grids)}


# --- families ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How to build a model and its prompts. `image` is the ids that one picture takes in the prompt."""

    make: Callable[[], nn.Module]
    image: tuple[int, ...] = ()
    pixels: Callable[[list[int], int], dict[str, Tensor]] | None = None
    video: tuple[int, ...] = ()
    types: str = ""  # name of the token type input, if the family needs one
    grid: bool = False  # Qwen-VL: pictures come with grids, of varying size
    mrope: bool = False
    sliding: bool = False
    tags: frozenset[str] = field(default_factory=frozenset)

    @property
    def visual(self) -> bool:
        return bool(self.image)


def llama(seed: int = 0, **changes) -> nn.Module:
    return built(tf.LlamaForCausalLM, tf.LlamaConfig(**{**TEXT, **changes}), seed)


def qwen2(seed: int = 0) -> nn.Module:
    return built(tf.Qwen2ForCausalLM, tf.Qwen2Config(**WITHOUT_HEAD_DIM), seed)


def qwen3(**changes) -> nn.Module:
    return built(tf.Qwen3ForCausalLM, tf.Qwen3Config(**{**TEXT, **changes}))


def gemma2() -> nn.Module:
    """Every other layer slides over 8 tokens; logits and attention are soft-capped."""
    config = tf.Gemma2Config(**TEXT, sliding_window=8, query_pre_attn_scalar=8)
    return built(tf.Gemma2ForCausalLM, config, attention="eager")


def mistral() -> nn.Module:
    return built(tf.MistralForCausalLM, tf.MistralConfig(**TEXT, sliding_window=8))


def llava(**changes) -> nn.Module:
    vision, text = tf.CLIPVisionConfig(**{**TOWER, "patch_size": 4}), tf.LlamaConfig(**{**TEXT, **changes})
    config = tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=4)
    return built(tf.LlavaForConditionalGeneration, config)


def llava_next() -> nn.Module:
    parts = {"vision_config": tf.CLIPVisionConfig(**{**TOWER, "patch_size": 4}), "text_config": tf.LlamaConfig(**TEXT)}
    config = tf.LlavaNextConfig(**parts, image_token_index=IMAGE, image_grid_pinpoints=[[16, 8]])
    return built(tf.LlavaNextForConditionalGeneration, config)


def pixtral() -> nn.Module:
    tower = tf.PixtralVisionConfig(**{**TOWER, "patch_size": 4}, head_dim=8)
    config = tf.LlavaConfig(
        vision_config=tower,
        text_config=tf.MistralConfig(**TEXT, sliding_window=None),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return built(tf.LlavaForConditionalGeneration, config)


def mistral3() -> nn.Module:
    tower, text = tf.PixtralVisionConfig(**TOWER, head_dim=8), tf.MistralConfig(**TEXT, sliding_window=None)
    config = tf.Mistral3Config(vision_config=tower, text_config=text, image_token_index=IMAGE, spatial_merge_size=2)
    return built(tf.Mistral3ForConditionalGeneration, config)


def qwen2_vl() -> nn.Module:
    config = tf.Qwen2VLConfig(
        text_config={**WITHOUT_HEAD_DIM, "rope_parameters": MROPE},
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 2, "mlp_ratio": 2},
        **VISION_IDS,
    )
    return built(tf.Qwen2VLForConditionalGeneration, config)


def qwen2_5_vl(**changes) -> nn.Module:
    text = WITHOUT_HEAD_DIM | changes
    tower = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2}
    config = tf.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": MROPE},
        vision_config={**tower, "out_hidden_size": 32, "window_size": 8, "fullatt_block_indexes": [1]},
        **VISION_IDS,
    )
    return built(tf.Qwen2_5_VLForConditionalGeneration, config)


def qwen3_vl() -> nn.Module:
    """Vision features enter at the embeddings and again after each of the first two layers ("deepstack")."""
    tower = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2}
    deep = {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    config = tf.Qwen3VLConfig(
        text_config={**TEXT, "num_hidden_layers": 3, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        vision_config={**tower, **deep},
        **VISION_IDS,
    )
    return built(tf.Qwen3VLForConditionalGeneration, config)


def idefics(kind: str = "Idefics3") -> nn.Module:
    """Idefics3, and SmolVLM, which has its configuration."""
    config = getattr(tf, f"{kind}Config")(
        vision_config=TOWER, text_config=tf.LlamaConfig(**TEXT), image_token_id=IMAGE, scale_factor=2, pad_token_id=PAD
    )
    return built(getattr(tf, f"{kind}ForConditionalGeneration"), config)


def gemma3(layers: int = 3) -> nn.Module:
    """Every other layer slides over 8 tokens (all prompts are longer). Pictures see themselves both ways."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"][:layers]
    text = {**TEXT, "num_hidden_layers": layers, "sliding_window": 8, "layer_types": kinds, "query_pre_attn_scalar": 8}
    config = tf.Gemma3Config(
        text_config=text,
        vision_config={**TOWER, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )
    return built(tf.Gemma3ForConditionalGeneration, config)


def paligemma() -> nn.Module:
    """The whole prompt sees itself both ways."""
    config = tf.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"},
        vision_config={**TOWER, "patch_size": 4, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=IMAGE,
        projection_dim=32,
        hidden_size=32,
        vocab_size=VOCAB,
    )
    return built(tf.PaliGemmaForConditionalGeneration, config)


def internvl() -> nn.Module:
    tower, text = {**TOWER, "image_size": [8, 8], "patch_size": [2, 2]}, tf.Qwen2Config(**WITHOUT_HEAD_DIM)
    config = tf.InternVLConfig(vision_config=tower, text_config=text, image_token_id=IMAGE, image_seq_length=4)
    return built(tf.InternVLForConditionalGeneration, config)


FOUR = (IMAGE,) * 4
QWEN = {"grid": True, "types": "mm_token_type_ids", "mrope": True}
FAMILIES: dict[str, Family] = {
    "llama": Family(llama), "qwen2": Family(qwen2), "gemma2": Family(gemma2, sliding=True),
    "mistral": Family(mistral, sliding=True), "llava": Family(llava, FOUR, flat_pixels),
    "llava_next": Family(llava_next, (IMAGE,) * 16, anyres_pixels), "pixtral": Family(pixtral, FOUR, sized_pixels),
    "mistral3": Family(mistral3, FOUR, sized_pixels), "qwen2_vl": Family(qwen2_vl, FOUR, video=(VIDEO,) * 8, **QWEN),
    "qwen2_5_vl": Family(qwen2_5_vl, FOUR, video=(VIDEO,) * 8, **QWEN),
    "qwen3_vl": Family(qwen3_vl, FOUR, video=(VIDEO,) * 4, **QWEN),
    "smolvlm": Family(functools.partial(idefics, "SmolVLM"), FOUR, per_row_pixels),
    "idefics3": Family(idefics, FOUR, per_row_pixels),
    "gemma3": Family(gemma3, (VISION_START, *FOUR, VISION_END), flat_pixels, types="token_type_ids", sliding=True),
    "paligemma": Family(paligemma, FOUR, flat_pixels, types="token_type_ids"),
    "internvl": Family(internvl, FOUR, flat_pixels),
}  # fmt: skip
VISUAL = [name for name, family in FAMILIES.items() if family.visual]
VIDEOS = [name for name, family in FAMILIES.items() if family.video]
TWINS = {"qwen2", "pixtral", "qwen2_vl", "idefics3", "internvl"}  # rows, positions and pictures are as another's
DISTINCT = [pytest.param(name, marks=[pytest.mark.nightly] * (name in TWINS)) for name in FAMILIES]


@functools.cache
def model_of(name: str) -> nn.Module:
    """A family's model, built once per session. Tests must leave it as they found it."""
    with torch.inference_mode(False):  # the first test to ask may be in that mode, and weights made in it stay so
        return FAMILIES[name].make()


# --- prompts ------------------------------------------------------------------------------------------------------

GRIDS = ([1, 4, 4], [1, 4, 8], [1, 8, 4])  # pictures of a prompt, in turn: in M-RoPE families rows get different deltas
CLIP = [3, 4, 4]  # a video of 3 frames (after merging frames in time): longer in time than it is wide
SHAPES = {  # what is between the pictures: numbers are ordinary ids, "i" a picture, "v" a video
    "one": ["5 i 7"],
    "several": ["4 i 3 i 6 i 5"],
    "even": ["4 i 5", "4 i 5"],  # nothing to pad: generate drops the attention mask
    "ragged": ["3 i 4 i 9", "6 i 5", "12"],
    "video": ["4 v 6"],
    "ragged_video": ["4 v 3 i 6", "3 i 5", "4 v 2"],
}
TEXT_SHAPES = {"one": ["14"], "several": ["25"], "even": ["10", "10"], "ragged": ["19", "12", "3"]}


def row_of(name: str, parts: str, generator: torch.Generator) -> tuple[list[int], list[int], dict[str, Any]]:
    """Ids, token types, and the grids of the pictures and videos of one prompt."""
    family = FAMILIES[name]
    ids, types = [BOS], [0]
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    for part in parts.split():
        if part == "i":
            grid = GRIDS[len(grids["image"]) % 3] if family.grid else [1, 4, 4]
            grids["image"].append(grid)
            packed = [VISION_START, *[IMAGE] * (grid[1] * grid[2] // 4), VISION_END]
            block = packed if family.grid else list(family.image)
        elif part == "v":
            grids["video"].append(CLIP)
            frame = [VIDEO] * (CLIP[1] * CLIP[2] // 4)
            stamped = [7, VISION_START, *frame, VISION_END] * CLIP[0]  # Qwen3-VL: frame by frame
            block = stamped if name == "qwen3_vl" else [VISION_START, *frame * CLIP[0], VISION_END]
        else:
            block = torch.randint(*TEXT_IDS, (int(part),), generator=generator).tolist()
        ids += block
        types += [{IMAGE: 1, VIDEO: 2}.get(i, 0) for i in block]
    return ids, types, grids


def prompt(name: str, rows: list[str], seed: int = 0) -> dict[str, Tensor]:
    """The inputs that a family's processor would make of these rows: left-padded, pictures attached."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(1000 + seed)
    made = [row_of(name, parts, generator) for parts in rows]
    longest = max(len(ids) for ids, _, _ in made)
    left = lambda row, fill: [fill] * (longest - len(row)) + row  # noqa: E731
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([left(ids, PAD) for ids, _, _ in made]),
        "attention_mask": torch.tensor([left([1] * len(ids), 0) for ids, _, _ in made]),
    }
    if family.types:
        types = [left(t, 0) if name != "paligemma" else [0] * longest for _, t, _ in made]
        inputs[family.types] = torch.tensor(types)
    images, videos = ([g[what] for _, _, g in made] for what in ("image", "video"))
    if family.grid:
        for what, of_rows in (("image", images), ("video", videos)):
            if grids := [grid for row in of_rows for grid in row]:
                inputs |= packed_pixels(grids, seed, what)
    elif any(images):
        inputs |= family.pixels([len(g) for g in images], seed)
    return inputs


def shapes(name: str) -> dict[str, list[str]]:
    family = FAMILIES[name]
    if not family.visual:
        return TEXT_SHAPES
    return {k: v for k, v in SHAPES.items() if "video" not in k or family.video}


def single_row(name: str, rows: list[str], inputs: dict[str, Tensor], b: int) -> dict[str, Tensor]:
    """Row b of a batch as a batch of its own, without its padding."""
    family = FAMILIES[name]
    real = inputs["attention_mask"][b].bool()
    alone = {k: inputs[k][b : b + 1, real] for k in ("input_ids", "attention_mask", family.types) if k in inputs}
    for kind, pixels, grid in (("i", "pixel_values", "image_grid_thw"), ("v", "pixel_values_videos", "video_grid_thw")):
        counts = [parts.split().count(kind) for parts in rows]
        if pixels not in inputs or not counts[b]:
            continue
        first, last = sum(counts[:b]), sum(counts[: b + 1])
        if family.grid:
            sizes = inputs[grid].prod(-1).tolist()
            alone[pixels] = inputs[pixels][sum(sizes[:first]) : sum(sizes[:last])]
            alone[grid] = inputs[grid][first:last]
        elif "pixel_attention_mask" in inputs:
            alone |= {k: inputs[k][b : b + 1, : counts[b]] for k in (pixels, "pixel_attention_mask")}
        else:
            alone |= {k: inputs[k][first:last] for k in (pixels, "image_sizes") if k in inputs}
    return alone
