"""Times of small random models, by hand: `python -P tests/clocks.py [assistants] [untrained] [states]`. No tests.

* assistants: our loop against transformers' own mode with the same assistant, batch 1, greedy, interleaved.
* untrained: drafters that need no training, where nothing is to be gained.
* states: what setting states aside costs of a pass over a draft, in a hybrid model of some size.
"""

from __future__ import annotations

import statistics
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import transformers as tf
from transformers.modeling_layers import MtpModel

# as pytest does, see `sweep`
sys.modules.setdefault("tests", types.ModuleType("tests")).__path__ = [str(Path(__file__).resolve().parent)]

import visspec  # noqa: E402
from tests import test_assistants as pairs  # noqa: E402
from tests.doubles import opened_model  # noqa: E402
from tests.test_recurrent import HYBRID  # noqa: E402
from tests.tiny import TEXT, built  # noqa: E402
from visspec import tree as trees  # noqa: E402

NEW, ROUNDS = 96, 12


def assistants() -> None:
    """Of each kind, with random weights, so that hardly a draft is accepted: what remains is the work around passes."""
    for name in pairs.PAIRS:
        target, drafter = pairs.pair_of(name)
        inputs = pairs.prompt((19,))
        fast = visspec.accelerate(target, pairs.made(name, target, drafter), adaptive=False)
        quick = visspec.accelerate(target, pairs.made(name, target, drafter))
        options = {**inputs, "max_new_tokens": NEW, "do_sample": False}
        theirs = {
            "dflash": {"speculation_type": "dflash", "assistant_model": drafter},
            "gemma4": {"assistant_model": drafter}, "mtp": {"use_mtp": True},
        }[name]  # fmt: skip
        arms = {
            "transformers": lambda o=options, t=target, x=theirs: t.generate(**o, **x),
            "ours, fixed depth": lambda o=options, f=fast: f.generate(**o),
            "ours": lambda o=options, f=quick: f.generate(**o),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MtpModel, "from_pretrained", lambda *_, d=drafter, **__: d)
            seconds, tokens = clocked(arms)
        assert all(torch.equal(t, tokens[0]) for t in tokens)
        base = seconds["transformers"]
        for arm, found in seconds.items():
            ratio = statistics.median(b / s for b, s in zip(base, found))
            print(f"{name:8} {arm:18} {1e3 * statistics.median(found):7.1f} ms  over transformers {ratio:.2f}")


def untrained() -> None:
    """Drafters without training over plain decoding, on a random model whose text hardly ever repeats."""
    model = built(tf.LlamaForCausalLM, tf.LlamaConfig(**{**TEXT, "hidden_size": 192, "intermediate_size": 512,
                                                         "num_hidden_layers": 12, "vocab_size": 4096}))  # fmt: skip
    names = (None, "ngram", "recycling", "context", "layers")
    quick = {name: visspec.accelerate(model, name) for name in names}
    rows = [pairs.prompt((19,), seed) for seed in range(ROUNDS + 2)]
    turn = {name: iter(rows * 2) for name in names}
    arms = {
        name: lambda f=fast, n=name: f.generate(**next(turn[n]), max_new_tokens=NEW, do_sample=False)
        for name, fast in quick.items()
    }
    seconds, _ = clocked(arms)
    for name, found in seconds.items():
        print(f"untrained {name!s:24} over plain {sum(seconds[None]) / sum(found):.3f}")


def clocked(arms):
    seconds, tokens = {name: [] for name in arms}, []
    for round in range(ROUNDS + 2):
        for name, call in arms.items():
            start = time.perf_counter()
            out = call()
            if round >= 2:
                seconds[name].append(time.perf_counter() - start)
                tokens.append(out)
    return seconds, tokens


@torch.inference_mode()
def states() -> None:
    sizes = {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "vocab_size": 4096,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    }  # fmt: skip
    model = built(tf.Qwen3_5ForCausalLM, tf.Qwen3_5TextConfig(**{**TEXT, **HYBRID, **sizes}))
    for rows in (1, 3):
        target, state, _ = opened_model(model, pairs.prompt((64,) * rows))
        draft = trees.chain_draft(state.pending, state.pending[:, None].repeat(1, 4))
        past, passes, asides = state.cache.past, [], []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            target.verify(state, draft)
            passes.append(time.perf_counter() - start)
            start = time.perf_counter()
            kept = [held[i].clone() for held, i in past._states()]
            asides.append(time.perf_counter() - start)
        size = sum(t.numel() * t.element_size() for t in kept) / 1e6
        share = statistics.median(asides) / statistics.median(passes)
        print(f"states   batch {rows}: {size:.1f} MB, {1e3 * statistics.median(asides):.2f} ms, {share:.1%} of a pass")


if __name__ == "__main__":
    for name in sys.argv[1:] or ("assistants", "untrained", "states"):
        globals()[name]()
