"""Stage 3 of the painter recipe: the text model learns to write the codes of a picture after its prompt."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import JanusForConditionalGeneration, JanusProcessor

from visspec.eval.world.palette import CLASSES, COLOURS
from visspec.eval.world.scene import Scene
from visspec.eval.world.suite import NUMBERS, RELATIONS, Metadata, every, suite, wanted
from visspec.recipes.painter_build import build_model, build_processor, build_tokenizer, grid, save
from visspec.recipes.painter_data import FIRST_SEED, pair
from visspec.recipes.painter_score import summary, to_uint8, verdicts
from visspec.recipes.painter_tokens import read_tokens, without_words
from visspec.recipes.painter_train import Stage
from visspec.recipes.painter_vq import load_vq

DROPPED = 0.1  # share of rows whose prompt is replaced by padding, for classifier-free guidance
READING_WEIGHT = 0.1  # of the throw-away heads' loss
FADE = (0.6, 0.85)  # shares of the steps between which that weight falls to 0
NEAR_WEIGHT = 2.0  # in the loss, of codes beside shapes that are drawn already
TEXTURE_WEIGHT = 0.3  # of the others in a textured picture
CHOICE_WEIGHT = 4.0  # of what is drawn where a shape begins, given that one does; in units of a code's loss
HARD = ("position", "color_attr")  # tasks whose pairs are shown twice as often
HUES = tuple(COLOURS)
GUIDANCES = (1.5, 2.0, 2.5, 3.0)
TEMPERATURES = (1.0, 0.7, 0.5)


class Reading(nn.Module):
    """Throw-away heads: what the prompt asks for and what of it is drawn, told from a middle layer at every position.

    From the codes' loss alone the text model takes very long to look at the prompt at all, and longer to see what is
    still to be drawn: few codes of a picture depend on it. These labels are dense. The slots of a prompt are the first
    and second class and colour, the relation and the number; 0 says that the prompt has none. Of the picture, they are
    whether the first and the second object have been begun, and how many shapes have. A later layer tells both
    together: class and colour of the shape that begins next, and of the one begun last; 0 where there is none. Without
    the last, colours and classes of a prompt are drawn, but in wrong pairs: the first code of a shape shows its colour,
    and its class is decided codes later.
    """

    def __init__(self, width: int, words: dict[str, int]):
        super().__init__()
        plural = {row["include"][0]["class"]: row["prompt"].split()[-1] for row in every("counting")}
        kinds = [[(kind, plural[kind]) for kind in CLASSES], [(colour,) for colour in COLOURS]]
        kinds += [[(relation.split()[0],) for relation in RELATIONS], [(number,) for number in NUMBERS.values()]]
        tables = torch.zeros(len(kinds), len(words), dtype=torch.long)
        for table, names in zip(tables, kinds):
            for i, synonyms in enumerate(names):
                table[[words[word] for word in synonyms]] = i + 1
        self.register_buffer("tables", tables, persistent=False)
        self.slots = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (3, 1)]  # (kind, which occurrence)
        self.heads = nn.ModuleList(nn.Linear(width, len(kinds[kind]) + 1) for kind, _ in self.slots)
        self.progress = nn.ModuleList(nn.Linear(width, n) for n in (2, 2, 1 + max(NUMBERS)))
        self.following = nn.ModuleList(nn.Linear(width, 1 + len(names)) for names in (CLASSES, COLOURS))
        self.newest = nn.ModuleList(nn.Linear(width, 1 + len(names)) for names in (CLASSES, COLOURS))

    def labels(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """One int64 (B,) a slot of prompts (B, prompt)."""
        found = self.tables[:, ids]
        count = (found > 0).cumsum(-1)
        return [(found[kind] * (count[kind] == which)).sum(-1) for kind, which in self.slots]

    def forward(
        self, middle: torch.Tensor, later: torch.Tensor, ids: torch.Tensor, asked: torch.Tensor, begun: torch.Tensor
    ) -> torch.Tensor:
        """Summed cross-entropy of all labels; layers (B, image tokens, width), begun as `progress` makes it. Rows not
        `asked` do not count for what a prompt says.
        """
        said = [label[:, None].expand(middle.shape[:2]) for label in self.labels(ids)]
        early, late = [*self.heads, *self.progress], [*self.following, *self.newest]
        layers = [middle] * len(early) + [later] * len(late)
        total = middle.new_zeros((), dtype=torch.float32)
        for head, layer, label in zip(early + late, layers, [*said, *begun.unbind(-1)]):
            # how many shapes are begun is told without a prompt, too
            counted = torch.ones_like(asked) if head is self.progress[-1] else asked
            losses = F.cross_entropy(head(layer).float().transpose(1, 2), label, reduction="none")
            total = total + (losses.mean(1) * counted).sum() / counted.sum().clamp_min(1)
        return total


def progress(metadata: Metadata, scene: Scene, side: int) -> np.ndarray:
    """Before each code, (side^2, 7) int8: whether the prompt's first and second object are begun, how many shapes are,
    class and colour (from 1) of the shape that begins next, 0 for none, and those of the shape begun last.

    A shape begins about where its topmost point is, a square at its corner.
    """
    left = [shape.x - (0.8 if shape.kind == "square" else 0.2) * shape.radius for shape in scene.shapes]
    starts = [int((s.y - 0.95 * s.radius) * side) * side + int(x * side) for s, x in zip(scene.shapes, left)]
    first = {shape.kind: start for shape, start in zip(scene.shapes, starts)}
    place, kinds = np.arange(side * side), [kind for kind, _ in wanted(metadata)]
    begun = [place > first[kinds[k]] if k < len(kinds) else np.zeros_like(place) for k in (0, 1)]
    count = sum((place > start).astype(np.int8) for start in starts)
    following, newest = np.zeros((len(place), 2)), np.zeros((len(place), 2))
    order = sorted(
        (start, 1 + CLASSES.index(s.kind), 1 + HUES.index(s.colour)) for start, s in zip(starts, scene.shapes)
    )
    for start, *what in reversed(order):
        following[place <= start] = what
    for start, *what in order:
        newest[place > start] = what
    return np.column_stack([*begun, count, following, newest]).astype(np.int8)


def beside(ink: torch.Tensor, side: int) -> torch.Tensor:
    """Codes whose left neighbour or one of the three above shows part of a shape; ink and result bool (B, side^2).

    It depends on earlier codes alone: to weigh codes by what they are themselves would teach another law.
    """
    framed = F.pad(ink.view(-1, side, side), (1, 1, 1, 0))
    left, above = framed[:, 1:, :-2], framed[:, :-1]
    return (left | above[..., :-2] | above[..., 1:-1] | above[..., 2:]).flatten(1)


def draw_loss(
    model: JanusForConditionalGeneration, ids: torch.Tensor, mask: torch.Tensor, codes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy in nats of every code, (B, image tokens), the logits (B, image tokens, codes) and two layers there,
    the middle one and one later, (2, B, image tokens, width).

    Prompts, ids and mask (B, prompt), are padded on the left.

    Positions count from the first column, padding included, as in the stock `generate`.
    """
    with torch.autocast("cpu", torch.bfloat16):
        drawn = model.prepare_embeddings_for_image_generation(codes[:, :-1])
        embeds = torch.cat([model.get_input_embeddings()(ids).to(drawn.dtype), drawn], 1)
        full = F.pad(mask, (0, codes.shape[1] - 1), value=1)
        out = model.model.language_model(
            inputs_embeds=embeds, attention_mask=full, use_cache=False, output_hidden_states=True
        )
        first, depth = ids.shape[1] - 1, len(out.hidden_states)
        layers = torch.stack([out.hidden_states[i][:, first:] for i in (depth // 2, 3 * depth // 4)])
        logits = model.model.generation_head(out.last_hidden_state[:, first:])
    losses = F.cross_entropy(logits.float().transpose(1, 2), codes, reduction="none")
    return losses, logits, layers


@torch.no_grad()
def draw(
    model: JanusForConditionalGeneration,
    processor: JanusProcessor,
    prompts: list[str],
    guidance: float,
    seed: int,
    temperature: float = 1.0,
    batch: int = 46,
) -> np.ndarray:
    """Pictures uint8 (B, S, S, 3) sampled with the stock `generate`."""
    torch.manual_seed(seed)
    out = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        inputs = processor(text=part, generation_mode="image", return_tensors="pt", padding=True)
        codes = model.generate(**inputs, generation_mode="image", guidance_scale=guidance, temperature=temperature)
        out.append(to_uint8(model.decode_image_tokens(codes).permute(0, 3, 1, 2)))
    return np.concatenate(out)


def score(model, processor, rows: list[Metadata], guidance: float, seed: int = 0, temperature: float = 1.0) -> dict:
    """GenEval of one picture a prompt, and the seconds it took."""
    begun = time.time()
    pictures = draw(model, processor, [row["prompt"] for row in rows], guidance, seed, temperature)
    record = {"guidance": guidance, "temperature": temperature, **summary(verdicts(pictures, rows), rows)}
    return record | {"seconds": round(time.time() - begun, 1)}


class DrawStage(Stage):
    """Training of everything but the VQ model and the unused understanding tower."""

    def __init__(self, options: argparse.Namespace, rank: int):
        torch.manual_seed(1)
        low = options.lowres
        self.model = build_model(load_vq(options.out, low).state_dict(), low).train()
        self.model.set_attn_implementation("eager")
        inner = self.model.model
        for part in (inner.vqmodel, inner.vision_model, inner.aligner):
            part.requires_grad_(False).eval()
        self.tokenizer = build_tokenizer()
        self.reading = Reading(self.model.config.text_config.hidden_size, self.tokenizer.get_vocab())
        trained = [p for part in (self.model, self.reading) for p in part.parameters() if p.requires_grad]
        parts = {"model": self.model, "reading": self.reading}
        file = "draw-lowres.pt" if low else "draw.pt"
        if options.start:
            start = torch.load(options.start, weights_only=True)
            mine = {name: value for name, value in self.model.state_dict().items() if ".vqmodel." in name}
            self.model.load_state_dict(start["model"] | mine)
            self.reading.load_state_dict(start["reading"], strict=False)  # an older one has fewer heads
        super().__init__(options, rank, file, options.steps, options.rate, trained, 0.05, parts)
        self.processor = build_processor(low)
        self.data = read_tokens(options.out, low)
        first = FIRST_SEED["tokens"]
        pairs = [pair(first + i) for i in range(len(self.data["ids"]))]
        self.begun = torch.from_numpy(np.stack([progress(*each, grid(low)) for each in pairs]))
        self.textured = torch.tensor([scene.ground != "plain" for _, scene in pairs])
        hard = np.array([metadata["tag"] in HARD for metadata, _ in pairs])
        self.every = np.repeat(np.arange(len(pairs)), 1 + hard)
        self.plain = self.every[~self.textured.numpy()[self.every]]
        self.ground = (self.data["codes"][~self.data["ink"] & ~self.textured[:, None]].long()[:1]).flatten()

    def rows(self) -> tuple[torch.Tensor, ...]:
        """This worker's ids (B, prompt), codes, ink and progress (B, image tokens), rows textured, without prompt."""
        per_step, known = self.options.rows * self.workers, self.every
        if self.step < self.options.plain_until * self.steps:
            known = self.plain  # without the noise of grounds the codes' loss is about shapes
        epoch, step = divmod(self.step, len(known) // per_step)
        order = known[np.random.default_rng(epoch).permutation(len(known))[step * per_step :][:per_step]]
        order = order[self.rank :: self.workers]
        ids, codes = self.data["ids"][order].long(), self.data["codes"][order].long()
        dropped = torch.from_numpy(np.random.default_rng((2, self.step, self.rank)).random(len(order)) < DROPPED)
        return ids, codes, self.data["ink"][order], self.begun[order].long(), self.textured[order], dropped

    def loss(self) -> torch.Tensor:
        """Loss of the next batch; padding on the left is masked, padding that stands for words is not.

        Most codes are ground, and what there is to learn of a texture is small, so it weighs less. Which shape begins
        weighs more, as a choice among shapes: that it begins may not, or too many would.
        """
        full, codes, ink, begun, textured, dropped = self.rows()
        ids = torch.where(dropped[:, None], without_words(self.tokenizer, full), full)
        mask = (full != self.tokenizer.pad_token_id).long()
        fade = min(1.0, max(0.0, (FADE[1] - self.step / self.steps) / (FADE[1] - FADE[0])))
        far = torch.where(textured[:, None], TEXTURE_WEIGHT, 1.0)
        near = beside(ink, grid(self.options.lowres))
        weight = torch.where(near, NEAR_WEIGHT, far)
        losses, logits, layers = draw_loss(self.model, ids, mask, codes)
        begins = ink & ~near & ~textured[:, None] & (codes != self.ground)
        rivals = logits[begins].float().index_fill(1, self.ground, -torch.inf)  # a choice among codes of shapes
        choice = F.cross_entropy(rivals, codes[begins], reduction="sum")
        with torch.autocast("cpu", torch.bfloat16):
            read = self.reading(*layers, full, (~dropped).float(), begun)
        self.notes = {"reading": round(read.item(), 4), "ink": round(losses[ink].mean().item(), 3)}
        self.notes["choice"] = round(choice.item() / max(1, int(begins.sum())), 3)
        self.notes["ground"] = round(losses[~ink & ~textured[:, None]].mean().item(), 3)
        drawn = (losses * weight).sum() + CHOICE_WEIGHT * choice
        return drawn / weight.sum() + READING_WEIGHT * fade * read

    def report(self) -> dict:
        """GenEval on a quarter of the suite; workers share the guidances. The first refreshes the early folder."""
        self.model.eval()
        mine = GUIDANCES[self.rank :: self.workers] if self.options.sweep else GUIDANCES[1:][self.rank : self.rank + 1]
        scores = [
            score(self.model, self.processor, suite()[:: 4 * self.options.every_prompt], guidance) for guidance in mine
        ]
        self.model.train()
        if self.rank == 0 and self.options.early:
            save(self.model, self.processor, self.options.early, torch.float16)
        return {"scores": scores}
