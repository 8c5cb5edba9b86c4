"""`visspec bench sizes`: decoding at the sizes of real models, with random weights and a drafter that knows the answer.

Weights are drawn on the device. Embeddings and head are built so that a token is mostly followed by the next id, with a
margin that rounding does not exceed. The oracle thus has the requested acceptance in any dtype. Correctness is checked
by distributions, not only by these tokens: `law_error` compares a draft's nodes with the whole text in one stock pass.
Arms take turns, after prompts of random ids. Shapes: B rows, L levels of a draft, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, StaticCache

from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.api.loading import resolve_device
from visspec.api.text.accelerate import Accelerated, accelerate
from visspec.cli.bench import BenchOptions, Cell, table
from visspec.distributions import categorical
from visspec.eval.bench import paired as speed
from visspec.eval.bench.clock import issue_times, median_seconds, seconds_of, waiter
from visspec.eval.bench.oracle import Oracle, erring
from visspec.io.options import Positive, Probability, option
from visspec.io.provenance import provenance
from visspec.loop.decode import open_request
from visspec.models.attention.pass_inputs import CACHE
from visspec.types import Request, State

Decoder = LlamaForCausalLM | Qwen2ForCausalLM
Answer = tuple[Tensor, State | None]  # ids including the prompt, and the state of our loop
STOCK, STATIC, PLAIN = "transformers_generate", "transformers_static", "plain"
ORACLE, POLICY = "oracle", "policy"


class Size(NamedTuple):
    """Layers, hidden size, MLP size, query and key heads, vocabulary.

    Args:
        qwen: Whether there are biases, as in Qwen2.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    keys: int
    vocabulary: int
    qwen: bool = False

    def config(self, room: int) -> LlamaConfig | Qwen2Config:
        """Return the configuration for `room` positions."""
        kind: type[Any] = Qwen2Config if self.qwen else LlamaConfig
        sizes = {"vocab_size": self.vocabulary, "hidden_size": self.hidden, "intermediate_size": self.inner}
        heads = {"num_attention_heads": self.heads, "num_key_value_heads": self.keys}
        ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
        spread, room_of = 1.3 * self.hidden**-0.5, {"max_position_embeddings": room}
        return kind(num_hidden_layers=self.layers, initializer_range=spread, **sizes, **heads, **ends, **room_of)

    def build(self) -> type[Decoder]:
        return Qwen2ForCausalLM if self.qwen else LlamaForCausalLM

    def model(self, device: str, dtype: torch.dtype, room: int) -> Decoder:
        """Return a decoder with weights drawn on the device."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            model = self.build()._from_config(self.config(room), dtype=dtype, attn_implementation="sdpa").eval()
            with torch.no_grad():
                table = torch.nn.init.normal_(model.model.embed_tokens.weight, std=4.0)
                model.lm_head.weight.copy_(table.roll(1, 0) / self.hidden**0.5)
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model


SIZES = {
    "llava-1.6-7b": Size(32, 4096, 11008, 32, 32, 32064),  # with Vicuna
    "qwen2.5-vl-7b": Size(28, 3584, 18944, 28, 4, 152064, qwen=True),
    "janus-pro-7b": Size(30, 4096, 11008, 32, 32, 16384),  # with its head for codes
    "llamagen-xl": Size(36, 1280, 3584, 20, 20, 16384),
    "tiny": Size(2, 64, 96, 4, 1, 128, qwen=True),  # for a quick test
}


@dataclass(kw_only=True)
class Options(BenchOptions):
    sizes: list[str] = option("models whose sizes are measured", [*SIZES][:-1], choices=SIZES)
    batch: list[Positive] = option("batch sizes", [1, 8, 32])
    acceptance: list[Probability] = option("probability that a drafted token is the target's own", [0.5, 0.7, 0.8, 0.9])
    levels: Positive = option("levels of a draft, which is a chain", 6)
    prompt: Positive = option("length of a prompt; an image takes about 600 tokens", 640)
    max_new_tokens: Positive = option("length of an answer", 128)
    repeats: Positive = option("number of batches of prompts", 3)
    device: str = option("torch device; auto: the GPU if there is one", "auto")
    dtype: Literal["float32", "bfloat16", "float16"] = option("dtype of the weights", "bfloat16")


def run(arguments: Options) -> None:
    arguments.begin()
    record = bench_sizes(arguments)
    arguments.end(record, view(record))


def bench_sizes(arguments: Options) -> dict[str, Any]:
    """Return one row for each size, batch and arm. The arms are transformers' `generate`, the same with a static cache
    (compiled on a GPU), our loop without a drafter, with oracles of `levels` drafts, and with oracles whose
    draft-length policy starts untrained. Raises ValueError for fewer than two tokens.

    `speedup` is for whole calls over transformers' generate, `decode_over_*` without the prompt. `ideal_speedup` is tau
    / (v + c + o) in passes over one node, where o is the part of our plain round outside the pass; `over_pass` is the
    measured value in that unit. `attention` is the way our passes attend. `identical` of `compared` rows equal
    transformers'. `length_share` is tau of the policy over that of `levels` drafts. `bytes_bound` is the time to read
    the weights at read bandwidth over that of a pass. On a GPU there are also `pass_ms` and `host_share`, the part of a
    pass until the host has issued it.
    """
    prompt, new, levels = arguments.prompt, arguments.max_new_tokens, arguments.levels
    if new < 2:
        raise ValueError(f"max_new_tokens: got {new}, expected at least 2.")
    rows, where, failures = [], {}, []
    for name in arguments.sizes:
        size = SIZES[name]
        model = size.model(resolve_device(arguments.device), getattr(torch, arguments.dtype), prompt + new + levels + 1)
        where = provenance(model, repeats=arguments.repeats)
        for batch in tqdm(arguments.batch, desc=f"bench sizes {name}", leave=False):
            try:
                case: Any = SizeCase(model, batch, prompt, new, levels)
                results = case.rows(arguments.acceptance, arguments.repeats)
                rows += [{"size": name, "layers": size.layers} | row for row in results]
            except RuntimeError as error:  # mostly out of memory; results so far are kept
                failures.append(f"{name}, batch {batch}: {error}")
            case = None
            if where.get("cuda"):
                torch.cuda.empty_cache()
        del model
    record = {"bench": "sizes", "guarantee": "exact", "drafter": "oracle", "acceptance": "exact", "temperature": 0.0}
    record |= {"seed": 0, "n_prompts": arguments.repeats, "prompt": prompt, "max_new_tokens": new, "levels": levels}
    record |= {key: sum(row[key] for row in rows) for key in ("identical", "compared")}
    return record | {"random_weights": True, "failures": failures, "rows": rows, "provenance": where}


class SizeCase:
    """One model at one batch size. A prompt is a number that seeds its ids."""

    def __init__(self, model: Decoder, batch: int, length: int, new: int, levels: int):
        self.model, self.batch, self.length, self.new, self.levels = model, batch, length, new, levels
        self.cuda, self.wait = model.device.type == "cuda", waiter(model.device)
        self.vocabulary = model.config.vocab_size
        self.static: StaticCache | None = None
        self.known: dict[int, Tensor] = {}
        self.plain = self.accelerate(None)
        self.drafters: dict[str, Oracle] = {}
        self.fast: dict[str, Accelerated] = {}

    def accelerate(self, drafter: Oracle | None) -> Accelerated:
        """Accelerate the model with a drafter, whose traits determine whether a policy chooses lengths."""
        adaptive = drafter is not None and drafter.traits.adaptive_depth
        return accelerate(self.model, drafter, adaptive=adaptive, levels=self.levels)

    def ids(self, prompt: int) -> Tensor:
        generator = torch.Generator().manual_seed(prompt)
        return torch.randint(1, self.vocabulary, (self.batch, self.length), generator=generator).to(self.model.device)

    def answer(self, prompt: int) -> Tensor:
        """Return transformers' greedy answer, (B, T)."""
        if prompt not in self.known:
            self.known[prompt] = self.stock(self.ids(prompt), self.new)[0][:, self.length :]
        return self.known[prompt]

    def stock(self, ids: Tensor, new: int, **more: StaticCache) -> Answer:
        return self.model.generate(**self.options(ids, new), **more), None

    def with_static_cache(self, ids: Tensor, new: int) -> Answer:
        """Run with a static cache, for which transformers compiles passes on a GPU."""
        if self.static is None:
            self.static = StaticCache(config=self.model.config, max_cache_len=self.length + self.new)
        self.static.reset()
        return self.stock(ids, new, **{CACHE: self.static})

    def ours(self, ids: Tensor, new: int, arm: str = "") -> Answer:
        result = (self.fast[arm] if arm else self.plain).run(**self.options(ids, new))
        return result.output, result.state

    def time_drafted(self, arm: str, prompt: int) -> speed.ArmRun:
        if arm not in self.fast or arm.startswith(POLICY):
            self.drafters[arm] = Oracle(levels=self.levels, adaptive=arm.startswith(POLICY))
            self.fast[arm] = self.accelerate(self.drafters[arm])
        drafts_BT = erring(self.answer(prompt), acceptance_of(arm), self.vocabulary, seed=prompt)
        self.drafters[arm].drafts_BT = drafts_BT
        return self.time_calls(partial(self.ours, arm=arm), prompt)

    def options(self, ids: Tensor, new: int) -> dict[str, Any]:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": new}

    def time_calls(self, call: Callable[[Tensor, int], Answer], prompt: int) -> speed.ArmRun:
        """Time a call for one token and one for all of them."""
        ids = self.ids(prompt)
        first, _ = seconds_of(partial(call, ids, 1), self.wait)
        whole, (output, state) = seconds_of(partial(call, ids, self.new), self.wait)
        tokens = output[:, self.length :].tolist()
        return speed.ArmRun(whole, tokens, first, *([] if state is None else [state.trace.times, state.trace.rounds]))

    def rows(self, acceptance: Sequence[float], repeats: int) -> list[dict[str, Any]]:
        arms: dict[str, Callable[[int], speed.ArmRun]] = {
            STOCK: partial(self.time_calls, self.stock),
            STATIC: partial(self.time_calls, self.with_static_cache),
            PLAIN: partial(self.time_calls, self.ours),
        }
        drafted = [f"{kind} {a:g}" for kind in (ORACLE, POLICY) for a in acceptance]
        arms |= {name: partial(self.time_drafted, name) for name in drafted}
        runs, failures = speed.interleave(arms, list(range(repeats)), [repeats])
        if not runs[STOCK]:
            raise RuntimeError(failures[0])
        passes = self.passes()
        return [self.row(name, runs, passes) | {"failures": failures} for name in runs]

    def row(self, name: str, runs: dict[str, list[speed.ArmRun]], passes: dict[str, Any]) -> dict[str, Any]:
        found, against = runs[name], speed.compare(runs[STOCK], runs[name])
        acceptance = acceptance_of(name) if name in self.fast else None
        reach = speed.tau(found)["tau"] if acceptance is not None else None
        each = [sum(run.seconds - run.first for run in part) for part in (found, runs[PLAIN])]
        rounds = [sum(len(run.rounds) for run in part) for part in (found, runs[PLAIN])]
        row: dict[str, Any] = {"arm": name, "batch_size": self.batch, "given_acceptance": acceptance, "tau": reach}
        row["expected_tau"] = None if acceptance is None else expected_tau(acceptance, self.levels)
        if reach is not None and name.startswith(POLICY):
            row["length_share"] = reach / speed.tau(runs[f"{ORACLE} {acceptance:g}"])["tau"]
        row |= {key: against[key] for key in ("speedup", "speedup_ci95", "speedup_decode_only")}
        row["identical"] = sum(a == b for s, f in zip(runs[STOCK], found) for a, b in zip(s.tokens, f.tokens))
        row["compared"] = len(found) * self.batch
        row["ms_per_token"] = 1e3 * each[0] / max(len(found) * (self.new - 1), 1) if self.cuda else None
        row["attention"] = str(self.plain.target.masks.backend)
        for other in (STATIC, PLAIN):
            row[f"decode_over_{other}"] = speed.compare(runs[other], found)["speedup_decode_only"]
        if reach is not None:
            v = passes["verify_over_plain"]
            c = sum(run.stages.get("draft", 0.0) for run in found) / max(rounds[0], 1) / passes["seconds"]
            o = max(0.0, each[1] / max(rounds[1], 1) / passes["seconds"] - 1)
            row |= {"verify_over_plain": v, "draft_over_plain": c, "host_over_plain": o}
            row["over_pass"] = passes["seconds"] * len(found) * (self.new - 1) / each[0]
            row["ideal_speedup"] = reach / (v + c + o)
        return row | {key: passes[key] for key in ("pass_ms", "host_share", "bytes_bound", "law_error")}

    @torch.inference_mode()
    def passes(self) -> dict[str, Any]:
        """Time a pass over one node and one over a draft, alone, and the host's share."""
        target, ids, answer = self.plain.target, self.ids(0), self.answer(0)
        options = {"attention_mask": torch.ones_like(ids), "use_cache": True}
        state, _ = open_request(target, Exact(), Request(options, ids, self.new))
        single = trees.empty_draft(state.pending)
        deep = min(self.levels, self.new - 1)
        chain = trees.chain_draft(state.pending, answer[:, 1 : 1 + deep])
        logits = categorical(target.verify(state, chain).distribution).logits.float()
        whole = self.model(torch.cat([ids, answer[:, : 1 + deep]], dim=1), logits_to_keep=deep + 1).logits.float()
        spread = (whole - whole.mean(dim=-1, keepdim=True)).norm(dim=-1)
        error = ((logits - whole).norm(dim=-1) / spread).max()
        calls = {1: lambda: target.verify(state, single), 2: lambda: target.verify(state, chain)}
        seconds = median_seconds(calls, 9, self.wait)
        record: dict[str, Any] = dict.fromkeys(("pass_ms", "host_share"))
        record |= {"seconds": seconds[1], "verify_over_plain": seconds[2] / seconds[1], "law_error": float(error)}
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        record["bytes_bound"] = weights / read_bandwidth(self.model.device) / seconds[1]
        if self.cuda:
            record["pass_ms"] = 1e3 * seconds[1]
            record["host_share"] = min(1.0, median(issue_times(lambda _: calls[1](), self.wait)) / seconds[1])
        return record


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second at which a device reads a large tensor, measured by its sum."""
    source = torch.ones((256 if device.type == "cuda" else 32) << 18, device=device)
    return 4 * source.numel() / median_seconds({0: source.sum}, 9, waiter(device))[0]


def acceptance_of(arm: str) -> float:
    """Return the acceptance of an arm with an oracle, the last word of its name."""
    return float(arm.split()[-1])


def expected_tau(acceptance: float, levels: int) -> float:
    """Return the expected tokens per pass, sum_{i=0..L} a^i, including the token after the accepted ones."""
    return sum(acceptance**i for i in range(levels + 1))


COLUMNS: dict[str, Cell] = {
    "size": "{size}", "batch": "{batch_size}", "arm": lambda row: row["arm"].removeprefix("transformers_"),
    "tau (expected)": "{tau:.2f} ({expected_tau:.2f})", "speed-up": "{speedup:.2f}",
    "over static": f"{{decode_over_{STATIC}:.2f}}", "over plain": f"{{decode_over_{PLAIN}:.2f}}",
    "over pass": "{over_pass:.2f}", "tau/(v+c+o)": "{ideal_speedup:.2f}", "length": "{length_share:.2f}",
    "bytes": "{bytes_bound:.2f}", "same": "{identical}/{compared}",
}  # fmt: skip
TIMES: dict[str, Cell] = {"ms a token": "{ms_per_token:.2f}", "pass, ms": "{pass_ms:.2f}", "host": "{host_share:.2f}"}


def view(record: dict[str, Any]) -> Table:
    """Return the table of a record, with absolute times only on a GPU."""
    timed = any(row["ms_per_token"] is not None for row in record["rows"])
    caption = "speed-up: whole calls over transformers' generate; the next three without the prompt"
    caption += "".join(f"\nfailed: {failure}" for failure in record.get("failures", ()))
    title = f"real sizes, random weights; {record['prompt']} + {record['max_new_tokens']} ids"
    return table(title, record["rows"], COLUMNS | (TIMES if timed else {}), caption, left=["arm"])
