"""Options of a run that trains a drafter. Imports nothing heavy, because the command line is built from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from visspec.io.options import Count, HardwareOptions, Positive, Seed, Share, option


@dataclass(kw_only=True)
class DrafterTraining(HardwareOptions):
    """Options of `visspec train drafter`, and in Python of `drafter.run` and `image_drafter.run`."""

    target: str = option("folder or hub id of the target")
    data: str | None = option(
        "train for text on a folder or glob of images or videos, or on .jsonl, .json, .parquet, .tar or hf:NAME with"
        " {image, prompt}, `conversations` (LLaVA, ShareGPT) or `messages`; every answer of a record is an item;"
        " self: an instruct target writes 2000 prompts itself (self:N for N)",
        None,
    )
    images: str | None = option("with --data self: a folder or glob of pictures to ask about", None)
    prompts: Path | None = option(
        "train for images on a file with a prompt on each line (default: an included model's own prompts)", None
    )
    answers: Literal["target", "own"] = option(
        "target: train on the target's own answers, which a drafter must predict; own: on the answers of the data",
        "target",
    )
    ignore: list[str] = option("fields of records, or endings of a tar's files, to ignore", [])
    out: Path = option("folder of the drafter", writes="folder")
    steps: Positive | None = option("number of training steps (default: 2000)", None)
    epochs: Share | None = option("number of passes over the data, instead of --steps", None)
    loss: Literal["tv", "soft_ce", "kl"] = option("loss between the drafter's distribution and the target's", "tv")
    preset: str | None = option(
        "context: prepare the default drafter in minutes, without data; or a published drafter: eagle, eagle3, flash,"
        " ...; for images: image-eagle, distilled (docs/train.md)",
        None,
    )
    structure: str | None = option(
        "structure of drafts: tree=chain, or a tree such as width=4,nodes=16 (default: the fastest measured one)", None
    )
    image_latents: Positive | None = option("number of vectors that represent an image (default: 1)", None)
    draft_vocab: Positive | None = option(
        "one-layer drafters: train a new head for this many most frequent ids of the target's answers"
        " (default: 32000 for eagle3, else the target's head)",
        None,
    )
    block: Positive | None = option("block size of flash (5), dflash, ddtree, dspark, dflash2 (16)", None)
    layers: Positive | None = option(
        "layers of dflash, ddtree, dspark, dflash2 (a quarter of the target's) or distilled (3)", None
    )
    intermediate: Positive | None = option("width of the drafter's MLP (default: the target's)", None)
    height: Positive | None = option("height of images in pixels (default: the model's own)", None)
    width: Positive | None = option("width of images in pixels (default: the model's own)", None)
    max_new_tokens: Positive = option("maximum length of the target's answers", 256)
    seed: Seed = option("random seed", 0)
    rows: Positive = option("batch size of the target's answers", 16)
    rate: float = option("peak learning rate", 1e-3)
    schedule: Literal["cosine", "linear", "constant"] = option("schedule of the learning rate", "cosine")
    warm_up: float = option("share of the steps for warm-up of the learning rate", 0.025)
    accumulate: Positive = option("batches per update, over all processes", 1)
    bf16: bool = option("compute the drafter's matrix products in bfloat16", False)
    eval_every: Positive | None = option("steps between validations (default: a fifth of the steps)", None)
    eval_rows: Positive = option(
        "number of held-out items for validation, at most a twentieth of the data (for images: 16 prompts)", 64
    )
    max_pixels: Positive | None = option("scale larger pictures down to this many pixels", None)
    max_bad: Count = option("number of unreadable items to skip, in each process", 100)
    save_every: Positive = option("steps between checkpoints", 200)
    keep: Positive = option("number of checkpoints to keep in addition to the best one", 1)
    store: Path | None = option(
        "folder to store the target's answers in, for this and later runs", None, writes="folder"
    )
    resume: bool = option("continue the run in --out, if there is one", False)
    overwrite: bool = option("replace a drafter that is already in --out", False)
