"""`captioner`, `captioner-small` and `captioner-emoji` from zero: a small LLaVA that describes a world.

Stage `vision` teaches a CLIP tower dense labels (see captioner_vision.py), `caption` trains projector and text model
on the frozen tower, `finish` writes a complete folder with float16 weights, a model card and its provenance. The small
one has a text model of two layers on the same tower: run it in the folder of `captioner`, after it.

Data: scenes of the world, rendered as they are needed; batch t always holds the same scenes, and seeds from 2^30 on are
never trained on. Seeds: 0 (vision), 1 (captions). Two CPU cores, no accelerator.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoProcessor, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast

from visspec.io.options import option
from visspec.toys.recipes import cards
from visspec.toys.recipes.captioner_build import TEXT, build_model, build_processor
from visspec.toys.recipes.captioner_vision import SIDE, VisionStage, patch_features, patch_labels, seen_in
from visspec.toys.recipes.recipe import Options, Recipe, Stages, TrainingStage, mixed_precision
from visspec.toys.world.captions import REQUESTS
from visspec.toys.world.scene import Scene
from visspec.toys.world.worlds import WORLDS, World, world

FIRST_SEED = 1 << 28  # scenes the vision stage has not seen, still below the held-out ones
QUESTION_SHARE = 1 / 8
GROUP = 4  # batches drawn and sorted together
FACT_WEIGHT = 3.0  # words that must be read from the image weigh more than the sentences around them
MAX_NEW_TOKENS = 160
MEASURED_FROM = 1000  # the first held-out scenes were watched during training; these were not
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
        "notice": "",
    },
    "emoji": {
        "world": "*emoji world*: one to five turned pictures of Noto Color Emoji in a 3x3 layout on\ngrounds with "
        "texture and tint",
        "facts": "count, ground and tint, for every picture its\nplace, size and name, and how the first and the last "
        "stand to each other",
        "short": "the emoji world",
        "things": "pictures",
        "notice": "\n\nThe pictures it was trained on are Google's Noto Color Emoji, under the SIL Open Font License "
        "1.1; the notice is beside\nthem, in `visspec/toys/world/emoji/OFL.txt`.",
    },
}
ROLES = {
    False: "It is the target of visspec's demonstrations and tests: deep for its width, as real targets are.",
    True: "It is the assistant (draft model) of `captioner`: the same words, the same eyes, two text layers. "
    "It is what an ideal\nassistant looks like: nearly always of the same opinion, at a fraction of the cost.",
}
# World whose captioner learns by `Naming`, too. Captions alone teach a few words to be read from the picture, but not
# hundreds: after 1,200 steps of 16 captions, 57 % of the facts were right and every picture had the same name.
NAMED = "emoji"


class Naming:
    """A loss on projected patches: what lies in a patch's cell is to be read off it by the text model's last layer."""

    def __init__(self, world: World, table: dict[str, int]):
        self.world, self.laws = world, {}
        for name, things in world.facts.items():
            law = torch.zeros(len(things) + 1, len(table))
            for number, thing in enumerate(things, start=1):  # 0 is an empty cell
                words = thing.split()
                law[number, [table[word] for word in words]] = 1 / len(words)
            self.laws[name] = law

    def __call__(self, model: LlavaForConditionalGeneration, scenes: list, seen: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the words of every fact, for `seen` (B, patches, hidden)."""
        log_p = model.lm_head(model.model.language_model.norm(seen)).float().log_softmax(-1)
        labels = patch_labels(scenes, self.world)
        losses = [-(law[labels[name]] * log_p).sum(-1)[labels[name] > 0].mean() for name, law in self.laws.items()]
        return torch.stack(losses).mean()


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
    begun, text = time.time(), ""
    counts: list[tuple[int, int, int, int]] = []  # of each caption: facts right, stated and missing, and tokens
    nats: list[float] = []
    for start in range(first, first + n, batch):
        scenes = world.scenes(min(batch, first + n - start), start)
        requests = [REQUESTS[i % len(REQUESTS)] for i in range(len(scenes))]
        new, entropies = _generate(model, processor, [world.to_image(s) for s in scenes], requests, sample)
        for row, scene, entropy in zip(new, scenes, entropies):
            text = processor.tokenizer.decode(row, skip_special_tokens=True)
            length = int((row != model.generation_config.pad_token_id).sum())
            counts.append((*world.captions.score(text, scene), world.captions.missing(text, scene), length))
            nats += entropy
    *facts, lengths = zip(*counts)
    right, stated, missing = map(sum, facts)
    perfect = sum(good == said and not lost for good, said, lost, _ in counts)
    record: dict[str, Any] = {"scenes": n, "right": right, "stated": stated, "missing": missing}
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


@dataclass(frozen=True)
class CaptionBatch:
    """Scenes, and rows of text about them. Every row starts with the same prefix, `<s> user : <image>*36`, so that
    image features lie at fixed positions; rows are padded on the right, which a causal model needs no mask for.

    ids int64 (B, L), weight float32 (B, L): loss weight of predicting that token, 0 for prompts and padding.
    """

    scenes: list[Scene]
    ids: torch.Tensor
    weight: torch.Tensor


def _turns(world: World, scene, rng: np.random.Generator) -> list[tuple[str, str]]:
    """(request, answer) turns of one row: a caption, or several questions in random order."""
    if rng.random() >= QUESTION_SHARE:
        requests = world.captions.requests
        return [(requests[int(rng.integers(len(requests)))], world.captions.caption(scene, rng))]
    asked = world.captions.questions(scene)
    return [asked[i] for i in rng.permutation(len(asked))[:7]]


class Encoder:
    """Turns sampled rows into ids and weights by one table look-up a word."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, world: World):
        self.world, self.fact_words = world, world.captions.read_words
        self.table = tokenizer.get_vocab()
        self.pad, self.eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.first_image = 3  # after "<s> user :"
        self.prefix = self._ids("<s> user :") + [self.table["<image>"]] * SIDE**2

    def _ids(self, text: str) -> list[int]:
        return [self.table[word] for word in text.split()]

    def row(self, turns: list[tuple[str, str]]) -> tuple[list[int], list[float]]:
        """Ids and weights of one conversation about one image."""
        ids, weight = list(self.prefix), [0.0] * len(self.prefix)
        for i, (request, answer) in enumerate(turns):
            asked = self._ids(("" if i == 0 else "user : ") + request + " assistant :")
            said = answer.split()
            ids += asked + self._ids(answer) + [self.eos]
            weight += [0.0] * len(asked) + [FACT_WEIGHT if w in self.fact_words else 1.0 for w in said] + [1.0]
        return ids, weight

    def batches(self, step: int, rows: int, rank: int = 0, workers: int = 1) -> list[CaptionBatch]:
        """This worker's next GROUP batches of `rows` fresh rows; a pure function of the arguments.

        Rows are sorted by length, to save padding and to give all workers equally long rows at the same step.
        """
        rng = np.random.default_rng(FIRST_SEED + step)
        share = rows * workers
        scenes = [self.world.captioned(FIRST_SEED + step * share + i) for i in range(share * GROUP)]
        coded = [(scene, *self.row(_turns(self.world, scene, rng))) for scene in scenes]
        coded.sort(key=lambda item: len(item[1]))
        return [self.collate(coded[i * share : (i + 1) * share][rank::workers]) for i in rng.permutation(GROUP)]

    def collate(self, coded: Sequence[tuple[Scene, list[int], list[float]]]) -> CaptionBatch:
        length = max(len(ids) for _, ids, _ in coded)
        ids = np.full((len(coded), length), self.pad, np.int64)
        weight = np.zeros((len(coded), length), np.float32)
        for row, (_, row_ids, row_weight) in enumerate(coded):
            ids[row, : len(row_ids)], weight[row, : len(row_ids)] = row_ids, row_weight
        return CaptionBatch([scene for scene, _, _ in coded], torch.from_numpy(ids), torch.from_numpy(weight))


def caption_loss(
    model: LlavaForConditionalGeneration,
    batch: CaptionBatch,
    features: torch.Tensor,
    first: int,
    naming: Naming | None = None,
) -> torch.Tensor:
    """Weighted mean cross-entropy of a batch; `features` (B, patches, vision hidden) fill ids first..first+patches.

    naming: a loss on projected patches that is added.
    """
    inner, length = model.model, features.shape[1]
    with mixed_precision():
        embeds = model.get_input_embeddings()(batch.ids)
        seen = inner.multi_modal_projector(features).to(embeds.dtype)
        embeds = torch.cat([embeds[:, :first], seen, embeds[:, first + length :]], 1)
        hidden = inner.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, first + length - 1 : -1])
        named = 0.0 if naming is None else naming(model, batch.scenes, seen)
    losses = F.cross_entropy(logits.float().flatten(0, 1), batch.ids[:, first + length :].flatten(), reduction="none")
    weight = batch.weight[:, first + length :].flatten()
    return (losses * weight).sum() / weight.sum() + named


class CaptionStage(TrainingStage):
    """Stage 2: projector and text model on frozen vision features, fresh scenes at every step."""

    seed, warm = 1, 0.03

    def build(self, options: argparse.Namespace) -> dict:
        self.name = "caption-small.pt" if options.small else "caption.pt"
        tower = torch.load(options.out / "vision.pt", weights_only=True)["tower"]
        self.world = world(options.world)
        self.processor = build_processor(self.world)
        self.encoder, self.waiting = Encoder(self.processor.tokenizer, self.world), list[CaptionBatch]()
        self.naming = Naming(self.world, self.encoder.table) if self.world.name == NAMED else None
        self.model = build_model(tower, self.world, options.small).train()
        self.model.set_attn_implementation("eager")
        self.model.model.vision_tower.requires_grad_(False)
        return {"model": self.model}

    def loss(self) -> torch.Tensor:
        """Loss of the next batch; batches come several at a time, so checkpoints are made after all of them."""
        self.waiting = self.waiting or self.encoder.batches(self.step, self.options.rows, self.rank, self.workers)
        batch = self.waiting.pop(0)
        with torch.no_grad(), mixed_precision():
            features = patch_features(self.model.model.vision_tower, self.world.pixels(batch.scenes)).float()
        return caption_loss(self.model, batch, features, self.encoder.first_image, self.naming)

    def figures(self) -> dict:
        torch.set_num_threads(self.workers)
        record = score_captions(self.model, self.processor, self.world)
        torch.set_num_threads(1)
        return record


def finish(options: argparse.Namespace) -> None:
    """Write the folder from the last checkpoints, read it back, measure it and describe it."""
    place, small = world(options.world), options.small
    folder = options.out / NAMES[place.name][small]
    files = {"vision": "vision.pt", "caption": "caption-small.pt" if small else "caption.pt"}
    saved, stages = cards.read_stages(options.out, files)
    model = build_model(saved["vision"]["tower"], place, small)
    model.load_state_dict(saved["caption"]["model"])
    model = cards.half_precision_copy(model, build_processor(place), folder)
    processor = AutoProcessor.from_pretrained(folder)
    torch.manual_seed(0)
    measured = {
        "greedy": score_captions(model, processor, place, options.scenes, MEASURED_FROM),
        "temperature_1": score_captions(model, processor, place, options.scenes, MEASURED_FROM, sample=True),
        "questions": score_answers(model, processor, place, options.scenes, MEASURED_FROM),
    }
    stages["vision"]["accuracy"] = seen_in(saved["vision"], place)
    about = stages | {"seeds": {"vision": 0, "caption": 1}, "world": place.name, "cores": options.workers}
    record = cards.origin(model, f"visspec.toys {folder.name}", folder, measured, **about)
    cards.publish(folder, card(place, small, model, record))
    cards.say(folder, **measured)


def card(place: World, small: bool, model: LlavaForConditionalGeneration, record: dict) -> str:
    """The model card's text, from the provenance of the weights."""
    return cards.fill(
        "captioner",
        record,
        model,
        globals(),
        name=NAMES[place.name][small],
        of=place.name,
        side=place.side,
        role=ROLES[small],
        text=TEXT[small],
        after=" after that of `captioner` into the same folder" if small else "",
        minutes=sum(round(record[part]["seconds"] / 60) for part in ("vision", "caption")),
        cores=cards.cores(record.get("cores")),
        **WORDS[place.name],
    )


@dataclass
class CaptionerOptions(Options):
    world: str = option("whose scenes it describes", "shapes", choices=WORLDS)
    small: bool = option("the two-layer sibling, on the same vision tower", False)
    vision_steps: int = option("steps of the vision tower", 2400)
    vision_rows: int = option("scenes in a batch of it", 128)
    steps: int = option("text-model steps", 2500)
    every: int = option("steps between reports and checkpoints, in fours", 500)
    scenes: int = option("held-out scenes the finished model is measured on", 512)
    workers: int = option("processes of a stage, one thread each", 2)
    rows: int = option("captions in a batch of one worker", 16)
    rate: float = option("peak learning rate of the text model", 1.5e-3)


DESCRIBING: Stages = {"caption": CaptionStage, "finish": finish}
STAGES: Stages = {"vision": VisionStage} | DESCRIBING
CAPTIONER = Recipe("captioner", "Train the captioner of shapes.", CaptionerOptions, STAGES, threads=2)
SMALL = Recipe(
    "captioner-small",
    "Train the captioner's sibling of two text layers.",
    CaptionerOptions,
    DESCRIBING,
    {"small": True, "rate": 2e-3},
    threads=2,
)
EMOJI = Recipe(
    "captioner-emoji",
    "Train the captioner of the emoji world.",
    CaptionerOptions,
    STAGES,
    {"world": "emoji", "vision_steps": 2000, "steps": 3100, "workers": 1},
)
