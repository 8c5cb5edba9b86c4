"""`visspec bench prompts`: what a pass and the whole loop cost behind long prompts, against transformers' own.

Small random decoders with the head layouts of the field; the prompt's keys and values are made up, the same for both
sides, so that nothing but decoding is measured. Ratios are of medians of calls that alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM

from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.cli.arguments import positive
from visspec.cli.bench_first_token import DRAFTERS, first_token
from visspec.io.files import write_json
from visspec.io.provenance import provenance
from visspec.loop.decode import decode
from visspec.loop.draft_length import AdaptiveLength
from visspec.loop.output import TokenBuffer
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.attention.slot_layers import CACHE, SlotLayers
from visspec.models.decoder.target import HFDecoder
from visspec.types import Draft, Drafter, DrafterTraits, Request, Scores, State

VOCABULARY = 512
LOOPED = (1, 8)  # nodes of the drafts with which the whole loop is run; 1 is plain decoding


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
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.keys,
            head_dim=self.size,
            max_position_embeddings=1 << 17,
            eos_token_id=None,
            pad_token_id=0,
        )


LAYOUTS = {
    str(layout): layout
    for layout in (
        HeadLayout(8, 8, 32, 4, 256),
        HeadLayout(8, 2, 32, 4, 256),
        HeadLayout(16, 4, 64, 8, 512),
        HeadLayout(28, 4, 128, 2, 896),
        HeadLayout(32, 8, 128, 2, 1024),
    )
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=positive, nargs="+", default=[256, 1024, 4096, 16384, 32768])
    parser.add_argument("--nodes", type=positive, nargs="+", default=[1, 8, 16, 24, 64])
    parser.add_argument("--heads", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--tau", type=positive, default=4, help="tokens committed a pass by the oracle drafter")
    parser.add_argument("--max-new-tokens", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument(
        "--drafters",
        nargs="+",
        choices=list(DRAFTERS),
        default=[],
        help="what these add to the time to the first token; prompts are read for real",
    )
    parser.add_argument("--threads", type=positive, help="torch threads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)


def run(arguments: argparse.Namespace) -> None:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    record = bench_prompts(
        arguments.heads,
        arguments.prompts,
        arguments.nodes,
        tau=arguments.tau,
        device=arguments.device,
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        drafters=arguments.drafters,
    )
    Console().print(*tables(record))
    write_json(arguments.json, record)


def bench_prompts(
    heads: Sequence[str] = tuple(LAYOUTS),
    prompts: Sequence[int] = (256, 1024),
    nodes: Sequence[int] = (1, 8),
    *,
    tau: int = 4,
    max_new_tokens: int = 32,
    repeats: int = 9,
    device: str = "cpu",
    drafters: Sequence[str] = (),
) -> dict[str, Any]:
    """One row for each layout, prompt length and number of nodes; nodes 1 is plain decoding.

    over_stock_pass: a pass of ours over a one-token pass of the model with transformers' own cache;
    attention_over_stock_query: the same for one attention call; loop_over_transformers: time of transformers'
    `generate` over that of our loop, prompt aside, with a drafter that commits `tau` tokens a pass (None where the loop
    was not run); identical of compared: answers equal to transformers'. drafters: see `first_token`.
    """
    rows, first = [], []
    for name in heads:
        case = PromptCase(LAYOUTS[name], device)
        for length in tqdm(prompts, desc=f"bench prompts {name}", leave=False):
            with torch.inference_mode():
                prompt = PromptRun(case, length, max_new_tokens)
                rows += prompt.rows(nodes, tau, repeats)
        first += first_token(case.model, name, prompts, drafters, max(3, repeats // 3))
    return {
        "bench": "prompts",
        "guarantee": "exact",
        "rows": rows,
        "drafters": first,
        "tau": tau,
        "max_new_tokens": max_new_tokens,
        "provenance": provenance(case.model, repeats=repeats),
    }


class PromptCase:
    """A random decoder of one head layout, and our target on it."""

    def __init__(self, layout: HeadLayout, device: str):
        self.layout = layout
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = LlamaForCausalLM._from_config(layout.config(), attn_implementation="sdpa").eval()
            torch.nn.init.normal_(model.lm_head.weight, std=4.0 * layout.hidden**-0.5)
            torch.nn.init.normal_(model.model.embed_tokens.weight)
        model.generation_config.eos_token_id = None
        self.model = model.to(device)
        self.target = PrimedTarget(self.model)


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


class TauOracle(Drafter):
    """Chains of which as many nodes are right as make `tau` tokens a pass."""

    traits = DrafterTraits(adaptive_depth=False)

    def __init__(self, answer: Tensor, tau: int):
        self.answer, self.tau = answer, tau

    def propose(self, state: State, depth: int) -> Draft:
        done, size = len(state.tokens[state.rows[0]]), depth + 1
        value = torch.zeros(1, size, dtype=torch.long, device=self.answer.device)
        ahead = self.answer[:, done : done + size - 1]
        value[:, 1 : 1 + ahead.shape[1]] = ahead
        value[:, self.tau :] = (value[:, self.tau :] + 1) % VOCABULARY
        value[:, 0] = state.pending
        return Draft(value, trees.chain(depth, str(value.device)))


class PromptRun:
    """One layout behind one prompt, with transformers' answer to it."""

    def __init__(self, case: PromptCase, length: int, max_new_tokens: int):
        self.case, self.length, self.new = case, length, max_new_tokens
        layout, device = case.layout, case.model.device
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
        return self.case.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            do_sample=False,
            max_new_tokens=self.new,
            **{CACHE: cache},
        )

    def rows(self, nodes: Sequence[int], tau: int, repeats: int) -> list[dict[str, Any]]:
        passes = alternated({0: self.stock_pass()} | {n: self.our_pass(n) for n in nodes}, repeats, synchronise(self))
        calls = {0: self.attention(0)} | {n: self.attention(n) for n in nodes}
        attention = alternated(calls, repeats, synchronise(self))
        found = []
        for n in nodes:
            ratio, same = self.loop(n, tau, max(3, repeats // 3)) if n in LOOPED else (None, None)
            found.append(
                {
                    "nodes": n,
                    "prompt": self.length,
                    "heads": str(self.case.layout),
                    "layers": self.case.layout.layers,
                    "over_stock_pass": passes[n] / passes[0],
                    "attention_over_stock_query": attention[n] / attention[0],
                    "loop_over_transformers": ratio,
                    "speedup": ratio,
                    "identical": same,
                    "compared": int(same is not None),
                }
            )
        return found

    def stock_pass(self) -> Callable[[], Any]:
        cache, token = self.stock_cache(), self.ids[:, -1:]

        def call() -> None:
            self.case.model(token, use_cache=True, **{CACHE: cache})
            cache.crop(-1)

        return call

    def our_pass(self, nodes: int) -> Callable[[], Any]:
        state, _ = self.case.target.prefill(self.request())
        draft = trees.empty_draft(state.pending)
        if nodes > 1:
            tree = trees.chain(nodes - 1, str(state.pending.device))
            draft = Draft(state.pending[:, None].repeat(1, nodes), tree)
        return lambda: self.case.target.verify(state, draft)

    def attention(self, nodes: int) -> Callable[[], Any]:
        """One attention call with a draft's mask; 0 nodes: with one query and no mask, as in transformers' generate."""
        layout, device = self.case.layout, self.case.model.device
        queries = max(nodes, 1)
        query = torch.randn(1, queries, layout.heads, layout.size, device=device).transpose(1, 2)
        key, value = (torch.cat([x, x[:, :, :1].expand(-1, -1, queries, -1)], dim=2) for x in self.cached[0])
        module: Any = SimpleNamespace(num_key_value_groups=layout.heads // layout.keys, is_causal=True)
        mask = None
        if nodes:
            slots = SlotLayers(1).slots
            slots.lengths = [self.length - 1]
            tree = trees.empty_draft(self.ids[:, 0]).tree if nodes == 1 else trees.chain(nodes - 1, str(device))
            mask = self.case.target.masks(slots, tree, key.shape[2])
        function = AttentionInterface()["sdpa"]
        return lambda: function(module, query, key, value, mask, scaling=layout.size**-0.5)

    def loop(self, nodes: int, tau: int, repeats: int) -> tuple[float, int]:
        """Time of transformers' generate over that of our loop, and whether the answers are equal."""
        target = self.case.target
        guarded = None
        if nodes > 1:
            guarded = SafeDrafter(TauOracle(self.answer, tau), target.capabilities, target.device, False)
        same = True
        times: dict[str, list[float]] = {"stock": [], "ours": []}
        for turn in range(repeats + 1):
            cache, wait = self.stock_cache(), synchronise(self)
            wait()
            began = time.perf_counter()
            self.generate(cache)
            wait()
            stock = time.perf_counter() - began
            state = decode(target, guarded, Exact(), self.request(), AdaptiveLength(max(nodes - 1, 1), adaptive=False))
            same = same and state.tokens == self.answer.tolist()
            if turn:
                times["stock"].append(stock / self.new)
                stages = state.trace.times
                # the prefill of ours gives the first token, transformers' first pass is inside its time
                times["ours"].append(sum(v for k, v in stages.items() if k != "prefill") / (self.new - 1))
        return statistics.median(times["stock"]) / statistics.median(times["ours"]), int(same)


def synchronise(prompt: PromptRun) -> Callable[[], None]:
    """Waits for the device; nothing on a CPU."""
    device = prompt.case.model.device
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def alternated(calls: dict[int, Callable[[], Any]], repeats: int, wait: Callable[[], None]) -> dict[int, float]:
    """Median seconds of each call, in turns, after two of each that are not counted."""
    times: dict[int, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            wait()
            began = time.perf_counter()
            call()
            wait()
            if turn > 1:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def tables(record: dict[str, Any]) -> list[Table]:
    """Rich tables of a record."""
    shown = [table(record)]
    if record["drafters"]:
        shown.append(view := Table(title="time to the first token"))
        for column in ("heads", "prompt", "drafter", "prefill, s", "the drafter's, s", "its share"):
            view.add_column(column, justify="right")
        for row in record["drafters"]:
            view.add_row(
                row["heads"],
                str(row["prompt"]),
                row["drafter"],
                f"{row['prefill_s']:.2f}",
                f"{row['draft_prefill_s']:.3f}",
                f"{row['share']:.1%}",
            )
    return shown


def table(record: dict[str, Any]) -> Table:
    """A rich table of passes and loops."""
    view = Table(title=f"passes and loops behind long prompts; oracle drafter, tau {record['tau']}")
    for column in ("heads", "prompt", "nodes", "pass / stock's", "attention / stock's", "loop over generate", "same"):
        view.add_column(column, justify="right")
    for row in record["rows"]:
        loop = row["loop_over_transformers"]
        view.add_row(
            row["heads"],
            str(row["prompt"]),
            str(row["nodes"]),
            f"{row['over_stock_pass']:.2f}",
            f"{row['attention_over_stock_query']:.2f}",
            "" if loop is None else f"{loop:.2f}",
            "" if loop is None else f"{row['identical']}/{row['compared']}",
        )
    return view
