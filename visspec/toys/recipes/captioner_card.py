"""The last stage of the captioner recipe: a complete folder, measured after it was written and read back."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from visspec.io.files import write_json
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import TEXT, build_model, build_processor, save
from visspec.toys.recipes.captioner_score import score_answers, score_captions
from visspec.toys.world.worlds import World

MEASURED_FROM = 1000  # the first held-out scenes were watched during training; these were not

CARD = """
A `LlavaForConditionalGeneration` of {parameters:.1f} million parameters, trained from zero, that describes pictures of
visspec's {world}, {side} x {side} pixels.
{role}

```python
from transformers import AutoProcessor, LlavaForConditionalGeneration
from visspec.toys.world{package}.render import to_image
from visspec.toys.world{package}.scene import scene_from_seed

folder = "models/zoo/{name}"
processor, model = AutoProcessor.from_pretrained(folder), LlavaForConditionalGeneration.from_pretrained(folder)
content = [{{"type": "image", "image": to_image(scene_from_seed(2**30))}},
           {{"type": "text", "text": "describe the picture in detail ."}}]
inputs = processor.apply_chat_template([{{"role": "user", "content": content}}], add_generation_prompt=True,
                                       tokenize=True, return_dict=True, return_tensors="pt")
print(processor.batch_decode(model.generate(**inputs), skip_special_tokens=True)[0])
```

## Measured

On {scenes} held-out scenes (seeds from 2^30 + {first}; never trained on, nor watched during training), weights as
stored, computed in float32, captions parsed back into facts: {facts}.

| | greedy | temperature 1 |
|---|---|---|
| facts right / stated | {g[right]} / {g[stated]} = **{g[accuracy]:.2%}** | \
{s[right]} / {s[stated]} = {s[accuracy]:.2%} |
| facts of the scene left out | {g[missing]} | {s[missing]} |
| captions without error or omission | {g[perfect_captions]} of {g[scenes]} | {s[perfect_captions]} of {s[scenes]} |
| length in tokens, end mark included | mean {g[tokens_mean]}, {g[tokens_range][0]} to {g[tokens_range][1]} | \
mean {s[tokens_mean]}, {s[tokens_range][0]} to {s[tokens_range][1]} |
| entropy, nats a token | | {s[nats_per_token]} |

Short questions answered word for word: {a[right]} of {a[questions]}.

A greedy caption of one of these scenes: "{g[sample]}"

## Architecture

Vision: CLIP tower, {vision}. Text: Llama, {text}.
{vocabulary} words. One image is 36 tokens.

## Training

Recipe: `python -m visspec.toys.recipes.captioner --out FOLDER{flag}`;
about {minutes} minutes in all where these weights were made, on {cores} shared with other work
({vision_minutes} for the vision tower, {caption_minutes} for the text model).
Data, seeds and steps: `visspec/toys/recipes/captioner.py`; versions and digests: `provenance.json`.

## Limits

It knows nothing but {short}. On any other picture it will describe {things} that are not there. Captions are what
it was made for: short questions were a small part of its training, and it answers many of them wrongly.{notice}
"""
NAMES = {
    "shapes": {False: "captioner", True: "captioner-small"},
    "emoji": {False: "captioner-emoji", True: "captioner-emoji-small"},
}
WORDS = {
    "shapes": {
        "world": "*shape world*: three to six coloured shapes in a 3x3 layout on a grey ground",
        "facts": "count, ground, empty middle, and for every shape its\nplace, size, colour and class",
        "short": "the shape world",
        "things": "shapes",
        "package": "",
        "notice": "",
    },
    "emoji": {
        "world": "*emoji world*: one to five turned pictures of Noto Color Emoji in a 3x3 layout on\ngrounds with "
        "texture and tint",
        "facts": "count, ground and tint, for every picture its\nplace, size and name, and how the first and the last "
        "stand to each other",
        "short": "the emoji world",
        "things": "pictures",
        "package": ".emoji",
        "notice": "\n\nThe pictures it was trained on are Google's Noto Color Emoji, under the SIL Open Font License "
        "1.1; the notice is beside\nthem, in `visspec/toys/world/emoji/OFL.txt`.",
    },
}
ROLES = {
    False: "It is the target of visspec's demonstrations and tests: deep for its width, as real targets are.",
    True: "It is the assistant (draft model) of `captioner`: the same words, the same eyes, two text layers. "
    "It is what an ideal\nassistant looks like: nearly always of the same opinion, at a fraction of the cost.",
}


def finish(out: Path, world: World, small: bool, scenes: int, cores: int) -> Path:
    """Write `out`/captioner(-small) from the last checkpoints, read it back, measure it and describe it; its path."""
    folder = out / NAMES[world.name][small]
    vision = torch.load(out / "vision.pt", weights_only=True)
    text = torch.load(out / ("caption-small.pt" if small else "caption.pt"), weights_only=True)
    model = build_model(vision["tower"], world, small)
    model.load_state_dict(text["model"])
    save(model, build_processor(world), folder, torch.float16)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    torch.manual_seed(0)
    greedy = score_captions(model, processor, world, scenes, MEASURED_FROM)
    sampled = score_captions(model, processor, world, scenes, MEASURED_FROM, sample=True)
    answers = score_answers(model, processor, world, scenes, MEASURED_FROM)
    measured = {"greedy": greedy, "temperature_1": sampled, "questions": answers}
    record = cards.origin(
        model, "visspec.toys.recipes.captioner", folder, measured, seeds={"vision": 0, "caption": 1},
        vision={"steps": vision["step"], "seconds": round(vision["seconds"]), "accuracy": vision["accuracy"]},
        caption={"steps": text["step"], "seconds": round(text["seconds"])}, world=world.name, cores=cores,
    )  # fmt: skip
    write_json(folder / "provenance.json", record)
    cards.publish(folder, card(world, small, model, len(processor.tokenizer), record))
    print(json.dumps({"stage": "finish", "folder": str(folder), **measured}), flush=True)
    return folder


def card(world: World, small: bool, model: LlavaForConditionalGeneration, vocabulary: int, record: dict) -> str:
    """The model card's text, from the provenance of the weights."""
    name, measured = NAMES[world.name][small], record["measured"]
    tower: Any = model.config.vision_config
    minutes = [round(record[part]["seconds"] / 60) for part in ("vision", "caption")]
    head = cards.HEAD.format(task="image-text-to-text", name=name)
    return head + CARD.format(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        role=ROLES[small],
        side=world.side,
        cores="one CPU core" if record.get("cores") == 1 else "two CPU cores",
        **WORDS[world.name],
        scenes=measured["greedy"]["scenes"],
        first=MEASURED_FROM,
        g=measured["greedy"],
        s=measured["temperature_1"],
        a=measured["questions"],
        vision=f"{tower.num_hidden_layers} layers of width {tower.hidden_size}, patches of {tower.patch_size} pixels",
        text=cards.layers(TEXT[small]),
        vocabulary=vocabulary,
        flag=(" --world emoji" if world.name == "emoji" else "")
        + (" --small --stage caption, then --stage finish" if small else ""),
        minutes=sum(minutes),
        vision_minutes=minutes[0],
        caption_minutes=minutes[1],
    )
