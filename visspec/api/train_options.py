"""Options of a run that trains a drafter. Imports nothing heavy: the command line is made of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from visspec.io.options import Count, HardwareOptions, Positive, Seed, Share, option


@dataclass(kw_only=True)
class DrafterTraining(HardwareOptions):
    """Options of `visspec train drafter`, in Python those of `train_drafter.run` and `train_image_drafter.run`."""

    target: str = option("folder or hub id of the target")
    data: str | None = option(
        "for a drafter of text: a folder or glob of images or videos, .jsonl, .json, .parquet, .tar or hf:NAME, of"
        " {image, prompt}, `conversations` (LLaVA, ShareGPT) or `messages`; each answer in a record makes an item;"
        " self: the target, an instruct model, writes 2000 prompts (self:N for N)",
        None,
    )
    images: str | None = option("with --data self: a folder or glob of pictures that it asks about", None)
    prompts: Path | None = option(
        "for a drafter of image codes: a file with a prompt on each line (an included model's own prompts)", None
    )
    answers: Literal["target", "own"] = option(
        "target: it answers the prompts itself, as a drafter has to guess what the target says; own: the"
        " target reads the answers of the data",
        "target",
    )
    ignore: list[str] = option("fields of records, or endings of a tar's files, to pass over", [])
    out: Path = option(writes="folder")
    steps: Positive | None = option("training steps (2000)", None)
    epochs: Share | None = option("how often the data is seen, in place of --steps", None)
    loss: Literal["tv", "soft_ce", "kl"] = option("between the drafter's law and the target's", "tv")
    preset: str | None = option(
        "context: a table for the default drafter, in minutes and without data; a published drafter: eagle, eagle3,"
        " flash, ...; of images: image-eagle, distilled (docs/train.md)",
        None,
    )
    structure: str | None = option(
        "of drafts: tree=chain, or a tree such as width=4,nodes=16 (the fastest of a few on held-out items)", None
    )
    image_latents: Positive | None = option("vectors that stand for an image (1)", None)
    draft_vocab: Positive | None = option(
        "of one-layer drafters: the most frequent ids of the target's answers, which a head of its own predicts"
        " (eagle3: 32000, others: the target's head)",
        None,
    )
    block: Positive | None = option("of flash (5), dflash, ddtree, dspark, dflash2 (16), deer (15): places", None)
    layers: Positive | None = option(
        "of dflash, ddtree, dspark, dflash2, deer (a quarter of the target's), distilled (3)", None
    )
    intermediate: Positive | None = option("width of the drafter's MLP (the target's)", None)
    height: Positive | None = option("of images, in pixels (the model's own)", None)
    width: Positive | None = option("of images, in pixels (the model's own)", None)
    max_new_tokens: Positive = option("of the target's own answers", 256)
    seed: Seed = option("of the random numbers", 0)
    rows: Positive = option("answers that the target makes together", 16)
    rate: float = option("peak learning rate", 1e-3)
    schedule: Literal["cosine", "linear", "constant"] = option("of the learning rate", "cosine")
    warm_up: float = option("share of the steps in which the rate rises", 0.025)
    accumulate: Positive = option("lessons of an update, over all processes", 1)
    bf16: bool = option("matrix products of the drafter in bfloat16", False)
    eval_every: Positive | None = option("steps between measurements of tau on held-out data (a fifth)", None)
    eval_rows: Positive = option(
        "items that only validate, drawn by seed, a twentieth of the data at most (64; 16 prompts)", 64
    )
    max_pixels: Positive | None = option("pictures are scaled down to so many", None)
    max_bad: Count = option("items that can't be read and are passed over, in each process", 100)
    save_every: Positive = option("steps between checkpoints", 200)
    keep: Positive = option("checkpoints that are kept, beside that of the best tau", 1)
    store: Path | None = option("keep the target's answers here, for later runs too", None, writes="folder")
    resume: bool = option("go on with the run in --out, if there is one", False)
    overwrite: bool = option("train anew where --out holds a drafter already", False)
