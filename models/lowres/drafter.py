"""Drafts from a low-resolution model: it generates a small image, and an up-sampler converts it to the target's codes.

The low-resolution model shares the target's codes and prompts (as in MuLo-SD, 2601.05149). It uses plain decoding with
the request's guidance and warp, separate random numbers and without the request's processors. Up-samplers:

    bicubic   the small image in pixels, enlarged, and encoded by the target's own VQ encoder
    latent    every code repeated over the positions that it covers (nearest neighbor in the codes' latent space)
    (folder)  the most likely codes of a trained up-sampler (`models.lowres.upsampler`)

In raster order the codes are point masses, proposed in chains of `window`. `visspec.loop.orders.RejectedRegions`
takes the whole draft at once (`sketch`). B rows, T positions of the image with grammar, S codes of the small image.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.models.drafting import checkpoint as feature_checkpoint
from visspec.models.image_codes.family import EncodedPrompt, Family
from visspec.models.image_codes.target import ImageAR
from visspec.models.layers import same_table
from visspec.models.lowres.upsampler import Upsampler
from visspec.types import FREE, Draft, Drafter, DrafterTraits, Request, Scores, State

UPSAMPLERS = ("bicubic", "latent")


class LowRes(Drafter):
    """Drafts whole images with a low-resolution model and an up-sampler.

    Args:
        family: The low-resolution model.
        target: The family that it drafts for, or None until `attach`.
        window: Codes proposed at a time, in raster order.
        upsample: One of UPSAMPLERS, or the folder of a trained up-sampler.

    Raises:
        ValueError: The up-sampler is unknown or for another codebook, or the model has another codebook or tokenizer or
            a larger grid.
    """

    def __init__(self, family: Family, target: Family | None = None, window: int = 8, upsample: str | Path = "bicubic"):
        if window < 1:
            raise ValueError(f"window: got {window}, expected at least 1.")
        self.family, self.upsample = family, upsample
        self.traits = DrafterTraits(levels=window, whole_images=True)
        self.learned = None if upsample in UPSAMPLERS else load_upsampler(upsample, family)
        self.layout = family.layout()
        self.target: Family | None = None
        if target is not None:
            self.attach(target)

    def attach(self, target: Family) -> None:
        """Pair the drafter with a target; call it again after the target has moved to another device."""
        if self.target is not None and self.target.decoder is not target.decoder:
            raise ValueError("drafter: got a LowRes that drafts for another model, expected one for this model.")
        check_siblings(self.family, target)
        self.target = target

    def start(self, state: State, scores: Scores) -> None:
        fixed, total = state.request.fixed, state.request.max_new_tokens
        codes_BN = self.sketch(state)
        drawn_BT = codes_BN.new_zeros(len(state.rows), total)  # `SafeDrafter` inserts grammar tokens
        free = torch.arange(total) if fixed is None else (fixed[:total] == FREE).nonzero()[:, 0]
        drawn_BT[:, free[-codes_BN.shape[1] :].to(drawn_BT.device)] = codes_BN  # an earlier preview is not drafted
        rows: list[list[int]] = [[] for _ in state.tokens]
        for row, codes in zip(state.rows, drawn_BT.tolist()):
            rows[row] = codes
        state.memory = rows  # drafted codes of all rows of the request, on the host

    def propose(self, state: State, depth: int) -> Draft:
        sketch: list[list[int]] = state.memory
        ahead = [sketch[row][len(state.tokens[row]) :][:depth] for row in state.rows]
        return trees.ragged_draft(state.pending, ahead)

    def sketch(self, state: State) -> Tensor:
        """Draft the codes (B, rows * columns) of the live rows' images, in raster order."""
        request = state.request
        assert request.grid is not None
        return self.upsample_codes(self.small(state), request.grid)

    @torch.inference_mode()
    def small(self, state: State) -> Tensor:
        """Generate codes (B, S) of the small images by plain decoding, with generators derived from each row's."""
        sampling = replace(state.request.sampling, processors=())
        prompt = self._prompt(state, sampling.guidance != 1.0)
        layout = self.layout
        request = Request(prompt, prompt.ids, layout.positions, sampling, grid=layout.grid)
        if bool((layout.fixed != FREE).any()):
            request.fixed = layout.fixed.to(prompt.ids.device)
        if state.noise is not None:
            request.generators = state.noise.child_generators()
        sketch = decode(ImageAR(self.family), None, Exact(), request, FixedLength(1))
        return torch.tensor(sketch.tokens, device=prompt.ids.device)[:, layout.free.to(prompt.ids.device)]

    @torch.inference_mode()
    def upsample_codes(self, small_BS: Tensor, grid: tuple[int, int]) -> Tensor:
        """Convert codes of a small image to codes (B, rows * columns) of a larger grid."""
        rows, columns = self.layout.grid
        if self.learned is not None:
            return self.learned(small_BS.view(-1, rows, columns)).argmax(dim=-1).flatten(1)
        if self.upsample == "latent":
            places = small_BS.view(-1, 1, rows, columns).float()  # ids below 2**24 are exact
            return F.interpolate(places, size=grid, mode="nearest-exact").long().flatten(1)
        pixels = self.family.pixels(small_BS, self.layout)
        size = pixels.shape[2] // rows * grid[0], pixels.shape[3] // columns * grid[1]
        assert self.target is not None
        return self.target.encode(F.interpolate(pixels, size=size, mode="bicubic", antialias=True).clamp(0, 1))

    def _prompt(self, state: State, guided: bool) -> EncodedPrompt:
        """Return the live rows' prompts for the low-resolution model, from the request's texts if any, else its ids."""
        texts, prompt = state.request.media.get("texts"), state.request.inputs
        if texts is not None:
            negatives = state.request.media.get("negatives")
            own = None if negatives is None else [negatives[row] for row in state.rows]
            return self.family.prompt([texts[row] for row in state.rows], guided, self.layout, own)
        if not hasattr(self.family, "from_ids"):
            raise ValueError(f"media: got no 'texts', expected the prompts ({self.family.name} reads no ids).")
        return self.family.from_ids(prompt.ids[state.rows], prompt.attention[state.rows], guided)


def load_upsampler(name: str | Path, family: Family) -> Upsampler:
    """Load the up-sampler of a checkpoint folder, for the family's codebook and on its device."""
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(
            f"upsample: got {str(name)!r}, expected one of {', '.join(UPSAMPLERS)} or a checkpoint folder."
        )

    def check(config) -> None:
        if family.codebook is None or config.codes != len(family.codebook):
            raise ValueError(f"upsample: got an up-sampler of {config.codes} codes, expected the family's codebook.")

    head = feature_checkpoint.read(folder, Upsampler, check)
    assert family.codebook is not None
    return head.to(family.codebook.device).eval()


def check_siblings(family: Family, target: Family) -> None:
    """Raise ValueError if the low-resolution model's codes or prompts differ from the target's."""
    own, other = family.codebook, target.codebook
    if own is None or other is None:
        raise ValueError("family: got a model without a codebook, expected one that shares the target's.")
    if not same_table(own, other, 1e-4):
        raise ValueError(f"family: got a sibling with another codebook, expected the target's {len(other)} codes.")
    ours, theirs = (_vocabulary(f) for f in (family, target))
    if ours != theirs:
        raise ValueError("family: got a sibling with another tokenizer, expected that of the target.")
    small, large = family.layout().grid, target.layout().grid
    if small[0] > large[0] or small[1] > large[1]:
        raise ValueError(f"family: got a sibling with a grid of {small}, expected at most the target's {large}.")


def _vocabulary(family: Family) -> Any:
    """Return what must be equal for compatible prompts: the tokenizer's vocabulary, or else the number of ids."""
    processor = getattr(family, "processor", None)
    tokenizer = getattr(processor, "tokenizer", processor)
    words = tokenizer.get_vocab() if tokenizer is not None and hasattr(tokenizer, "get_vocab") else None
    embedding = getattr(family.decoder, "get_input_embeddings", lambda: None)()  # class-conditional models have none
    return (
        words,
        getattr(embedding, "num_embeddings", None),
        getattr(family, "keeps", None),
        getattr(family, "pad", None),
    )
