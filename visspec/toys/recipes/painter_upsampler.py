"""Train the up-sampler of the embedded painter's low-resolution drafts, on the codes both painters were trained on.

python -m visspec.toys.recipes.painter_upsampler --tokens runs/painter --out runs/painter-upsampler

Every pair of shards of the painter recipe's `tokens` stages holds the same scenes at 48 and at 96 pixels a side. The
last shard is kept out of training and measured. One CPU core, a few minutes.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from visspec.io.provenance import provenance
from visspec.models.drafting.checkpoint import write
from visspec.models.lowres.upsampler import Upsampler, UpsamplerConfig
from visspec.toys.recipes import cards
from visspec.toys.recipes.painter_build import CODES, grid
from visspec.toys.recipes.painter_tokens import read_tokens
from visspec.train.stages import descend

CARD = """---
license: apache-2.0
---

# visspec painter-upsampler

Codes of a 48-pixel picture of `painter-lowres` to the codes of the 96-pixel one, for drafts at low resolution:

```python
import visspec
pipe = visspec.ImagePipeline.from_pretrained("painter", drafter="lowres:upsample=painter-upsampler",
                                             acceptance="local:tau=0.05,k=8,radius=1,window=2")   # the preset `mulo`
```

{parameters:.2f} million parameters. Of {pictures:,} pictures kept out of training it names {right:.1%} of the codes,
{shapes:.1%} of those that show shapes (the most frequent code alone would be right for {common:.1%}).
Recipe: `python -m visspec.toys.recipes.painter_upsampler`; {steps:,} steps of {rows} pictures, {minutes} minutes on one
core.
"""


def pairs(folder: Path, count: int) -> dict[str, torch.Tensor]:
    """`small` (N, 6, 6), `large` (N, 12, 12) codes of the same scenes, int64, and `ink` (N, 12, 12), bool."""
    small, large = (read_tokens(folder, "tokens", low, 0, count) for low in (True, False))
    if not torch.equal(small["ids"], large["ids"]):
        raise ValueError(f"tokens: {folder} has other scenes at 48 than at 96 pixels, expected the same pairs")
    shapes = {"small": (small["codes"], grid(True)), "large": (large["codes"], grid(False))}
    out = {name: codes.long().unflatten(1, (side, side)) for name, (codes, side) in shapes.items()}
    return out | {"ink": large["ink"].unflatten(1, (grid(False), grid(False)))}


@torch.no_grad()
def score(model: Upsampler, data: dict[str, torch.Tensor]) -> dict[str, float]:
    """Shares of codes named rightly, of all and of those that show shapes, and the most frequent code's share."""
    made = torch.cat([model(part).argmax(-1) for part in data["small"].split(256)])
    right, common = made == data["large"], data["large"].flatten().mode().values
    figures = {"right": right, "shapes": right[data["ink"]], "common": data["large"] == common}
    return {name: float(hits.float().mean()) for name, hits in figures.items()}


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description="Train the up-sampler of low-resolution drafts.")
    parser.add_argument("--tokens", type=Path, required=True, help="folder of the painter recipe, both tokens stages")
    parser.add_argument("--pairs", type=int, default=64_000, help="pairs of them to read")
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished up-sampler")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--rows", type=int, default=64, help="pictures in a batch")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = pairs(options.tokens, options.pairs)
    kept = len(data["small"]) // 8
    train, held = ({name: part[at] for name, part in data.items()} for at in (slice(-kept), slice(-kept, None)))
    model = Upsampler(UpsamplerConfig(CODES))
    trained = list(model.parameters())
    optimiser = torch.optim.AdamW(trained, lr=options.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, options.rate, options.steps, pct_start=0.05)
    begun = time.time()
    for step in range(options.steps):
        rows = torch.randint(len(train["small"]), (options.rows,))
        logits = model(train["small"][rows])
        loss = F.cross_entropy(logits.flatten(0, 2), train["large"][rows].flatten())
        descend(optimiser, trained, loss, 1)
        schedule.step()
        if step % 100 == 99:
            print(json.dumps({"step": step + 1, "loss": round(loss.item(), 4)}), flush=True)
    seconds = time.time() - begun
    measured = score(model, held)
    record = provenance(
        recipe="visspec.toys.recipes.painter_upsampler", seed=0, steps=options.steps, rows=options.rows,
        seconds=round(seconds), measured=measured,
    )  # fmt: skip
    write(options.out, model, record, torch.float16)
    card = CARD.format(
        parameters=sum(p.numel() for p in trained) / 1e6, pictures=len(held["small"]), steps=options.steps,
        rows=options.rows, minutes=round(seconds / 60, 1), **measured,
    )  # fmt: skip
    cards.publish(options.out, card)
    print(json.dumps({"out": str(options.out), **measured}), flush=True)


if __name__ == "__main__":
    main()
