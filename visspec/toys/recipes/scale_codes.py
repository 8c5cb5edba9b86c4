"""Codes of the next-scale painters.

Encoder and decoder of `painter-emoji`'s VQ model are folded into VAR's autoencoder; only codebook and convolutions of
the quantiser, of several scales, are taught, on features of the pictures. Codes that nobody uses start again at what a
map was to bring, with a chance that grows with its square.
"""

import argparse
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visspec.api.train_vq import PATIENCE, RESTARTS, quantise
from visspec.models.codecs.vq_layout import conv_to_linear, stock_rules
from visspec.models.published_tensors import rename
from visspec.models.scales.multiscale import MultiScaleShape, MultiScaleVAE, ScaleSizes
from visspec.models.var.layout import load_var_vae, save_vae
from visspec.toys.recipes import animals
from visspec.toys.recipes.any_order_painter import included_vq
from visspec.toys.recipes.painter_score import to_uint8
from visspec.toys.recipes.recipe import Coder, TrainingStage

SIDES = (1, 2, 3, 4, 5, 6, 7, 8)  # of the maps
SCALES = ScaleSizes.square(*SIDES)
FIRST = 1 << 28  # number of the first pair
BATCH = 32
SEED = 7
CODES = 256
LENGTH = 2.42  # median length of what the painter's encoder says of a place; the decoder reads unit vectors
RATE = 1e-2


@torch.no_grad()
def multi_scale_of(codes: int = CODES) -> MultiScaleVAE:
    """`painter-emoji`'s VQ model as VAR's autoencoder, with a fresh quantiser. Its 1 x 1 convolutions around the codes
    are folded into the 3 x 3 ones beside them; at the border that one's bias counts where the stock model has none.
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
    taming = {
        level_name(name, levels): tensor
        for name, tensor in (tensors | folded).items()
        if name.startswith(("encoder.", "decoder."))
    }
    named = {name: conv_to_linear(name, tensor) for name, (_, tensor) in rename(taming, stock_rules(levels)).items()}
    model = MultiScaleVAE(shape).eval()
    for conv in (model.quant_conv, model.post_quant_conv):
        be_identity(conv)
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(("encoder", "decoder"))}
    model.load_state_dict(named | own)
    for smooth in (part for part in model.quantize.quant_resi.modules() if isinstance(part, torch.nn.Conv2d)):
        be_identity(smooth)
    return model.requires_grad_(False)


def level_name(name: str, levels: int) -> str:
    """A tensor's name where the decoder's levels are numbered from the finest."""
    part = name.split(".")
    if part[:2] != ["decoder", "up"]:
        return name
    return ".".join([*part[:2], str(levels - 1 - int(part[2])), *part[3:]])


def be_identity(conv: torch.nn.Conv2d) -> None:
    """Weights that change nothing."""
    torch.nn.init.dirac_(conv.weight)
    torch.nn.init.zeros_(conv.bias)  # type: ignore[arg-type]


@torch.no_grad()
def features(model: MultiScaleVAE, pictures: Tensor) -> Tensor:
    """What the encoder says of pictures, (B, c, rows, columns), float16."""
    return model.quant_conv(model.encoder(pictures)).half()


def feature_coders(options: argparse.Namespace) -> dict[Path, Coder]:
    """What makes features.pt: classes (N,) int16, and features."""
    return animals.coders(options, "features.pt", FIRST, "features", partial(features, multi_scale_of()))


class QuantiserStage(TrainingStage):
    """Training of codebook and convolutions of the quantiser on features, all else stays."""

    name, seed, decay = "quantiser.pt", SEED, 0.0
    steps_option, rate_option, rate_share = "vq_steps", None, RATE

    def build(self, options: argparse.Namespace) -> dict:
        self.model, self.data = multi_scale_of(), torch.load(options.out / "features.pt", weights_only=True)
        self.model.quantize.requires_grad_(True)
        self.used = torch.zeros(CODES, dtype=torch.bool)
        return {"model": self.model}

    def loss(self) -> Tensor:
        """Squared distance after each map; codes start again on the way."""
        rng = np.random.default_rng((SEED, self.step, self.rank))
        chosen = torch.from_numpy(rng.integers(len(self.data["classes"]), size=self.options.vq_rows))
        features = self.data["features"][chosen].float()
        _, loss, brought, codes = quantise(self.model.quantize, features, SCALES)
        self.used[codes.flatten()] = True
        if self.step % PATIENCE == 0 and self.step < RESTARTS * self.steps:
            self.restart(brought)
            _, loss, _, _ = quantise(self.model.quantize, features, SCALES)
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

    def figures(self) -> dict:
        """Those of `measure`; the folder is written."""
        save_vae(self.options.out / "vq", self.model, SCALES)
        return measure(self.model, 4 * self.options.every_prompt)


def load_vq(folder: Path) -> MultiScaleVAE:
    """The autoencoder of a recipe's folder."""
    return load_var_vae(folder / "vq").requires_grad_(False)


def code_coders(options: argparse.Namespace) -> dict[Path, Coder]:
    """What makes codes.pt of features.pt: classes (N,) and codes (N, T), int16."""
    codec, data = load_vq(options.out), torch.load(options.out / "features.pt", weights_only=True)

    def codes() -> dict[str, Tensor]:
        parts = [codec.quantize.encode(part.float(), SCALES).short() for part in data["features"].split(64)]
        return {"classes": data["classes"], "codes": torch.cat(parts)}

    return {options.out / "codes.pt": codes}


@torch.no_grad()
def measure(codec: MultiScaleVAE, every: int = 1) -> dict:
    """Right animals of one held-out picture a prompt, and of what is decoded of its features and of its codes, in dB
    too; how many codes they use, by map.
    """
    rows = animals.rows(every)
    true = animals.held_out(rows)
    found = torch.cat([codec.quant_conv(codec.encoder(part)) for part in true.split(BATCH)])
    codes = codec.quantize.encode(found, SCALES)
    bare = torch.cat([codec.decoder(codec.post_quant_conv(part)).clamp(-1, 1) for part in found.split(BATCH)])
    made = torch.cat([codec.decode(part, SCALES) for part in codes.split(BATCH)])
    shown = {"rendered": true, "not_quantised": bare, "decoded": made}
    figures = {name: animals.geneval(to_uint8(part), rows)["images"] for name, part in shown.items()}
    for name in ("not_quantised", "decoded"):
        error = (shown[name] - true).square().mean().item()
        figures[f"{name}_psnr"] = round(10 * math.log10(4 / error), 2)
    return figures | {"codes_used": [len(part.unique()) for part in codes.split(SCALES.sizes, dim=1)]}
