"""The captioner's parts: word-level tokenizer, processor, stock LLaVA model, and how they are written to a folder."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPVisionModel,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from visspec.toys.recipes.captioner_vision import MEAN, SIDE, STD, vision_config
from visspec.toys.world.worlds import World

PAD, BOS, EOS, UNK, IMAGE = "<pad>", "<s>", "</s>", "<unk>", "<image>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : "
    "{% if message['content'] is string %}{{ message['content'] }} {% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} "
    "{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}</s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
# Text models. The full one is deep on purpose: a target's depth against its drafter's is what acceleration lives on.
TEXT: dict[bool, dict[str, Any]] = {
    False: {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 6},
    True: {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def build_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """One token a word or mark of the world, lower-cased; decoding joins by spaces, marks stick to the word before."""
    names = [PAD, BOS, EOS, UNK, IMAGE, "user", "assistant", ":", *world.captions.vocabulary()]
    return word_tokenizer(names, 1024, image_token=IMAGE)


def word_tokenizer(names: list[str], length: int, **extra: str) -> PreTrainedTokenizerFast:
    """Word-level, lower-cased, `<s>` in front, padded on the left. names: all tokens in the order of their ids;
    length: longest prompt; extra: special tokens by name, beside PAD, BOS, EOS and UNK.
    """
    table = {name: i for i, name in enumerate(names)}
    core = Tokenizer(models.WordLevel(table, unk_token=UNK))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, table[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens=extra,
        padding_side="left",
        model_max_length=length,
    )


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The ids that configurations of models and of generation name."""
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def build_processor(world: World) -> LlavaProcessor:
    """Tokenizer, image processor and chat template as one LlavaProcessor; it expands <image> to one token a patch."""
    images = CLIPImageProcessor(
        size={"shortest_edge": world.side},
        crop_size={"height": world.side, "width": world.side},
        image_mean=list(MEAN),
        image_std=list(STD),
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=build_tokenizer(world),
        patch_size=world.side // SIDE,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


def build_model(tower: dict[str, torch.Tensor], world: World, small: bool = False) -> LlavaForConditionalGeneration:
    """A LLaVA with fresh text weights over a taught vision tower (a state dict of CLIPVisionModel)."""
    tokenizer = build_tokenizer(world)
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        **special_ids(tokenizer),
        **TEXT[small],
    )
    config = LlavaConfig(
        vision_config=vision_config(world),
        text_config=text,
        image_token_index=tokenizer.get_vocab()[IMAGE],
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=SIDE**2,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config)
    taught = CLIPVisionModel(vision_config(world))
    taught.load_state_dict(tower)
    target = model.model.vision_tower
    missing_keys, unexpected = target.load_state_dict(taught.state_dict(), strict=False)
    if missing_keys or unexpected:
        raise RuntimeError(f"the tower does not fit: missing {missing_keys}, unexpected {unexpected}")
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=160, **special_ids(tokenizer))
    return model


def save(model: PreTrainedModel, processor: ProcessorMixin | None, folder: Path, dtype: torch.dtype) -> None:
    """Write a complete, loadable folder with weights stored in `dtype`; the model in memory is left as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    before = model.dtype
    weights = {name: value.to(dtype) for name, value in model.state_dict().items()}
    model.config.dtype = dtype
    model.save_pretrained(folder, state_dict=weights)
    model.config.dtype = before
    if processor is not None:
        processor.save_pretrained(folder)
