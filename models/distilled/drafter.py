"""Distilled decoding as a drafter: a small network that maps the noise of many places to their codes at once.

Distilled Decoding (arXiv 2412.17153) trains a student that maps a whole sequence's noise to the teacher's tokens, with
some error. Here the noise is the Gumbel numbers of each place (`visspec.sampling`), which determine the teacher's
sequence exactly, and the student only drafts: with the rule `exact` the output is always the teacher's for that noise,
and after every verification it drafts again from what is known by then. It only reads tokens, so it needs nothing from
the target but its embeddings.

A draft takes at most `refine` passes of the network over all its places. Before the first, places are blank; each pass
gives every place a distribution given the guesses before it, and the argmax of distribution and noise is the next
guess. On a CPU, where checking is free, this ends early when a guess repeats itself, because further passes would too.

Rules with their own random numbers get separate noise from the drafter, so that drafts are samples of the reported
distributions: a place's distribution only depends on earlier guesses, which do not depend on its own numbers.

Shapes: B rows, P prompt, T elements, S elements of the memory, D depth, V ids, d hidden size of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import Categorical
from visspec.grammar import fixed_ids
from visspec.models.distilled.head import BLANK, GUESSED, KNOWN, DistilledHead
from visspec.models.image_codes.drafting import IMPOSSIBLE, ImageNetworkDrafter, embedding
from visspec.models.image_codes.family import Family
from visspec.sampling import Gumbel, gumbel_given, warp
from visspec.train.batches import Prediction, TrainingBatch
from visspec.types import FREE, Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict

BLANKS, GUESSES = 0.15, 0.2  # shares of training images with missing codes, and with guesses
FADE = 0.9  # factor on a place's weight in the loss per place after the known codes


@dataclass
class DistilledMemory:
    """The state that a request's drafts are computed from."""

    stored: Tensor  # (layers, 2, B, H, S, E) keys and values: of the prompt, then a slot for each code
    prompt: Tensor  # (B, P) bool: prompt elements that are not padding
    noise: Gumbel | None  # the drafter's random numbers, for rules with their own


class DistilledDrafter(ImageNetworkDrafter, Drafter):
    """A drafter around a `DistilledHead`, for one image model (or its `Family`).

    Raises ValueError for other values, or if the network was made for another target.

    Args:
        levels: Places per draft (default: the configuration's).
        refine: Maximum passes of the network per draft.
    """

    head_class = DistilledHead
    borrowed: tuple[nn.Module, ...] = ()

    def __init__(self, head: DistilledHead, target: nn.Module | Family, *, levels: int | None = None, refine: int = 6):
        for name, value in (("levels", levels), ("refine", refine)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1.")
        family = self.subject(target)
        self.check_target(head.config, family)
        self.head, self.config, self.refine = head, head.config, refine
        self.traits = DrafterTraits(levels=levels or self.config.levels, adaptive_depth=False, own_noise=True)
        self.attach(family)

    @classmethod
    def defaults(cls, target: Family, options: dict[str, Any]) -> dict[str, Any]:
        rope = getattr(target.decoder.config, "rope_parameters", None) or {}
        own = getattr(target.model, "generation_config", None)
        return super().defaults(target, options) | {
            "layers": 3,
            "temperature": float(getattr(own, "temperature", None) or 1.0),
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
        }

    @classmethod
    def for_model(cls, target: nn.Module | Family, *, seed: int = 0, **options: object) -> DistilledDrafter:
        """Create an untrained drafter, initialized from layers of the target if their shapes match."""
        family = cls.subject(target)
        drafter = super().for_model(family, seed=seed, **options)
        drafter.head.start_from(family.decoder, family.mlp_head)
        return drafter

    def refresh(self) -> None:
        """Draft with the network's current weights, which need no conversion."""
        self.head.eval()

    def attach(self, target: Family) -> None:
        """Follow a target to its device; the network keeps its own dtype."""
        like = next(target.decoder.parameters())
        self.head.to(like.device)
        self.table = embedding(target, self.config.vocab).weight.float()

    def start(self, state: State, scores: Scores) -> None:
        """Compute keys and values of the prompt."""
        self.check_request(state.request)
        prompt, rows = state.request.inputs, state.rows
        embeds, real_BP = prompt.embeds[rows].to(self.table.dtype), prompt.attention[rows]
        _, stored = self.head(*words(embeds, real_BP, self.head))
        noise = None
        if state.noise is not None and state.noise.samples:
            noise = Gumbel(state.noise.child_generators(), self.config.vocab)
        room = (0, 0, 0, self.config.positions)
        state.memory = DistilledMemory(F.pad(stored, room), real_BP, noise)

    def propose(self, state: State, depth: int) -> Draft:
        depth = min(depth, state.budget - 1)
        if depth < 1:
            return trees.empty_draft(state.pending)
        value_BD, distribution = self._draw(state, depth)
        if distribution is None:
            return trees.chain_draft(state.pending, value_BD)
        p_BDV = distribution.p
        return trees.chain_draft(state.pending, value_BD, Categorical(p=torch.cat([p_BDV[:, :1], p_BDV], dim=1)))

    def _draw(self, state: State, depth: int) -> tuple[Tensor, Categorical | None]:
        """Draw codes of the next places (B, D). For rules that judge draws, also return their distribution."""
        own: DistilledMemory = state.memory
        noise, pending, vocab = own.noise or state.noise, state.pending[:, None], self.config.vocab
        numbers_BDV = 0.0 if noise is None else noise.window(depth)[..., :vocab]
        element_BD, memory, mask = context_elements(own, [len(state.tokens[row]) - 1 for row in state.rows], depth)
        own_BD = None
        if state.request.fixed is not None:
            own_BD = fixed_ids(state, torch.arange(1, depth + 1, device=pending.device)[None])
        value_BD = torch.cat([pending, pending.new_zeros(len(pending), depth - 1)], dim=1)
        kind_BD = torch.full_like(value_BD, BLANK)
        kind_BD[:, 0] = KNOWN
        for number in range(self.refine):
            state.calls["draft_pass"] += 1
            x_BDd, _ = self.head(self.table[value_BD], kind_BD, element_BD, memory, mask)
            logits = F.pad(self.head.logits(x_BDd), (0, vocab - self.config.codes), value=IMPOSSIBLE)
            distribution = Categorical(warp(logits, state.request.sampling))
            drawn_BD = (distribution.logits + numbers_BDV).argmax(dim=-1)
            if own_BD is not None:
                drawn_BD = torch.where(own_BD == FREE, drawn_BD, own_BD)
            before_BD = torch.cat([pending, drawn_BD[:, :-1]], dim=1)
            if number and value_BD.device.type == "cpu" and torch.equal(before_BD, value_BD):
                break
            value_BD, kind_BD[:, 1:] = before_BD, GUESSED
        return drawn_BD, None if own.noise is None else distribution

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Store keys and values of the codes that the target has kept; later slots are masked and overwritten."""
        own: DistilledMemory = state.memory
        count = max(map(len, outcome.path))
        first = [len(state.tokens[row]) - len(committed) - 1 for row, committed in zip(state.rows, outcome.tokens)]
        value_BN, (element_BN, memory, mask) = draft.value[:, :count], context_elements(own, first, count)
        _, fresh = self.head(self.table[value_BN], torch.full_like(value_BN, KNOWN), element_BN, memory, mask)
        slot_BN = own.prompt.shape[1] + element_BN.clamp(max=self.config.positions - 1)
        own.stored.scatter_(4, slot_BN[None, None, :, None, :, None].expand_as(fresh), fresh)
        if own.noise is not None:
            own.noise.advance([len(tokens) for tokens in outcome.tokens])

    def select(self, state: State, keep: list[int]) -> None:
        own: DistilledMemory = state.memory
        own.stored, own.prompt = own.stored[:, :, keep], own.prompt[keep]
        if own.noise is not None:
            own.noise.select(keep)

    def trained_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (..., V) at the temperature of the training data; grammar ids are never drafted."""
        logits = self.head.logits(states) / self.config.temperature
        return F.pad(logits, (0, self.config.vocab - self.config.codes), value=IMPOSSIBLE)

    def rollout(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """Run one training pass over whole images, each known up to a random code.

        Most images have their own codes after it. In a share of them these are missing, as in a draft's first pass, or
        are guesses of one or two passes, as in later ones; their weight fades with the distance from the known codes,
        as does what can be predicted.
        """
        device, code_BT = batch.ids.device, batch.ids[:, batch.prompt_length : -1]
        rows, count = code_BT.shape
        ahead_BT = torch.arange(count, device=device) - torch.randint(count, (rows, 1), device=device)
        share_B = torch.rand(rows, device=device)
        blank_B, faded_B = share_B < BLANKS, share_B < BLANKS + GUESSES
        value_BT, kind_BT = code_BT.clone(), torch.where(ahead_BT > 0, GUESSED, KNOWN)
        missing_BT = torch.where(ahead_BT > 0, BLANK, KNOWN)
        kind_BT[blank_B] = missing_BT[blank_B]
        if len(row_G := (faded_B & ~blank_B).nonzero()[:, 0]):
            value_BT[row_G] = self._guesses(batch, row_G, ahead_BT[row_G], missing_BT[row_G])
        x_BTd = self._pass(batch, slice(None), value_BT, kind_BT)
        weight_BT = torch.where(faded_B[:, None], FADE ** ahead_BT.clamp(min=0), 1.0)
        return [Prediction(x_BTd, weight_BT * (batch.best < self.config.codes))]

    @torch.no_grad()
    def _guesses(self, batch: TrainingBatch, row_G: Tensor, ahead_GT: Tensor, kind_GT: Tensor) -> Tensor:
        """Return codes (G, T) of these rows: the target's as far as they are known, then guesses of one or two passes.

        Guesses use the noise that the target's codes were drawn with. It is not recorded, but sampled again given these
        codes.
        """
        codes_GM, vocab = batch.ids[row_G, batch.prompt_length :], self.config.vocab
        fixed_GT = batch.best[row_G] >= self.config.codes
        logp_GTV = batch.law(batch.states[row_G])[..., :vocab].log_softmax(dim=-1)
        noise_GTV = gumbel_given(logp_GTV, codes_GM[:, 1:])
        value_GT = codes_GM[:, :-1]
        for _ in range(int(torch.randint(1, 3, ()))):
            x_GTd = self._pass(batch, row_G, value_GT, kind_GT)
            drawn_GT = (self.trained_logits(x_GTd, value_GT).float() + noise_GTV).argmax(dim=-1)
            drawn_GT = torch.where(fixed_GT, codes_GM[:, 1:], drawn_GT)
            value_GT = torch.where(ahead_GT > 0, F.pad(drawn_GT[:, :-1], (1, 0)), codes_GM[:, :-1])
            kind_GT = torch.where(ahead_GT > 0, GUESSED, KNOWN)
        return value_GT

    def _pass(self, batch: TrainingBatch, rows: Tensor | slice, value_BT: Tensor, kind_BT: Tensor) -> Tensor:
        """Return states (B, T, d) of codes after the prompts of some rows of a batch."""
        assert batch.embeddings is not None and batch.attention is not None
        count, real_BP = value_BT.shape[1], batch.attention[rows]
        _, memory = self.head(*words(batch.embeddings[rows], real_BP, self.head))
        own_TT = torch.ones(count, count, dtype=torch.bool, device=value_BT.device).tril()
        masks = real_BP[:, None].expand(-1, count, -1), own_TT.expand(len(value_BT), -1, -1)
        element_BT = torch.arange(count, device=value_BT.device).expand_as(value_BT)
        return self.head(self.table[value_BT], kind_BT, element_BT, memory, torch.cat(masks, dim=2))[0]


def words(embeds_BPd: Tensor, real_BP: Tensor, head: DistilledHead) -> tuple[Tensor, ...]:
    """Return the network's arguments for left-padded prompts: inputs (B, P, d), kinds, elements, memory and mask."""
    rows, length = real_BP.shape
    element = torch.arange(-length, 0, device=real_BP.device).expand(rows, -1)
    own_PP = torch.eye(length, dtype=torch.bool, device=real_BP.device)  # padding sees itself
    mask = torch.ones_like(own_PP).tril() & real_BP[:, None] | own_PP
    return embeds_BPd, torch.full_like(element, KNOWN), element, head.empty(rows), mask


def context_elements(own: DistilledMemory, newest: list[int], depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return elements (B, D) from each row's newest code on, the memory up to the longest row, and the mask
    (B, D, S + D) of what elements see in it and of each other: everything before them.
    """
    prompt, device = own.prompt.shape[1], own.prompt.device
    newest_B1 = to_device(newest, device)[:, None]
    reach = min(prompt + max(newest), own.stored.shape[4])  # grammar ids may follow the last row
    memory_BS = torch.cat([own.prompt, torch.arange(reach - prompt, device=device) < newest_B1], dim=1)
    own_DD = torch.ones(depth, depth, dtype=torch.bool, device=device).tril()
    parts = memory_BS[:, None].expand(-1, depth, -1), own_DD.expand(len(memory_BS), -1, -1)
    element_BD = newest_B1 + torch.arange(depth, device=device)
    return element_BD, own.stored[..., :reach, :], torch.cat(parts, dim=2)
