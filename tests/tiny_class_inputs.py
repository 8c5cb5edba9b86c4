"""Prompts for the classes of `tiny_classes`: of text, and of a picture in text where a way to hand it over is found.

`cases` gives what the table runs: a row of one prompt ("1") and a left-padded batch of three ("3").
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests import tiny
from tests.tiny import BOS, PAD, noise
from tests.tiny_classes import tiny_model
from tests.tiny_sizes import PATCH, SIDE, SPECIAL

NEW = 30  # tokens of an answer
TEXT = {"1": [20], "3": [40, 20, 6]}  # lengths: prompts and answers end before and behind the windows and limits
PICTURED = {"1": [8], "3": [24, 12, 5]}  # tokens of text, a part of them before the picture
IN_STREAM = (0, 2, 1, 2)  # rows of the batch of three, each a prompt of its own
STREAMED = ("3 i 4 i 9", "12 i 4", "6 i 5")  # as `tiny.SHAPES`
LIVELY, SEEDS = 6, 5
COUNTS = (4, 16, 1, 0)  # tokens of a picture to try where the model does not tell
FAMILIES = {type_name: name for name, type_name in {
    "llava": "LlavaForConditionalGeneration", "llava_next": "LlavaNextForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration", "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration", "idefics3": "Idefics3ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration", "paligemma": "PaliGemmaForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
}.items()}  # fmt: skip

Batches = dict[str, dict[str, Any]]


def text_ids(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Ids of prompts: a motif that comes again, so that n-grams find something."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        motif = torch.randint(5, SPECIAL[0], (7,), generator=generator).tolist()
        rows.append([BOS, *(motif * length)][:length])
    return rows


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """The rows padded on the left, and their mask."""
    longest = max(len(row) for row in rows)
    return {
        "input_ids": torch.tensor([[PAD] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }


def text(model: nn.Module) -> Batches:
    """Prompts of text; where the answer is a picture, with the grids it shall have, and the id that begins it; where it
    is speech as well, without that.
    """
    batches = {batch: padded(text_ids(lengths)) for batch, lengths in TEXT.items()}
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


def lively(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Whether stock generate says more than a few different tokens in every row, or nothing can be said about it."""
    try:
        answers = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        return all(len(set(row)) >= LIVELY for row in answers[:, inputs["input_ids"].shape[1] :].tolist())
    except Exception:
        return True


def cases(name: str) -> list[tuple[str, nn.Module, Batches]]:
    """(inputs, model, batches) of a class; of a few random models the first that is lively. Raises what its
    construction raises.
    """
    for seed in range(SEEDS):
        model = tiny_model(name, seed)
        pictures = None if name in FAMILIES else pictured(model)
        if lively(model, text(model)["3"]) and (pictures is None or lively(model, pictures["3"])):
            break
    found = [("text", model, with_stream(text(model)))]
    if name in FAMILIES:  # with prompts of several pictures, and none in some rows
        family, ragged = FAMILIES[name], tiny.SHAPES["ragged"]
        batches = {"1": tiny.prompt(family, tiny.SHAPES["one"]), "3": tiny.prompt(family, ragged)}
        prompts = [tiny.prompt(family, [row], seed) for seed, row in enumerate(STREAMED)]
        batches["stream"] = [prompts[b] for b in IN_STREAM]
        return [*found, ("pictures", tiny.model_of(family), batches)]
    return [*found, ("pictures", model, with_stream(pictures))] if pictures else found


def with_stream(batches: Batches) -> Batches:
    """With the rows of the batch of three as prompts of their own."""
    return batches | {"stream": [single_row(batches["3"], b) for b in IN_STREAM]}


def single_row(inputs: dict[str, Any], b: int) -> dict[str, Any]:
    """Row b of a batch without its padding. What is no number of each id is an equal part of the whole."""
    mask = inputs["attention_mask"]
    alone = {k: v.chunk(len(mask))[b] if isinstance(v, Tensor) else v for k, v in inputs.items()}
    if "image_token_pooling" in alone:  # patches of the row's own picture
        alone["image_token_pooling"] = alone["image_token_pooling"] - alone["image_token_pooling"].min()
    return {
        k: v[:, mask[b].bool()] if isinstance(v, Tensor) and inputs[k].shape[:2] == mask.shape else v
        for k, v in alone.items()
    }


# --- pictures -------------------------------------------------------------------------------------------------------


def pictured(model: nn.Module) -> Batches | None:
    """Prompts with one picture a row, in the first form that the model takes and that changes what it says."""
    accepted = set(inspect.signature(model.forward).parameters)
    if "pixel_values" not in accepted:
        return None
    for form in forms(model, accepted):
        for count in counts(model, form(1)):
            batch = placed(model, form, count, PICTURED["1"])
            if works(model, batch, form):
                return {b: placed(model, form, count, lengths) for b, lengths in PICTURED.items()}
    return None


def forms(model: nn.Module, accepted: set[str]) -> Iterator[Any]:
    """Ways to hand over n pictures, as functions of n: patches in one list, tiles, or plain pictures."""
    vision = getattr(model.config, "vision_config", None)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    patch = _first(getattr(vision, "patch_size", None)) or PATCH
    sides = [s for s in (_first(getattr(vision, "image_size", None)), SIDE, 2 * SIDE, 4 * SIDE) if s]
    if "image_grid_thw" in accepted:
        for shape in ((channels * 2 * patch * patch,), (channels * patch * patch,), (channels, patch, patch)):
            yield lambda n, seed=0, shape=shape: {
                "pixel_values": noise(n * 16, *shape, seed=seed),
                "image_grid_thw": torch.tensor([[1, 4, 4]] * n),
                **({"image_merge_sizes": torch.full((n,), 2)} if "image_merge_sizes" in accepted else {}),
            }
    if "image_token_pooling" in accepted:
        yield lambda n, seed=0: {
            "pixel_values": noise(n, 16, channels * patch * patch, seed=seed),
            "image_token_pooling": torch.arange(16 * n).view(4 * n, 4),  # counted through all pictures of a batch
            "image_grids": torch.tensor([[2, 2, 0, 0]] * n),
            "image_num_crops": torch.ones(n).long(),
        }
    if "spatial_shapes" in accepted:
        yield lambda n, seed=0: {
            "pixel_values": noise(n, 16, channels * patch * patch, seed=seed),
            "spatial_shapes": torch.tensor([[4, 4]] * n),
            "pixel_attention_mask": torch.ones(n, 16).long(),
        }
    if "image_position_ids" in accepted:
        grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), dim=-1).reshape(1, 16, 2)
        for side in (patch, patch * 2):
            yield lambda n, seed=0, side=side: {
                "pixel_values": noise(n, 16, channels * side * side, seed=seed),
                "image_position_ids": grid.repeat(n, 1, 1),
            }
    if "image_patches" in accepted:
        yield lambda n, seed=0: {"pixel_values": noise(n, 16, channels * patch * patch, seed=seed)}
    for side in dict.fromkeys(sides):
        yield from _plain(accepted, channels, side)


def _plain(accepted: set[str], channels: int, side: int) -> Iterator[Any]:
    """Whole pictures: one a row of the batch, sized, in a list of one, or as tiles."""
    sized = {"image_sizes"} & accepted
    masks = [(side, side), ()] if "pixel_attention_mask" in accepted else [()]  # of pixels, or of pictures
    for shape, mask in itertools.product(((), (1,), (3,), (2,)), masks):

        def form(n: int, seed: int = 0, shape: Any = shape, mask: Any = mask) -> dict[str, Tensor]:
            size = [2 * side, side] if shape == (3,) else [side, side]
            made = {"pixel_values": noise(n, *shape, channels, side, side, seed=seed)}
            made |= {"image_sizes": torch.tensor([size] * n)} if sized else {}
            if shape == (1,) and "pixel_attention_mask" in accepted:
                made["pixel_attention_mask"] = torch.ones(n, 1, *mask).bool()
            if "high_res_pixel_values" in accepted:
                made["high_res_pixel_values"] = noise(n, channels, side, side, seed=seed + 50)
            if "qformer_input_ids" in accepted:
                made |= {"qformer_input_ids": torch.full((n, 3), 7), "qformer_attention_mask": torch.ones(n, 3).long()}
            return made

        yield form


def _first(value: Any) -> int | None:
    return value[0] if isinstance(value, (list, tuple)) else value


@torch.no_grad()
def counts(model: nn.Module, one: dict[str, Tensor]) -> list[int]:
    """How many tokens a picture may take in the prompt, the likeliest first."""
    found = []
    try:
        accepted = set(inspect.signature(model.get_image_features).parameters)
        features = model.get_image_features(**{k: v for k, v in one.items() if k in accepted})
        features = getattr(features, "pooler_output", features)
        while not isinstance(features, Tensor):
            features = features[0]
        found.append(features.numel() // features.shape[-1])
    except Exception:
        pass  # another way to count is tried
    try:
        model(**padded([[BOS, *[image_id(model)] * 3, 7]]), **one)
    except Exception as error:
        if told := re.findall(r"features:? *(\d+)", str(error)):
            found.append(int(told[-1]))
    return list(dict.fromkeys([c for c in found if c < 200] + list(COUNTS)))


def image_id(model: nn.Module) -> int:
    for name in ("image_token_id", "image_token_index", "image_patch_id", "media_placeholder_token_id"):
        if isinstance(value := getattr(model.config, name, None), int):
            return value
    return SPECIAL[0]


def placed(model: nn.Module, form: Any, count: int, lengths: list[int]) -> dict[str, Tensor]:
    """Rows of text of these lengths with a picture behind the second token of each."""
    config = model.config
    starts = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
    ends = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
    start, end = ([i for name in names if isinstance(i := getattr(config, name, None), int)][:1]
                  for names in (starts, ends))  # fmt: skip
    picture = [*start, *[image_id(model)] * count, *end]
    rows = [row[:2] + picture + row[2:] for row in text_ids(lengths)]
    inputs = padded(rows)
    accepted = set(inspect.signature(model.forward).parameters)
    kinds = (inputs["input_ids"] == image_id(model)).long()
    if count == 0:
        kinds = torch.zeros_like(kinds)
    inputs |= {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
    if "image_embeds_position_mask" in accepted:
        inputs["image_embeds_position_mask"] = kinds
    return {**inputs, **form(len(lengths))}


@torch.no_grad()
def works(model: nn.Module, inputs: dict[str, Tensor], form: Any) -> bool:
    """Whether stock generate takes these inputs, and another picture gives other logits."""
    rows = inputs["input_ids"].shape[0]
    try:
        outputs = [
            model.generate(
                **{**inputs, **form(rows, seed)}, max_new_tokens=3, do_sample=False, return_dict_in_generate=True,
                output_logits=True,
            )
            for seed in (0, 1)
        ]  # fmt: skip
    except Exception:
        return False
    return bool((outputs[0].logits[0] - outputs[1].logits[0]).abs().max() > 1e-4)
