"""How well a captioner describes held-out scenes: its words are parsed into facts and compared with the scene."""

import time
from typing import Any

import numpy as np
import torch
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from visspec.toys.world.captions import REQUESTS
from visspec.toys.world.worlds import World

MAX_NEW_TOKENS = 160


def prompt(processor: LlavaProcessor, request: str = REQUESTS[0]) -> str:
    """The chat prompt of one image and one request, up to and including "assistant :"."""
    content = [{"type": "image"}, {"type": "text", "text": request}]
    messages = [{"role": "user", "content": content}]
    # transformers declares contents as texts alone, and takes lists of parts
    return processor.apply_chat_template(messages, add_generation_prompt=True)  # type: ignore[arg-type]


@torch.no_grad()
def _generate(model, processor, images: list, requests: list[str], sample: bool) -> tuple[torch.Tensor, list]:
    """New tokens (B, L), padded, and the entropies in nats of their distributions, one list a row."""
    texts = [prompt(processor, request) for request in requests]
    inputs = processor(text=texts, images=images, return_tensors="pt", padding=True)
    law = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    wide = {"max_new_tokens": MAX_NEW_TOKENS, "return_dict_in_generate": True, "output_logits": sample}
    out = model.generate(**inputs, **law, **wide)
    new = out.sequences[:, inputs["input_ids"].shape[1] :]
    if not sample:
        return new, [[] for _ in images]
    log_p = torch.stack(out.logits, 1).float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    alive = new != model.generation_config.pad_token_id
    return new, [entropy[row][alive[row]].tolist() for row in range(len(images))]


def score_captions(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    world: World,
    n: int = 64,
    first: int = 0,
    sample: bool = False,
    batch: int = 64,
) -> dict:
    """Caption held-out scenes first..first+n, greedily or at temperature 1, and count their facts.

    Returns facts right, stated and missing, accuracy = right / stated, captions without any error or omission,
    lengths in tokens (end mark included), seconds, one caption, and for sampling the mean entropy in nats a token.
    """
    begun, right, stated, absent, perfect = time.time(), 0, 0, 0, 0
    lengths: list[int] = []
    nats: list[float] = []
    text = ""
    for start in range(first, first + n, batch):
        scenes = world.scenes(min(batch, first + n - start), start)
        requests = [REQUESTS[i % len(REQUESTS)] for i in range(len(scenes))]
        new, entropies = _generate(model, processor, [world.to_image(s) for s in scenes], requests, sample)
        for row, scene, entropy in zip(new, scenes, entropies):
            text = processor.tokenizer.decode(row, skip_special_tokens=True)
            good, said = world.captions.score(text, scene)
            lost = world.captions.missing(text, scene)
            right, stated, absent = right + good, stated + said, absent + lost
            perfect += good == said and not lost
            lengths.append(int((row != model.generation_config.pad_token_id).sum()))
            nats += entropy
    record: dict[str, Any] = {"scenes": n, "right": right, "stated": stated, "missing": absent}
    record |= {"accuracy": round(right / max(1, stated), 4), "perfect_captions": perfect}
    record |= {"tokens_mean": round(sum(lengths) / n, 1), "tokens_range": [min(lengths), max(lengths)]}
    if sample:
        record["nats_per_token"] = round(sum(nats) / len(nats), 4)
    return record | {"seconds": round(time.time() - begun, 1), "sample": text}


def score_answers(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, world: World, n: int = 256, first: int = 0
) -> dict:
    """One random question about each of `n` held-out scenes; an answer counts when every word is right."""
    rng = np.random.default_rng(first)
    right = 0
    for start in range(first, first + n, 64):
        scenes = world.scenes(min(64, first + n - start), start)
        asked = [(turns := world.captions.questions(scene))[int(rng.integers(len(turns)))] for scene in scenes]
        images = [world.to_image(scene) for scene in scenes]
        new, _ = _generate(model, processor, images, [question for question, _ in asked], False)
        for row, (_, answer) in zip(new, asked):
            said = processor.tokenizer.convert_ids_to_tokens(row, skip_special_tokens=True)
            right += " ".join(said) == answer
    return {"questions": n, "right": right, "accuracy": round(right / n, 4)}
