"""`visspec bench prefix`: several questions about each image, the image read once against once a question.

Both arms are the same stream of requests, with and without kept prompts (`prefix_cache`). The included model has
few slots an image; a small model with random weights stands for those of real models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from visspec.api.accelerate import Accelerated, accelerate
from visspec.api.captions import prepare
from visspec.cli.arguments import CaptioningOptions, Positive, load
from visspec.cli.bench import BenchOptions, Cell, measured_on, table
from visspec.eval.bench.paired import ratio, time_arms
from visspec.io import included
from visspec.io.options import option
from visspec.models.decoder.prefix import ROOM

IMAGE, SIDE, PATCH = 31999, 128, 4  # of the model with random weights: the placeholder's id, pixels
VIEW: dict[str, Cell] = {
    "slots": "{slots}",
    "questions": "{questions}",
    "images / s over fresh": "{over_fresh:.2f}",
    "over passes": "{over_fresh_low:.2f}..{over_fresh_high:.2f}",
    "same": "{identical}/{compared}",
    "peak, MB": "{peak_mb:.0f}",
}


@dataclass(kw_only=True)
class Options(BenchOptions, CaptioningOptions):
    max_new_tokens: Positive = option(default=12)
    images: Positive = option("of the included model's world", 8)
    questions: Positive = option("about each image", 5)
    slots: Positive = option("of the stream", 8)
    passes: Positive = option("over all requests, of both arms", 5)
    skip_random: bool = option("do not measure the model with random weights", False)


def run(arguments: Options) -> None:
    arguments.begin()
    model, processor, drafter = load(arguments)
    pixels = included.scenes(None, processor).images(arguments.images)
    asked = included.scenes(None, processor).questions(arguments.images)
    requests = [
        prepare(processor, [image], texts[number % len(texts)], model)
        for image, texts in zip(pixels, asked)
        for number in range(arguments.questions)
    ]
    rows = [measure(accelerate(model, drafter), requests, arguments)]
    if not arguments.skip_random:
        rows.append(measure(accelerate(random_model(), None), random_requests(2, arguments.questions), arguments))
    record = measured_on(model) | {"bench": "prefix", "guarantee": "exact", "drafter": drafter, "rows": rows}
    arguments.end(record, table("Several questions an image", rows, VIEW))


def measure(fast: Accelerated, requests: Sequence[dict[str, Any]], arguments: Options) -> dict[str, Any]:
    """One row: both arms over all requests, in turns."""
    options = {"slots": arguments.slots, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}

    def answers(room: int) -> dict[int, list[int]]:
        return {answer.id: answer.tokens for answer in fast.stream(requests, prefix_cache=room, **options)}

    arms = {"fresh": partial(answers, 0), "kept": partial(answers, ROOM)}
    fresh, kept = time_arms(arms, arguments.passes, warmup=1).values()
    ratios = [slow / quick for slow, quick in zip(fresh.seconds, kept.seconds)]
    return {
        "slots": int((requests[0]["input_ids"] == fast.model.config.image_token_index).sum()),
        "questions": arguments.questions,
        "n_prompts": len(requests),
        "over_fresh": ratio(fresh.seconds, kept.seconds),
        "cpu_over_fresh": ratio(fresh.cpu, kept.cpu),
        "over_fresh_low": min(ratios),
        "over_fresh_high": max(ratios),
        "drafter": fast.name,
        "identical": sum(kept.tokens[key] == tokens for key, tokens in fresh.tokens.items()),
        "compared": len(fresh.tokens),
        "peak_mb": kept.peak,
    }


def random_model() -> LlavaForConditionalGeneration:
    """1,024 slots an image; a decoder of 7 million parameters and a tower of one, embeddings aside."""
    vision = CLIPVisionConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
    )
    text = LlamaConfig(
        vocab_size=IMAGE + 1, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, eos_token_id=None,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def random_requests(images: int, questions: int) -> list[dict[str, torch.Tensor]]:
    """Twelve ids behind each image, others for each question."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(images, 1, 3, SIDE, SIDE, generator=generator)
    asked = torch.randint(5, IMAGE, (questions, 1, 12), generator=generator)
    slots = torch.full((1, (SIDE // PATCH) ** 2), IMAGE)
    found = []
    for picture, question in product(pixels, asked):
        ids = torch.cat([torch.tensor([[1]]), slots, question], dim=1)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": picture})
    return found
