"""Stage 2 of the painter recipe: prompts and the VQ model's codes of a picture each, in shards."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from transformers import JanusVQVAE, PreTrainedTokenizerFast

from visspec.toys.recipes.painter_build import BOI, BOS, build_tokenizer
from visspec.toys.recipes.painter_codes import composed
from visspec.toys.recipes.painter_data import FIRST_SEED, SIDE, bound_pair, pair
from visspec.toys.recipes.painter_vq import load_vq
from visspec.train.stages import keep_memory

KINDS = {"tokens": pair, "bound": bound_pair}  # of pairs: every task's, and the one task's that takes longest to learn
SHARES = {"tokens": 1.0, "bound": 0.5}  # pairs of a kind for each that --pairs asks for
SHARD = 8000  # pairs in a file at most: coding more of them in one go fills the memory with freed blocks
PROMPT = 12  # ids of the longest prompt: <s>, ten words, image start


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompts: list[str], length: int = PROMPT) -> torch.Tensor:
    """Ids int64 (B, length) of "<s> words <begin_of_image>", padded on the left, as the processor makes them."""
    out = tokenizer([text + BOI for text in prompts], padding="max_length", max_length=length, return_tensors="pt")
    return out["input_ids"]


def without_words(tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor) -> torch.Tensor:
    """The unconditional form that the stock class guides against: all but bos and image start become padding."""
    words = tokenizer.get_vocab()
    keep = (ids == words[BOS]) | (ids == words[BOI])
    return torch.where(keep, ids, tokenizer.pad_token_id)


@torch.no_grad()
def encode(vq: JanusVQVAE, kind: str, first: int, count: int, low: bool, batch: int = 64) -> dict[str, torch.Tensor]:
    """Pairs number first..first+count of a kind: `ids` (count, PROMPT) and `codes` (count, grid^2), both int16.

    `ink` (count, grid^2), bool, tells the codes whose pixels show part of a shape.
    """
    tokenizer = build_tokenizer()
    ids, codes, ink = [], [], []
    for start in range(first, first + count, batch):
        numbers = range(start, min(start + batch, first + count))
        rows, scenes = zip(*(KINDS[kind](FIRST_SEED[kind] + i) for i in numbers))
        ids.append(prompt_ids(tokenizer, [row["prompt"] for row in rows]))
        written, shown = composed(vq, list(scenes), low)
        codes.append(written.flatten(1))
        ink.append(shown.flatten(1))
    return {"ids": torch.cat(ids).short(), "codes": torch.cat(codes).short(), "ink": torch.cat(ink)}


def shards(folder: Path, kind: str, low: bool, first: int, count: int) -> dict[Path, range]:
    """Files that hold a kind's part of the pairs number first..first+count, and the pairs of the kind in each."""
    numbers = range(int(first * SHARES[kind]), int((first + count) * SHARES[kind]))
    each = int(SHARD * SHARES[kind])
    return {
        folder / f"{kind}-{SIDE[low]}-{start}.pt": range(start, min(start + each, numbers.stop))
        for start in numbers[::each]
    }


def _worker(rank: int, options: argparse.Namespace) -> None:
    keep_memory()
    torch.set_num_threads(1)
    vq, low = load_vq(options.out, options.lowres), options.lowres
    files = [(k, *each) for k in KINDS for each in shards(options.out, k, low, options.first, options.pairs).items()]
    for kind, file, numbers in files[rank :: options.workers]:
        begun = time.time()
        if options.resume and file.exists():
            continue
        torch.save(encode(vq, kind, numbers.start, len(numbers), low), file)
        print(json.dumps({"file": file.name, "pairs": len(numbers), "s": round(time.time() - begun)}), flush=True)


def write_tokens(options: argparse.Namespace) -> None:
    """Encode `options.pairs` pairs in `options.workers` processes."""
    mp.spawn(_worker, (options,), nprocs=options.workers)


def read_tokens(folder: Path, kind: str, low: bool, first: int, count: int) -> dict[str, torch.Tensor]:
    """All shards in order: ids (N, PROMPT), codes (N, grid^2) and ink (N, grid^2), as `encode` makes them.

    `number` (N,), int64, tells which pair of its kind each is.
    """
    files = shards(folder, kind, low, first, count)
    parts = [torch.load(file, weights_only=True) for file in files]
    out = {name: torch.cat([part[name] for part in parts]) for name in ("ids", "codes", "ink")}
    return out | {"number": torch.tensor([number for numbers in files.values() for number in numbers])}
