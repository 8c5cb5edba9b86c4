"""Forward passes of published drafters over one whole sequence, written from their descriptions: no cache, no drafter.

A drafter's configuration (`EagleConfig`) says which description; weights are a checkpoint's, by their published names
(those of `midlayer.` as `layers.0.`). Shapes: L tokens of which the last has no feature, T elements, d hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import visspec
from tests.tiny import prompt, shapes, single_row
from visspec.api.training.drafter import request_of
from visspec.loop.decode import apply_verdict, open_request, retire
from visspec.models.decoder.target import HFDecoder

NEW = 14  # tokens that are asked for


def judged(target, drafter, rule, state, draft) -> None:
    """One round of a loop by hand, with this draft; rows stay, also those that are done."""
    scores = target.verify(state, draft)
    verdict = rule(draft, scores, state.noise)
    outcome = apply_verdict(state, draft, scores, verdict)
    target.commit(state, draft, outcome)
    drafter.observe(state, draft, scores, verdict, outcome)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class Weights(dict):
    """A state dict that applies its layers by name."""

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return norm(x, self[f"{name}.weight"], eps)


def rotated(x_THE: Tensor, angle_TC: Tensor, factor: float = 1.0) -> Tensor:
    """The first 2 C channels turned, the others as they are."""
    a, b, rest = x_THE.tensor_split((angle_TC.shape[1], 2 * angle_TC.shape[1]), dim=-1)
    cos, sin = factor * angle_TC.cos()[:, None], factor * angle_TC.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def turning(head_size: int, theta: float, scaling: dict | None = None, share: float = 1.0) -> tuple[Tensor, float]:
    """(angles per position, factor of what is turned) of a share of a head's channels; scaled, transformers' own."""
    if scaling:
        given = {"rope_theta": theta, "partial_rotary_factor": share, **scaling}
        rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_size, rope_parameters=given))
        return rotary.inv_freq, rotary.attention_scaling
    half = int(head_size * share) // 2
    return theta ** -(torch.arange(half) / half), 1.0


def attended(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Grouped attention of (T, H, E) to (S, K, E), seen (T, S): (T, H * E)."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    score = torch.einsum("the,she->hts", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("hts,she->the", score.masked_fill(~seen, float("-inf")).softmax(-1), value).flatten(1)


def layer(config, weights: Weights, x: Tensor, places: Tensor) -> Tensor:
    """One Llama layer: (T, d). places: (T, 3) positions."""
    named = "layers.0."
    read, rest = x, x
    if config.fusion == "cross":
        rest, _ = x.chunk(2, dim=-1)
        read = weights.norm(rest, named + "input_layernorm", config.eps)
    if config.fusion == "split":
        embedding, rest = x.chunk(2, dim=-1)
        hidden = weights.norm(rest, named + "hidden_norm", config.eps)
        read = torch.cat([weights.norm(embedding, named + "input_layernorm", config.eps), hidden], dim=-1)
        rest = hidden if config.norm_before_residual else rest
    if config.norm_input:
        read = weights.norm(x, named + "input_layernorm", config.eps)
    query, key, value = (
        weights.linear(read, f"{named}self_attn.{p}_proj").unflatten(-1, (-1, config.head_size)) for p in "qkv"
    )
    if config.qk_norm:
        query, key = (weights.norm(x, f"{named}self_attn.{p}_norm", config.eps) for x, p in ((query, "q"), (key, "k")))
    frequency, factor = turning(config.head_size, config.rope_theta, config.rope_scaling, config.partial_rotary_factor)
    half = len(frequency)
    section = config.mrope_section or (half, 0, 0)
    row = [r for r, n in enumerate(section) for _ in range(n)]
    if config.mrope_interleaved:  # time, height, width, time, ...; time alone behind the channels of the others
        row = [c % 3 if c // 3 < section[c % 3] else 0 for c in range(half)]
    angle = places[:, row].float() * frequency
    before = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    mixed = attended(rotated(query, angle, factor), rotated(key, angle, factor), value, before)
    rest = rest + weights.linear(mixed, f"{named}self_attn.o_proj")
    rest = rest + mlp(weights, named, weights.norm(rest, f"{named}post_attention_layernorm", config.eps))
    return crossed(config, weights, rest, x.chunk(2, dim=-1)[1]) if config.fusion == "cross" else rest


def crossed(config, weights: Weights, x: Tensor, features: Tensor) -> Tensor:
    """DREAM's gated cross-attention of a stream (T, d) to features (T, d), each to those up to its own; and an MLP."""
    read = weights.norm(x, "cross.norm", config.eps)
    query, key, value = (
        weights.linear(y, f"cross.{p}_proj").unflatten(-1, (-1, config.head_size))
        for y, p in ((read, "q"), (features, "k"), (features, "v"))
    )
    query, key = (weights.norm(y, f"cross.{p}_norm", config.eps) for y, p in ((query, "q"), (key, "k")))
    mixed = attended(query, key, value, torch.ones(len(x), len(x), dtype=torch.bool).tril())
    x = x + weights["cross.gate"].tanh() * weights.linear(mixed, "cross.o_proj")
    inside = mlp(weights, "cross.", weights.norm(x, "cross.mlp_norm", config.eps))
    x = x + weights["cross.mlp_gate"].tanh() * inside
    last = {name.replace("cross.last.", "last.mlp."): weight for name, weight in weights.items()}
    x = x + mlp(Weights(last), "last.", weights.norm(x, "cross.last_norm", config.eps))
    return weights.norm(x, "norm", config.eps)


def mlp(weights: Weights, named: str, x: Tensor) -> Tensor:
    gate, up = (weights.linear(x, f"{named}mlp.{p}_proj") for p in ("gate", "up"))
    return weights.linear(F.silu(gate) * up, f"{named}mlp.down_proj")


def joined(config, weights: Weights, embedding: Tensor, feature: Tensor, image: Tensor) -> Tensor:
    """The layer's input of an element of text."""
    if config.fusion != "sum":
        return torch.cat([embedding, feature])
    if config.images == "latents":
        feature = weights.linear(torch.cat([feature, image]), "img_fc")
    return weights.linear(torch.cat([embedding, feature]), "fc")


def compressed(config, weights: Weights, run: Tensor) -> Tensor:
    """ViSpec's outputs for an image's embeddings (S, d): latents, then the global vector."""

    def heads(name):
        return weights.linear(run, f"imadpt.{name}").unflatten(-1, (config.heads, -1))

    score = torch.einsum("qhe,she->hqs", weights["imadpt.q"], heads("k_proj"))
    score = score * (len(run[0]) / config.heads) ** -0.5
    return weights.linear(torch.einsum("hqs,she->qhe", score.softmax(-1), heads("v_proj")).flatten(1), "imadpt.o_proj")


def condensed(config, weights: Weights, x: Tensor, features: Tensor, question: Tensor) -> Tensor:
    """FLASH's and SpecVLM's vectors for the layer inputs (S, d) of an image, (Q, d)."""
    if config.images == "queries":
        return (weights["compressor.queries"] @ features.T).softmax(-1) @ x
    count, branch = config.image_latents, int(weights.linear(question, "compressor.gate").argmax())
    middle = [(2 * i + 1) * len(x) // (2 * count) for i in range(count)]
    if branch == 0:
        return x[middle]
    if branch == 1:
        return F.adaptive_avg_pool1d(x.T, count).T
    if branch == 2:
        kernel, bias = weights["compressor.convolution.weight"], weights["compressor.convolution.bias"]
        return F.conv1d(x.T, kernel, bias, padding=1).T[middle]
    named = {name.replace("compressor.resampler", "imadpt"): weight for name, weight in weights.items()}
    return compressed(config, Weights(named), x)


def reduced(config, weights: Weights, features: Tensor) -> Tensor:
    """(L, F) -> (L, d)."""
    if config.images == "blind":
        return torch.zeros(len(features), config.hidden)
    if config.fusion != "split":
        return features[..., -config.hidden :]
    if config.norm_before_fc:
        features = weights.norm(features, "input_norm", config.eps)
    if config.fc_norm:
        parts = features.chunk(len(config.feature_layers), dim=-1)
        features = torch.cat([weights.norm(p, f"fc_norm.{i}", config.eps) for i, p in enumerate(parts)], dim=-1)
    return weights.linear(features, "fc")


def elements(config, weights, table, ids, embedded, features):
    """(layer inputs, the tokens whose places they have, the last global vector) of a sequence."""
    picture = [n < len(embedded) and int(i) in config.image_ids for n, i in enumerate(ids)]
    feature, image = reduced(config, weights, features), torch.zeros(config.hidden)
    sequence, places, t = [], [], 0
    while t + 1 < len(ids):
        if not picture[t + 1] or config.images in ("slots", "placeholders"):
            stock = config.images == "slots" and t + 1 < len(embedded)
            after = embedded[t + 1] if stock else table[ids[t + 1]]
            sequence.append(joined(config, weights, after, feature[t], image))
            places.append(t)
        elif config.images == "embeddings":
            sequence.append(embedded[t + 1])
            places.append(t)
        elif config.images == "latents":
            end = next(s for s in range(t + 1, len(ids)) if s + 1 == len(ids) or not picture[s + 1])
            outputs = compressed(config, weights, embedded[t + 1 : end + 1])
            sequence += list(outputs[:-1])
            places += [max(end - len(outputs) + 1 + i, t) for i in range(len(outputs) - 1)]
            image, t = outputs[-1], end - 1
        elif config.images in ("queries", "gated"):
            end = next(s for s in range(t + 1, len(ids)) if s + 1 == len(ids) or not picture[s + 1])
            slots = [joined(config, weights, embedded[s], feature[s - 1], image) for s in range(t + 1, end + 1)]
            outputs = condensed(config, weights, torch.stack(slots), feature[t:end], feature[len(embedded) - 1])
            sequence += list(outputs)
            places += [max(end - len(outputs) + i, t) for i in range(len(outputs))]
            t = end - 1
        t += 1
    return sequence, places, image


def eagle_logits(config, weights, table, decode, known, chain) -> Tensor:
    """Logits after each drafted element, (1 + len(chain), V). known: ids (L), the target's input embeddings of the
    prompt, features (L - 1, F), positions (3, L - 1). table: token embeddings. decode: the target's head.
    """
    ids, embedded, features, positions = known
    weights = Weights(weights)
    sequence, places, image = elements(config, weights, table, ids, embedded, features)
    where = torch.arange(len(ids))[None].expand(3, -1) if config.positions == "index" else positions
    turns, logits = [where[:, t] for t in places], []
    ahead: list[Tensor] = []  # FLASH: features of the tokens that are left of a pass
    for step in range(1 + len(chain)):
        if not ahead:
            feature = layer(config, weights, torch.stack(sequence), torch.stack(turns))[-1]
            ahead = [feature]
            if config.block > 1:
                more = weights.linear(F.silu(weights.linear(feature, "ahead.down")), "ahead.up")
                ahead = list(feature + more.view(config.block, -1))
        feature = ahead.pop(0)
        normed = config.fusion == "split" or config.norm_output
        read = weights.norm(feature, "norm", config.eps) if normed else feature
        feature = read if config.norm_output else feature
        if config.draft_vocab:
            few = weights.linear(read, "lm_head")
            own = torch.arange(len(few)) + weights.get("d2t", 0)
            logits.append(torch.full((config.vocab,), float("-inf")).scatter(0, own, few))
        else:
            logits.append(decode(read))
        if step < len(chain):
            sequence.append(joined(config, weights, table[chain[step]], feature, image))
            turns.append(turns[-1].max() + 1 - torch.zeros(3, dtype=torch.long))
    return torch.stack(logits)


def dflash_hidden(weights, sizes, context: Tensor, block: Tensor, hidden: dict) -> Tensor:
    """The hidden states (K, d) of a block whose input embeddings are (K, d), behind a context (L, F) of the target's.

    sizes: head_size, eps, theta, scaling. hidden: by layer, (K, L + K) bool, what a place does not see.
    """
    weights = Weights(weights)
    head_size, eps, *rope = sizes
    frequency, factor = turning(head_size, *rope)
    known, x = weights.norm(weights.linear(context, "fc"), "hidden_norm", eps), block
    angle = torch.arange(len(known) + len(x))[:, None].float() * frequency
    for n, mask in hidden.items():
        named = f"layers.{n}."
        own, after = around(weights, f"{named}attention_conv", weights.norm(x, f"{named}input_layernorm", eps))
        both = torch.cat([known, own])
        query = weights.linear(own, f"{named}self_attn.q_proj").unflatten(-1, (-1, head_size))
        key, value = (weights.linear(both, f"{named}self_attn.{p}_proj").unflatten(-1, (-1, head_size)) for p in "kv")
        query = rotated(weights.norm(query, f"{named}self_attn.q_norm", eps), angle[len(known) :], factor)
        key = rotated(weights.norm(key, f"{named}self_attn.k_norm", eps), angle, factor)
        x = x + after(weights.linear(attended(query, key, value, ~mask), f"{named}self_attn.o_proj"))
        own, after = around(weights, f"{named}mlp_conv", weights.norm(x, f"{named}post_attention_layernorm", eps))
        x = x + after(mlp(weights, named, own))
    return weights.norm(x, "norm", eps)


def walked(weights, said, base, hidden, table, tokens) -> Tensor:
    """Laws (K, V) below tokens (K) of base logits (K, V) and hidden states (K, d), by DSpark's or Domino's head."""
    weights, laws, state = Weights(weights), [], None
    rank = weights.get("markov_head.markov_w1.weight", base).shape[1]
    for place, (law, h, token) in enumerate(zip(base, hidden, tokens)):
        if "prefix_gru.weight_ih_l0" in weights:
            state = torch.zeros(weights["prefix_gru.weight_hh_l0"].shape[1]) if state is None else state
            new, old = weights["prefix_gru.weight_ih_l0"] @ table[token], weights["prefix_gru.weight_hh_l0"] @ state
            (a, b, c), (x, y, z) = new.chunk(3), old.chunk(3)
            keep = torch.sigmoid(b + y)
            state = (1 - keep) * torch.tanh(c + torch.sigmoid(a + x) * z) + keep * state
            more = weights.linear(F.silu(weights.linear(torch.cat([h, state]), "embed_proj.0")), "embed_proj.2")
            more = more if place >= said["pure_draft_prefix_len"] else 0 * more
        else:
            vector = before = weights["markov_head.markov_w1.weight"][token]
            if said["markov_head_type"] == "gated":
                vector = torch.sigmoid(weights.linear(torch.cat([h, before]), "markov_head.gate_proj")) * before
            if said["markov_head_type"] == "rnn":
                state = torch.zeros(rank) if state is None else state
                mixed = weights.linear(torch.cat([state, before, h]), "markov_head.joint_proj")
                keep, new, out = torch.sigmoid(mixed[:rank]), torch.tanh(mixed[rank:-rank]), torch.tanh(mixed[-rank:])
                state, vector = keep * state + (1 - keep) * new, out
            more = weights["markov_head.markov_w2.weight"] @ vector
            if "d2t" in weights:
                ids = torch.arange(len(more)) + weights["d2t"]
                more = torch.zeros_like(law).index_copy(0, ids, more)
        laws.append(law + more)
    return torch.stack(laws)


def around(weights, name: str, x: Tensor):
    """The input (K, d) of a sublayer of DFlash 2, and what becomes of its output; as they are in DFlash."""
    if f"{name}.base_kernel" not in weights:
        return x, lambda y: y
    base_STd = weights[f"{name}.base_kernel"]
    delta_KSTG = weights.linear(x, f"{name}.kernel_projection").unflatten(-1, (2, base_STd.shape[1], -1))

    def mixed(y: Tensor, side: int) -> Tensor:
        out, size = torch.zeros_like(y), y.shape[1] // delta_KSTG.shape[-1]
        for i in range(len(y)):
            for t in range(min(base_STd.shape[1], i + 1)):
                out[i] += (base_STd[side, t] + delta_KSTG[i, side, t].repeat_interleave(size)) * y[i - t]
        return out

    return mixed(x, 0), lambda y: mixed(y, 1)


def edges(weights, unary: Tensor, hidden: Tensor, before: int, top_k: int) -> Tensor:
    """The logits (V) of a place of DFlash 2 behind a token: of its likeliest tokens, -inf elsewhere."""
    named = "candidate_selector."
    context = weights[f"{named}predecessor_codebook"][before] * (weights[f"{named}hidden_projection.weight"] @ hidden)
    ids = unary.argsort(descending=True)[:top_k]
    result = torch.full_like(unary, float("-inf"))
    result[ids] = unary[ids] + weights[f"{named}successor_codebook"][ids] @ context
    return result


class Watched:
    """Keeps the logits of every level of a drafter."""

    def __init__(self, drafter, seen):
        self.drafter, self.seen = drafter, seen

    def propose(self, state, depth):
        logits = self.drafter._logits

        def watched(feature):
            self.seen.append(logits(feature))
            return self.seen[-1]

        self.drafter._logits = watched
        try:
            return self.drafter.propose(state, depth)
        finally:
            del self.drafter._logits


def begun(drafter, model, inputs, new):
    """(target, state, stock's answer (B, T)) of a greedy request of `new` tokens that the drafter has started."""
    target = HFDecoder(model, drafter.traits.feature_layers, embeddings=True)
    request = request_of(model, inputs, temperature=0, max_new_tokens=new, seed=0)
    state, scores = open_request(target, visspec.Exact(), request)
    drafter.start(state, scores)
    answer = model.generate(**inputs, max_new_tokens=new, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return target, state, answer


def known(target, model, inputs, answer):
    """(ids, input embeddings, features, positions) of one prompt and its answer so far, from one pass of the target."""
    length = inputs["input_ids"].shape[1]
    request = request_of(model, inputs, temperature=0, max_new_tokens=32, seed=0)
    state, scores = open_request(target, visspec.Exact(), request)
    chain = visspec.tree.chain_draft(state.pending, answer[None, 1:])
    after = target.verify(state, chain)
    features = torch.cat([scores.features[0], after.features[0]])[: length + len(answer) - 1]
    positions = scores.aux["positions"]
    positions = positions[-3:, :1] if positions.dim() == 3 else positions[None, :1].expand(3, -1, -1)
    more = positions[..., -1:] + torch.arange(1, len(answer))
    ids = torch.cat([inputs["input_ids"][0], answer])
    embedded = scores.aux["embeddings"]  # a text decoder takes ids
    embedded = model.get_input_embeddings()(inputs["input_ids"]) if embedded is None else embedded
    return ids, embedded[0], features, torch.cat([positions, more], dim=-1)[:, 0]


def one_round(target, drafter, state, answer):
    """Verify a chain of which row b has its next b + 1 tokens right."""
    tokens = torch.stack([answer[b, len(t) - 1 :][:4] for b, t in enumerate(state.tokens)])
    for b in range(len(tokens)):
        tokens[b, 1 + b % 3] = (tokens[b, 1 + b % 3] + 1) % 88
    judged(target, drafter, visspec.Exact(), state, visspec.tree.chain_draft(state.pending, tokens[:, 1:]))
    retire(state, target, drafter)


@torch.inference_mode()
def check_drafts(drafter, model, name, config, weights, table, depth=3):
    """What a drafter drafts for ragged rows is what its description makes of its tensors, after each of two rounds."""
    rows, seen = shapes(name)["ragged"], []
    inputs = prompt(name, rows)
    target, state, answer = begun(drafter, model, inputs, NEW)
    for _ in range(2):
        draft = Watched(drafter, seen).propose(state, depth)
        levels = [one for result in seen for one in (result.unbind(1) if result.dim() == 3 else [result])][-depth:]
        for b in range(len(rows)):
            done = len(state.tokens[b])
            assert state.tokens[b] == answer[b, :done].tolist()
            sequence = known(target, model, single_row(name, rows, inputs, b), answer[b, :done])
            chain = draft.value[b, 1:depth].tolist()
            want = eagle_logits(config, weights, table, model.lm_head, sequence, chain)
            got = torch.stack([level[b] for level in levels])
            torch.testing.assert_close(got.log_softmax(-1), want.log_softmax(-1), rtol=1e-3, atol=1e-3)
        one_round(target, drafter, state, answer)
