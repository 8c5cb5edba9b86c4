"""Answers in bfloat16 under `batch_invariant=True`, counted against our plain decoding of each request alone.

    make real
    OMP_NUM_THREADS=1 python -P tests/real/invariant.py real/smollm2 --out answers.jsonl
    python -P tests/real/invariant.py real/smollm2 --costs
    python -P tests/real/invariant.py captioner --out captions.jsonl --arms "none, alone" "vispec, stream 8"
    python -P tests/real/invariant.py painter-var

Every answer is appended to a file. A run that is killed goes on there; its streams
and batches then hold other requests.
"""

import argparse
import json
import random
import statistics
from pathlib import Path
from time import perf_counter

import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

import visspec
from visspec.api.captions import PROMPT, prepare
from visspec.api.loading import load
from visspec.cli import bench_text
from visspec.toys.table import HELD_OUT

# drafter, how it runs, and marks; answers are compared with those of the first arm of the same marks.
# off: a control without the mode
ARMS = [
    "none, stream 8", "recycling, stream 8", "auto, stream 4", "none, stream 8, sampled", "recycling, batch 4",
    "auto, stream 8, sampled", "ngram, batch 4, sampled", "auto, alone", "none, alone", "layers, stream 8",
    "auto, stream 1", "context, batch 4", "none, batch 4", "auto, alone, sampled", "none, alone, sampled",
    "none, stream 8, off", "auto, stream 8, off", "none, batch 4, off",
]  # fmt: skip


def inputs_of(model, tokenizer, count):
    prompts = bench_text.read_prompts(None) + bench_text.read_prompts(None, "train")
    step = max(len(prompts) // count, 1)
    return [prepare(tokenizer, [[]], prompt.prompt, model) for prompt in prompts[::step][:count]]


def captioner(name, count):
    """An included captioner, and its inputs for held-out pictures."""
    model, processor = load(name, dtype="bfloat16")
    folder = HELD_OUT / ("emoji" if name.endswith("emoji") else "shapes")
    images = [Image.open(file).convert("RGB") for file in sorted(folder.glob("*.png"))[:count]]
    return model, [prepare(processor, [image], PROMPT, model) for image in images]


def drawn(pipe, texts, size, drafter):
    options = {"drafter": drafter, "output_type": "latent", "batch_size": size}
    return [torch.as_tensor(image) for image in pipe(texts, seed=list(range(len(texts))), **options).images]


def painted(name, count):
    """Pictures that are the same with drafts (codes), and in batches of four, as alone, with and without the mode."""
    world = HELD_OUT / ("emoji" if name.endswith("emoji") else "shapes")
    lines = (world / "prompts.jsonl").read_text().splitlines()
    for invariant in (True, False):
        pipe = visspec.ImagePipeline.from_pretrained(name, dtype="bfloat16", batch_invariant=invariant)
        pipe.set_progress_bar_config(disable=True)
        texts = list(pipe.family.labels) or [json.loads(line)["prompt"] for line in lines]
        texts = texts[:: max(len(texts) // count, 1)][:count]
        drafter = {"maps": "var", "vectors": "mar"}.get(pipe.family.draws, "jacobi")
        alone, arms = drawn(pipe, texts, 1, None), {"none, batch 4": drawn(pipe, texts, 4, None)}
        if not (invariant and pipe.family.draws == "maps"):  # the mode refuses their drafts
            arms |= {f"{drafter}, {way}": drawn(pipe, texts, n, drafter) for way, n in (("alone", 1), ("batch 4", 4))}
        for arm, result in arms.items():
            own = arms[f"{drafter}, alone"] if pipe.family.draws == "vectors" and drafter in arm else alone
            same = sum(map(torch.equal, result, own))
            print(f"{name}, mode {'on' if invariant else 'off'}, {arm}: {same} of {len(result)} equal", flush=True)


def answers(model, inputs, arm, new, todo):
    """Yields (number, tokens) of the prompts `todo`."""
    drafter, way, *marks = arm.split(", ")
    rows, sampled = int(way.partition(" ")[2] or 1), "sampled" in marks
    options = {"adaptive": drafter in ("auto", "none"), "batch_invariant": "off" not in marks}
    if drafter != "none" and rows > 1:
        options |= {"levels": 3}  # longer drafts of many rows take long on a CPU
    fast = visspec.accelerate(model, drafter, debug=True, **options)
    options = {"max_new_tokens": new, "do_sample": sampled} | ({"temperature": 1.0, "top_k": 0} if sampled else {})
    random.Random(arm).shuffle(todo)
    if way.startswith("stream"):
        entries = ({**inputs[n], "id": n} | ({"seed": n} if sampled else {}) for n in todo)
        for answer in fast.stream(entries, slots=rows, **options):
            if answer.error is not None:
                raise answer.error
            yield answer.id, answer.tokens
        return
    for part in (todo[i : i + rows] for i in range(0, len(todo), rows)):
        longest = max(inputs[n]["input_ids"].shape[1] for n in part)
        pad = [(longest - inputs[n]["input_ids"].shape[1], 0) for n in part]
        some = {
            name: torch.cat([torch.nn.functional.pad(inputs[n][name], by) for n, by in zip(part, pad)])
            for name in ("input_ids", "attention_mask")
        }
        if rows == 1:
            some |= inputs[part[0]]  # pictures, too
        yield from zip(part, fast.run(**some, **options, **({"seed": part} if sampled else {})).state.tokens)


def costs(model, inputs, new):
    """Seconds a token with the mode over those without it, the two in turn; the first pair warms up."""
    for drafter, slots in (("none", 1), ("context", 1), ("none", 8)):
        both = {on: visspec.accelerate(model, drafter, batch_invariant=on) for on in (False, True)}
        options, ratios = {"max_new_tokens": new, "do_sample": False}, []
        for turn in range(13 if slots == 1 else 6):
            some, seconds = inputs[turn * slots :][:slots], {}
            for on in (turn % 2 == 0, turn % 2 == 1):
                start = perf_counter()
                made = [answer.tokens for answer in both[on].stream(some, slots=slots, **options)]
                seconds[on] = (perf_counter() - start) / sum(map(len, made))
            ratios += [seconds[True] / seconds[False]] if turn else []
        low, middle, high = min(ratios), statistics.geometric_mean(ratios), max(ratios)
        print(
            f"{drafter}, {slots} at once: {middle:.3f} times [{low:.2f}, {high:.2f}] in {len(ratios)} pairs", flush=True
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, help="file of the answers")
    parser.add_argument("--costs", action="store_true", help="time it on an otherwise idle machine (4 minutes at most)")
    parser.add_argument("--arms", nargs="+", default=ARMS, help="a drafter and how it runs (default: %(default)s)")
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--limit", type=int, help="answers of an arm at most (default: all)")
    parser.add_argument("--new", type=int, default=128)
    asked = parser.parse_args()
    name = str(asked.model)
    if name.startswith("painter"):
        painted(name, asked.count)
        return
    if name.startswith("captioner"):
        model, inputs = captioner(name, asked.count)
    else:
        tokenizer = AutoTokenizer.from_pretrained(asked.model, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16).eval()
        inputs = inputs_of(model, tokenizer, asked.count)
    if asked.costs:
        costs(model, inputs, min(asked.new, 64))
        return
    result = {}
    for line in asked.out.read_text().splitlines() if asked.out.exists() else []:
        arm, number, tokens = json.loads(line)
        result.setdefault(arm, {})[number] = tokens
    for arm in asked.arms:
        known = result.setdefault(arm, {})
        order = sorted(range(len(inputs)), key=lambda n: n * 37 % len(inputs))  # some of each kind first
        todo = [n for n in order if n not in known][: max((asked.limit or len(inputs)) - len(known), 0)]
        for number, tokens in answers(model, inputs, arm, asked.new, todo):
            known[number] = tokens
            with asked.out.open("a") as file:
                print(json.dumps([arm, number, tokens]), file=file)
        plain = next(some for name, some in result.items() if name.split(", ")[2:] == arm.split(", ")[2:])
        both = known.keys() & plain.keys()
        same = sum(known[number] == plain[number] for number in both)
        print(f"{arm}: {same} of {len(both)} equal, {sum(len(known[n]) for n in both)} tokens", flush=True)


if __name__ == "__main__":
    main()
