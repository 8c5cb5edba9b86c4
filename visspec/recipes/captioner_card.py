"""The last stage of the captioner recipe: a complete folder, measured after it was written and read back."""

import hashlib
import json
import platform
import subprocess
from pathlib import Path

import numpy as np
import PIL
import torch
import transformers
from transformers import AutoProcessor, LlavaForConditionalGeneration

from visspec.recipes.captioner_build import TEXT, build_model, build_processor, save
from visspec.recipes.captioner_score import score_answers, score_captions

MEASURED_FROM = 1000  # the first held-out scenes were watched during training; these were not

CARD = """---
license: apache-2.0
pipeline_tag: image-text-to-text
library_name: transformers
---

# visspec {name}

A `LlavaForConditionalGeneration` of {parameters:.1f} million parameters, trained from zero, that describes pictures of
visspec's *shape world*: three to six coloured shapes in a 3x3 layout on a grey ground, 96 x 96 pixels.
{role}

```python
from transformers import AutoProcessor, LlavaForConditionalGeneration
from visspec.eval.world.render import to_image
from visspec.eval.world.scene import scene_from_seed

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
stored, computed in float32, captions parsed back into facts: count, ground, empty middle, and for every shape its
place, size, colour and class.

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

Recipe: `python -m visspec.recipes.captioner --out FOLDER{flag}`;
about {minutes} minutes in all where these weights were made, on two CPU cores shared with other work
({vision_minutes} for the vision tower, {caption_minutes} for the text model).
Data, seeds and steps: `visspec/recipes/captioner.py`; versions and digests: `provenance.json`.

## Limits

It knows nothing but the shape world. On any other picture it will describe shapes that are not there. Captions are what
it was made for: short questions were a small part of its training, and it answers many of them wrongly.
"""
ROLES = {
    False: "It is the target of visspec's demonstrations and tests: deep for its width, as real targets are.",
    True: "It is the assistant (draft model) of `captioner`: the same words, the same eyes, two text layers. "
    "It is what an ideal\nassistant looks like: nearly always of the same opinion, at a fraction of the cost.",
}


def revision() -> str:
    """Git revision of this source tree, or `unknown` outside one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def identity(weights: Path) -> dict:
    """Name, size and digest of a weight file."""
    return {
        "file": weights.name,
        "bytes": weights.stat().st_size,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }


def _provenance(vision: dict, text: dict, weights: Path, measured: dict) -> dict:
    """What made these weights, in plain JSON values."""
    return {
        "recipe": "visspec.recipes.captioner",
        "git_revision": revision(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "pillow": PIL.__version__,
        },
        "device": f"cpu, {platform.machine()}, 2 cores",
        "seeds": {"vision": 0, "caption": 1},
        "vision": {"steps": vision["step"], "seconds": round(vision["seconds"]), "accuracy": vision["accuracy"]},
        "caption": {"steps": text["step"], "seconds": round(text["seconds"])},
        "compute_dtype": "bfloat16 autocast over float32 weights",
        "stored_dtype": "float16",
        "weights": identity(weights),
        "measured": measured,
    }


def finish(out: Path, small: bool, scenes: int) -> Path:
    """Write `out`/captioner(-small) from the last checkpoints, read it back, measure it and describe it; its path."""
    name = "captioner-small" if small else "captioner"
    folder = out / name
    vision = torch.load(out / "vision.pt", weights_only=True)
    text = torch.load(out / ("caption-small.pt" if small else "caption.pt"), weights_only=True)
    model = build_model(vision["tower"], small)
    model.load_state_dict(text["model"])
    save(model, build_processor(), folder, torch.float16)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    torch.manual_seed(0)
    greedy = score_captions(model, processor, scenes, MEASURED_FROM)
    sampled = score_captions(model, processor, scenes, MEASURED_FROM, sample=True)
    answers = score_answers(model, processor, scenes, MEASURED_FROM)
    measured = {"greedy": greedy, "temperature_1": sampled, "questions": answers}
    record = _provenance(vision, text, folder / "model.safetensors", measured)
    (folder / "provenance.json").write_text(json.dumps(record, indent=2) + "\n")
    tower = model.config.vision_config
    minutes = [round(part["seconds"] / 60) for part in (vision, text)]
    card = CARD.format(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        role=ROLES[small],
        scenes=scenes,
        first=MEASURED_FROM,
        g=greedy,
        s=sampled,
        a=answers,
        vision=f"{tower.num_hidden_layers} layers of width {tower.hidden_size}, patches of {tower.patch_size} pixels",
        text="{num_hidden_layers} layers of width {hidden_size}, {num_attention_heads} heads".format(**TEXT[small]),
        vocabulary=len(processor.tokenizer),
        flag=" --small --stage caption, then --stage finish" if small else "",
        minutes=sum(minutes),
        vision_minutes=minutes[0],
        caption_minutes=minutes[1],
    )
    (folder / "README.md").write_text(card)
    print(json.dumps({"stage": "finish", "folder": str(folder), **measured}), flush=True)
    return folder
