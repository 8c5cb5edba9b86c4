"""`visspec bench grammar`: answers that are JSON of a schema, against transformers' generate with the same processor.

The model is small and has random weights: what a grammar leaves open decides how much is drafted, not what a model
knows. `unforced` is our loop with the same drafter, where forced text is not drafted.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import tokenizers as hf
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from visspec.api.accelerate import accelerate
from visspec.api.processors import Scorer, at_any_prefix
from visspec.api.schemas import EXTRA, JsonGrammars
from visspec.api.sources import need
from visspec.cli.arguments import Positive
from visspec.cli.bench import BenchOptions, Cell, measured_on, table
from visspec.eval.bench.paired import ratio, time_arms
from visspec.io.options import option
from visspec.types import RowProcessor, Tokenizer

SIZES, COLOURS = ("small", "medium", "large"), ("red", "green", "blue", "yellow", "purple", "orange")
THING = {"size": {"enum": [*SIZES]}, "colour": {"enum": [*COLOURS]}, "shape": {"enum": ["circle", "square", "star"]}}


def object_of(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


PARTS = {"count": {"enum": [1, 2, 3, 4]}, "ground": {"enum": ["black", "white", "grey"]}}
SCHEMA = object_of(PARTS | {name: object_of(THING) for name in ("first", "last")})
WORDS = 400  # of the tokenizer
PROMPT = 8  # tokens
VIEW: dict[str, Cell] = {
    "package": "{package}",
    "drafter": "{drafter}",
    "over transformers": "{over_plain_constrained:.2f}",
    "over passes": "{over_plain_low:.2f}..{over_plain_high:.2f}",
    "over unforced": "{over_unforced:.2f}",
    "same": "{identical}/{compared}",
    "valid": "{valid}",
}


@dataclass(kw_only=True)
class Options(BenchOptions):
    packages: list[str] = option("of xgrammar, llguidance, outlines", ["xgrammar", "llguidance", "outlines"])
    drafters: list[str] = option("or none", ["none", "ngram", "suffix"])
    prompts: Positive = option(default=4)
    passes: Positive = option("over all prompts, of every arm", 3)


class Unforced(RowProcessor):
    """A processor whose forced tokens are not known."""

    def __init__(self, inner: Scorer):
        self.inner = inner

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        return self.inner(ids_L[None], scores_V[None])[0]


def run(arguments: Options) -> None:
    arguments.begin()
    if strange := [name for name in arguments.packages if name not in PROCESSORS]:
        raise ValueError(f"--packages: got {strange[0]}, expected {', '.join(PROCESSORS)}")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, WORDS, (arguments.prompts, 1, PROMPT), generator=generator)
    tokenizer = json_tokenizer()
    model = random_model(tokenizer)
    rows = [
        {"package": package} | measure(model, tokenizer, fresh, drafter, prompts, arguments.passes)
        for package in arguments.packages
        for fresh in (PROCESSORS[package](model, tokenizer),)
        for drafter in arguments.drafters
    ]
    record = measured_on(model) | {"bench": "grammar", "guarantee": "exact", "rows": rows}
    arguments.end(record, table(f"{arguments.prompts} answers of a schema", rows, VIEW))


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    fresh: Callable[[], Any],
    drafter: str,
    prompts: Tensor,
    passes: int,
) -> dict[str, Any]:
    """One row: transformers, ours, and ours without forced text, in turns. fresh: makes a processor for a call."""
    fast = accelerate(model, None if drafter == "none" else drafter)

    def answers(generate: Callable[..., Any], processor: Callable[[], Any]) -> dict[int, list[int]]:
        found = {}
        for n, ids in enumerate(prompts):
            options = {"logits_processor": [processor()], "max_new_tokens": 200, "do_sample": False}
            found[n] = generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, PROMPT:].tolist()
        return found

    arms = {
        "transformers": partial(answers, model.generate, fresh),
        "forced": partial(answers, fast.generate, fresh),
        "unforced": partial(answers, fast.generate, lambda: Unforced(at_any_prefix(fresh(), prompts[0]))),
    }
    plain, forced, other = time_arms(arms, passes, warmup=1).values()
    ratios = [slow / quick for slow, quick in zip(plain.seconds, forced.seconds)]
    texts = [str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in forced.tokens.values()]
    return {
        "drafter": drafter,
        "over_plain_constrained": ratio(plain.seconds, forced.seconds),
        "over_plain_low": min(ratios),
        "over_plain_high": max(ratios),
        "over_unforced": ratio(other.seconds, forced.seconds),
        "identical": sum(forced.tokens[n] == other.tokens[n] == tokens for n, tokens in plain.tokens.items()),
        "compared": len(prompts),
        "valid": sum(map(is_valid, texts)),
    }


def is_valid(text: str) -> bool:
    jsonschema = need("jsonschema", "bench grammar", EXTRA)
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def json_tokenizer(
    text: str = json.dumps(SCHEMA), words: int = WORDS, more: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, made of a text. more: special tokens behind those of padding, beginning and end."""
    core = hf.Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", *more]
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([text] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", additional_special_tokens=[*more]
    )


def random_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def xgrammar(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Callable[[], Any]:
    (processor,) = JsonGrammars(cast(Tokenizer, tokenizer), model, "--packages").options(SCHEMA)["logits_processor"]
    return lambda: type(processor)(processor.compiled_grammars)


def llguidance(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Callable[[], Any]:
    own = need("llguidance", "--packages")
    need("outlines", "--packages")
    from llguidance.hf import from_tokenizer
    from outlines.backends.llguidance import LLGuidanceLogitsProcessor

    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    grammar, words = own.LLMatcher.grammar_from_json_schema(SCHEMA, overrides=spaces), from_tokenizer(tokenizer)
    return lambda: LLGuidanceLogitsProcessor(grammar, words, "torch")


def outlines(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Callable[[], Any]:
    own = need("outlines", "--packages").from_transformers(model, tokenizer)
    from outlines.backends import get_json_schema_logits_processor

    processor = get_json_schema_logits_processor("outlines_core", own, json.dumps(SCHEMA), "[ ]?")

    def fresh() -> Any:
        processor.reset()
        return processor

    return fresh


PROCESSORS = {"xgrammar": xgrammar, "llguidance": llguidance, "outlines": outlines}  # what makes a fresh one
