"""`visspec bench sizes`: decoding at the sizes of real models, with random weights and a drafter that knows the answer.

Weights are drawn on the device. Embeddings and head are built so that a token is mostly followed by the next id, with a
margin that rounding does not exceed. The oracle thus has the requested acceptance in any dtype. Correctness is checked
by distributions, not only by these tokens: `law_error` compares a draft's nodes with the whole text in one stock pass.
Arms take turns, after prompts of random ids. Shapes: B rows, L levels of a draft, V vocabulary.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel, Qwen2Config

from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.api.loading import resolve_device
from visspec.api.text.accelerate import accelerate
from visspec.cli.bench import BenchOptions, CaptionArm, Cell, Prompt, StockCaptionArm, table
from visspec.distributions import categorical
from visspec.eval.bench import paired as speed
from visspec.eval.bench.clock import median_seconds, waiter
from visspec.eval.bench.oracle import Oracle, with_errors
from visspec.io.options import Positive, Probability, option
from visspec.io.provenance import provenance
from visspec.loop.decode import open_request
from visspec.models.runner.views import join_weights
from visspec.types import Request

STOCK, STATIC, PLAIN = "transformers_generate", "transformers_static", "plain"
ORACLE, POLICY = "oracle", "policy"
COMPILED = ", compiled"  # suffix of our arms with compiled passes
READ = 1 << 32  # bytes that are summed to measure the bandwidth of reading


def config_of(
    kind: type[LlamaConfig | Qwen2Config], layers: int, hidden: int, inner: int, heads: int, keys: int, vocabulary: int
) -> LlamaConfig | Qwen2Config:
    """Return a configuration: layers, hidden size, MLP size, query and key heads, vocabulary. Qwen2 has biases."""
    return kind(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        initializer_range=1.3 * hidden**-0.5,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )


SIZES = {
    "llava-1.6-7b": config_of(LlamaConfig, 32, 4096, 11008, 32, 32, 32064),  # with Vicuna
    "qwen2.5-vl-7b": config_of(Qwen2Config, 28, 3584, 18944, 28, 4, 152064),
    "janus-pro-7b": config_of(LlamaConfig, 30, 4096, 11008, 32, 32, 16384),  # with its head for codes
    "llamagen-xl": config_of(LlamaConfig, 36, 1280, 3584, 20, 20, 16384),
    "tiny": config_of(Qwen2Config, 2, 64, 96, 4, 1, 128),  # for a quick test
}


def random_decoder(name: str, device: str, dtype: torch.dtype, room: int) -> PreTrainedModel:
    """Return a decoder of one of SIZES for `room` positions, with weights drawn on the device."""
    config = copy.deepcopy(SIZES[name])
    config.max_position_embeddings = room
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        with torch.no_grad():
            weight = torch.nn.init.normal_(model.model.embed_tokens.weight, std=4.0)
            model.lm_head.weight.copy_(weight.roll(1, 0) / config.hidden_size**0.5)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


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
    compile: bool = option("add our arms with compiled passes, which are recorded on a GPU", False)
    join: bool = option("join the weights of q, k, v and of gate, up, for one product in compiled layers", False)


def run(arguments: Options) -> None:
    arguments.begin()
    record = bench_sizes(arguments)
    arguments.end(record, view(record))


def bench_sizes(arguments: Options) -> dict[str, Any]:
    """Return one row for each size, batch and arm. The arms are transformers' `generate`, the same with a static cache
    (compiled on a GPU), our loop without a drafter, with oracles of `levels` drafts, and with oracles whose
    draft-length policy starts untrained; with `compile` ours also with compiled passes. Raises ValueError for fewer
    than two tokens.

    `speedup` is for whole calls over transformers' generate, `decode_over_*` without the prompt. `ideal_speedup` is tau
    / (v + c + o) in passes over one node, where o is the part of our plain round outside the pass. `attention` is the
    way our passes attend. `identical` of `compared` rows equal transformers'. `length_share` is tau of the policy over
    that of `levels` drafts. On a GPU there are also `ms_per_token` and, without a drafter, `ms_per_pass` and
    `over_bytes`: a pass over the time in which the device reads the weights.
    """
    prompt, new, levels = arguments.prompt, arguments.max_new_tokens, arguments.levels
    if new < 2:
        raise ValueError(f"max_new_tokens: got {new}, expected at least 2.")
    rows: list[dict[str, Any]] = []
    where, failures = {}, []
    for name in arguments.sizes:
        dtype, room = getattr(torch, arguments.dtype), prompt + new + levels + 1
        model = random_decoder(name, resolve_device(arguments.device), dtype, room)
        if arguments.join:
            join_weights(model.get_decoder())
        where = provenance(model, repeats=arguments.repeats)
        for batch in tqdm(arguments.batch, desc=f"bench sizes {name}", leave=False):
            try:
                case = SizeCase(model, batch, prompt, new, levels, arguments.compile)
                results = case.rows(arguments.acceptance, arguments.repeats)
                rows += [{"size": name, "layers": SIZES[name].num_hidden_layers} | row for row in results]
            except RuntimeError as error:  # mostly out of memory; results so far are kept
                failures.append(f"{name}, batch {batch}: {error}")
            if where.get("cuda"):
                torch.cuda.empty_cache()
        del model
    record = {"bench": "sizes", "guarantee": "exact", "drafter": "oracle", "acceptance": "exact", "temperature": 0.0}
    record |= {"seed": 0, "n_prompts": arguments.repeats, "prompt": prompt, "max_new_tokens": new, "levels": levels}
    record |= {key: sum(row[key] for row in rows) for key in ("identical", "compared")} | {"joined": arguments.join}
    return record | {"random_weights": True, "failures": failures, "rows": rows, "provenance": where}


class SizeCase:
    """One model at one batch size. A prompt is a number that seeds its ids, with the model's inputs."""

    def __init__(self, model: PreTrainedModel, batch: int, length: int, new: int, levels: int, compile: bool = False):
        self.model, self.batch, self.length, self.new, self.levels = model, batch, length, new, levels
        self.cuda = model.device.type == "cuda"
        self.options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new}
        self.plain = {how: accelerate(model, None, compile=bool(how)) for how in ("", COMPILED)[: 1 + compile]}
        self.known: dict[int, Tensor] = {}

    def prompt(self, number: int) -> Prompt:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(1, self.model.config.vocab_size, (self.batch, self.length), generator=generator)
        ids = ids.to(self.model.device)
        return number, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def answer(self, prompt: Prompt) -> Tensor:
        """Return transformers' greedy answer, (B, T)."""
        number, inputs = prompt
        if number not in self.known:
            model: Any = self.model
            self.known[number] = model.generate(**inputs, **self.options)[:, self.length :]
        return self.known[number]

    def oracle_arm(self, acceptance: float, adaptive: bool, how: str) -> speed.Arm:
        """Return our loop with an oracle. If `adaptive`, the draft-length policy of every call is untrained."""
        oracle = Oracle(levels=self.levels, adaptive=adaptive)
        fast = accelerate(self.model, oracle, adaptive=adaptive, levels=self.levels, compile=bool(how))
        measure, untrained = CaptionArm(fast, self.options, seed=0), copy.deepcopy(vars(fast.length_policy))

        def arm(prompt: Prompt) -> speed.ArmRun:
            vars(fast.length_policy).update(copy.deepcopy(untrained))
            vocabulary = self.model.config.vocab_size
            oracle.drafts_BT = with_errors(self.answer(prompt), acceptance, vocabulary, seed=prompt[0])
            return measure(prompt)

        return arm

    def rows(self, acceptance: Sequence[float], repeats: int) -> list[dict[str, Any]]:
        arms: dict[str, speed.Arm] = {
            STOCK: StockCaptionArm(self.model, self.options, seed=0),
            STATIC: StockCaptionArm(self.model, self.options | {"cache_implementation": "static"}, seed=0),
        }
        arms |= {PLAIN + how: CaptionArm(fast, self.options, seed=0) for how, fast in self.plain.items()}
        settings = {
            f"{kind} {a:g}{how}": (a, kind == POLICY, how)
            for how in self.plain
            for kind in (ORACLE, POLICY)
            for a in acceptance
        }
        arms |= {name: self.oracle_arm(*one) for name, one in settings.items()}
        runs, failures = speed.interleave(arms, [*map(self.prompt, range(repeats))], [self.prompt(repeats)])
        if not runs[STOCK]:
            raise RuntimeError(failures[0])
        passes = {how: self.passes(how) for how in self.plain}
        return [self.row(name, runs, passes, settings.get(name, [None])[0]) | {"failures": failures} for name in runs]

    def row(
        self,
        name: str,
        runs: dict[str, list[speed.ArmRun]],
        passes_by_how: dict[str, dict[str, float]],
        acceptance: float | None,
    ) -> dict[str, Any]:
        how = COMPILED if name.endswith(COMPILED) else ""
        passes, plain_runs = passes_by_how[how], runs[PLAIN + how]
        arm_runs, ratios = runs[name], speed.compare(runs[STOCK], runs[name])
        decoding = sum(run.seconds - run.first for run in arm_runs)
        row: dict[str, Any] = {"arm": name, "batch_size": self.batch, "given_acceptance": acceptance}
        row |= {"tau": None, "expected_tau": None, "attention": str(self.plain[how].target.masks.backend)}
        row |= {key: ratios[key] for key in ("speedup", "speedup_ci95", "speedup_decode_only")}
        for other in (STATIC, PLAIN):
            row[f"decode_over_{other}"] = speed.compare(runs[other], arm_runs)["speedup_decode_only"]
        row["identical"] = sum(a == b for s, f in zip(runs[STOCK], arm_runs) for a, b in zip(s.tokens, f.tokens))
        row["compared"] = len(arm_runs) * self.batch
        row["ms_per_token"] = 1e3 * decoding / (len(arm_runs) * (self.new - 1)) if self.cuda else None
        row["law_error"] = passes["law_error"]
        if self.cuda and name == PLAIN + how:
            weights = sum(x.nbytes for name, x in self.model.named_parameters() if "embed_tokens" not in name)
            row["ms_per_pass"] = 1e3 * passes["seconds"]
            row["over_bytes"] = passes["seconds"] * read_bandwidth(self.model.device) / weights
        if acceptance is None:
            return row
        tau, seconds = speed.tau(arm_runs)["tau"], passes["seconds"]
        if name.startswith(POLICY):
            row["length_share"] = tau / speed.tau(runs[f"{ORACLE} {acceptance:g}{how}"])["tau"]
        plain_rounds = sum(len(run.rounds) for run in plain_runs)
        v = passes["verify_over_plain"]
        c = sum(run.stages.get("draft", 0.0) for run in arm_runs) / sum(len(run.rounds) for run in arm_runs) / seconds
        o = max(0.0, sum(run.seconds - run.first for run in plain_runs) / plain_rounds / seconds - 1)
        row |= {"tau": tau, "expected_tau": expected_tau(acceptance, self.levels), "ideal_speedup": tau / (v + c + o)}
        return row | {"verify_over_plain": v, "draft_over_plain": c, "host_over_plain": o}

    @torch.inference_mode()
    def passes(self, how: str = "") -> dict[str, float]:
        """Time a pass over one node and one over a draft, alone, and compare its distributions with a stock pass."""
        target, prompt = self.plain[how].target, self.prompt(0)
        ids, answer = prompt[1]["input_ids"], self.answer(prompt)
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
        seconds = median_seconds(calls, 9, waiter(self.model.device))
        return {"seconds": seconds[1], "verify_over_plain": seconds[2] / seconds[1], "law_error": float(error)}


@functools.cache
def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second at which the device reads memory."""
    values = torch.zeros(READ // 4, device=device)
    return READ / median_seconds({0: values.sum}, 9, waiter(device))[0]


def expected_tau(acceptance: float, levels: int) -> float:
    """Return the expected tokens per pass, sum_{i=0..L} a^i, including the token after the accepted ones."""
    return sum(acceptance**i for i in range(levels + 1))


COLUMNS: dict[str, Cell] = {
    "size": "{size}", "batch": "{batch_size}", "arm": lambda row: row["arm"].removeprefix("transformers_"),
    "tau (expected)": "{tau:.2f} ({expected_tau:.2f})", "speed-up": "{speedup:.2f}",
    "over static": f"{{decode_over_{STATIC}:.2f}}", "over plain": f"{{decode_over_{PLAIN}:.2f}}",
    "tau/(v+c+o)": "{ideal_speedup:.2f}", "length": "{length_share:.2f}", "same": "{identical}/{compared}",
}  # fmt: skip


def view(record: dict[str, Any]) -> Table:
    """Return the table of a record, with absolute times only on a GPU."""
    timed = any(row["ms_per_token"] is not None for row in record["rows"])
    caption = "speed-up: whole calls over transformers' generate; the next two without the prompt"
    caption += "".join(f"\nfailed: {failure}" for failure in record.get("failures", ()))
    title = f"real sizes, random weights; {record['prompt']} + {record['max_new_tokens']} ids"
    times: dict[str, Cell] = {"ms a pass": "{ms_per_pass:.2f}", "over bytes": "{over_bytes:.2f}"}
    columns = COLUMNS | (times | {"ms a token": "{ms_per_token:.2f}"} if timed else {})
    return table(title, record["rows"], columns, caption, left=["arm"])
