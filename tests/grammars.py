"""A tokenizer that spells JSON, a model with it, and each grammar package's processor of one schema."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch
import transformers as tf
import transformers.tokenization_utils as tokenization
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.tiny import EOS, IMAGE, PAD, VOCAB, model_of

SHAPE = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}, "count": {"enum": [1, 2, 12]}}}
SHAPE |= {"required": ["colour", "count"], "additionalProperties": False}
SCHEMA: dict[str, Any] = {"type": "object", "required": ["ground", "first", "seen"], "additionalProperties": False}
SCHEMA["properties"] = {"ground": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "first": SHAPE}
SCHEMA["properties"]["seen"] = {"type": "boolean"}
LONGEST = 120  # tokens


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, behind ids that write nothing: those that the tiny models have."""
    text = '{"ground": "red", "first": {"colour": "green", "count": 12}, "seen": false}'
    core, more = Tokenizer(models.BPE()), [f"<{n}>" for n in range(EOS + 1, VOCAB)]
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<pad>", "<s>", "</s>", *more], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    core.train_from_iterator([text] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", additional_special_tokens=more
    )


@functools.cache
def json_model() -> nn.Module:
    """A tiny LLaVA of that vocabulary."""
    with torch.inference_mode(False):
        model = copy.deepcopy(model_of("llava"))
        model.resize_token_embeddings(len(tokenizer()), mean_resizing=False)
        generator = torch.Generator().manual_seed(1)
        for embedding in (model.lm_head, model.get_input_embeddings()):
            embedding.weight.data = 0.3 * torch.randn(embedding.weight.shape, generator=generator)
    model.generation_config.eos_token_id = EOS
    return model.eval()


def json_processor() -> tf.LlavaProcessor:
    """The model's processor."""
    images = tf.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    return tf.LlavaProcessor(
        images, tokenizer(), patch_size=4, vision_feature_select_strategy="default", image_token=f"<{IMAGE}>",
        num_additional_image_tokens=1,
    )  # fmt: skip


def record(tokens: list[int]) -> Any:
    """What tokens write, as JSON that the schema allows. Raises if it is none."""
    result = json.loads(tokenizer().decode([token for token in tokens if token not in (PAD, EOS)]))
    jsonschema.validate(result, SCHEMA)
    return result


@functools.cache
def compiled(schema: str = json.dumps(SCHEMA), **options: Any) -> Any:
    """A schema's grammar of xgrammar."""
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=len(tokenizer()))
    return xgrammar.GrammarCompiler(info).compile_json_schema(schema, **options)


def _xgrammar() -> dict[str, Any]:
    grammar = compiled(any_whitespace=False)
    from xgrammar.contrib.hf import LogitsProcessor

    return {"logits_processor": [LogitsProcessor(grammar)]}


@functools.cache
def _llguidance_grammar() -> tuple[Any, str]:
    llguidance = pytest.importorskip("llguidance")
    from llguidance.hf import from_tokenizer

    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides=options)
    return from_tokenizer(tokenizer()), grammar


class LLGuidance:
    """A processor as a user of llguidance writes it."""

    def __init__(self, llg_tokenizer: Any, grammar: str):
        self.tokenizer, self.grammar, self.matchers = llg_tokenizer, grammar, []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        from llguidance import LLMatcher

        if not self.matchers:
            self.matchers = [LLMatcher(self.tokenizer, self.grammar) for _ in ids]
        else:
            for matcher, row in zip(self.matchers, ids.tolist()):
                assert matcher.is_stopped() or matcher.consume_token(row[-1]), "an illegal token"
        allowed = [list(matcher.compute_logit_bias()) for matcher in self.matchers]
        return scores.masked_fill(torch.tensor(allowed)[:, : scores.shape[1]] == 0, float("-inf"))


def _llguidance() -> dict[str, Any]:
    return {"logits_processor": [LLGuidance(*_llguidance_grammar())]}


@functools.cache
def _outlines_model() -> Any:
    outlines = pytest.importorskip("outlines")
    return outlines.from_transformers(json_model(), tokenizer())


def _outlines() -> dict[str, Any]:
    pytest.importorskip("outlines")
    from outlines.backends import get_json_schema_logits_processor

    made = get_json_schema_logits_processor("outlines_core", _outlines_model(), json.dumps(SCHEMA), "[ ]?")
    return {"logits_processor": [made]}


def _outlines_xgrammar() -> dict[str, Any]:
    pytest.importorskip("outlines")
    from outlines.backends.xgrammar import XGrammarLogitsProcessor

    return {"logits_processor": [XGrammarLogitsProcessor(compiled(any_whitespace=False), "torch")]}


def _lm_format_enforcer() -> dict[str, Any]:
    pytest.importorskip("lmformatenforcer")
    tokenization.PreTrainedTokenizerBase = PreTrainedTokenizerBase  # where its 0.11.3 imports it from
    from lmformatenforcer import JsonSchemaParser
    from lmformatenforcer.integrations.transformers import build_transformers_prefix_allowed_tokens_fn

    made = build_transformers_prefix_allowed_tokens_fn(tokenizer(), JsonSchemaParser(SCHEMA))
    made.token_enforcer.root_parser.config.max_consecutive_whitespaces = 1
    return {"prefix_allowed_tokens_fn": made}


PACKAGES: dict[str, Callable[[], dict[str, Any]]] = {  # generate's arguments, with a fresh processor
    "xgrammar": _xgrammar,
    "llguidance": _llguidance,
    "outlines": _outlines,
    "outlines-xgrammar": _outlines_xgrammar,
    "lm-format-enforcer": _lm_format_enforcer,
}
