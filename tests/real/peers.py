"""The default drafter beside transformers' own modes and another package, in one run on published weights.

    make real && pip install economize
    python -P tests/real/peers.py --dtype bfloat16 --threads 2 --count 20

All arms decode the same held-out prompts, prompt by prompt in alternating order, after a warm-up on other prompts.
"""

import argparse
import copy
from functools import partial
from pathlib import Path

import economize
import torch
from economize.techniques.lookup import LookupConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import visspec
from visspec.api.captions import prepare
from visspec.cli import bench_text
from visspec.cli.bench import CaptionArm, StockCaptionArm, in_turns, trim_rows
from visspec.eval.bench import paired
from visspec.eval.bench.clock import seconds_of

FOLDER = Path(__file__).resolve().parents[2] / "real" / "smollm2"


class Economize:
    """Prompt lookup of `economize`, up to so many tokens a pass."""

    def __init__(self, model, tokens, new):
        self.model, self.new, self.config = economize.apply(model, LookupConfig()), new, model.generation_config
        self.decoding = economize.DecodeConfig(cycle_length=tokens + 1)

    def __call__(self, prompt):
        ids = prompt[1]["input_ids"][0]
        run = partial(self.model.decode, ids, self.new, decoding=self.decoding, stop=self.config.eos_token_id)
        seconds, result = seconds_of(run)
        tokens = torch.as_tensor(result.tokens).reshape(1, -1)
        same = tokens[0, : len(ids)].tolist() == ids.tolist()
        return paired.ArmRun(seconds, trim_rows(tokens[:, len(ids) :] if same else tokens, self.config))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--new", type=int, default=64)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=asked.dtype).eval()
    prompts = in_turns(bench_text.read_prompts(None))[: asked.count]
    warm = in_turns(bench_text.read_prompts(None, "train"))[:5]
    inputs = [(i, prepare(tokenizer, [[]], prompt.prompt, model)) for i, prompt in enumerate([*prompts, *warm])]
    base = {"max_new_tokens": asked.new, "do_sample": False}
    arms = {"generate": StockCaptionArm(model, base, 0)}
    for tokens in (3, 10):
        arms[f"prompt lookup, {tokens}"] = StockCaptionArm(model, base | {"prompt_lookup_num_tokens": tokens}, 0)
        arms[f"economize lookup, {tokens}"] = Economize(copy.deepcopy(model), tokens, asked.new)
    arms["visspec, no drafter"] = CaptionArm(visspec.accelerate(model, None), base, 0)
    arms["visspec"] = CaptionArm(visspec.accelerate(model), base, 0)
    runs, failures = paired.interleave(arms, inputs[: len(prompts)], inputs[len(prompts) :], "peers")
    print(f"{len(prompts)} prompts, {asked.new} tokens, {asked.dtype}, {asked.threads} threads; failures: {failures}")
    for name, result in runs.items():
        ratio = paired.compare(runs["generate"], result)
        low, high = ratio["speedup_ci95"]
        tau = f", tau {paired.tau(result)['tau']:.2f}" if result[0].rounds else ""
        same = f"{ratio['identical']}/{ratio['compared']}"
        kinds = {}
        for prompt, one in zip(prompts, ratio["ratios"]):
            kinds.setdefault(prompt.category, []).append(one)
        of_kinds = ", ".join(f"{kind} {paired.geometric_mean(some):.2f}" for kind, some in kinds.items())
        print(f"{name}: {ratio['speedup']:.2f} [{low:.2f}, {high:.2f}], identical {same}{tau}; {of_kinds}")


if __name__ == "__main__":
    main()
