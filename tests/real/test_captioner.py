"""`captioner-smollm2` around its published language model (`make real`): what it names, identity with `generate`, and
what it answers without a picture.

    SCENES=256 python -m pytest -q -s tests/real/test_captioner.py    # prints the figures of its card
"""

import os
import re
from collections import Counter

import pytest
import torch
import transformers as tf

import visspec
from visspec.api import loading
from visspec.api.captions import PROMPT, prepare
from visspec.cli.bench_text import read_prompts
from visspec.io import included
from visspec.toys.world.captions import NUMBERS, PLACES
from visspec.toys.world.palette import CLASSES, COLOURS
from visspec.toys.world.scene import HELD_OUT_SEED, scene_from_seed

NAME, SCENES = "captioner-smollm2", int(os.environ.get("SCENES", 32))
LANGUAGE, WEIGHTS = included.PUBLISHED / "smollm2", included.folder(NAME) / "model.safetensors"
THING = re.compile(rf"(small|large) ({'|'.join(COLOURS)}) ({'|'.join(CLASSES)})")
PLACE = re.compile("|".join(PLACES))
GREEDY = {"max_new_tokens": 160, "do_sample": False}
pytestmark = pytest.mark.skipif(
    not ((LANGUAGE / "config.json").is_file() and WEIGHTS.is_file()), reason=f"run `make real` and train.py of {NAME}"
)


@pytest.fixture(scope="module")
def loaded():
    return loading.load(NAME)


def answers(loaded, images, requests):
    """Greedy answers in batches of eight."""
    model, processor = loaded
    fast, made = visspec.accelerate(model), []
    for first in range(0, len(images), 8):
        inputs = prepare(processor, images[first : first + 8], requests[first : first + 8], model)
        made += processor.batch_decode(fast.run(**inputs, **GREEDY).state.tokens, skip_special_tokens=True)
    return made


def test_things_of_held_out_scenes_are_named(loaded):
    images, counts = included.scenes("shapes").images(SCENES), Counter()
    for number, text in enumerate(answers(loaded, images, [PROMPT] * SCENES)):
        things = scene_from_seed(HELD_OUT_SEED + number).things
        truth = {(t.size, t.colour, t.kind, PLACES[t.cell]) for t in things}
        sentences = [(THING.findall(s), PLACE.findall(s)) for s in text.lower().split(". ")]
        placed = {(*thing, place) for result, places in sentences for thing, place in zip(result, places)}
        named = Counter(thing for result, _ in sentences for thing in result) & Counter(t[:3] for t in truth)
        whole = placed == truth and f"shows {NUMBERS[len(things)]} shapes" in text
        counts += Counter(
            things=len(things), named=named.total(), placed=len(placed & truth), scenes_without_error=whole
        )
    print(f"\n{SCENES} scenes: {dict(counts)}")
    assert counts["named"] >= 0.97 * counts["things"]


def test_questions(loaded):
    images, counts = included.scenes("shapes").images(SCENES), Counter()
    things = [scene_from_seed(HELD_OUT_SEED + number).things for number in range(SCENES)]
    one = [next((t for t in all if [s.kind for s in all].count(t.kind) == 1), None) for all in things]
    for kind, request, truth in (
        ("count", "How many shapes are there?", lambda all, _: f" {NUMBERS[len(all)]} "),
        ("color", "What color is the {}?", lambda _, thing: f" {thing.colour}."),
        ("place", "Where is the {}?", lambda _, thing: f" {PLACES[thing.cell]}."),
    ):
        asked = [i for i in range(SCENES) if one[i]]
        texts = answers(loaded, [images[i] for i in asked], [request.format(one[i].kind) for i in asked])
        counts[kind] = sum(truth(things[i], one[i]) in text for i, text in zip(asked, texts))
    print(f"\nof {len(asked)} questions each: {dict(counts)}")
    assert min(counts.values()) >= 0.8 * len(asked)


def test_captions_equal_generate(loaded):
    model, processor = loaded
    images, fast = included.scenes("shapes").images(4), visspec.accelerate(model)
    requests = [PROMPT, "What do you see?", "How many shapes are there?", "Describe this image in detail."]
    for chosen in ([0], [1], [0, 1, 2, 3]):
        inputs = prepare(processor, [images[i] for i in chosen], [requests[i] for i in chosen], model)
        assert torch.equal(fast.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))


def test_answers_without_a_picture(loaded):
    """12 held-out prompts: the loss of SmolLM2's own greedy answers hardly grows."""
    (model, processor), losses, same = loaded, [], 0
    language = tf.AutoModelForCausalLM.from_pretrained(LANGUAGE, dtype=torch.float32).eval()
    for prompt in read_prompts(None)[::4]:
        inputs = prepare(processor, [[]], prompt.prompt, model)
        own = language.generate(**inputs, max_new_tokens=32, do_sample=False)
        labels = own.clone()
        labels[:, : inputs["input_ids"].shape[1]] = -100
        with torch.no_grad():
            losses.append([float(each(own, labels=labels).loss) for each in (language, model)])
        same += torch.equal(model.generate(**inputs, max_new_tokens=32, do_sample=False), own)
    before, after = torch.tensor(losses).mean(0).tolist()
    print(f"\n{len(losses)} prompts: {same} answers of 32 tokens unchanged, loss {before:.3f} and {after:.3f}")
    assert after < before + 0.25
