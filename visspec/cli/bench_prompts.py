"""`visspec bench prompts`: what a pass and the whole loop cost behind long prompts, against transformers' own.

Small random decoders with the head layouts of the field; the prompt's keys and values are made up, the same for both
sides, so that nothing but decoding is measured. Ratios are of medians of calls that alternate. With `--drafters` the
prompt is read for real, and then a drafter reads it: its share is the time of its own reading over both. Drafters are
untrained; what reading costs doesn't depend on weights.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.cli.arguments import Positive
from visspec.cli.bench import BenchOptions, Cell, table
from visspec.eval.bench.clock import median_seconds, seconds_of, waiter
from visspec.eval.bench.oracle import Oracle, erring_every
from visspec.io.options import option
from visspec.io.provenance import provenance
from visspec.loop.decode import decode, start
from visspec.loop.draft_length import FixedLength
from visspec.loop.output import TokenBuffer
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.attention.slot_layers import CACHE, SlotLayers
from visspec.models.decoder.small_model import SmallModel
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle.drafter import FeatureDrafter
from visspec.models.lookup.ngram import NGram
from visspec.types import Draft, Drafter, Request, Scores, State

VOCABULARY = 512
LOOPED = (1, 8)  # nodes of the drafts with which the whole loop is run; 1 is plain decoding
LONG = 8192  # tokens of a prompt from which on it is read once
WARM = 256  # tokens read before the clock starts
SMALLER = 4  # the small model has this many times less width, and heads; and half of that fewer layers


class HeadLayout(NamedTuple):
    """Query heads, key heads, head size, layers, hidden size."""

    heads: int
    keys: int
    size: int
    layers: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.keys}x{self.size}"

    def config(self) -> LlamaConfig:
        options: dict[str, Any] = {"max_position_embeddings": 1 << 17, "eos_token_id": None, "pad_token_id": 0}
        options |= {"num_attention_heads": self.heads, "num_key_value_heads": self.keys, "head_dim": self.size}
        options |= {"hidden_size": self.hidden, "intermediate_size": 2 * self.hidden, "vocab_size": VOCABULARY}
        return LlamaConfig(num_hidden_layers=self.layers, **options)

    def model(self, device: str) -> LlamaForCausalLM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = LlamaForCausalLM._from_config(self.config(), attn_implementation="sdpa").eval()
            torch.nn.init.normal_(model.lm_head.weight, std=4.0 * self.hidden**-0.5)
            torch.nn.init.normal_(model.model.embed_tokens.weight)
        model.generation_config.eos_token_id = None
        return model.to(device)


SHAPES = ((8, 8, 32, 4, 256), (8, 2, 32, 4, 256), (16, 4, 64, 8, 512), (28, 4, 128, 2, 896), (32, 8, 128, 2, 1024))
LAYOUTS = {str(layout): layout for layout in (HeadLayout(*shape) for shape in SHAPES)}


def small_model(model: PreTrainedModel) -> SmallModel:
    """A `SmallModel` drafter for a Llama, with a quarter of its width and heads and half its layers."""
    small = copy.deepcopy(model.config)
    small.num_hidden_layers = max(small.num_hidden_layers // 2, 1)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(small, name, max(getattr(small, name) // SMALLER, 1))
    made = LlamaForCausalLM._from_config(small, attn_implementation="sdpa").eval().to(model.device)
    return SmallModel(made, model)


DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "ngram": lambda model: NGram(),
    "feature": FeatureDrafter.for_model,
    "small_model": small_model,
}


@dataclass(kw_only=True)
class Options(BenchOptions):
    prompts: list[Positive] = option(default=[256, 1024, 4096, 16384, 32768])
    nodes: list[Positive] = option(default=[1, 8, 16, 24, 64])
    heads: list[str] = option(default=list(LAYOUTS), choices=LAYOUTS)
    tau: Positive = option("tokens committed a pass by the oracle drafter", 4)
    max_new_tokens: Positive = option(default=32)
    repeats: Positive = option(default=9)
    drafters: list[str] = option(
        "what these add to the time to the first token; prompts are read for real", [], choices=DRAFTERS
    )
    device: str = option(default="cpu")


def run(arguments: Options) -> None:
    arguments.begin()
    record = bench_prompts(arguments)
    title = f"passes and loops behind long prompts; oracle drafter, tau {record['tau']}"
    views = [table(title, record["rows"], COLUMNS, left=[], whole=[])]
    if record["drafters"]:
        views.append(table("time to the first token", record["drafters"], FIRST_TOKEN, whole=[]))
    arguments.end(record, *views)


def bench_prompts(arguments: Options) -> dict[str, Any]:
    """One row for each layout, prompt length and number of nodes; nodes 1 is plain decoding.

    over_stock_pass: a pass of ours over a one-token pass of the model with transformers' own cache;
    attention_over_stock_query: the same for one attention call; loop_over_transformers: time of transformers'
    `generate` over that of our loop, prompt aside, with a drafter that commits `tau` tokens a pass (None where the loop
    was not run); identical of compared: answers equal to transformers'. drafters: see `first_token`.
    """
    rows, first, new, repeats = [], [], arguments.max_new_tokens, arguments.repeats
    for name in arguments.heads:
        layout = LAYOUTS[name]
        target = PrimedTarget(layout.model(arguments.device))
        for length in tqdm(arguments.prompts, desc=f"bench prompts {name}", leave=False):
            with torch.inference_mode():
                rows += PromptRun(layout, target, length, new).rows(arguments.nodes, arguments.tau, repeats)
        first += first_token(target.model, name, arguments.prompts, arguments.drafters, max(3, repeats // 3))
    record = {"bench": "prompts", "guarantee": "exact", "rows": rows, "drafters": first, "tau": arguments.tau}
    return record | {"max_new_tokens": new, "provenance": provenance(target.model, repeats=repeats)}


COLUMNS: dict[str, Cell] = {
    "heads": "{heads}",
    "prompt": "{prompt}",
    "nodes": "{nodes}",
    "pass / stock's": "{over_stock_pass:.2f}",
    "attention / stock's": "{attention_over_stock_query:.2f}",
    "loop over generate": "{loop_over_transformers:.2f}",
    "same": lambda row: f"{row['identical']}/{row['compared']}" if row["compared"] else "",
}
FIRST_TOKEN: dict[str, Cell] = {
    "heads": "{heads}",
    "prompt": "{prompt}",
    "drafter": "{drafter}",
    "prefill, s": "{prefill_s:.2f}",
    "the drafter's, s": "{draft_prefill_s:.3f}",
    "its share": "{share:.1%}",
}


class PrimedTarget(HFDecoder):
    """A target whose prompt is known: `inputs` are keys and values of all tokens but the last one, layer by layer."""

    def prefill(self, request: Request) -> tuple[State, Scores]:
        rows, length = request.prompt.shape
        cache = SlotLayers(rows, request.max_new_tokens)
        cache.slots.open(length - 1, self.device)
        for layer, (key, value) in enumerate(request.inputs):
            cache.update(key, value, layer)
        cache.slots.commit([list(range(length - 1))] * rows)
        position = torch.full((rows,), length - 1, device=self.device)
        state = State(request, request.prompt[:, -1], position, cache, list(range(rows)), TokenBuffer(request, rows))
        scores = self.verify(state, trees.empty_draft(state.pending))
        cache.slots.commit([[0]] * rows)
        return state, scores


class PromptRun:
    """One layout behind one prompt, with transformers' answer to it."""

    def __init__(self, layout: HeadLayout, target: PrimedTarget, length: int, max_new_tokens: int):
        self.layout, self.target, self.length, self.new = layout, target, length, max_new_tokens
        device = target.device
        generator = torch.Generator().manual_seed(length)
        shape = 1, layout.keys, length - 1, layout.size
        self.cached = [
            tuple(torch.randn(shape, generator=generator).to(device) for _ in range(2)) for _ in range(layout.layers)
        ]
        self.ids = torch.randint(5, VOCABULARY, (1, length), generator=generator).to(device)
        self.answer = self.generate(self.stock_cache())[:, length:]

    def request(self) -> Request:
        return Request(self.cached, self.ids, self.new)

    def stock_cache(self) -> DynamicCache:
        cache = DynamicCache()
        for layer, (key, value) in enumerate(self.cached):
            cache.update(key, value, layer)
        return cache

    def generate(self, cache: DynamicCache) -> Tensor:
        """transformers' generate behind the cached prompt."""
        options = {"attention_mask": torch.ones_like(self.ids), "do_sample": False, "max_new_tokens": self.new}
        return self.target.model.generate(self.ids, **options, **{CACHE: cache})

    def rows(self, nodes: Sequence[int], tau: int, repeats: int) -> list[dict[str, Any]]:
        wait = waiter(self.target.device)
        passes = median_seconds({0: self.stock_pass()} | {n: self.our_pass(n) for n in nodes}, repeats, wait)
        attention = median_seconds({n: self.attention(n) for n in (0, *nodes)}, repeats, wait)
        about = {"prompt": self.length, "heads": str(self.layout), "layers": self.layout.layers}
        found = []
        for n in nodes:
            ratio, same = self.loop(n, tau, max(3, repeats // 3)) if n in LOOPED else (None, None)
            row: dict[str, Any] = {"nodes": n, **about, "over_stock_pass": passes[n] / passes[0]}
            row["attention_over_stock_query"] = attention[n] / attention[0]
            row |= {"loop_over_transformers": ratio, "speedup": ratio, "identical": same}
            found.append(row | {"compared": int(same is not None)})
        return found

    def stock_pass(self) -> Callable[[], Any]:
        cache, token = self.stock_cache(), self.ids[:, -1:]

        def call() -> None:
            self.target.model(token, use_cache=True, **{CACHE: cache})
            cache.crop(-1)

        return call

    def our_pass(self, nodes: int) -> Callable[[], Any]:
        state, _ = self.target.prefill(self.request())
        draft = trees.empty_draft(state.pending)
        if nodes > 1:
            tree = trees.chain(nodes - 1, str(state.pending.device))
            draft = Draft(state.pending[:, None].repeat(1, nodes), tree)
        return lambda: self.target.verify(state, draft)

    def attention(self, nodes: int) -> Callable[[], Any]:
        """One attention call with a draft's mask; 0 nodes: with one query and no mask, as in transformers' generate."""
        layout, device = self.layout, self.target.device
        queries, mask = max(nodes, 1), None
        query = torch.randn(1, queries, layout.heads, layout.size, device=device).transpose(1, 2)
        key, value = (torch.cat([x, x[:, :, :1].expand(-1, -1, queries, -1)], dim=2) for x in self.cached[0])
        module = SimpleNamespace(num_key_value_groups=layout.heads // layout.keys, is_causal=True)
        if nodes:
            slots = SlotLayers(1).slots
            slots.lengths = [self.length - 1]
            tree = trees.empty_draft(self.ids[:, 0]).tree if nodes == 1 else trees.chain(nodes - 1, str(device))
            mask = self.target.masks(slots, tree, key.shape[2])
        function = AttentionInterface()["sdpa"]
        return lambda: function(module, query, key, value, mask, scaling=layout.size**-0.5)

    def loop(self, nodes: int, tau: int, repeats: int) -> tuple[float, int]:
        """Time of transformers' generate over that of our loop, and whether the answers are equal."""
        target, guarded, same = self.target, None, True
        if nodes > 1:
            oracle = Oracle(erring_every(self.answer, tau, VOCABULARY))
            guarded = SafeDrafter(oracle, target.capabilities, target.device, False)
        stock, ours = [], []
        for _ in range(repeats + 1):
            seconds, _ = seconds_of(partial(self.generate, self.stock_cache()), waiter(self.target.device))
            state = decode(target, guarded, Exact(), self.request(), FixedLength(max(nodes - 1, 1)))
            same = same and state.tokens == self.answer.tolist()
            stock.append(seconds / self.new)
            # the prefill of ours gives the first token, transformers' first pass is inside its time
            ours.append(sum(v for k, v in state.trace.times.items() if k != "prefill") / (self.new - 1))
        return statistics.median(stock[1:]) / statistics.median(ours[1:]), int(same)


def first_token(
    model: nn.Module, heads: str, prompts: Sequence[int], drafters: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """A row for each drafter and length of the prompt: `prefill_s` of the model, `draft_prefill_s`, and `share`, the
    second over both. Medians; prompts of `LONG` tokens or more are read once.
    """
    rows = []
    for name in drafters:
        drafter = DRAFTERS[name](model)
        target = HFDecoder(model, drafter.traits.feature_layers, drafter.traits.embeddings)
        guarded = SafeDrafter(drafter, target.capabilities, target.device)
        for length in prompts:
            ids = torch.randint(5, target.capabilities.vocab, (1, length), device=target.device)
            read(target, guarded, ids[:, :WARM])
            times = [read(target, guarded, ids) for _ in range(1 if length >= LONG else repeats)]
            prefill, own = (statistics.median(part) for part in zip(*times))
            row = {"heads": heads, "drafter": name, "prompt": length, "prefill_s": prefill, "draft_prefill_s": own}
            rows.append(row | {"share": own / (prefill + own), "repeats": len(times)})
    return rows


@torch.inference_mode()
def read(target: HFDecoder, drafter: SafeDrafter, ids: Tensor) -> tuple[float, float]:
    """Seconds of the target's prefill of a prompt, and of the drafter's. Raises RuntimeError if the drafter failed."""
    request = Request({"attention_mask": torch.ones_like(ids), "logits_to_keep": 1}, ids, 2)
    state = start(target, drafter, Exact(), request)
    if not state.drafting:
        raise RuntimeError(f"drafter: got a failure of {type(drafter.inner).__name__}, expected it to read the prompt")
    return state.trace.times["prefill"], state.trace.times["draft_prefill"]
