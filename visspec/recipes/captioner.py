"""Train the embedded captioner from zero: a small LLaVA that describes the shape world in 60 to 120 words.

python -m visspec.recipes.captioner --out runs/captioner [--stage vision|caption|finish|all] [--small] [--resume]

Stage `vision` teaches a CLIP tower dense labels (see captioner_vision.py), `caption` trains projector and text model
on the frozen tower, `finish` writes a complete folder with float16 weights, a model card and its provenance. Every
stage is resumable. With --small the caption stage trains the two-layer sibling on the same tower.

Data: scenes of `visspec.eval.world`, rendered as they are needed; batch t always holds the same scenes, and seeds
from 2^30 on are never trained on. Seeds: 0 (vision), 1 (captions). Two CPU cores, no accelerator.

| stage | scenes | wall clock, with half a core to a core taken by other work |
|---|---|---|
| vision | 2,400 batches of 128 | 24 minutes measured, most of it before eager attention (then 0.2 s a step) |
| caption | 2,500 batches of 2 x 16 | 33 minutes measured |
| caption --small | 2,500 batches of 2 x 16 | 5 minutes measured |

Measured on 512 held-out scenes: captioner 100.0 % of 10,641 stated facts right, captioner-small 99.8 %; the model
cards that `finish` writes say more.
"""

import argparse
import ctypes
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from transformers import LlavaForConditionalGeneration

from visspec.files import replacing
from visspec.recipes.captioner_build import build_model, build_processor, save
from visspec.recipes.captioner_card import finish
from visspec.recipes.captioner_data import Batch, Encoder
from visspec.recipes.captioner_score import score_captions
from visspec.recipes.captioner_vision import patch_features, pixels, teach_vision

VISION_STEPS = 2400
PEAK_RATE = {False: 1.5e-3, True: 2e-3}


def keep_memory() -> None:
    """Let glibc keep freed memory: large tensors are otherwise mapped and zeroed by the kernel at every step."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 28)):  # no mmap, no trim, grow by 256 MiB
            libc.mallopt(option, value)
    except OSError:
        pass


def caption_loss(
    model: LlavaForConditionalGeneration, batch: Batch, features: torch.Tensor, first: int
) -> torch.Tensor:
    """Weighted mean cross-entropy of a batch; `features` (B, patches, vision hidden) fill ids first..first+patches."""
    inner, length = model.model, features.shape[1]
    with torch.autocast("cpu", torch.bfloat16):
        embeds = model.get_input_embeddings()(batch.ids)
        seen = inner.multi_modal_projector(features).to(embeds.dtype)
        embeds = torch.cat([embeds[:, :first], seen, embeds[:, first + length :]], 1)
        hidden = inner.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, first + length - 1 : -1])
    losses = F.cross_entropy(logits.float().flatten(0, 1), batch.ids[:, first + length :].flatten(), reduction="none")
    weight = batch.weight[:, first + length :].flatten()
    return (losses * weight).sum() / weight.sum()


def _decay_groups(parameters: list[nn.Parameter], decay: float) -> list[dict]:
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def average_gradients(parameters: list[nn.Parameter], workers: int) -> None:
    """Replace every gradient by its mean over the workers, in one message."""
    if workers == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]  # of the same parameters on every worker
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.div_(workers).split([gradient.numel() for gradient in gradients])):
        gradient.copy_(mean.view_as(gradient))


def descend(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter], loss: torch.Tensor, workers: int) -> None:
    """One step down a loss: gradients averaged over the workers and clipped to norm 1."""
    optimiser.zero_grad()
    loss.backward()
    average_gradients(parameters, workers)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimiser.step()


class CaptionStage:
    """Stage 2: projector and text model on frozen vision features, fresh scenes at every step.

    Each worker is one process with one thread: at this size that is faster than two threads inside each operation,
    and it suffers less from other work on the machine. Workers hold equal weights and average their gradients.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, rank: int):
        torch.manual_seed(1)
        tower = torch.load(folder / "vision.pt", weights_only=True)["tower"]
        self.processor = build_processor()
        self.encoder = Encoder(self.processor.tokenizer)
        self.model = build_model(tower, options.small)
        self.model.set_attn_implementation("eager")
        self.model.model.vision_tower.requires_grad_(False)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(_decay_groups(self.trained, 0.05), lr=options.rate, betas=(0.9, 0.98))
        self.steps, self.rows, self.peak, self.early = options.steps, options.rows, options.rate, options.early
        self.rank, self.workers = rank, options.workers
        self.file = folder / ("caption-small.pt" if options.small else "caption.pt")
        self.step, self.seconds = 0, 0.0

    def rate(self) -> float:
        """Learning rate: linear warm-up over 3 % of the steps, then a cosine down to 2 % of the peak."""
        warm = max(1, int(0.03 * self.steps))
        if self.step < warm:
            return self.peak * (self.step + 1) / warm
        done = (self.step - warm) / max(1, self.steps - warm)
        return self.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

    def checkpoint(self) -> None:
        """Write model, optimiser and progress, replacing the former checkpoint in one move."""
        state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}
        with replacing(self.file) as draft:
            torch.save({**state, "step": self.step, "seconds": self.seconds}, draft)

    def restore(self) -> None:
        """Take up the last checkpoint, if there is one."""
        if self.file.exists():
            saved = torch.load(self.file, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimiser.load_state_dict(saved["optimiser"])
            self.step, self.seconds = saved["step"], saved["seconds"]

    def update(self, batch: Batch) -> float:
        """One optimiser step; returns the loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            features = patch_features(self.model.model.vision_tower, pixels(batch.scenes)).float()
        loss = caption_loss(self.model, batch, features, self.encoder.first_image)
        descend(self.optimiser, self.trained, loss, self.workers)
        self.step += 1
        return loss.item()

    def report(self, losses: list[float], scenes: int) -> dict:
        """Evaluate on held-out scenes, print one JSON line, refresh the early folder."""
        self.model.eval()
        torch.set_num_threads(self.workers)
        record: dict[str, Any] = {"stage": "caption", "step": self.step}
        record |= {"loss": round(sum(losses) / max(1, len(losses)), 4)}
        record |= {"rate": round(self.rate(), 6), "s": round(self.seconds)}
        record |= score_captions(self.model, self.processor, scenes)
        torch.set_num_threads(1)
        self.model.train()
        print(json.dumps(record), flush=True)
        if self.early and record["accuracy"] > 0.3:
            save(self.model, self.processor, self.early, torch.float16)
        return record

    def run(self, every: int = 500) -> None:
        """Train to the last step; a report and a checkpoint every `every` steps, a multiple of the data's GROUP."""
        self.model.train()
        losses: list[float] = []
        begun = time.time() - self.seconds
        while self.step < self.steps:
            for batch in self.encoder.batches(self.step, self.rows, self.rank, self.workers):
                if self.step == self.steps:
                    break
                losses.append(self.update(batch))
                self.seconds = time.time() - begun
                if self.rank == 0 and self.step % 100 == 0:
                    mean = sum(losses[-100:]) / len(losses[-100:])
                    print(json.dumps({"step": self.step, "loss": round(mean, 4), "s": round(self.seconds)}), flush=True)
                if self.rank == 0 and (self.step % every == 0 or self.step == self.steps):
                    self.checkpoint()
                    self.report(losses[-every:], 64)


def _caption_worker(rank: int, meeting: str, options: argparse.Namespace) -> None:
    """Body of one worker process; `meeting` is a fresh file through which the workers find each other."""
    keep_memory()
    torch.set_num_threads(1)
    if options.workers > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.workers)
    stage = CaptionStage(options.out, options, rank)
    if options.resume:
        stage.restore()
    stage.run()
    if options.workers > 1:
        dist.destroy_process_group()


def teach_captions(options: argparse.Namespace) -> None:
    """Stage 2 in `options.workers` processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_caption_worker, (str(Path(folder) / "meeting"), options), nprocs=options.workers)


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description="Train the embedded captioner from zero on two CPU cores.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the finished model")
    parser.add_argument("--stage", choices=("vision", "caption", "finish", "all"), default="all")
    parser.add_argument("--small", action="store_true", help="the two-layer sibling, on the same vision tower")
    parser.add_argument("--resume", action="store_true", help="take up the checkpoints in --out")
    parser.add_argument("--vision-steps", type=int, default=VISION_STEPS)
    parser.add_argument("--steps", type=int, default=2500, help="text-model steps")
    parser.add_argument("--scenes", type=int, default=512, help="held-out scenes the finished model is measured on")
    parser.add_argument("--threads", type=int, default=2, help="threads of the other stages; 1 if cores are busy")
    parser.add_argument("--workers", type=int, default=2, help="processes of the caption stage, one thread each")
    parser.add_argument("--rows", type=int, default=16, help="captions in a batch of one worker")
    parser.add_argument("--rate", type=float, help="peak learning rate of the text model; default 1.5e-3, small 2e-3")
    parser.add_argument(
        "--early", type=Path, default=None, help="folder to refresh with a loadable model at each report"
    )
    options = parser.parse_args(arguments)
    options.rate = options.rate or PEAK_RATE[options.small]
    keep_memory()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage in ("vision", "all"):
        teach_vision(options.out, options.vision_steps, resume=options.resume)
    if options.stage in ("caption", "all"):
        teach_captions(options)
    if options.stage in ("finish", "all"):
        finish(options.out, options.small, options.scenes)


if __name__ == "__main__":
    main()
