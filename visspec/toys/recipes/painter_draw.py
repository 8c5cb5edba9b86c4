"""Stage 3 of the painter recipe: the text model learns to write the codes of a picture after its prompt."""

import argparse
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import JanusForConditionalGeneration, JanusProcessor

from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.painter_build import build_model, build_processor, build_tokenizer, grid
from visspec.toys.recipes.painter_data import FIRST_SEED
from visspec.toys.recipes.painter_reading import ProbeHeads, progress
from visspec.toys.recipes.painter_score import summary, to_uint8, verdicts
from visspec.toys.recipes.painter_tokens import KINDS, prompt_ids, read_tokens, without_words
from visspec.toys.recipes.painter_vq import load_vq
from visspec.toys.world.suite import Metadata, make, suite
from visspec.train.stages import Stage

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


def beside(ink: torch.Tensor, side: int) -> torch.Tensor:
    """Codes whose left neighbour or one of the three above shows part of a shape; ink and result bool (B, side^2).

    It depends on earlier codes alone: to weigh codes by what they are themselves would teach another distribution.
    """
    framed = F.pad(ink.view(-1, side, side), (1, 1, 1, 0))
    left, above = framed[:, 1:, :-2], framed[:, :-1]
    return (left | above[..., :-2] | above[..., 1:-1] | above[..., 2:]).flatten(1)


def exchanged(metadata: Metadata) -> Metadata:
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


def drawn(
    model: JanusForConditionalGeneration, ids: torch.Tensor, mask: torch.Tensor, codes: torch.Tensor
) -> PainterOutput:
    """Teacher-forced codes (B, image tokens) after prompts, ids and mask (B, prompt), that are padded on the left.

    The model needs eager attention, which shows its shares and is the faster one here. Positions count from the first
    column, padding included, as in the stock `generate`.
    """
    with torch.autocast("cpu", torch.bfloat16):
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


def score(model, processor, rows: list[Metadata], guidance: float, seed: int = 0, temperature: float = 1.0) -> dict:
    """GenEval of one picture a prompt, and the seconds it took."""
    begun = time.time()
    pictures = draw(model, processor, [row["prompt"] for row in rows], guidance, seed, temperature)
    record = {"guidance": guidance, "temperature": temperature, **summary(verdicts(pictures, rows), rows)}
    return record | {"seconds": round(time.time() - begun, 1)}


class PainterStage(Stage):
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
        self.reading = ProbeHeads(self.model.config.text_config.hidden_size, self.tokenizer.get_vocab(), grid(low))
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
        kinds = {kind: read_tokens(options.out, kind, low, options.first, options.pairs) for kind in KINDS}
        self.data = {name: torch.cat([kind[name] for kind in kinds.values()]) for name in ("ids", "codes", "ink")}
        pairs = [KINDS[kind](FIRST_SEED[kind] + i) for kind, read in kinds.items() for i in read["number"].tolist()]
        self.textured = torch.tensor([scene.ground != "plain" for _, scene in pairs])
        self.every = np.repeat(np.arange(len(pairs)), [SHOWN.get(metadata["tag"], 1) for metadata, _ in pairs])
        self.plain = self.every[~self.textured.numpy()[self.every]]
        self.ground = (self.data["codes"][~self.data["ink"] & ~self.textured[:, None]].long()[:1]).flatten()
        shown = (self.data["ink"] & (self.data["codes"] != self.ground)).view(len(pairs), grid(low), grid(low)).numpy()
        self.begun = torch.from_numpy(np.stack([progress(*each, part) for each, part in zip(pairs, shown)]))

        self.brief, bound = BRIEF * grid(low), len(kinds["tokens"]["ids"])
        early = self.begun[bound:, self.brief - self.reading.span, 2] > 0
        self.bound = bound + early.nonzero().flatten().numpy()
        wrong = [exchanged(metadata)["prompt"] for metadata, _ in pairs[bound:]]
        self.wrong = F.pad(prompt_ids(self.tokenizer, wrong), (0, 0, bound, 0))

    def fade(self) -> float:
        """What is left of the weight of the throw-away heads and of telling colours apart, 1 to 0."""
        first, last = self.options.fade
        done = self.step / self.steps
        return 0.0 if done >= last else min(1.0, (last - done) / max(last - first, 1e-9))

    def bindings(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first codes of a few pictures of two colours: their losses (B, codes), the cross-entropy of telling their
        prompt from the same with its colours exchanged, and that of the labels there.

        Both prompts have the same words, and one code or two of a picture tell them apart: little of the codes' loss.
        """
        rng, rows = np.random.default_rng((3, self.step, self.rank)), max(1, self.options.rows // 2)
        chosen = rng.choice(self.bound, rows)
        ids, codes = self.data["ids"][chosen].long(), self.data["codes"][chosen, : self.brief].long()
        both = torch.cat([ids, self.wrong[chosen]])
        out = drawn(self.model, both, (both != self.tokenizer.pad_token_id).long(), torch.cat([codes, codes]))
        own, other = out.losses.chunk(2)
        evidence = (other - own).sum(1)
        self.notes["evidence"] = round(evidence.mean().item(), 2)
        begun = self.begun[chosen, : self.brief].long()
        read = self.reading(*out.layers[:, :rows], out.looks[:rows], ids, torch.ones(rows), begun)
        return own, F.softplus(-evidence).mean(), read

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
        """Loss of the next batch: of the codes and, until they are faded, the heads; padding on the left is masked,
        padding that stands for words is not.

        Most codes are ground, and what there is to learn of a texture is small, so it weighs less. Which shape begins
        weighs more, as a choice among shapes: that it begins may not, or too many would.
        """
        full, codes, ink, begun, textured, dropped = self.rows()
        ids = torch.where(dropped[:, None], without_words(self.tokenizer, full), full)
        mask = (full != self.tokenizer.pad_token_id).long()
        far = torch.where(textured[:, None], TEXTURE_WEIGHT, 1.0)
        near = beside(ink, grid(self.options.lowres))
        weight = torch.where(near, NEAR_WEIGHT, far)
        fade = self.fade()
        out = drawn(self.model, ids, mask, codes)
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
        with torch.autocast("cpu", torch.bfloat16):
            read = self.reading(*out.layers, out.looks, full, (~dropped).float(), begun)
            read = read + self.reading.pairs(out.early, ids)
            brief, bound, also = self.bindings()
        self.notes["reading"] = round(read.item(), 4)
        total = (total + brief.sum()) / (weights + brief.numel())
        return total + fade * (WRONG_WEIGHT * bound + READING_WEIGHT * (read + also))

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
