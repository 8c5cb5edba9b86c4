"""The painter's parts: word-level tokenizer, processor, stock Janus model, and how they are written to a folder."""

import torch
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from visspec.toys.recipes.captioner_build import BOS, EOS, IMAGE, PAD, UNK, special_ids, word_tokenizer
from visspec.toys.recipes.painter_data import SIDE
from visspec.toys.world.worlds import world

BOI, EOI = "<begin_of_image>", "<end_of_image>"
PATCH = 8  # pixels a side of what one image token stands for
CODES = 1024
PROMPT = 12  # ids of the longest prompt: <s>, ten words, image start
MEAN = STD = (0.5, 0.5, 0.5)
# Text models, by `low`. Heads are 64 wide.
TEXT = {
    False: {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4},
    True: {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 3},
}
GUIDANCE = 3.0  # until a finished model has been measured


def grid(low: bool) -> int:
    """Image tokens along a side: 12, or 6 at low resolution."""
    return SIDE[low] // PATCH


def build_tokenizer(of: str = "shapes") -> PreTrainedTokenizerFast:
    """One token a word of a world's prompts, lower-cased, `<s>` in front; batches are padded on the left."""
    names = [PAD, BOS, EOS, UNK, BOI, EOI, IMAGE, *world(of).suite.vocabulary()]
    return word_tokenizer(names, 64, boi_token=BOI, eoi_token=EOI, image_token=IMAGE)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompts: list[str], length: int = PROMPT) -> torch.Tensor:
    """Ids int64 (B, length) of "<s> words <begin_of_image>", padded on the left, as the processor makes them."""
    out = tokenizer([text + BOI for text in prompts], padding="max_length", max_length=length, return_tensors="pt")
    return out["input_ids"]


def without_words(tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor) -> torch.Tensor:
    """The unconditional form that the stock class guides against: all but bos and image start become padding."""
    words = tokenizer.get_vocab()
    keep = (ids == words[BOS]) | (ids == words[BOI])
    return torch.where(keep, ids, tokenizer.pad_token_id)


def build_processor(low: bool = False, of: str = "shapes", side: int | None = None) -> JanusProcessor:
    """Tokenizer and image processor; with generation_mode="image" it ends a prompt with the image-start token. side: of
    a picture, in pixels, where it is another painter's.
    """
    side = side or SIDE[low]
    images = JanusImageProcessor(size={"height": side, "width": side}, image_mean=list(MEAN), image_std=list(STD))
    return JanusProcessor(image_processor=images, tokenizer=build_tokenizer(of), num_image_tokens=(side // PATCH) ** 2)


def vq_config(low: bool) -> JanusVQVAEConfig:
    """Three halvings, 64 channels everywhere, 1,024 codes of dimension 8.

    The stock class normalises in 32 groups. With 32 channels a group is one channel, its strength is divided out and
    the decoder cannot tell colours apart; with 64 the offset of two channels keeps the scale. No residual blocks but
    those of the middle and one a level of the decoder, so that 64 channels at full resolution stay affordable.
    """
    return JanusVQVAEConfig(
        embed_dim=8,
        num_embeddings=CODES,
        base_channels=64,
        channel_multiplier=(1, 1, 1, 1),
        latent_channels=64,
        num_res_blocks=0,
        num_patches=grid(low),
        projection_dim=TEXT[low]["hidden_size"],
        image_token_embed_dim=TEXT[low]["hidden_size"],
    )


def model_config(low: bool = False, text: dict | None = None, of: str = "shapes") -> JanusConfig:
    """Configuration of the painter; `text` overrides sizes of the text model (for tests).

    The understanding tower is never trained or used: it has one layer of width 16, because the class requires one.
    """
    tokenizer, sizes = build_tokenizer(of), TEXT[low] | (text or {})
    width = sizes["hidden_size"]
    vq = vq_config(low)
    vq.projection_dim = vq.image_token_embed_dim = width
    return JanusConfig(
        text_config=LlamaConfig(
            vocab_size=len(tokenizer), max_position_embeddings=256, **special_ids(tokenizer), **sizes
        ),
        vision_config=JanusVisionConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            mlp_ratio=1.0,
            depth=1,
            projection_dim=width,
            image_size=SIDE[low],
            patch_size=PATCH,
            num_image_tokens=grid(low) ** 2,
        ),
        vq_config=vq,
        image_token_id=tokenizer.get_vocab()[IMAGE],
    )


def generation_config(
    low: bool = False, guidance: float = GUIDANCE, temperature: float = 1.0, of: str = "shapes"
) -> GenerationConfig:
    """Sampling with classifier-free guidance; `max_length` only has to hold prompt and image."""
    return image_generation(
        16 + grid(low) ** 2, of, do_sample=True, temperature=temperature, top_k=0, top_p=1.0, guidance_scale=guidance
    )


def image_generation(length: int, of: str = "shapes", **settings: float) -> GenerationConfig:
    """Settings of a painter's generation, with its special tokens; length: of prompt and image."""
    tokenizer = build_tokenizer(of)
    boi = {"boi_token_id": tokenizer.convert_tokens_to_ids(BOI)}
    return GenerationConfig(max_length=length, **special_ids(tokenizer), generation_kwargs=boi, **settings)


def build_model(
    vq: dict[str, torch.Tensor], low: bool = False, text: dict | None = None, of: str = "shapes"
) -> JanusForConditionalGeneration:
    """A Janus with fresh text weights around a taught VQ model (a state dict); token embeddings start at its codes."""
    model = JanusForConditionalGeneration(model_config(low, text, of))
    model.model.vqmodel.load_state_dict(vq)
    model.model.generation_embeddings.weight.data.copy_(vq["quantize.embedding.weight"])
    model.generation_config = generation_config(low, of=of)
    return model
