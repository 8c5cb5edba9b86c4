"""The feature drafter (EAGLE-type): drafts on the target's hidden states, with its embeddings and its LM head.

ViSpec form (arXiv 2509.15235): images reach it as learned latents and a global vector, see `nets/feature_head.py`.
As the network has one layer, only the *last* element of a catch-up needs attention and MLP: of all others the keys and
values suffice. So one pass reads the true features of everything accepted since the last round and gives the first
level's law; each further level is one element a row.

Shapes: B rows, T elements, N elements of all rows, d hidden size, F features, V vocabulary, W width of a tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visspec import tree as trees
from visspec.models.drafters import feature_checkpoint as checkpoint
from visspec.models.drafters import feature_layout as layouts
from visspec.models.drafters.feature_memory import Memory
from visspec.models.nets.feature_head import (
    FeatureHead,
    Folded,
    HeadConfig,
    rotate,
    rotations,
    rotations_at,
    staggered,
    unit,
)
from visspec.models.targets.hf_decoder import CONTENT_IDS
from visspec.sampling import propose, warp
from visspec.types import Draft, Outcome, Scores, State, Verdict

FOLD_LIMIT = 1 << 26  # numbers in the folded embedding table; above it embeddings are looked up and multiplied


class FeatureDrafter:
    """A drafter around a `FeatureHead`, for one loaded target.

    width 1 drafts chains; above it, trees of at most `nodes` nodes grown best first. images=False drafts blind: image
    latents and global vectors are left out (the vision off-switch of the evaluation). Raises ValueError when the
    network was made for another target.
    """

    def __init__(self, head: FeatureHead, model: nn.Module, *, width: int = 1, nodes: int = 24, images: bool = True):
        config = head.config
        checkpoint.check_target(config, model)
        if width < 1 or nodes < 1:
            raise ValueError(f"width, nodes: got {width}, {nodes}, expected at least 1 each")
        self.head, self.config, self.model = head.to(model.device), config, model
        self.width, self.nodes, self.images = width, nodes, images and config.image_latents > 0
        self.feature_layers, self.levels = config.feature_layers, config.levels
        self.needs = frozenset({"features", "embeddings"} if self.images else {"features"})
        self.embed = model.get_input_embeddings()
        self.lm_head = model.get_output_embeddings()
        self._turns = rotations(256, config.head_size, config.rope_theta, model.device)
        self.refresh()

    @classmethod
    def for_model(cls, model: nn.Module, *, seed: int = 0, **options: Any) -> FeatureDrafter:
        """A fresh, untrained drafter for a target. `options` are fields of HeadConfig."""
        torch.manual_seed(seed)
        return cls(FeatureHead(config_for(model, **options)), model)

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: nn.Module, **options: Any) -> FeatureDrafter:
        """Load a checkpoint folder for its target, strictly; `options` as in the constructor."""
        return cls(checkpoint.read(folder, model), model, **options)

    def save_pretrained(self, folder: str | Path, provenance: dict[str, Any], dtype: torch.dtype | None = None) -> None:
        """Write model.safetensors (stored as `dtype`), config.json and provenance.json."""
        checkpoint.write(folder, self.head, provenance, dtype)

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold the network's present weights for drafting: to be called after they change."""
        table, (vocab, d) = None, self.embed.weight.shape
        if vocab * d <= FOLD_LIMIT:
            table = self.embed(torch.arange(vocab, device=self.embed.weight.device))
        self.fold = Folded.of(self.head, table, self.model.dtype)

    def start(self, state: State, scores: Scores) -> None:
        """Read the prompt: keys and values of all its elements but the last, which waits for the pending token."""
        rows = state.rows
        prompt = state.request.prompt[rows]
        features_BLF = scores.features[rows]
        attention = scores.aux.get("attention")
        real = None if attention is None else attention[rows].tolist()
        shown = frozenset(self.config.image_ids)
        latents = self.config.image_latents if self.images else 0
        layout = layouts.plan(prompt.tolist(), real, shown, latents)
        embeddings = scores.aux["embeddings"][rows] if self.images else features_BLF[..., : self.config.hidden]
        positions = scores.aux["positions"]
        if positions.shape[-2] > len(rows):
            positions = positions[..., rows, :]
        x_BTd, turn_BTC, globals_ = self.elements(layout, prompt, features_BLF, embeddings, positions)
        _, key, value = self.head.project(x_BTd, turn_BTC)
        memory = Memory(self.config.heads, [p - 1 for p in state.position.tolist()])
        memory.write_prompt(torch.cat([key, value], dim=2).to(self.fold.qkv.dtype), layout.lengths)
        if self.images and layout.runs:
            memory.shift = globals_[layout.last_image.to(globals_.device)].to(self.fold.qkv.dtype) @ self.fold.image_in
        memory.add(state.pending[:, None], features_BLF[:, -1:], [1] * len(rows))
        state.memory = memory

    def _turns_to(self, length: int) -> None:
        if self._turns.shape[0] < length:
            size, theta = self.config.head_size, self.config.rope_theta
            self._turns = rotations(2 * length, size, theta, self._turns.device)

    def elements(
        self, layout: layouts.Layout, ids_BL: Tensor, features_BLF: Tensor, embeddings_BLd: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Layer inputs (B, T, d) and rotations (B, T, C) of a layout's elements, and the runs' global vectors."""
        head, last, dtype = self.head, self.embed.weight.shape[0] - 1, self.head.fc.weight.dtype
        following = ids_BL[:, 1:].clamp(max=last)
        embed = self.embed(layouts.pick(following, layout.token.clamp(max=following.shape[1] - 1))).to(dtype)
        feature = head.reduced(layouts.pick(features_BLF, layout.token).to(dtype))
        latents, globals_ = layouts.compress(head, embeddings_BLd.to(dtype), layout)
        x_BTd = layouts.layer_inputs(head, layout, embed, feature, latents, globals_)
        section = self.config.mrope_section
        position = layouts.positions_at(positions, layout, ids_BL.shape[0], section)
        self._turns_to(int(position.max()) + 1 if position.numel() else 1)
        return x_BTd, rotations_at(self._turns, position, section), globals_

    def propose(self, state: State, depth: int) -> Draft:
        """A chain of `depth` levels, or with width above 1 a tree. Coupled to the noise of the positions it drafts."""
        memory: Memory = state.memory
        feature_Bd = self._catch_up(memory, depth)
        if self.width > 1:
            return self._tree(state, memory, feature_Bd, depth)
        tokens, laws = [], []
        for level in range(depth):
            token_B, law = propose(self._logits(feature_Bd), state, level)
            tokens.append(token_B)
            laws.append(law)
            if level + 1 < depth:
                x_Bd = self._join(token_B, feature_Bd, memory.shift)
                feature_Bd = self._level(memory, x_Bd, level)
        q = None if laws[0] is None else torch.stack([torch.zeros_like(laws[0]), *laws], dim=1)
        return trees.chain_draft(state.pending, torch.stack(tokens, dim=1), q)

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Keep the true features of the accepted nodes; they are read at the next proposal."""
        counts = [len(path) for path in outcome.path]
        width = max(counts)
        if draft.tree.chain and len(counts) == 1:
            features = scores.features[:, :width]
            tokens = torch.cat([draft.tokens[:, 1:width], verdict.next[:, None]], dim=1)
        else:
            path = verdict.path[:, :width].clamp(min=0)
            features = layouts.pick(scores.features, path)
            shifted = torch.cat([path[:, 1:], path[:, -1:]], dim=1)
            tokens = draft.tokens.gather(1, shifted).scatter(1, verdict.length[:, None] - 1, verdict.next[:, None])
        state.memory.add(tokens, features, counts)

    def select(self, state: State, keep: list[int]) -> None:
        state.memory.select(keep)

    def _logits(self, feature: Tensor) -> Tensor:
        weight = self.lm_head.weight
        return F.linear(feature.to(weight.dtype), weight, self.lm_head.bias)

    def _join(self, token: Tensor, feature: Tensor, shift: Tensor | None) -> Tensor:
        """Layer inputs (N, d) of text elements: fc([embedding; feature]) and what the image adds, (1|N, d)."""
        fold = self.fold
        if fold.table is not None:
            base = fold.table[token]
        else:
            base = torch.addmm(fold.bias, unit(self.embed(token)), fold.embed_in)
        return torch.addmm(base if shift is None else base + shift, feature, fold.feature_in)

    def _catch_up(self, memory: Memory, depth: int) -> Tensor:
        """Read the elements that wait, and predict the feature after each row's pending token, (B, d)."""
        token_BT, feature_BTF, counts = memory.take()
        rows, width = token_BT.shape
        memory.reserve(memory.end + width + depth * self.width)
        self._turns_to(max(memory.positions) + width + depth)
        if self.config.reduced:
            feature_BTF = self.head.reduced(feature_BTF.to(self.head.fc.weight.dtype))
        feature = feature_BTF.to(self.fold.qkv.dtype).flatten(0, 1)
        shift = memory.shift
        if shift is not None and rows > 1 and width > 1:
            shift = shift.repeat_interleave(width, dim=0)
        x_Nd = self._join(token_BT.flatten(), feature, shift)
        qkv = self._project(x_Nd, rows, width, memory.turns(self._turns, width))
        heads = self.config.heads
        memory.write(qkv[:, :, heads:])
        memory.advance(counts)
        if min(counts) == width:
            x_Bd, query = x_Nd.view(rows, width, -1)[:, -1], qkv[:, -1, :heads]
        else:
            row, last = torch.arange(rows, device=x_Nd.device), torch.tensor(counts, device=x_Nd.device) - 1
            x_Bd, query = x_Nd.view(rows, width, -1)[row, last], qkv[row, last, :heads]
        return self._finish(x_Bd, memory.attend(query, 0))

    def _project(self, x_Nd: Tensor, rows: int, width: int, turn_BTC: Tensor) -> Tensor:
        """Rotated queries, rotated keys, and values of a block of elements, (B, T, 3H, E)."""
        heads, size = self.config.heads, self.config.head_size
        qkv = torch.mm(_unit(x_Nd), self.fold.qkv).view(rows, width, 3 * heads, size)
        turned = qkv[:, :, : 2 * heads]
        if qkv.dtype == torch.float32:  # in place: two calls less, each as dear as a small matrix product
            torch.view_as_complex(turned.unflatten(-1, (-1, 2))).mul_(turn_BTC[:, :, None])
        else:
            turned.copy_(rotate(turned, turn_BTC))
        return qkv

    def _level(self, memory: Memory, x_Bd: Tensor, level: int) -> Tensor:
        """One element a row, written behind the `level` drafted before it: the predicted feature (B, d)."""
        qkv = self._project(x_Bd, x_Bd.shape[0], 1, memory.turn(self._turns, level)[:, None])
        memory.write(qkv[:, :, self.config.heads :], level)
        return self._finish(x_Bd, memory.attend(qkv[:, 0, : self.config.heads], level + 1))

    def _finish(self, x_Bd: Tensor, attended_Bd: Tensor) -> Tensor:
        fold = self.fold
        x = torch.addmm(x_Bd, attended_Bd, fold.out)
        gate, up = torch.mm(_unit(x), fold.gate_up).chunk(2, dim=-1)
        x = torch.addmm(x, F.silu(gate).mul_(up), fold.down)
        return _unit(x).mul_(fold.norm_out)

    def _tree(self, state: State, memory: Memory, feature_Bd: Tensor, depth: int) -> Draft:
        """Grow a tree best first (EAGLE-2). Under noise a child counts by its law *given* the noise of its position."""
        growing, rows = trees.Growing(state.pending, self.width), feature_Bd.shape[0]
        coupled = state.noise is not None and state.noise.kind == "gumbel"
        window = state.noise.window(depth) if coupled else None
        feature_BWd, seen = feature_Bd[:, None], None
        for level in range(depth):
            law = warp(self._logits(feature_BWd), state.request.sampling)
            if window is not None:
                law = law + window[:, level, None, : law.shape[-1]]
            token_BW, parent_BW = growing.grow(law.log_softmax(dim=-1))
            if level + 1 == depth:
                break
            width = token_BW.shape[1]
            carried = layouts.pick(feature_BWd, parent_BW).flatten(0, 1)
            shift = None if memory.shift is None else memory.shift.repeat_interleave(width, dim=0)
            x_Nd = self._join(token_BW.flatten(), carried, shift)
            eye = torch.eye(width, dtype=torch.bool, device=x_Nd.device).expand(rows, width, width)
            seen = eye if seen is None else torch.cat([layouts.pick(seen, parent_BW), eye], dim=2)
            qkv = self._project(x_Nd, rows, width, memory.turn(self._turns, level)[:, None])
            memory.write(qkv[:, :, self.config.heads :], seen.shape[2] - width)
            attended = memory.attend_tree(qkv[:, :, : self.config.heads], seen)
            feature_BWd = self._finish(x_Nd, attended.flatten(0, 1)).view(rows, width, -1)
        return growing.finish(self.nodes)

    def rollout(self, lesson: Any, steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Self-fed steps over whole answers, for training (`visspec.train.capture.Lesson`).

        Step k sees true features up to k tokens back, and its own predictions from there on. Per step: logits
        (B, T, V), predicted features (B, T, d), and which elements count (B, T) bool. Element t of a row's answer
        predicts the law after answer token t.
        """
        ids, prompt = lesson.ids, lesson.prompt_length
        real = None if lesson.attention is None else lesson.attention.tolist()
        shown = frozenset(self.config.image_ids)
        latents = self.config.image_latents if self.images else 0
        layout = layouts.plan(ids[:, :prompt].tolist(), real, shown, latents)
        layout = layouts.extend(layout, prompt, lesson.lengths)
        features = lesson.features
        embeddings = lesson.embeddings if lesson.embeddings is not None else features[..., : self.config.hidden]
        x, turn, globals_ = self.elements(layout, ids, features, embeddings, lesson.positions)
        first = torch.tensor(layout.lengths, device=ids.device) - torch.tensor(lesson.lengths, device=ids.device) + 1
        answer = first[:, None] + torch.arange(max(lesson.lengths) - 1, device=ids.device)
        count = torch.tensor(lesson.lengths, device=ids.device)[:, None] - 1
        answer = answer.clamp(max=x.shape[1] - 1)
        index = torch.arange(answer.shape[1], device=ids.device)
        following = ids[:, 1:]
        embed = self.embed(layouts.pick(following, layout.token.clamp(max=following.shape[1] - 1))).to(x.dtype)
        image = globals_[layout.image.to(globals_.device)]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        out = []
        for step in range(steps):
            query, key, value = self.head.project(x, turn)
            keys.append(key)
            values.append(value)
            feature = self.head.finish(x, staggered(query, keys, values))
            predicted = layouts.pick(feature, answer)
            out.append((self._logits(predicted), predicted, (index >= step) & (index < count)))
            if step + 1 < steps:
                shifted = torch.cat([torch.zeros_like(feature[:, :1]), feature[:, :-1]], dim=1)
                x = self.head.join(embed, shifted, image)
        return out


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-6)


def config_for(model: nn.Module, **options: Any) -> HeadConfig:
    """The configuration of a drafter for a loaded target: sizes and rotary sections are the target's."""
    text = model.config.get_text_config()
    heads = options.pop("heads", text.num_attention_heads)
    rope = getattr(text, "rope_parameters", None) or {}
    section = tuple(rope.get("mrope_section") or ())
    half = text.hidden_size // heads // 2
    if section and sum(section) != half:  # the target's heads are of another size: same shares, rounded
        total = sum(section)
        shares = [half * n // total for n in section]
        section = (half - sum(shares[1:]), *shares[1:])
    ids = {getattr(c, key, None) for c in (model.config, text) for key in CONTENT_IDS}
    return HeadConfig(
        **{
            "family": model.config.model_type,
            "vocab": model.get_output_embeddings().weight.shape[0],
            "hidden": text.hidden_size,
            "target_layers": text.num_hidden_layers,
            "heads": heads,
            "intermediate": text.intermediate_size,
            "image_ids": tuple(sorted(i for i in ids if isinstance(i, int))),
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
            "mrope_section": section,
            **options,
            **({} if any(isinstance(i, int) for i in ids) else {"image_latents": 0}),  # a text decoder
        }
    )
