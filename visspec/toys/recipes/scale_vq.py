"""Stages of the next-scale painters' recipe that make codes: the painter's VQ model, quantised in several scales.

Encoder and decoder are those of `painter`, folded into VAR's autoencoder; only codebook and convolutions of the
quantiser are taught, on features of the pictures. Codes that nobody uses start again at what a map was to bring, with
a chance that grows with its square: most of a picture is plain ground, and codes that all stand for it would be chosen
among by chance.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visspec.api.train_vq import PATIENCE, RESTARTS, quantised
from visspec.models.codecs.vq_layout import fitted, stock_rules
from visspec.models.published_tensors import rename
from visspec.models.scales.multiscale import MultiScaleShape, MultiScaleVAE
from visspec.models.var.layout import load_var_vae, save_vae
from visspec.toys.recipes.any_order_data import included_vq
from visspec.toys.recipes.painter_data import pixels
from visspec.toys.recipes.painter_score import summary, to_uint8, verdicts
from visspec.toys.recipes.scale_data import BATCH, FIRST_SEED, SCALES, SIDE, held_out, pair, rows_of_labels
from visspec.train.stages import Stage

SEED = 7
CODES = 256
LENGTH = 2.19  # median length of what the painter's encoder says of a place; the decoder reads unit vectors
RATE = 1e-2


@torch.no_grad()
def borrowed(codes: int = CODES) -> MultiScaleVAE:
    """The painter's VQ model as VAR's autoencoder, with a fresh quantiser. Its 1 x 1 convolutions around the codes are
    folded into the 3 x 3 ones beside them; at the border that one's bias counts where the stock model has none.
    """
    vq = included_vq()
    config, tensors = vq.config, vq.state_dict()
    levels = len(config.channel_multiplier)
    shape = MultiScaleShape(
        codes, config.embed_dim, config.base_channels, tuple(config.channel_multiplier), config.num_res_blocks, kernel=1
    )
    inner, outer = tensors["quant_conv.weight"][:, :, 0, 0], tensors["post_quant_conv.weight"][:, :, 0, 0]
    out, inside = tensors["encoder.conv_out.weight"], tensors["decoder.conv_in.weight"]
    bias = inner @ tensors["encoder.conv_out.bias"] + tensors["quant_conv.bias"]
    offset = inside.sum(dim=(2, 3)) @ tensors["post_quant_conv.bias"]
    folded = {
        "encoder.conv_out.weight": torch.einsum("oi,ihkl->ohkl", inner, out) / LENGTH,
        "encoder.conv_out.bias": bias / LENGTH,
        "decoder.conv_in.weight": torch.einsum("oihk,ic->ochk", inside, outer),
        "decoder.conv_in.bias": tensors["decoder.conv_in.bias"] + offset,
    }
    taming = {  # which numbers the decoder's levels from the finest
        name.replace(f"decoder.up.{part[2]}.", f"decoder.up.{levels - 1 - int(part[2])}.")
        if (part := name.split("."))[:2] == ["decoder", "up"] else name: tensor
        for name, tensor in (tensors | folded).items() if name.startswith(("encoder.", "decoder."))
    }  # fmt: skip
    named = {name: fitted(name, tensor) for name, (_, tensor) in rename(taming, stock_rules(levels)).items()}
    model = MultiScaleVAE(shape).eval()
    for conv in (model.quant_conv, model.post_quant_conv):
        torch.nn.init.dirac_(conv.weight)
        torch.nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(("encoder", "decoder"))}
    model.load_state_dict(named | own)
    for smooth in (part for part in model.quantize.quant_resi.modules() if isinstance(part, torch.nn.Conv2d)):
        torch.nn.init.dirac_(smooth.weight)
        torch.nn.init.zeros_(smooth.bias)  # type: ignore[arg-type]
    return model.requires_grad_(False)


@torch.no_grad()
def write_features(options: argparse.Namespace) -> None:
    """Write `options.pairs` pairs to features.pt: classes (N,) int16, features (N, c, rows, columns) float16."""
    file, begun = options.out / "features.pt", time.time()
    if options.resume and file.exists():
        return
    model = borrowed()
    classes: list[int] = []
    features: list[Tensor] = []
    for start in range(0, options.pairs, BATCH):
        numbers, scenes = zip(*(pair(FIRST_SEED["codes"] + i) for i in range(start, min(start + BATCH, options.pairs))))
        classes += numbers
        features.append(model.quant_conv(model.encoder(pixels(list(scenes), SIDE))).half())
    torch.save({"classes": torch.tensor(classes, dtype=torch.int16), "features": torch.cat(features)}, file)
    print(json.dumps({"file": file.name, "pairs": options.pairs, "s": round(time.time() - begun)}), flush=True)


class QuantiserStage(Stage):
    """Training of codebook and convolutions of the quantiser on features, all else stays."""

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(SEED)
        self.model, self.data = borrowed(), torch.load(options.out / "features.pt", weights_only=True)
        self.model.quantize.requires_grad_(True)
        trained = list(self.model.quantize.parameters())
        super().__init__(options, rank, "quantiser.pt", options.vq_steps, RATE, trained, 0.0, {"model": self.model})
        self.used = torch.zeros(CODES, dtype=torch.bool)

    def loss(self) -> Tensor:
        """Squared distance after each map; codes start again on the way."""
        rng = np.random.default_rng((SEED, self.step, self.rank))
        chosen = torch.from_numpy(rng.integers(len(self.data["classes"]), size=self.options.vq_rows))
        features = self.data["features"][chosen].float()
        _, loss, brought, codes = quantised(self.model.quantize, features, SCALES)
        self.used[codes.flatten()] = True
        if self.step % PATIENCE == 0 and self.step < RESTARTS * self.steps:
            self.restart(brought)
            _, loss, _, _ = quantised(self.model.quantize, features, SCALES)
        return loss

    @torch.no_grad()
    def restart(self, brought: list[Tensor]) -> None:
        """Unused codes become what some map was to bring, a map of equal chance, a place by its squared length."""
        weight = self.model.quantize.embedding.weight
        rng = torch.Generator().manual_seed(SEED * 1_000_003 + self.step)
        unused = (~self.used).nonzero()[:, 0] if self.step else torch.arange(len(weight))
        flat = [part.flatten(0, 1) for part in brought]
        for code, k in zip(unused, torch.randint(len(flat), (len(unused),), generator=rng).tolist()):
            place = torch.multinomial(flat[k].square().sum(-1), 1, generator=rng)
            weight[code] = flat[k][place[0]]
        self.used.zero_()

    def report(self) -> dict:
        """That of `measure`; the folder is written, on the first worker."""
        if self.rank:
            return {}
        save_vae(self.options.out / "vq", self.model, SCALES)
        return measure(self.model)


def load_vq(folder: Path) -> MultiScaleVAE:
    """The autoencoder of a recipe's folder."""
    return load_var_vae(folder / "vq").requires_grad_(False)


@torch.no_grad()
def write_codes(options: argparse.Namespace) -> None:
    """Write codes.pt of features.pt: classes (N,) and codes (N, T), int16."""
    codec, data = load_vq(options.out), torch.load(options.out / "features.pt", weights_only=True)
    codes = [codec.quantize.encode(part.float(), SCALES).short() for part in data["features"].split(64)]
    torch.save({"classes": data["classes"], "codes": torch.cat(codes)}, options.out / "codes.pt")


@torch.no_grad()
def measure(codec: MultiScaleVAE) -> dict:
    """GenEval of one held-out picture a prompt, and of what is decoded of its features and of its codes, in dB too; how
    many codes they use, by map.
    """
    rows = rows_of_labels()
    true = held_out(rows)
    features = torch.cat([codec.quant_conv(codec.encoder(part)) for part in true.split(BATCH)])
    codes = codec.quantize.encode(features, SCALES)
    bare = torch.cat([codec.decoder(codec.post_quant_conv(part)).clamp(-1, 1) for part in features.split(BATCH)])
    made = torch.cat([codec.decode(part, SCALES) for part in codes.split(BATCH)])
    shown = {"rendered": true, "not_quantised": bare, "decoded": made}
    figures = {name: summary(verdicts(to_uint8(part), rows), rows)["geneval"] for name, part in shown.items()}
    for name in ("not_quantised", "decoded"):
        error = (shown[name] - true).square().mean().item()
        figures[f"{name}_psnr"] = round(10 * math.log10(4 / error), 2)
    return figures | {"codes_used": [len(part.unique()) for part in codes.split(SCALES.sizes, dim=1)]}
