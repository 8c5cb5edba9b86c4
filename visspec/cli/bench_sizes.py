"""`visspec bench sizes`: decoding at the sizes of real models, with random weights and a drafter that knows the answer.

Weights are drawn on the device. Embeddings and head are such that a token is mostly followed by the next id, with a
margin that rounding does not turn: the oracle then has the acceptance that it is asked for, in any dtype. What is
computed is checked by distributions, not by these tokens alone: `law_error` compares a draft's nodes with the whole
text in one stock pass. Arms run in turn, behind prompts of random ids; B rows, L levels of a draft, V vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, StaticCache

from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.api.accelerate import accelerate
from visspec.cache import to_device
from visspec.cli.arguments import positive, probability
from visspec.cli.bench_prompts import alternated
from visspec.distributions import categorical
from visspec.eval.bench import paired as speed
from visspec.eval.bench.kernels import copy_bandwidth
from visspec.eval.bench.kernels_clock import clock_of
from visspec.eval.bench.paired import ArmRun
from visspec.io.files import write_json
from visspec.io.provenance import provenance
from visspec.loop.decode import open_request
from visspec.models.attention import folding, ragged
from visspec.models.attention.slot_layers import CACHE
from visspec.types import Draft, Drafter, DrafterTraits, Request, State

STOCK, STATIC, PLAIN = "transformers_generate", "transformers_static", "plain"


class Size(NamedTuple):
    """Layers, hidden size, that of the feed-forward part, query and key heads, vocabulary; qwen: biases, as Qwen2."""

    layers: int
    hidden: int
    inner: int
    heads: int
    keys: int
    vocabulary: int
    qwen: bool = False

    def config(self, room: int) -> Any:
        """The configuration, for `room` positions."""
        kind: Any = Qwen2Config if self.qwen else LlamaConfig
        return kind(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.keys,
            max_position_embeddings=room, eos_token_id=None, bos_token_id=None, pad_token_id=0,
            tie_word_embeddings=False, initializer_range=1.3 * self.hidden**-0.5,
        )  # fmt: skip

    def build(self) -> Any:
        return Qwen2ForCausalLM if self.qwen else LlamaForCausalLM

    def model(self, device: str, dtype: torch.dtype, room: int) -> Any:
        """A decoder with weights drawn on the device."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            model = self.build()._from_config(self.config(room), dtype=dtype, attn_implementation="sdpa").eval()
            with torch.no_grad():
                table = torch.nn.init.normal_(model.model.embed_tokens.weight, std=2.0)
                model.lm_head.weight.copy_(table.roll(1, 0) / (0.5 * self.hidden**0.5))
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model


SIZES = {
    "llava-1.6-7b": Size(32, 4096, 11008, 32, 32, 32064),  # with Vicuna
    "qwen2.5-vl-7b": Size(28, 3584, 18944, 28, 4, 152064, qwen=True),
    "janus-pro-7b": Size(30, 4096, 11008, 32, 32, 16384),  # its head over codes
    "llamagen-xl": Size(36, 1280, 3584, 20, 20, 16384),
}
TINY = {"hidden": 64, "inner": 96, "heads": 4, "vocabulary": 128, "layers": 2}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--acceptance", type=probability, nargs="+", default=[0.5, 0.7, 0.8, 0.9],
                        help="probability that a drafted token is the target's own")  # fmt: skip
    parser.add_argument("--levels", type=positive, default=6, help="of a draft, which is a chain")
    parser.add_argument("--prompt", type=positive, default=640, help="ids of a prompt; an image takes some 600")
    parser.add_argument("--max-new-tokens", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=3, help="batches of prompts")
    parser.add_argument("--layers", type=positive, help="instead of the model's own number, to see whether it runs")
    parser.add_argument("--tiny", action="store_true", help="a few small layers in place of each model's")
    parser.add_argument("--compile", action="store_true", help="our passes compiled, too")
    parser.add_argument("--attention", choices=["mask", "varlen", "tree"], help="of our passes; default: the device's")
    parser.add_argument("--threads", type=positive, help="torch threads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--json", type=Path)


def run(arguments: argparse.Namespace) -> None:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    changes = dict(TINY) if arguments.tiny else {}
    if arguments.layers:
        changes["layers"] = arguments.layers
    record = bench_sizes(
        arguments.sizes, arguments.batch, arguments.acceptance, levels=arguments.levels, prompt=arguments.prompt,
        max_new_tokens=arguments.max_new_tokens, repeats=arguments.repeats, changes=changes, device=arguments.device,
        dtype=getattr(torch, arguments.dtype), compile=arguments.compile, attention=arguments.attention,
    )  # fmt: skip
    Console().print(table(record))
    write_json(arguments.json, record)


def bench_sizes(
    sizes: Sequence[str] = tuple(SIZES), batches: Sequence[int] = (1, 8, 32), acceptance: Sequence[float] = (0.8,), *,
    levels: int = 6, prompt: int = 640, max_new_tokens: int = 128, repeats: int = 3,
    changes: dict[str, int] | None = None, device: str = "cpu", dtype: torch.dtype = torch.bfloat16,
    compile: bool = False, attention: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One row for each size, batch and arm: transformers' `generate`, the same with a static cache (compiled on a GPU),
    our loop without a drafter, and with oracles. Raises ValueError for fewer than two tokens.

    speedup: whole calls over transformers' generate, decode_over_*: without the prompt. tau of `expected_tau`;
    ideal_speedup: tau / (v + c + o) in passes over one node, o being the part of our plain round that is no pass;
    over_pass: what was measured in that unit. attention: how our passes attend, None for the device's own choice.
    identical of compared: rows equal to transformers'. On a GPU only: pass_ms, host_share (the part of a pass until the
    host has issued it) and over_bytes (a pass over reading its weights at copy bandwidth).
    """
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, expected at least 2")
    rows, where, failures = [], {}, []
    for name in sizes:
        size = SIZES[name]._replace(**_fitting(SIZES[name], changes or {}))
        model = size.model(device, dtype, prompt + max_new_tokens + levels + 1)
        where = provenance(model, repeats=repeats)
        for batch in tqdm(batches, desc=f"bench sizes {name}", leave=False):
            try:
                case: Any = SizeCase(model, batch, prompt, max_new_tokens, levels, compile, attention)
                rows += [{"size": name, "layers": size.layers} | row for row in case.rows(acceptance, repeats)]
            except RuntimeError as error:  # of memory, mostly; what has been measured stays
                failures.append(f"{name}, batch {batch}: {error}")
            case = None
            if where.get("cuda"):
                torch.cuda.empty_cache()
        del model
    return {
        "bench": "sizes", "guarantee": "exact", "drafter": "oracle", "acceptance": "exact", "temperature": 0.0,
        "seed": 0, "n_prompts": repeats, "prompt": prompt, "max_new_tokens": max_new_tokens, "levels": levels,
        "identical": sum(row["identical"] for row in rows), "compared": sum(row["compared"] for row in rows),
        "random_weights": True, "changes": changes or {}, "failures": failures, "rows": rows, "provenance": where,
    }  # fmt: skip


def _fitting(size: Size, changes: dict[str, int]) -> dict[str, Any]:
    """The changes, with key heads in the size's own proportion to query heads."""
    heads = changes.get("heads", size.heads)
    return {**changes, "keys": max(1, heads * size.keys // size.heads)}


class AcceptanceOracle(Drafter):
    """Chains of a known answer (B, T), each of whose tokens is another one with probability 1 - acceptance."""

    traits = DrafterTraits(adaptive_depth=False, observes="none")

    def __init__(self, answer_BT: Tensor, acceptance: float, vocabulary: int, seed: int = 0):
        uniforms = torch.rand(answer_BT.shape, generator=torch.Generator().manual_seed(seed)).to(answer_BT.device)
        self.drafts_BT = torch.where(uniforms < acceptance, answer_BT, (answer_BT + 1) % vocabulary)

    def propose(self, state: State, depth: int) -> Draft:
        done_B = [len(state.tokens[row]) for row in state.rows]
        depth = min(depth, self.drafts_BT.shape[1] - max(done_B))
        if depth < 1:
            return trees.root(state.pending)
        at_B2 = to_device([list(pair) for pair in zip(state.rows, done_B)], self.drafts_BT.device)
        ahead = torch.arange(depth, device=self.drafts_BT.device)
        return trees.chain_draft(state.pending, self.drafts_BT[at_B2[:, :1], at_B2[:, 1:] + ahead])


class PromptOracle(Drafter):
    """The oracle of the prompt at hand, so that one accelerated model serves them all."""

    traits = AcceptanceOracle.traits
    oracle: AcceptanceOracle

    def __init__(self, levels: int):
        self.traits = DrafterTraits(levels=levels, adaptive_depth=False, observes="none")

    def propose(self, state: State, depth: int) -> Draft:
        return self.oracle.propose(state, depth)


class SizeCase:
    """One model at one batch size. A prompt is its number, which seeds its ids."""

    def __init__(
        self, model: Any, batch: int, length: int, new: int, levels: int, compile: bool = False,
        attention: str | None = None,
    ):  # fmt: skip
        self.model, self.batch, self.length, self.new, self.levels = model, batch, length, new, levels
        self.cuda = model.device.type == "cuda"
        self.vocabulary = model.config.vocab_size
        self.static: Any = None
        self.known: dict[int, Tensor] = {}
        self.plain = accelerate(model, None, compile=compile)
        self.drafter = PromptOracle(levels)
        self.fast = accelerate(model, self.drafter, adaptive=False, levels=levels, compile=compile)
        for target in (self.plain.target, self.fast.target):
            if attention is not None:
                folding.register()
                text = model.config.get_text_config()
                target.masks.backend = ragged.choose(target.decoder, text, model.dtype, model.device, attention)

    def ids(self, prompt: int) -> Tensor:
        generator = torch.Generator().manual_seed(prompt)
        return torch.randint(1, self.vocabulary, (self.batch, self.length), generator=generator).to(self.model.device)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.model.device)

    def answer(self, prompt: int) -> Tensor:
        """transformers' greedy answer, (B, T)."""
        if prompt not in self.known:
            self.known[prompt] = self.stock(self.ids(prompt), self.new)[0][:, self.length :]
        return self.known[prompt]

    def stock(self, ids: Tensor, new: int) -> tuple[Tensor, Any]:
        return self.generate(ids, new), None

    def with_static_cache(self, ids: Tensor, new: int) -> tuple[Tensor, Any]:
        """transformers compiles what runs on such a cache, on a GPU."""
        if self.static is None:
            self.static = StaticCache(config=self.model.config, max_cache_len=self.length + self.new)
        self.static.reset()
        return self.generate(ids, new, **{CACHE: self.static}), None

    def ours(self, ids: Tensor, new: int) -> tuple[Tensor, Any]:
        found = self.plain.run(**self.options(ids, new))
        return found.output, found.state

    def drafted(self, acceptance: float, prompt: int) -> ArmRun:
        self.drafter.oracle = AcceptanceOracle(self.answer(prompt), acceptance, self.vocabulary, seed=prompt)
        return self.timed(self.quickly, prompt)

    def quickly(self, ids: Tensor, new: int) -> tuple[Tensor, Any]:
        found = self.fast.run(**self.options(ids, new))
        return found.output, found.state

    def options(self, ids: Tensor, new: int) -> dict[str, Any]:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new}

    def generate(self, ids: Tensor, new: int, **more: Any) -> Tensor:
        return self.model.generate(**self.options(ids, new), **more)

    def timed(self, call: Callable[[Tensor, int], tuple[Tensor, Any]], prompt: int) -> ArmRun:
        """A call for one token and one for all of them."""
        seconds, ids = [], self.ids(prompt)
        for new in (1, self.new):
            self.wait()
            began = time.perf_counter()
            output, state = call(ids, new)
            self.wait()
            seconds.append(time.perf_counter() - began)
        tokens = output[:, self.length :].tolist()
        rounds = [] if state is None else state.trace.rounds
        times = {} if state is None else state.trace.times
        return ArmRun(seconds[1], tokens, seconds[0], times, rounds)

    def rows(self, acceptance: Sequence[float], repeats: int) -> list[dict[str, Any]]:
        arms: dict[str, Callable[[int], ArmRun]] = {
            STOCK: partial(self.timed, self.stock),
            STATIC: partial(self.timed, self.with_static_cache),
            PLAIN: partial(self.timed, self.ours),
        }
        for a in acceptance:
            arms[f"oracle {a:g}"] = partial(self.drafted, a)
        runs, failures = speed.interleave(arms, list(range(repeats)), warmup=1)
        if not runs[STOCK]:
            raise RuntimeError(failures[0])
        passes, rows = self.passes(), []
        for name, found in runs.items():
            wanted = name.removeprefix("oracle ")
            rows.append(self.row(name, found, runs, passes, float(wanted) if wanted != name else None))
            rows[-1]["failures"] = failures
        return rows

    def row(
        self,
        name: str,
        found: list[ArmRun],
        runs: dict[str, list[ArmRun]],
        passes: dict[str, Any],
        acceptance: float | None,
    ) -> dict[str, Any]:
        """A row of the record: one arm."""
        against = speed.compare(runs[STOCK], found)
        reach = speed.tau(found)["tau"] if acceptance is not None else None
        each = [sum(run.seconds - run.first for run in part) for part in (found, runs[PLAIN])]
        rounds = [sum(len(run.rounds) for run in part) for part in (found, runs[PLAIN])]
        row: dict[str, Any] = {
            "arm": name, "batch_size": self.batch, "given_acceptance": acceptance, "tau": reach,
            "expected_tau": None if acceptance is None else expected_tau(acceptance, self.levels),
            **{key: against[key] for key in ("speedup", "speedup_ci95", "speedup_decode_only")},
            "identical": sum(a == b for s, f in zip(runs[STOCK], found) for a, b in zip(s.tokens, f.tokens)),
            "compared": len(found) * self.batch,
            "ms_per_token": 1e3 * each[0] / max(len(found) * (self.new - 1), 1) if self.cuda else None,
            "ms_per_round": 1e3 * each[0] / rounds[0] if self.cuda and rounds[0] else None,
            "compiled": name == STATIC and self.cuda, "attention": str(self.fast.target.masks.backend),
        }  # fmt: skip
        for other in (STATIC, PLAIN):
            row[f"decode_over_{other}"] = speed.compare(runs[other], found)["speedup_decode_only"]
        if acceptance is not None and reach is not None:
            v = passes["verify_over_plain"]
            c = sum(run.stages.get("draft", 0.0) for run in found) / max(rounds[0], 1) / passes["seconds"]
            o = max(0.0, each[1] / max(rounds[1], 1) / passes["seconds"] - 1)
            over = passes["seconds"] * len(found) * (self.new - 1) / each[0]
            row |= {"verify_over_plain": v, "draft_over_plain": c, "host_over_plain": o, "over_pass": over}
            row["ideal_speedup"] = reach / (v + c + o)
            row["measured_over_ideal"] = over / row["ideal_speedup"]
        return row | {key: passes[key] for key in ("pass_ms", "host_share", "over_bytes", "law_error")}

    @torch.inference_mode()
    def passes(self) -> dict[str, Any]:
        """A pass over one node and one over a draft, alone: seconds, and what the host has of it."""
        target, ids, answer = self.plain.target, self.ids(0), self.answer(0)
        options = {"attention_mask": torch.ones_like(ids), "use_cache": True}
        state, _ = open_request(target, Exact(), Request(options, ids, self.new))
        single = trees.empty_draft(state.pending)
        deep = min(self.levels, self.new - 1)
        chain = trees.chain_draft(state.pending, answer[:, 1 : 1 + deep])
        found = categorical(target.verify(state, chain).distribution).logits.float()
        whole = self.model(torch.cat([ids, answer[:, : 1 + deep]], dim=1), logits_to_keep=deep + 1).logits.float()
        spread = (whole - whole.mean(dim=-1, keepdim=True)).norm(dim=-1)
        error = ((found - whole).norm(dim=-1) / spread).max()
        calls = {1: lambda: target.verify(state, single), 2: lambda: target.verify(state, chain)}
        seconds = alternated(calls, 9, self.wait)
        record: dict[str, Any] = dict.fromkeys(("pass_ms", "host_share", "over_bytes"))
        record |= {"seconds": seconds[1], "verify_over_plain": seconds[2] / seconds[1], "law_error": float(error)}
        if self.cuda:
            weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
            bandwidth = copy_bandwidth(self.model.device, clock_of(self.model.device))
            record |= {"pass_ms": 1e3 * seconds[1], "over_bytes": seconds[1] * bandwidth / weights}
            record["host_share"] = min(1.0, issued(calls[1], self.wait) / seconds[1])
        return record


def issued(call: Callable[[], Any], wait: Callable[[], None], repeats: int = 9) -> float:
    """Median seconds until a call returns, whether the device has done it or not."""
    seconds = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def expected_tau(acceptance: float, levels: int) -> float:
    """Tokens a pass: sum_{i=0..L} a^i, the token that follows the accepted ones included."""
    return sum(acceptance**i for i in range(levels + 1))


def table(record: dict[str, Any]) -> Table:
    """A rich table; absolute times on a GPU only."""
    timed = any(row["ms_per_token"] is not None for row in record["rows"])
    view = Table(title=f"real sizes, random weights; {record['prompt']} + {record['max_new_tokens']} ids")
    columns = ["size", "batch", "arm", "tau (expected)", "speed-up", "over static", "over plain"]
    columns += ["over pass", "tau/(v+c+o)", "same"]
    for column in columns + (["ms a token", "pass, ms", "host", "over bytes"] if timed else []):
        named = column in ("size", "arm")
        view.add_column(column, justify="left" if named else "right", no_wrap=named)
    for row in record["rows"]:
        number = lambda key, form="{:.2f}", row=row: "" if row.get(key) is None else form.format(row[key])  # noqa: E731
        reach = "" if row["tau"] is None else f"{row['tau']:.2f} ({row['expected_tau']:.2f})"
        cells = [row["size"], str(row["batch_size"]), row["arm"].removeprefix("transformers_"), reach]
        cells += [
            number("speedup"),
            number(f"decode_over_{STATIC}"),
            number(f"decode_over_{PLAIN}"),
            number("over_pass"),
        ]
        cells.append(number("ideal_speedup"))
        cells.append(f"{row['identical']}/{row['compared']}")
        if timed:
            cells += [number("ms_per_token"), number("pass_ms"), number("host_share"), number("over_bytes")]
        view.add_row(*cells)
    view.caption = "speed-up: whole calls over transformers' generate; the next three without the prompt"
    view.caption += "".join(f"\nfailed: {failure}" for failure in record.get("failures", ()))
    return view
