"""What `tests/test_train_processes.py` runs in two processes: the included captioner, split by transformers' plan."""

import json
from pathlib import Path

import torch.distributed as dist

import visspec
from visspec.api.captions import PROMPT, prepare
from visspec.api.loading import load
from visspec.io import included


def captions(device: str) -> dict:
    """Tokens of two captions, drafted and stock, and how many rows of a weight are here."""
    model, processor = load(None, device=device)
    images = included.scenes("shapes").images(2)
    inputs = prepare(processor, images, PROMPT, model)
    options = {"max_new_tokens": 6, "do_sample": False}
    fast = visspec.accelerate(model, "vispec", adaptive=False)
    result = {name: one.generate(**inputs, **options).tolist() for name, one in (("vispec", fast), ("stock", model))}
    weight = model.get_decoder().layers[0].self_attn.q_proj.weight
    return result | {"rows": (weight.to_local() if hasattr(weight, "to_local") else weight).shape[0]}


def main(home: Path) -> None:
    result = captions("tp")
    (home / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
