"""A tiny random CLIP whose tokenizer knows letters; as in the real one, no special token has id 0."""

import json
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = SMALL | {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
VISION = SMALL | {"image_size": 32, "patch_size": 16}
LENGTH = 40  # ids of a text


def tokenizer(folder: Path) -> CLIPTokenizer:
    characters = "abcdefghijklmnopqrstuvwxyz-"
    words = ["!", "<|startoftext|>", "<|endoftext|>", *characters, *(c + "</w>" for c in characters)]
    (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)


def clip(folder: Path) -> tuple[CLIPModel, CLIPProcessor]:
    """Model and processor, which are saved in the folder, too."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    text = TEXT | {"max_position_embeddings": LENGTH}
    config = CLIPConfig(text_config=text, vision_config=VISION, projection_dim=12)
    pixels = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    model, processor = CLIPModel(config).eval(), CLIPProcessor(pixels, tokenizer(folder))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor
