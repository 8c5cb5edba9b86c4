"""Tiny random image models made from configurations, and prompts for them made by hand.

Models are built outside inference mode whoever asks first: weights made in it would stay so for every later test.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import diffusers
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers.models.emu3.configuration_emu3 import Emu3TextConfig, Emu3VQVAEConfig
from transformers.models.janus.configuration_janus import JanusVisionConfig, JanusVQVAEConfig

from tests.tiny import enliven
from visspec import ImagePipeline
from visspec.io import included

PAD, BOS, EOS, BOI = 0, 1, 2, 3
SIDE, CODES = 4, 24


@functools.cache
@torch.inference_mode(False)
def janus(seed: int = 0):
    """Stock Janus with a 4 x 4 grid of 24 codes."""
    torch.manual_seed(seed)
    vision = JanusVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8 * SIDE, patch_size=8, mlp_ratio=1.0,
        num_image_tokens=SIDE * SIDE,
        projection_dim=32,
    )  # fmt: skip
    vq = JanusVQVAEConfig(
        embed_dim=4, num_embeddings=CODES, latent_channels=32, base_channels=32, channel_multiplier=[1, 1, 1, 1],
        num_res_blocks=1, projection_dim=32, image_token_embed_dim=32,
    )  # fmt: skip
    text = tf.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    parts = {"text_config": text.to_dict(), "vision_config": vision.to_dict(), "vq_config": vq.to_dict()}
    config = tf.JanusConfig(**parts, image_token_id=39)
    model = tf.JanusForConditionalGeneration(config).eval()
    enliven(model, seed)
    with torch.no_grad():
        model.model.generation_head.vision_head.weight.mul_(1.5)
    model.generation_config = tf.GenerationConfig(
        bos_token_id=BOS, pad_token_id=PAD, eos_token_id=EOS, guidance_scale=3.0, max_length=64,
        generation_kwargs={"boi_token_id": BOI},
    )  # fmt: skip
    return model


def janus_pro(where: Path) -> None:
    """The tiny Janus with the files of deepseek-community/Janus-Pro-1B: no `do_sample`, BOS in front of a prompt."""
    special = {
        "pad_token": "<｜▁pad▁｜>", "bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>",
        "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_placeholder>",
    }  # fmt: skip
    words = ["<unk>", "a", "photo", "of", "three", "stars", "<｜User｜>", "<｜Assistant｜>"]
    names = [*list(special.values())[:4], *words, *(f"w{i}" for i in range(26)), *list(special.values())[4:]]
    tokenizer = word_tokenizer(names, **special)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[special["bos_token"], "$A"], special_tokens=[(special["bos_token"], BOS)]
    )
    pixels = tf.JanusImageProcessor(size={"height": 8 * SIDE, "width": 8 * SIDE})
    model = copy.deepcopy(janus())
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    model.generation_config = tf.GenerationConfig(**ids, guidance_scale=5, generation_kwargs={"boi_token_id": BOI})
    model.save_pretrained(where)
    tf.JanusProcessor(pixels, tokenizer, num_image_tokens=SIDE * SIDE).save_pretrained(where)


@functools.cache
@torch.inference_mode(False)
def sibling(side: int = 2, seed: int = 1):
    """A smaller Janus with the same codes, for a smaller image."""
    config = janus().config.to_dict()
    config["vq_config"]["num_patches"] = side
    config["vision_config"] |= {"image_size": 8 * side, "num_image_tokens": side * side}
    torch.manual_seed(seed)
    model = tf.JanusForConditionalGeneration(tf.JanusConfig(**config)).eval()
    enliven(model, seed)
    model.model.vqmodel.load_state_dict(janus().model.vqmodel.state_dict())
    model.generation_config = copy.deepcopy(janus().generation_config)
    return model


def pipeline(**options) -> ImagePipeline:
    return ImagePipeline(janus(), Words(), **options)


def painter(where, **sizes) -> None:
    """A tiny random model of the painter's kind, as a checkpoint folder."""
    torch.manual_seed(0)
    model = tf.JanusForConditionalGeneration(painter_config(**sizes)).eval()
    enliven(model, 0)
    model.generation_config = tf.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        guidance_scale=3.0, max_length=52, generation_kwargs={"boi_token_id": 4},
    )  # fmt: skip
    model.save_pretrained(where)
    painter_processor().save_pretrained(where)


def painter_config(**sizes) -> tf.JanusConfig:
    """The configuration of the included low-resolution painter with a tiny text model; `sizes` override its sizes."""
    config = tf.JanusConfig.from_pretrained(included_folder("painter-lowres")).to_dict()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2} | sizes
    heads = sizes["num_attention_heads"]
    config["text_config"] |= sizes | {"num_key_value_heads": heads, "head_dim": sizes["hidden_size"] // heads}
    config["vision_config"]["projection_dim"] = sizes["hidden_size"]
    config["vq_config"] |= dict.fromkeys(("projection_dim", "image_token_embed_dim"), sizes["hidden_size"])
    return tf.JanusConfig(**config)


def painter_processor() -> tf.JanusProcessor:
    return tf.JanusProcessor.from_pretrained(included_folder("painter-lowres"))


def scene_files(folder: Path, count: int) -> list[str]:
    """Held-out scenes of shapes as files 0.png, 1.png, ... of a folder; their paths."""
    paths = [folder / f"{i}.png" for i in range(count)]
    for image, path in zip(included.scenes("shapes").images(count), paths):
        image.save(path)
    return list(map(str, paths))


def included_folder(name: str) -> Path:
    """The folder of an included model; the test is skipped where its weights are not there."""
    if not included.present(name):
        pytest.skip(f"the included model {name} is not in this installation")
    return included.folder(name)


def prompts(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged prompts that end with the begin-of-image token, padded on the left: ids and attention (rows, 7)."""
    words = [[7, 8], [9, 10, 11, 12], [13], [14, 15, 16, 17, 18], [19, 20, 21]]
    ids = torch.full((rows, 7), PAD)
    for b in range(rows):
        line = [BOS, *words[b % len(words)], BOI]
        ids[b, 7 - len(line) :] = torch.tensor(line)
    return ids, ids != PAD


TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def word_tokenizer(names: list[str], **specials: str) -> tf.PreTrainedTokenizerFast:
    """One token per word, ids in the order of `names`; `specials` by transformers' names (pad_token, eoi_token)."""
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    known = {"bos_token", "eos_token", "pad_token", "unk_token"}
    extra = {key: name for key, name in specials.items() if key not in known}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", padding_side="left", extra_special_tokens=extra,
        **{key: name for key, name in specials.items() if key in known},
    )  # fmt: skip


# --- Emu3: ids of words, then special ids, then 24 codes --------------------------------------------------------------

EMU3 = [
    "<pad>", "<s>", "</s>", "<unk>", "<image>", "<boi>", "<eoi>", "<wrap>", "<eof>", "<|extra_200|>", "4*3", "2*5",
    "a", "red", "blue", "cube", "sphere", "on", "grass", "blurry.", "lowres,",
]  # fmt: skip
EMU3_SPECIAL = {
    "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>", "boi_token": "<boi>",
    "eoi_token": "<eoi>", "image_wrapper_token": "<wrap>", "eof_token": "<eof>",
}  # fmt: skip


@functools.cache
@torch.inference_mode(False)
def emu3(seed: int = 0):
    torch.manual_seed(seed)
    vocabulary = {name: i for i, name in enumerate(EMU3)}
    vocabulary |= {f"<|visual token {i:06d}|>": len(EMU3) + i for i in range(CODES)}
    text = Emu3TextConfig(vocab_size=len(vocabulary), pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, **TEXT)
    vq = Emu3VQVAEConfig(
        codebook_size=CODES, embed_dim=4, latent_channels=4, base_channels=32, channel_multiplier=[1, 1],
        num_res_blocks=1, attn_resolutions=[], hidden_size=32, temporal_downsample_factor=1,
    )  # fmt: skip
    config = tf.Emu3Config(text_config=text, vq_config=vq, vocabulary_map=vocabulary)
    model = enliven(tf.Emu3ForConditionalGeneration(config), seed)
    model.generation_config.guidance_scale = 3.0
    return model


@functools.cache
def emu3_processor() -> tf.Emu3Processor:
    names = EMU3 + [f"<|visual token {i:06d}|>" for i in range(CODES)]
    return tf.Emu3Processor(tf.Emu3ImageProcessor(), word_tokenizer(names, **EMU3_SPECIAL))


# --- GLM-Image: 24 codes, start, end, then words ----------------------------------------------------------------------

GLM_START, GLM_END = CODES, CODES + 1
GLM_HEAD = CODES + 4  # the head knows two ids more than codes, start and end
GLM = [f"<{i}>" for i in range(CODES)] + ["<start>", "<end>", "<x>", "<y>"] + [
    "<pad>", "<unk>", "<image>", "<grid>", "</grid>", "2", "3", "4", "19", "13", "a", "red", "blue", "cube", "on",
    "grass",
]  # fmt: skip


@functools.cache
@torch.inference_mode(False)
def glm_image(seed: int = 0):
    torch.manual_seed(seed)
    pad = GLM.index("<pad>")
    text = {
        "vocab_size": len(GLM), "vision_vocab_size": GLM_HEAD, "pad_token_id": pad, "eos_token_id": GLM_END,
        # all axes turn fast enough to count
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [1, 1, 2]},
        **TEXT, "max_position_embeddings": 512,
    }  # fmt: skip
    config = tf.GlmImageConfig(
        text_config=text,
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 8, "patch_size": 2,
                       "intermediate_size": 16},
        vq_config={"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 16},
        image_token_id=GLM.index("<image>"), image_start_token_id=GLM_START, image_end_token_id=GLM_END,
    )  # fmt: skip
    model = enliven(tf.GlmImageForConditionalGeneration(config), seed)
    model.generation_config.pad_token_id = pad
    return model


@functools.cache
def glm_processor() -> tf.GlmImageProcessor:
    tokenizer = word_tokenizer(
        GLM, pad_token="<pad>", bos_token="<start>", image_token="<image>", grid_bos_token="<grid>",
        grid_eos_token="</grid>",
    )  # fmt: skip
    template = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    processor = tf.GlmImageProcessor(tf.GlmImageImageProcessor(), tokenizer, chat_template=template)
    processor.target_h, processor.target_w = 64, 96
    return processor


@functools.cache
@torch.inference_mode(False)
def glm_diffusion() -> diffusers.GlmImagePipeline:
    """diffusers' own pipeline around `glm_image`, all parts tiny."""
    torch.manual_seed(0)
    transformer = diffusers.GlmImageTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, text_embed_dim=16,
        time_embed_dim=16, condition_dim=8, prior_vq_quantizer_codebook_size=CODES,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=[4] * 4, down_block_types=["DownEncoderBlock2D"] * 4, norm_num_groups=2, latent_channels=4,
        up_block_types=["UpDecoderBlock2D"] * 4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    text = tf.T5Config(vocab_size=400, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    pipe = diffusers.GlmImagePipeline(
        tf.ByT5Tokenizer(), glm_processor(), tf.T5EncoderModel(text).eval(), glm_image(), vae.eval(),
        transformer.eval(), diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


# --- Chameleon: special ids and words, then 24 codes in a shuffled order ----------------------------------------------

CHAMELEON = [
    "<s>", "<pad>", "</s>", "<unk>", "<racm3:break>", "<eoss>", "<reserved08706>", "<reserved08799>", "<image>",
    *(f"<reserved{8800 + n:05d}>" for n in range(1, 5)),
    "a", "red", "blue", "cube", "on", "grass", "Generate",
]  # fmt: skip


def code_name(code: int) -> str:
    """Chameleon's name of a code: its digits as letters."""
    return "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z"


@functools.cache
@torch.inference_mode(False)
def chameleon(seed: int = 0):
    """Stock Chameleon with 24 codes of 16 x 16 pixels."""
    torch.manual_seed(seed)
    vocabulary = {name: i for i, name in enumerate(CHAMELEON)}
    vocabulary |= {code_name((7 * i) % CODES): len(CHAMELEON) + i for i in range(CODES)}
    config = tf.ChameleonConfig(
        vocab_size=len(vocabulary) + 3, vocabulary_map=vocabulary, pad_token_id=1,
        vq_config={"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 8, "resolution": 64,
                   "base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 1], "num_res_blocks": 1},
        **TEXT,
    )  # fmt: skip
    return enliven(tf.ChameleonForConditionalGeneration(config), seed)


class ChameleonTexts:
    """As much of a `ChameleonProcessor` as prompts need."""

    def __init__(self):
        self.tokenizer = word_tokenizer(CHAMELEON, bos_token="<s>", pad_token="<pad>", eos_token="</s>")


class Words:
    """As much of a `JanusProcessor` as prompts need: letters are ids."""

    def __call__(self, text, **_):
        lines = [[BOS, *(7 + ord(c) % 20 for c in t if c != " "), BOI] for t in text]
        longest = max(map(len, lines))
        ids = torch.tensor([[PAD] * (longest - len(line)) + line for line in lines])
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}
