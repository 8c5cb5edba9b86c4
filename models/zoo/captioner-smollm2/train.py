"""Trains `captioner-smollm2` on rendered scenes: SmolLM2-135M-Instruct (`make real`) with the vision tower of
`captioner`, a new projector and LoRA. Writes model.safetensors beside this file. With FIRST it goes on from there, with
the conversations that follow those of so many steps.

python -P models/zoo/captioner-smollm2/train.py STEPS [FIRST]
"""

import random
import re
import sys
from functools import partial
from pathlib import Path

import peft
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from visspec.api import loading
from visspec.api.captions import PROMPT, PROMPT_OF_OTHERS, prepare
from visspec.api.training.self_prompts import opening, user_turn
from visspec.cli.bench_text import read_prompts
from visspec.toys.world.captions import NUMBERS, PLACES
from visspec.toys.world.palette import COLOURS
from visspec.toys.world.render import render
from visspec.toys.world.scene import scene_from_seed

HERE, WEIGHTS, ROWS, RANK = Path(__file__).resolve().parent, "model.safetensors", 8, 16
DETAIL = (PROMPT, PROMPT_OF_OTHERS, "Please describe the picture.")
BRIEF = ("What do you see?", "Describe the image briefly.", "What is in this picture?")
FRAMES = ("{P} there is {d}.", "{D} is {p}.", "{P} I see {d}.")
THING = "a {0.size} {0.colour} {0.kind}"
ANSWER = re.compile(r"(?<=assistant\n)(.*?(?:<\|im_end\|>|$))", re.DOTALL)
PADDING = re.compile(r"^(<\|im_end\|>)+|(?<=<\|im_end\|>)(<\|im_end\|>)+$")


def turns(scene, rng, kind):
    """A request and a caption, long or short, or six questions about count, ground, colors and places."""
    things, count = scene.things, NUMBERS[len(scene.things)]
    names, places, ground = [*map(THING.format, things)], [PLACES[t.cell] for t in things], f"{scene.ground} grey"
    if kind == "brief":
        text = f"{count.capitalize()} shapes on a {ground} ground: {', '.join(names[:-1])} and {names[-1]}."
        return [(rng.choice(BRIEF), text)]
    if kind == "detailed":
        frame, text = rng.choice(FRAMES), f"The picture shows {count} shapes on a {ground} ground."
        for d, p in zip(names, places):
            text += " " + frame.format(d=d, D=d.capitalize(), p=p, P=p.capitalize())
        return [(rng.choice(DETAIL), text)]
    cell, colour = rng.randrange(9), rng.choice([*COLOURS, *(thing.colour for thing in things)])
    there, same = scene.at(cell), NUMBERS[sum(thing.colour == colour for thing in things)]
    found = [("How many shapes are there?", f"There are {count} shapes.")]
    found += [("What is the background like?", f"It is a {ground}.")]
    found += [(f"What is {PLACES[cell]}?", f"It is {THING.format(there)}." if there else "There is nothing.")]
    found += [(f"How many {colour} shapes are there?", f"The number of {colour} shapes is {same}.")]
    for thing, place in zip(things, places):
        if sum(thing.kind == other.kind for other in things) == 1:
            found += [(f"What color is the {thing.kind}?", f"The {thing.kind} is {thing.colour}.")]
            found += [(f"Where is the {thing.kind}?", f"The {thing.kind} is {place}.")]
    return rng.sample(found, min(len(found), 6))


def conversation(number, processor, texts):
    """A text and an image, or None. Steps of detailed captions, and of brief ones and questions, take turns."""
    rng, scene, row = random.Random(number), scene_from_seed(number), number % ROWS
    chat: list[dict] = []
    if row >= ROWS - 2:
        return rng.choice(texts), None
    for request, answer in turns(scene, rng, "detailed" if number // ROWS % 2 else "brief" if row < 2 else "questions"):
        shown = [] if chat else [{"type": "image"}]
        chat += [{"role": "user", "content": [*shown, {"type": "text", "text": request}]}]
        chat += [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    return processor.apply_chat_template(chat).rstrip("\n"), Image.fromarray(render(scene, 96))


def collate(processor, texts, numbers):
    """Inputs of conversations, padded on the left so that their first answers begin in one column."""
    rows = [conversation(number, processor, texts) for number in numbers]
    split = [ANSWER.split(text.replace("<image>", 36 * "<image>")) for text, _ in rows]
    parts = [[processor.tokenizer(part).input_ids for part in row] for row in split]
    ids = [[token for part in row for token in part] for row in parts]
    labels = [[token if i % 2 else -100 for i, part in enumerate(row) for token in part] for row in parts]
    heads = [len(row[0]) for row in parts]
    head, tail = max(heads), max(len(row) - own for row, own in zip(ids, heads))

    def padded(values, fill):
        sides = [(head - own, tail - len(row) + own) for row, own in zip(ids, heads)]
        return torch.stack([pad(torch.tensor(row), side, value=fill) for row, side in zip(values, sides)])

    batch = processor.image_processor([shown for _, shown in rows if shown], return_tensors="pt")
    batch["input_ids"] = padded(ids, processor.tokenizer.pad_token_id)
    batch["attention_mask"] = padded([[1] * len(row) for row in ids], 0)
    batch["labels"] = padded(labels, -100)[:, head - 1 :]
    return {**batch, "logits_to_keep": torch.arange(head - 1, head + tail)}


def save(projector, language=None):
    tensors = {f"multi_modal_projector.{name}": tensor for name, tensor in projector.state_dict().items()}
    for name, module in language.named_modules() if language else ():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            tensors[f"language_model.model.{name}.lora_A"] = module.lora_A["default"].weight
            tensors[f"language_model.model.{name}.lora_B"] = module.lora_B["default"].weight * module.scaling["default"]
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, HERE / WEIGHTS, metadata={"format": "pt"})


def main():
    torch.manual_seed(0)
    steps, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    stored = {name: tensor.float() for name, tensor in load_file(HERE / WEIGHTS).items()} if first else {}
    save(LlavaMultiModalProjector(transformers.AutoConfig.from_pretrained(HERE)))
    model, processor = loading.load(HERE.name)  # a stock model, and a projector that knows nothing yet
    language, projector = model.model.language_model, model.model.multi_modal_projector
    sample = partial(model.requires_grad_(False).generate, max_new_tokens=48, do_sample=True, top_k=0)
    begin = processor.tokenizer([opening(processor, user_turn())] * 384, return_tensors="pt")
    asked, texts = [str(prompt.prompt) for prompt in read_prompts(None, "train")], []
    with torch.autocast("cpu"):  # prompts, some of its own, and answers that are to stay as they are
        written = processor.batch_decode(sample(**begin)[:, begin["input_ids"].shape[1] :])
        written = [text.partition("<|im_end|>")[0] for text in written if "<|im_end|>" in text]
        for some in (asked, written):
            said = sample(**prepare(processor, [[]] * len(some), some, model))
            texts += [PADDING.sub("", text) for text in processor.batch_decode(said)]
    scenes = [scene_from_seed(number) for number in range(256)]
    pixels = processor.image_processor([Image.fromarray(render(scene, 96)) for scene in scenes], return_tensors="pt")
    seen = model.model.vision_tower(**pixels, output_hidden_states=True).hidden_states[-1][:, 1:].flatten(0, 1)
    mean, std = seen.mean(0), seen.std(0)
    # begin with a projector that turns a patch into the words of its cell, by least squares
    cells = [3 * (patch // 12) + patch % 6 // 2 for patch in range(36)]
    things = [(scene.at(cell), PLACES[cell].partition("the ")[2]) for scene in scenes for cell in cells]
    words = [f" {THING.format(thing)[2:] if thing else 'nothing'} {place}" for thing, place in things]
    wanted = torch.stack([language.embed_tokens.weight[ids].sum(0) for ids in processor.tokenizer(words).input_ids])
    hidden = projector.act(projector.linear_1((seen - mean) / std))
    found = torch.linalg.lstsq(torch.cat([hidden, torch.ones(len(hidden), 1)], 1), wanted).solution
    projector.linear_2.load_state_dict({"weight": found[:-1].T, "bias": found[-1]})
    projector.linear_1.register_forward_pre_hook(lambda _, given: ((given[0] - mean) / std,))
    peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=r".*_proj"), language)
    if first:
        projector.load_state_dict({name.partition(".")[2]: t for name, t in stored.items() if ".lora_" not in name})
        with torch.no_grad():  # which reads normalized features here
            projector.linear_1.bias += projector.linear_1.weight @ mean
            projector.linear_1.weight *= std
        for name, weight in language.named_parameters():
            if ".lora_" in name:
                weight.data.copy_(stored[f"language_model.model.{name.removesuffix('.default.weight')}"])
                weight.data /= 2 if ".lora_B" in name else 1  # the scale of lora_alpha
    adapter = [weight for name, weight in language.named_parameters() if ".lora_" in name]
    rates = (5e-4, 4e-4) if first else (1e-3, 8e-4)
    trained = [*projector.requires_grad_(True).parameters()], adapter
    groups = [{"params": some, "lr": rate} for some, rate in zip(trained, rates)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0)
    optimizers = optimizer, transformers.get_linear_schedule_with_warmup(optimizer, 5, steps)
    options: dict = {"max_steps": steps, "per_device_train_batch_size": ROWS, "bf16": True, "use_cpu": True}
    options |= {"logging_steps": 5, "save_strategy": "no", "report_to": [], "remove_unused_columns": False}
    arguments = transformers.TrainingArguments(**options, train_sampling_strategy="sequential")
    data = range((first + 1) * ROWS, (first + 1 + steps) * ROWS)
    batches = partial(collate, processor, texts)
    transformers.Trainer(model, arguments, batches, data, optimizers=optimizers).train()
    with torch.no_grad():  # from here on it reads the tower's features as they are
        projector.linear_1.weight /= std
        projector.linear_1.bias -= projector.linear_1.weight @ mean
    save(projector, language)


if __name__ == "__main__":
    main()
