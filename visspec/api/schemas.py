"""Answers that are JSON of a schema. The grammar is xgrammar's, an optional package (pip install 'visspec[grammar]')."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from visspec.api.captions import Caption
from visspec.api.sources import need
from visspec.types import ConfiguredModel, Tokenizer

EXTRA = "grammar"
SPELLED = '{"a": [-1.5, true]}'  # what a tokenizer must write as it is


class JsonSchema:
    """A schema for one model's answers. schema None: any object. what: the argument that brought it. `options` are
    generate's, for any number of calls through `accelerate`. Raises ValueError for a schema that can't be a grammar,
    for a tokenizer that can't write JSON, and if a package is missing.
    """

    def __init__(self, schema: Any, tokenizer: Tokenizer, model: ConfiguredModel, what: str = "schema"):
        xgrammar = need("xgrammar", what, EXTRA)
        self.schema, self.what, self.validation = schema, what, need("jsonschema", what, EXTRA)
        if tokenizer.decode(tokenizer(SPELLED, add_special_tokens=False)["input_ids"]).strip() != SPELLED:
            raise ValueError(f"{what}: got a tokenizer that can't write JSON as it is, expected a model with another")
        vocabulary = model.config.get_text_config().vocab_size
        try:
            if schema is not None:
                self.validation.validators.validator_for(schema).check_schema(schema)
            compiler = xgrammar.GrammarCompiler(
                xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
            )
            form = {"type": "object"} if schema is None else schema
            grammar = compiler.compile_json_schema(json.dumps(form), any_whitespace=False)
        except Exception as error:  # of either package, which raise what they like
            said = str(error).strip().split("\n")[0][:200]
            raise ValueError(f"{what}: got what can't be a grammar, expected a JSON schema: {said}") from None
        from xgrammar.contrib.hf import LogitsProcessor

        self.options = {"logits_processor": [LogitsProcessor(grammar)]}

    def check(self, found: Caption) -> Caption:
        """A caption, with an error if it is not what the schema allows, as one that ended at its limit may be."""
        if found.text is None:
            return found
        try:
            self.validation.validate(json.loads(found.text), self.schema if self.schema is not None else {})
        except (ValueError, self.validation.ValidationError) as error:
            said = str(error).split("\n")[0][:200]
            why = f"{found.path}: got JSON that ended by {found.ended}, expected what {self.what} allows: {said}"
            return replace(found, text=None, error=why)
        return found
