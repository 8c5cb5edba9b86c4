"""The included models and what belongs to them, in one table (`io.included`). Imports nothing heavy."""

from pathlib import Path

from visspec.io.included import Included, IncludedModel, World

MODELS = {
    "captioner": IncludedModel("captions rendered scenes of coloured shapes"),
    "captioner-small": IncludedModel("a smaller one of the same words", "assistant", "captioner"),
    "captioner-emoji": IncludedModel("captions scenes of emoji"),
    "captioner-smollm2": IncludedModel(
        "captions scenes of shapes by SmolLM2-135M (make real)", parts=("smollm2", "captioner")
    ),
    "painter": IncludedModel("draws coloured shapes, code by code"),
    "painter-lowres": IncludedModel("its sibling of a quarter of the codes", "lowres", "painter"),
    "painter-upsampler": IncludedModel("enlarges the sibling's codes", "upsampler", "painter"),
    "painter-emoji": IncludedModel("draws an emoji, code by code"),
    "painter-emoji-lowres": IncludedModel("its sibling of a quarter of the codes", "lowres", "painter-emoji"),
    "painter-emoji-upsampler": IncludedModel("enlarges the sibling's codes", "upsampler", "painter-emoji"),
    "painter-any-order": IncludedModel("draws an animal, codes in any order"),
    "painter-mar": IncludedModel("draws an animal, vectors in any order"),
    "painter-var": IncludedModel("draws an animal, scale by scale"),
}
DRAFTERS = {
    "smollm2-context": IncludedModel("what SmolLM2-135M-Instruct ranks after each id", "context"),
    "vispec": IncludedModel("a drafter of its captions", "eagle", "captioner"),
    "vispec-emoji": IncludedModel("a drafter of its captions", "eagle", "captioner-emoji"),
    "vispec-smollm2": IncludedModel("a drafter of its captions", "eagle", "captioner-smollm2"),
    "painter-eagle": IncludedModel("a drafter of its codes", "image-eagle", "painter"),
    "painter-emoji-eagle": IncludedModel("a drafter of its codes", "image-eagle", "painter-emoji"),
    "painter-distilled": IncludedModel("a drafter of all its codes", "distilled", "painter"),
    "painter-mar-drafter": IncludedModel("a smaller one that drafts its vectors", "mar", "painter-mar"),
    "painter-var-small": IncludedModel("a smaller one that drafts its scales", "var", "painter-var"),
}
HELD_OUT = Path(__file__).parent / "heldout"
SHAPES, EMOJI = "visspec.toys.world", "visspec.toys.world.emoji"
WORLDS = [
    World("shapes", HELD_OUT / "shapes", f"{SHAPES}.detector:ShapeDetector", f"{SHAPES}.prompts:paint"),
    World("emoji", HELD_OUT / "emoji", f"{EMOJI}.detector:EmojiDetector", f"{EMOJI}.prompts:paint"),
    World("animals", HELD_OUT / "animals", f"{EMOJI}.detector:animal_detector", f"{EMOJI}.prompts:paint_animal"),
]
INCLUDED = Included(
    models=MODELS | DRAFTERS,
    drafters=DRAFTERS,
    text_model="captioner",
    image_model="painter",
    worlds={world.name: world for world in WORLDS},
    foreign="visspec.toys.judges:foreign",
)
