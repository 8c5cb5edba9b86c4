"""Stage `draw` of the painter recipe: the text model learns to write the codes of a picture after its prompt, and
throw-away heads are told at every position what it has to know.
"""

import argparse
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import JanusForConditionalGeneration, JanusProcessor

from visspec.toys.recipes.painter_build import (
    build_model,
    build_processor,
    build_tokenizer,
    grid,
    prompt_ids,
    without_words,
)
from visspec.toys.recipes.painter_data import FIRST_SEED
from visspec.toys.recipes.painter_score import score, to_uint8
from visspec.toys.recipes.painter_vq import KINDS, load_vq, read_tokens
from visspec.toys.recipes.recipe import TrainingStage, mixed_precision
from visspec.toys.world.palette import CLASSES, COLOURS, NAMES
from visspec.toys.world.scene import Scene
from visspec.toys.world.suite import NUMBERS, RELATIONS, Metadata, every, make, required_objects, suite

DROPPED = 0.1  # share of rows whose prompt is replaced by padding, for classifier-free guidance
READING_WEIGHT = 0.2  # of the throw-away heads' loss
NEAR_WEIGHT = 2.0  # in the loss, of codes beside shapes that are drawn already
TEXTURE_WEIGHT = 0.3  # of the others in a textured picture
CHOICE_WEIGHT = 4.0  # of what is drawn where a shape begins, given that one does; in units of a code's loss
SHOWN = {"position": 2}  # how often the pairs of a task are shown in an epoch; others once
WRONG_WEIGHT = 0.15  # of telling a prompt from the same with its colours exchanged
BRIEF = 5  # rows of a picture that are read for that; its first shape is begun within them
GUIDANCES = (1.25, 1.5, 2.0, 3.0)
TEMPERATURES = (1.0, 0.7, 0.5)


class ProbeHeads(nn.Module):
    """Throw-away heads: what the prompt asks for and what of it is drawn, told from a middle layer at every position.

    From the codes' loss alone the text model takes very long to look at the prompt at all, and longer to see what is
    still to be drawn: few codes of a picture depend on it. These labels are dense. The slots of a prompt are the first
    and second class and colour, the relation and the number; 0 says that the prompt has none. Of the picture, they are
    whether the first and the second object have been begun, and how many shapes have. A later layer tells both
    together: class and colour of the shape that begins next; 0 where there is none.

    Colours and classes of a prompt would still be drawn in wrong pairs: the first code of a shape shows its colour, and
    its class is decided codes later. So the later layer also tells class and colour of the shape begun last while it is
    new, in its first row and a little more; an early one tells at a prompt's class which colour it goes with; and one
    head of attention is to look at the class of the new shape in the prompt.
    """

    tables: torch.Tensor  # (kinds, words) number of a word among those of a kind, from 1; 0 for others

    def __init__(self, width: int, words: dict[str, int], side: int):
        super().__init__()
        self.span = side + 2  # codes for which a shape is new
        plural = {row["include"][0]["class"]: row["prompt"].split()[-1] for row in every("counting")}
        kinds: list[list[tuple[str, ...]]] = [[(kind, plural[kind]) for kind in CLASSES]]
        kinds += [[(colour,) for colour in COLOURS]]
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
        self.told = nn.Linear(width, 1 + len(COLOURS))
        self.newest = nn.ModuleList(nn.Linear(width, 1 + len(names)) for names in (CLASSES, COLOURS))

    def labels(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """One int64 (B,) a slot of prompts (B, prompt)."""
        found = self.tables[:, ids]
        count = (found > 0).cumsum(-1)
        return [(found[kind] * (count[kind] == which)).sum(-1) for kind, which in self.slots]

    def pairs(self, early: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the colours that stand before classes in prompts (B, prompt); layer (B, prompt, width)."""
        colours = self.tables[1][ids].roll(1, 1) * (self.tables[0][ids] > 0)
        colours = torch.where(colours > 0, colours, -100)
        losses = F.cross_entropy(self.told(early).float().transpose(1, 2), colours, reduction="sum")
        return losses / (colours > 0).sum().clamp_min(1)

    def forward(
        self,
        middle: torch.Tensor,
        later: torch.Tensor,
        looks: torch.Tensor,
        ids: torch.Tensor,
        asked: torch.Tensor,
        begun: torch.Tensor,
    ) -> torch.Tensor:
        """Summed cross-entropy of a picture's labels; layers (B, image tokens, width), looks (B, image tokens,
        prompt), begun as `progress` makes it. Rows not `asked` do not count for what a prompt says.
        """
        said = [label[:, None].expand(middle.shape[:2]) for label in self.labels(ids)]
        early, late = [*self.heads, *self.progress], [*self.following, *self.newest]
        layers = [middle] * len(early) + [later] * len(late)
        total = middle.new_zeros((), dtype=torch.float32)
        count = begun[..., 2]
        new = (count > F.pad(count, (self.span, 0))[:, : count.shape[1]]).float()
        for head, layer, label in zip(early + late, layers, [*said, *begun.unbind(-1)]):
            # how many shapes are begun is told without a prompt, too
            counted = torch.ones_like(asked) if head is self.progress[-1] else asked
            losses = F.cross_entropy(head(layer).float().transpose(1, 2), label, reduction="none")
            where = counted[:, None] * (new if head in self.newest else torch.ones_like(new))
            total = total + (losses * where).sum() / where.sum().clamp_min(1)
        there = (self.tables[0][ids][:, None] == begun[..., 5, None]) & (begun[..., 5, None] > 0)
        where = there.any(-1) * asked[:, None] * new
        losses = -(looks * there).sum(-1).float().clamp_min(1e-6).log()
        total = total + (losses * where).sum() / where.sum().clamp_min(1)
        return total


def progress(metadata: Metadata, scene: Scene, shown: np.ndarray) -> np.ndarray:
    """Before each code, (side^2, 7) int8: whether the prompt's first and second object are begun, how many shapes are,
    class and colour (from 1) of the shape that begins next, 0 for none, and those of the shape begun last.

    A shape begins with its first code that is `shown`, bool (side, side).
    """
    side, starts = len(shown), []
    for s in scene.things:
        top, bottom, left, right = (int((at + r) * side) for at in (s.y, s.x) for r in (-s.radius, s.radius))
        box = np.zeros_like(shown)
        box[top : bottom + 1, left : right + 1] = shown[top : bottom + 1, left : right + 1]
        starts.append(int(box.argmax()))
    first = {shape.kind: start for shape, start in zip(scene.things, starts)}
    place, kinds = np.arange(shown.size), [kind for kind, _ in required_objects(metadata)]
    begun = [place > first[kinds[k]] if k < len(kinds) else np.zeros_like(place) for k in (0, 1)]
    count = sum((place > start).astype(np.int8) for start in starts)
    following, newest = np.zeros((len(place), 2)), np.zeros((len(place), 2))
    order = sorted(
        (start, 1 + CLASSES.index(s.kind), 1 + NAMES.index(s.colour)) for start, s in zip(starts, scene.things)
    )
    for start, *what in reversed(order):
        following[place <= start] = what
    for start, *what in order:
        newest[place > start] = what
    return np.column_stack([*begun, count, following, newest]).astype(np.int8)


def beside(ink: torch.Tensor, side: int) -> torch.Tensor:
    """Codes whose left neighbour or one of the three above shows part of a shape; ink and result bool (B, side^2).

    It depends on earlier codes alone: to weigh codes by what they are themselves would teach another distribution.
    """
    framed = F.pad(ink.view(-1, side, side), (1, 1, 1, 0))
    left, above = framed[:, 1:, :-2], framed[:, :-1]
    return (left | above[..., :-2] | above[..., 1:-1] | above[..., 2:]).flatten(1)


def swap_pairs(metadata: Metadata) -> Metadata:
    """A prompt of two colours and two classes in the other pairs, which no picture of this prompt shows."""
    first, second = metadata["include"]
    return make(metadata["tag"], [first | {"color": second["color"]}, second | {"color": first["color"]}])


class PainterOutput(NamedTuple):
    """What the text model makes of B prompts and their codes."""

    losses: torch.Tensor  # cross-entropy in nats of every code, (B, image tokens)
    logits: torch.Tensor  # (B, image tokens, codes)
    layers: torch.Tensor  # the middle one and one later, (2, B, image tokens, width)
    early: torch.Tensor  # a layer before them, at the prompt, (B, prompt, width)
    looks: torch.Tensor  # where one head of the middle layer looks, shares (B, image tokens, prompt)


def draw_codes(
    model: JanusForConditionalGeneration, ids: torch.Tensor, mask: torch.Tensor, codes: torch.Tensor
) -> PainterOutput:
    """Teacher-forced codes (B, image tokens) after prompts, ids and mask (B, prompt), that are padded on the left.

    The model needs eager attention, which shows its shares and is the faster one here. Positions count from the first
    column, padding included, as in the stock `generate`.
    """
    with mixed_precision():
        written = model.prepare_embeddings_for_image_generation(codes[:, :-1])
        embeds = torch.cat([model.get_input_embeddings()(ids).to(written.dtype), written], 1)
        full = F.pad(mask, (0, codes.shape[1] - 1), value=1)
        out = model.model.language_model(
            inputs_embeds=embeds,
            attention_mask=full,
            use_cache=False,
            output_hidden_states=True,
            output_attentions=True,
        )
        first, depth = ids.shape[1] - 1, len(out.hidden_states)
        layers = torch.stack([out.hidden_states[i][:, first:] for i in (depth // 2, 3 * depth // 4)])
        logits = model.model.generation_head(out.last_hidden_state[:, first:])
    losses = F.cross_entropy(logits.float().transpose(1, 2), codes, reduction="none")
    looks = out.attentions[depth // 2][:, 0, first:, : ids.shape[1]]
    return PainterOutput(losses, logits, layers, out.hidden_states[depth // 4][:, : first + 1], looks)


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


class DrawStage(TrainingStage):
    """Training of everything but the VQ model and the unused understanding tower."""

    name, seed = "draw.pt", 1

    def begin(self, options: argparse.Namespace, low: bool = False, of: str = "shapes") -> None:
        """A fresh painter on the folder's VQ model, with its tokenizer and processor."""
        self.model = build_model(load_vq(options.out, low).state_dict(), low, of=of).train()
        self.model.set_attn_implementation("eager")
        inner = self.model.model
        for part in (inner.vqmodel, inner.vision_model, inner.aligner):
            part.requires_grad_(False).eval()
        self.tokenizer, self.processor = build_tokenizer(of), build_processor(low, of)

    def dropped(self, rows: int) -> torch.Tensor:
        """Which rows (B,) of this step are without their prompts."""
        return torch.from_numpy(np.random.default_rng((2, self.step, self.rank)).random(rows) < DROPPED)

    def output(self, ids: torch.Tensor, codes: torch.Tensor, dropped: torch.Tensor) -> PainterOutput:
        """That of codes after prompts; padding on the left is masked, padding that stands for words is not."""
        words = torch.where(dropped[:, None], without_words(self.tokenizer, ids), ids)
        return draw_codes(self.model, words, (ids != self.tokenizer.pad_token_id).long(), codes)


class PainterStage(DrawStage):
    """That of shapes, with throw-away heads."""

    def build(self, options: argparse.Namespace) -> dict:
        low = options.lowres
        self.name = "draw-lowres.pt" if low else "draw.pt"
        self.begin(options, low)
        self.reading = ProbeHeads(self.model.config.text_config.hidden_size, self.tokenizer.get_vocab(), grid(low))
        if options.start:
            start = torch.load(options.start, weights_only=True)
            mine = {name: value for name, value in self.model.state_dict().items() if ".vqmodel." in name}
            self.model.load_state_dict(start["model"] | mine)
            self.reading.load_state_dict(start["reading"], strict=False)  # an older one has fewer heads
        kinds = {kind: read_tokens(options.out, kind, low, options.first, options.pairs) for kind in KINDS}
        self.data = {name: torch.cat([kind[name] for kind in kinds.values()]) for name in ("ids", "codes", "ink")}
        pairs = [KINDS[kind](FIRST_SEED[kind] + i) for kind, read in kinds.items() for i in read["number"].tolist()]
        self.textured = torch.tensor([scene.ground != "plain" for _, scene in pairs])
        self.every = np.repeat(np.arange(len(pairs)), [SHOWN.get(metadata["tag"], 1) for metadata, _ in pairs])
        self.ground = (self.data["codes"][~self.data["ink"] & ~self.textured[:, None]].long()[:1]).flatten()
        shown = (self.data["ink"] & (self.data["codes"] != self.ground)).view(len(pairs), grid(low), grid(low)).numpy()
        self.begun = torch.from_numpy(np.stack([progress(*each, part) for each, part in zip(pairs, shown)]))

        self.brief, bound = BRIEF * grid(low), len(kinds["tokens"]["ids"])
        early = self.begun[bound:, self.brief - self.reading.span, 2] > 0
        self.bound = bound + early.nonzero().flatten().numpy()
        wrong = [swap_pairs(metadata)["prompt"] for metadata, _ in pairs[bound:]]
        self.wrong = F.pad(prompt_ids(self.tokenizer, wrong), (0, 0, bound, 0))
        return {"model": self.model, "reading": self.reading}

    def bindings(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first codes of a few pictures of two colours: their losses (B, codes), the cross-entropy of telling their
        prompt from the same with its colours exchanged, and that of the labels there.

        Both prompts have the same words, and one code or two of a picture tell them apart: little of the codes' loss.
        """
        rng, rows = np.random.default_rng((3, self.step, self.rank)), max(1, self.options.rows // 2)
        chosen = rng.choice(self.bound, rows)
        ids, codes = self.data["ids"][chosen].long(), self.data["codes"][chosen, : self.brief].long()
        both = torch.cat([ids, self.wrong[chosen]])
        out = draw_codes(self.model, both, (both != self.tokenizer.pad_token_id).long(), torch.cat([codes, codes]))
        own, other = out.losses.chunk(2)
        evidence = (other - own).sum(1)
        self.notes["evidence"] = round(evidence.mean().item(), 2)
        begun = self.begun[chosen, : self.brief].long()
        read = self.reading(*out.layers[:, :rows], out.looks[:rows], ids, torch.ones(rows), begun)
        return own, F.softplus(-evidence).mean(), read

    def rows(self) -> tuple[torch.Tensor, ...]:
        """This worker's ids (B, prompt), codes, ink and progress (B, image tokens), rows textured, without prompt."""
        order = self.every[self.chosen(len(self.every))]
        ids, codes = self.data["ids"][order].long(), self.data["codes"][order].long()
        dropped = self.dropped(len(order))
        return ids, codes, self.data["ink"][order], self.begun[order].long(), self.textured[order], dropped

    def loss(self) -> torch.Tensor:
        """Loss of the next batch: of the codes and, until they are faded, the heads.

        Most codes are ground, and what there is to learn of a texture is small, so it weighs less. Which shape begins
        weighs more, as a choice among shapes: that it begins may not, or too many would.
        """
        full, codes, ink, begun, textured, dropped = self.rows()
        far = torch.where(textured[:, None], TEXTURE_WEIGHT, 1.0)
        near = beside(ink, grid(self.options.lowres))
        weight = torch.where(near, NEAR_WEIGHT, far)
        fade = self.fading(*self.options.fade)  # of the heads, and of telling colours apart
        out = self.output(full, codes, dropped)
        losses = out.losses
        begins = ink & ~near & ~textured[:, None] & (codes != self.ground)
        rivals = out.logits[begins].float().index_fill(1, self.ground, -torch.inf)  # a choice among codes of shapes
        choice = F.cross_entropy(rivals, codes[begins], reduction="sum")
        self.notes["ink"] = round(losses[ink].mean().item(), 3)
        self.notes["choice"] = round(choice.item() / max(1, int(begins.sum())), 3)
        self.notes["ground"] = round(losses[~ink & ~textured[:, None]].mean().item(), 3)
        total, weights = (losses * weight).sum() + CHOICE_WEIGHT * choice, weight.sum()
        if not fade:
            return total / weights
        with mixed_precision():
            read = self.reading(*out.layers, out.looks, full, (~dropped).float(), begun)
            ids = torch.where(dropped[:, None], without_words(self.tokenizer, full), full)
            read = read + self.reading.pairs(out.early, ids)
            brief, bound, also = self.bindings()
        self.notes["reading"] = round(read.item(), 4)
        total = (total + brief.sum()) / (weights + brief.numel())
        return total + fade * (WRONG_WEIGHT * bound + READING_WEIGHT * (read + also))

    def figures(self) -> dict:
        rows = suite()[:: 4 * self.options.every_prompt]
        return score(partial(draw, self.model, self.processor, seed=0), rows, guidance=GUIDANCES[1], temperature=1.0)
