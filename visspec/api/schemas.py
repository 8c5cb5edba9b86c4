"""Answers that are JSON of a schema. The grammar is xgrammar's, an optional package: pip install 'visspec[grammar]'.

The grammar passes over some keywords of schemas (`not`, `uniqueItems`, ...): whole answers are validated in addition.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from visspec.api.captions import Caption
from visspec.api.sources import need
from visspec.io.files import Json
from visspec.types import ConfiguredModel, Tokenizer

EXTRA = "grammar"
SPELLED = '{"a": [-1.5, true]}'  # what a tokenizer must write as it is
MOST_CACHED = 1 << 26  # bytes of compiled schemas


class JsonGrammars:
    """Makes grammars of JSON schemas for one model. what: the argument that a refusal names. Raises ValueError for a
    tokenizer that can't write JSON, and if a package is missing.
    """

    def __init__(self, tokenizer: Tokenizer, model: ConfiguredModel, what: str):
        xgrammar = need("xgrammar", what, EXTRA)
        self.what, self.jsonschema = what, need("jsonschema", what, EXTRA)
        if tokenizer.decode(tokenizer(SPELLED, add_special_tokens=False)["input_ids"]).strip() != SPELLED:
            raise ValueError(f"{what}: got a model whose tokenizer can't write {SPELLED}, expected one that can")
        vocabulary = model.config.get_text_config().vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        self.compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=MOST_CACHED)

    def options(self, schema: Json) -> dict[str, Any]:
        """generate's arguments for answers of a schema, for any number of calls through `accelerate`. Raises ValueError
        for what is no schema, or none that can be a grammar.
        """
        from xgrammar.contrib.hf import LogitsProcessor

        try:
            self.jsonschema.validators.validator_for(schema).check_schema(schema)
            grammar = self.compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        except Exception as error:  # of either package, which raise what they like
            said = str(error).strip().split("\n")[0][:200]
            raise ValueError(f"{self.what}: got what can't be a grammar, expected a JSON schema ({said})") from None
        return {"logits_processor": [LogitsProcessor(grammar)]}

    def explain(self, text: str, schema: Json) -> str | None:
        """Why a text is no JSON of a schema; None if it is."""
        try:
            self.jsonschema.validate(json.loads(text), schema)
        except Exception as error:  # of a reference that leads nowhere, too
            return str(error).split("\n")[0][:200]
        return None

    def check(self, found: Caption, schema: Json) -> Caption:
        """A caption, with an error if it is not of the schema, as one that was cut at its limit."""
        if (why := self.explain(found.text or "", schema)) is None:
            return found
        said = f"{found.path}: got {found.tokens} tokens that {self.what} does not allow, expected JSON of it ({why})"
        return replace(found, text=None, error=found.error or said)
