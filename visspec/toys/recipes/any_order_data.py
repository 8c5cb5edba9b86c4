"""Codes of pictures for the any-order painter: pieces put together, as the painter reads them, and whole pictures'.

The included VQ model codes pieces of a scene apart, so that a patch has one code wherever it stands; its encoder gives
other codes of a whole picture (`painter_codes`). A picture that is given for inpainting can only be coded whole.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from transformers import JanusVQVAE

from visspec.api.loading import load_image_model
from visspec.toys.recipes.painter_data import FIRST_SEED, SIDE, pair, pixels
from visspec.toys.recipes.painter_tokens import encode
from visspec.train.stages import keep_memory

SHARD = 1000  # pairs in a file
BATCH = 32


def included_vq() -> JanusVQVAE:
    """The VQ model of `painter`."""
    model, _ = load_image_model("painter")
    return model.model.vqmodel.eval().requires_grad_(False)


@torch.no_grad()
def coded(vq: JanusVQVAE, numbers: range) -> dict[str, torch.Tensor]:
    """Pairs of these numbers: `ids` (N, PROMPT), `codes` and `whole` (N, places), all int16."""
    found = encode(vq, "tokens", numbers.start, len(numbers), False, BATCH)
    whole = []
    for start in numbers[::BATCH]:
        scenes = [pair(FIRST_SEED["tokens"] + i)[1] for i in range(start, min(start + BATCH, numbers.stop))]
        whole.append(vq.encode(pixels(scenes, SIDE[False])).image_tokens.view(len(scenes), -1).short())
    return {"ids": found["ids"], "codes": found["codes"], "whole": torch.cat(whole)}


def shards(folder: Path, count: int) -> dict[Path, range]:
    """Files of the first so many pairs, and the pairs in each."""
    return {
        folder / f"any-order-{start}-{min(start + SHARD, count)}.pt": range(start, min(start + SHARD, count))
        for start in range(0, count, SHARD)
    }


def _worker(rank: int, options: argparse.Namespace) -> None:
    keep_memory()
    torch.set_num_threads(1)
    vq = included_vq()
    for file, numbers in list(shards(options.out, options.pairs).items())[rank :: options.workers]:
        begun = time.time()
        if options.resume and file.exists():
            continue
        torch.save(coded(vq, numbers), file)
        print(json.dumps({"file": file.name, "pairs": len(numbers), "s": round(time.time() - begun)}), flush=True)


def write_tokens(options: argparse.Namespace) -> None:
    """Code `options.pairs` pairs in `options.workers` processes."""
    mp.spawn(_worker, (options,), nprocs=options.workers)


def read_tokens(folder: Path, count: int) -> dict[str, torch.Tensor]:
    """All shards in order, as `coded` makes them."""
    parts = [torch.load(file, weights_only=True) for file in shards(folder, count)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
