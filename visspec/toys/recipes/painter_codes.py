"""Scenes, codes and pictures. For training, the ground and each shape of a scene are coded apart and put together.

The stock encoder's group norms and attention see the whole picture, so that the same patch has other codes in other
pictures: the codes of an empty plain ground alone held three nats each, far more than the prompt says. Coded apart,
every patch means the same wherever it stands, and what is left to predict is the scene.
"""

import torch
import torch.nn.functional as F
from transformers import JanusVQVAE

from visspec.toys.recipes.painter_build import PATCH
from visspec.toys.recipes.painter_data import SIDE, held_out_scenes, pixels
from visspec.toys.recipes.painter_score import summary, to_uint8, verdicts
from visspec.toys.world.scene import Shape, ShapeScene
from visspec.toys.world.suite import suite

WINDOW = 48  # pixels a side of the picture in which a shape is coded


def latents(vq: JanusVQVAE, pictures: torch.Tensor) -> torch.Tensor:
    """Encoder outputs scaled to unit length, float32 (B, rows, columns, embed_dim)."""
    with torch.autocast("cpu", torch.bfloat16, enabled=vq.training):
        raw = vq.quant_conv(vq.encoder(pictures))
    return F.normalize(raw.float().permute(0, 2, 3, 1), dim=-1)


def decoded(vq: JanusVQVAE, codes: torch.Tensor) -> torch.Tensor:
    """Pictures float32 (B, 3, S, S) of unit codes (B, rows, columns, embed_dim), for any grid."""
    with torch.autocast("cpu", torch.bfloat16, enabled=vq.training):
        return vq.decoder(vq.post_quant_conv(codes.permute(0, 3, 1, 2).contiguous())).float()


def nearest(vq: JanusVQVAE, unit: torch.Tensor) -> torch.Tensor:
    """Index of the nearest code, int64, of unit vectors (..., embed_dim)."""
    return (unit @ vq.quantize.embedding.weight.T).argmax(-1)


def inked(true: torch.Tensor) -> torch.Tensor:
    """Where pictures (B, 3, S, S) show a shape: 1.0 or 0.0, (B, 1, S, S).

    Grounds stay within 30 grey levels of the canvas grey and no colour of a shape does.
    """
    return ((true - 0.2).abs().amax(1, keepdim=True) > 0.26).float()


def windowed(shape: Shape, side: int) -> tuple[int, int, ShapeScene]:
    """First row and column (in patches) of a window of WINDOW pixels around a shape, and the scene in that window."""
    most = (side - WINDOW) // PATCH
    row, column = (min(most, max(0, round((at * side - WINDOW / 2) / PATCH))) for at in (shape.y, shape.x))
    x, y = ((at * side - first * PATCH) / WINDOW for at, first in ((shape.x, column), (shape.y, row)))
    return row, column, ShapeScene((Shape(shape.kind, shape.colour, x, y, shape.radius * side / WINDOW),))


def compose(vq: JanusVQVAE, scenes: list[ShapeScene], low: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit latents float32 (B, grid, grid, embed_dim), and bool (B, grid, grid) where they show part of a shape.

    A patch of plain ground is the same everywhere. A patch with parts of two shapes is the larger part's.
    """
    side = SIDE[low]
    grid, window = side // PATCH, WINDOW // PATCH
    textured = [i for i, scene in enumerate(scenes) if scene.ground != "plain"]
    grounds = [ShapeScene(())] + [ShapeScene((), scenes[i].ground, scenes[i].texture_seed) for i in textured]
    cut = [(i, *windowed(shape, side)) for i, scene in enumerate(scenes) for shape in scene.shapes]
    alone = pixels([scene for *_, scene in cut], WINDOW)
    of_ground, of_shape = latents(vq, pixels(grounds, side)), latents(vq, alone)
    plain = F.normalize(of_ground[0].mean((0, 1)), dim=-1)
    out = plain.expand(len(scenes), grid, grid, -1).clone()
    out[textured] = of_ground[1:]
    most = torch.zeros(out.shape[:3])
    share = F.avg_pool2d(inked(alone), PATCH)[:, 0]
    for (i, row, column, _), latent, ink in zip(cut, of_shape, share):
        here = (i, slice(row, row + window), slice(column, column + window))
        larger = ink > most[here]
        out[here] = torch.where(larger[..., None], latent, out[here])
        most[here] = torch.where(larger, ink, most[here])
    return out, most > 0


@torch.no_grad()
def composed(vq: JanusVQVAE, scenes: list[ShapeScene], low: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int64 (B, grid, grid) of scenes, and where they show part of a shape."""
    with torch.autocast("cpu", torch.bfloat16):
        unit, ink = compose(vq, scenes, low)
    return nearest(vq, unit), ink


@torch.no_grad()
def measure(vq: JanusVQVAE, low: bool, every: int = 4) -> dict:
    """GenEval of decoded held-out scenes of the suite's prompts [::every], pixel error, codes in use."""
    was, rows = vq.training, suite()[::every]
    vq.eval()
    scenes = held_out_scenes(rows)
    true, codes = pixels(scenes, SIDE[low]), composed(vq, scenes, low)[0]
    made = torch.cat([decoded(vq, vq.quantize.embedding(part)) for part in codes.split(32)]).clamp(-1, 1)
    vq.train(was)
    law = torch.bincount(codes.flatten(), minlength=len(vq.quantize.embedding.weight)) / codes.numel()
    out = summary(verdicts(to_uint8(made), rows), rows)
    out |= {"grey_levels": round(float((made - true).abs().mean()) * 127.5, 2), "codes": int((law > 0).sum())}
    return out | {"perplexity": round(float(torch.exp(-(law * (law + 1e-12).log()).sum())), 1)}
