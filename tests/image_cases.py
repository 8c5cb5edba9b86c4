"""Image families on tiny random models: prompts, and references that know nothing of ours. B rows, T positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tests import tiny_images as tiny
from visspec import registry
from visspec.api.images.pipeline import ImagePipeline
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.image_codes.family import EncodedPrompt, Family, ImageLayout, family_of
from visspec.models.image_codes.target import ImageAR
from visspec.models.llamagen.network import LlamaGen, LlamaGenConfig
from visspec.types import FREE, Request, Sampling

TEXTS = ["a red cube", "blue", "a blue cube on grass"]
NEGATIVE = "lowres, blurry."


@dataclass(frozen=True)
class Case:
    family: Family
    layout: ImageLayout
    guidance: float
    prompt: Callable[[list[int]], EncodedPrompt]  # of these rows, as one batch
    reference: Callable[[int], list[int]]  # greedy loop ids of one row


# --- references -----------------------------------------------------------------------------------------------------


def janus() -> Case:
    model = tiny.janus()
    family = family_of(model, None)
    ids, attention = tiny.prompts()

    def reference(row):
        one = ids[row : row + 1, ~attention[row].logical_not()]
        result = model.generate(
            input_ids=one, attention_mask=torch.ones_like(one), generation_mode="image", do_sample=False
        )
        return result[0].tolist()

    return Case(family, family.layout(), 3.0, lambda rows: family.from_ids(ids[rows], attention[rows], True), reference)


def emu3_rule(processor, model, height, width):
    """The `prefix_allowed_tokens_fn` of transformers' page on Emu3, in one expression a line."""
    names, row = processor.tokenizer, width + 1
    ends = {1: names.eof_token_id, 2: names.eoi_token_id, 3: names.eos_token_id}

    def allowed(batch, ids):
        offset = len(ids) - int((ids == names.image_wrapper_token_id).nonzero()[0])
        if offset % row == 0:
            return [model.vocabulary_mapping.eol_token_id]
        past = offset - row * height
        return model.vocabulary_mapping.image_tokens if past < 1 else [ends.get(past, names.pad_token_id)]

    return allowed


def emu3() -> Case:
    model, processor = tiny.emu3(), tiny.emu3_processor()
    family = family_of(model, processor, negative=NEGATIVE)
    layout = family.layout(8, 6)
    sized = {"return_for_image_generation": True, "ratio": "3:4", "image_area": 12 * 64, "return_tensors": "pt"}

    def reference(row):
        given, negative = (processor(text=[text], padding=True, **sized) for text in (TEXTS[row], NEGATIVE))
        result = model.generate(
            input_ids=given.input_ids, attention_mask=given.attention_mask, do_sample=False,
            max_new_tokens=layout.positions, guidance_scale=3.0,
            prefix_allowed_tokens_fn=emu3_rule(processor, model, *layout.grid),
            negative_prompt_ids=negative.input_ids, negative_prompt_attention_mask=negative.attention_mask,
        )  # fmt: skip
        return back(result[0, given.input_ids.shape[1] :], family)

    return Case(family, layout, 3.0, lambda rows: family.prompt([TEXTS[r] for r in rows], True, layout), reference)


def back(ids: torch.Tensor, family: Any) -> list[int]:
    """Vocabulary ids -> loop ids."""
    return [family.vocabulary.ids.tolist().index(i) for i in ids.tolist()]


def glm_image() -> Case:
    model = tiny.glm_image()
    family = family_of(model, tiny.glm_processor())
    grid, preview = (4, 3), (2, 2)
    layout = family.grids(grid, preview)

    def inputs(rows):
        size = f"<grid> {grid[0]} {grid[1]} </grid> <grid> {preview[0]} {preview[1]} </grid> <start>"
        batch = tiny.glm_processor().tokenizer([f"{TEXTS[r]} {size}" for r in rows], padding=True, return_tensors="pt")
        return {
            "input_ids": batch["input_ids"],
            "attention_mask": batch["attention_mask"],
            "image_grid_thw": torch.tensor([[1, *grid], [1, *preview]] * len(rows)),
            "images_per_sample": torch.tensor([2] * len(rows)),
        }

    def reference(row):
        given = inputs([row])
        length = given["input_ids"].shape[1]

        def allowed(batch, ids):
            return [tiny.GLM_END] if len(ids) - length == layout.positions - 1 else list(range(tiny.CODES))

        result = model.generate(
            **given, do_sample=False, max_new_tokens=layout.positions, prefix_allowed_tokens_fn=allowed
        )
        return back(result[0, length:], family)

    return Case(family, layout, 1.0, lambda rows: family.from_inputs(inputs(rows)), reference)


def plain_loop(step: Callable[[list[int]], torch.Tensor], layout: ImageLayout) -> list[int]:
    """Greedy loop ids from mixed logits of the codes after so many loop ids, each pass over everything."""
    result: list[int] = []
    for fixed in layout.fixed.tolist():
        result.append(fixed if fixed != FREE else int(step(result).argmax()))
    return result


def chameleon(style: str) -> Case:
    model = tiny.chameleon()
    family = family_of(model, tiny.ChameleonTexts(), style=style)
    layout = family.layout(64, 48 if style == "anole" else 64) if style == "lumina" else ImageLayout.plain(4, 3)
    words = [family.processor.tokenizer(t, add_special_tokens=False)["input_ids"] for t in TEXTS]
    name = model.model.vocabulary_mapping.vocab_map
    begin = ["<racm3:break>"] if style == "anole" else ["<racm3:break>", "<reserved08802>", "<reserved08802>"]
    begin = [name[n] for n in begin]
    of_loop = [name[tiny.code_name(code)] for code in range(tiny.CODES)] + [name["<reserved08799>"], name["<eoss>"]]

    def logits(ids):
        hidden = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
        return model.lm_head(hidden)[of_loop[: tiny.CODES]]

    def reference(row):
        given = [name["<s>"], *words[row], name["<reserved08706>"], *begin]
        empty = [name["<s>"], *begin] if style == "anole" else begin

        def step(found):
            drawn = [of_loop[i] for i in found]
            with_words, without = logits(given + drawn), logits(empty + drawn)
            return without + 3.0 * (with_words - without)

        return plain_loop(step, layout)

    return Case(family, layout, 3.0, lambda rows: family.from_words([words[r] for r in rows], True, layout), reference)


@cache
def llamagen_model(condition: str) -> LlamaGen:
    torch.manual_seed(0)
    more = {"prefix": 5, "caption_width": 12} if condition == "caption" else {"classes": 10}
    model = LlamaGen(LlamaGenConfig(2, 4, 32, 4, condition=condition, codes=24, kv_heads=2, intermediate=48, **more))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 1.0 if "embed" in name else 1.3 * weight.shape[-1] ** -0.5)
    model.output.weight.data.mul_(2.0)
    return model.eval().requires_grad_(False)


def llamagen(condition: str) -> Case:
    model = llamagen_model(condition)
    features = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1))
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()

    def encode(texts):
        rows = [TEXTS.index(text) for text in texts]
        return features[rows], real[rows]

    family = family_of(model, encode if condition == "caption" else None)
    layout = family.layout()

    def reference(row):
        if condition == "class":
            prefix, seen = model.prefix(torch.tensor([row]), guidance=True), torch.ones(5, dtype=torch.bool)[:1]
        else:
            count = int(real[row].sum())
            placed, seen = torch.zeros(1, 5, 12), torch.arange(5) >= 5 - count
            placed[0, 5 - count :] = features[row, :count]
            prefix = model.prefix(placed, guidance=True)
        length = prefix.shape[1]

        def step(found):
            x = torch.cat([prefix, model.embed(torch.tensor([found, found], dtype=torch.long))], dim=1)
            size = x.shape[1]
            mask = torch.ones(size, size, dtype=torch.bool).tril()
            mask[:, :length] &= seen
            mask |= torch.eye(size, dtype=torch.bool)
            hidden = model(inputs_embeds=x, attention_mask=mask[None, None]).last_hidden_state
            with_words, without = model.head(hidden[:, -1])
            return without + 3.0 * (with_words - without)

        return plain_loop(step, layout)

    def prompt(rows):
        return family.prompt([str(r) if condition == "class" else TEXTS[r] for r in rows], True)

    return Case(family, layout, 3.0, prompt, reference)


CASES: dict[str, Callable[[], Case]] = {
    "janus": janus, "emu3": emu3, "glm_image": glm_image, "anole": lambda: chameleon("anole"),
    "lumina": lambda: chameleon("lumina"), "llamagen-class": lambda: llamagen("class"),
    "llamagen-caption": lambda: llamagen("caption"),
}  # fmt: skip


@cache
def made(name: str) -> Case:
    with torch.inference_mode(False):
        return CASES[name]()


@cache
def expected(name: str, row: int) -> list[int]:
    with torch.no_grad():
        return made(name).reference(row)


def draw(case: Case, rows: list[int], drafter=None, rule="exact", temperature=0.0, seed=0):
    """Loop ids (B, T) of these rows, and the state. Row r is drawn with seed + r."""
    target, prompt = ImageAR(case.family), case.prompt(rows)
    case.family.check(prompt, case.layout, case.guidance)
    sampling = Sampling(temperature=temperature, guidance=case.guidance)
    request = Request(prompt, prompt.ids, case.layout.positions, sampling, grid=case.layout.grid)
    if bool((case.layout.fixed != FREE).any()):
        request.fixed = case.layout.fixed
    if temperature:
        request.generators = [torch.Generator().manual_seed(seed + r) for r in rows]
    guarded = SafeDrafter(drafter, target.capabilities) if drafter is not None else None
    rule = registry.rule(rule) if isinstance(rule, str) else rule
    state = decode(target, guarded, rule, request, FixedLength(8 if drafter is None else drafter.traits.levels))
    if guarded is not None:
        guarded.finish(state)
    assert state.trace.faults == 0
    return state.tokens, state


def named(name: str) -> tuple[Any, ImagePipeline]:
    """A family's pipeline at a small size of its own, with a processor that reads texts."""
    made(name)
    if name == "emu3":
        pipe = ImagePipeline(tiny.emu3(), tiny.emu3_processor(), parts={"negative": NEGATIVE})
        pipe.family.side = 8
        return pipe.family, pipe
    if name == "glm_image":
        pipe = ImagePipeline(tiny.glm_image(), tiny.glm_processor())
        return pipe.family, pipe
    pipe = ImagePipeline(llamagen_model("class"), None)
    return pipe.family, pipe
