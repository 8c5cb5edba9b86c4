"""The draft sequence of a prompt: its elements, their sources and their layer inputs.

Text token t becomes the element (feature of t, embedding of t + 1). The slots of an image run become `image_latents`
elements at the *original* positions of the run's last slots. Layouts are computed on the host, once per request.

Shapes: B rows, L prompt, T elements (rows are packed to the left, padded on the right), R runs, S slots of a run,
d hidden size, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visspec.models.eagle.config import EagleConfig
from visspec.models.eagle.head import EagleHead


@dataclass(frozen=True)
class PromptLayout:
    """Elements of a batch of prompts. Index tensors are (B, T); 0 at padding."""

    lengths: list[int]  # elements of each row
    token: Tensor  # index t of a text element's feature
    slot: Tensor  # prompt index of the element's position ids
    latent: Tensor  # 1 + index among all latents of the batch, or 0 for text
    image: Tensor  # 1 + index of the last run before the element, or 0
    last_image: Tensor  # (B,) `image` of generated tokens
    runs: list[tuple[int, int, int]]  # (row, start, end) of every image run
    prompt: int  # tokens of the prompts

    def part(self, start: int, size: int) -> PromptLayout:
        """Return at most `size` elements from `start` on."""
        own = {name: getattr(self, name)[:, start : start + size] for name in ("token", "slot", "latent", "image")}
        return replace(self, **own)


def plan(config: EagleConfig, ids_BL: Tensor, attention_BL: Tensor | None) -> PromptLayout:
    """Lay out the elements of prompts, except the last, which needs the first generated token.

    Without latents, image slots have no elements. If `config.images` is "embeddings", `latent` is 1 + the index of the
    slot in the batch.

    Args:
        attention_BL: False at padding.
    """
    image_ids, latents, images, ahead = config.image_ids, config.image_latents, config.images, config.ahead
    ids, real = ids_BL.tolist(), None if attention_BL is None else attention_BL.tolist()
    runs: list[tuple[int, int, int]] = []
    rows, newest = [], []
    for b, row in enumerate(ids):
        entries, start, image = [], None, 0
        for spot, token in enumerate(row[ahead:], start=ahead):
            t = spot - ahead  # the element is built from t and t + 1
            if real is not None and not real[b][t]:
                continue
            if token not in image_ids or images in ("slots", "placeholders"):
                if t + 1 < len(row):
                    entries.append((t, t, 0, image))
            elif images == "embeddings":
                entries.append((t, t, 1 + b * len(row) + spot, 0))
            elif latents:
                start = spot if start is None else start
                if spot + 1 == len(row) or row[spot + 1] not in image_ids:
                    first, count = start - ahead, len(runs)
                    runs.append((b, start, spot + 1))
                    image, start = count + 1, None
                    places = range(t + 1 - latents, t + 1)
                    entries += [(0, max(s, first), 1 + count * latents + q, image) for q, s in enumerate(places)]
        rows.append(entries)
        newest.append(image)
    width = max(map(len, rows), default=0)
    padded = [r + [(0, 0, 0, 0)] * (width - len(r)) for r in rows]
    index = torch.tensor(padded, dtype=torch.long).reshape(len(rows), width, 4)
    token_BT, slot_BT, latent_BT, image_BT = index.unbind(-1)
    lengths, last_image = [len(r) for r in rows], torch.tensor(newest)
    return PromptLayout(lengths, token_BT, slot_BT, latent_BT, image_BT, last_image, runs, len(ids[0]))


def extend(layout: PromptLayout, prompt_length: int, answers: list[int]) -> PromptLayout:
    """Extend a layout by answers of `answers[b]` tokens: text elements from the prompt's last token on.

    The answer's last token has no feature, so the last element starts from the token before it.
    """
    device = layout.token.device
    width = max(n + max(m - 1, 0) for n, m in zip(layout.lengths, answers))
    index = torch.arange(width, device=device)
    start, more = torch.tensor(layout.lengths, device=device), torch.tensor(answers, device=device) - 1
    distance = (index - start[:, None]).clamp(min=0)
    new = (index >= start[:, None]) & (index < (start + more)[:, None])
    step = torch.minimum(distance, (more[:, None] - 1).clamp(min=0)) + prompt_length - 1

    def grown(x: Tensor, value: Tensor | int) -> Tensor:
        return torch.where(new, value, torch.nn.functional.pad(x, (0, width - x.shape[1])))

    lengths = [n + max(m - 1, 0) for n, m in zip(layout.lengths, answers)]
    return replace(
        layout,
        lengths=lengths,
        token=grown(layout.token, step),
        slot=grown(layout.slot, step),
        latent=grown(layout.latent, 0),
        image=grown(layout.image, layout.last_image[:, None]),
    )


def compress(
    head: EagleHead, embeddings_BLd: Tensor, feature_BLd: Tensor, layout: PromptLayout
) -> tuple[Tensor, Tensor]:
    """Return latents (1 + R * latents, d) and global vectors (1 + R, d) of all runs; entry 0 of both is zero.

    FLASH and SpecVLM compress the layer inputs of the slots, and have no global vectors: theirs are zero.
    """
    zero = embeddings_BLd.new_zeros(1 + len(layout.runs), embeddings_BLd.shape[-1])
    if not layout.runs:
        return zero, zero
    row_R1, start_R1, end_R1 = torch.tensor(layout.runs, device=zero.device).T[..., None]
    slot_RS = start_R1 + torch.arange(max(end - start for _, start, end in layout.runs), device=zero.device)
    real_RS, slot_RS = slot_RS < end_R1, torch.minimum(slot_RS, end_R1 - 1)  # shorter runs repeat their last slot
    embed_RSd = embeddings_BLd[row_R1, slot_RS]
    if head.config.images == "latents":
        out = head.imadpt(embed_RSd, real_RS)
        out, zero = out[:, :-1], torch.cat([zero[:1].to(out.dtype), out[:, -1]])
    else:
        feature_RSd, question_Rd = feature_BLd[row_R1, slot_RS - 1], feature_BLd[row_R1[:, 0], layout.prompt - 1]
        out = head.compressor(head.join(embed_RSd, feature_RSd, None), feature_RSd, real_RS, question_Rd)
    return torch.cat([zero[:1].to(out.dtype), out.flatten(0, 1)]), zero


def layer_inputs(
    head: EagleHead, layout: PromptLayout, embed_BTd: Tensor, feature_BTd: Tensor, latents: Tensor, globals_: Tensor
) -> Tensor:
    """Return layer inputs (B, T, d): text joins its (reduced) feature and embedding, latents are used unchanged."""
    device = embed_BTd.device
    text = head.join(embed_BTd, feature_BTd, globals_[layout.image.to(device)])
    if latents.shape[0] == 1:
        return text
    latent = layout.latent.to(device)
    return torch.where((latent > 0)[..., None], latents[latent], text)


def positions_at(positions: Tensor, layout: PromptLayout, rows: int, section: tuple[int, ...]) -> Tensor:
    """Return position ids of the elements, (B, T), or (3, B, T) for a drafter with M-RoPE.

    Args:
        positions: (B, L), or (3 | 4, B, L) where row 0 of four is the plain text position; a single row serves all.
    """
    if positions.dim() == 3:
        positions = positions[-3:] if section else positions[0]
    positions = positions.expand(*positions.shape[:-2], rows, positions.shape[-1])
    index = layout.slot.to(positions.device)
    gathered = positions.gather(-1, index.expand(*positions.shape[:-1], index.shape[-1]))
    return gathered.expand(3, *gathered.shape) if section and gathered.dim() == 2 else gathered
