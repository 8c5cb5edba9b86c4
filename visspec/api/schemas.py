"""Answers constrained by a JSON schema, with grammars of the optional package xgrammar: pip install 'visspec[grammar]'.

The grammar ignores some keywords of schemas (`not`, `uniqueItems`, ...), so whole answers are validated as well.
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
SPELLED = '{"a": [-1.5, true]}'  # a text that a tokenizer must reproduce
MOST_CACHED = 1 << 26  # maximum bytes of compiled schemas


class JsonGrammars:
    """Compiles JSON schemas for one model. `what` names the argument in errors. Raises ValueError if it can't."""

    def __init__(self, tokenizer: Tokenizer, model: ConfiguredModel, what: str):
        xgrammar = need("xgrammar", what, EXTRA)
        self.what, self.jsonschema = what, need("jsonschema", what, EXTRA)
        if tokenizer.decode(tokenizer(SPELLED, add_special_tokens=False)["input_ids"]).strip() != SPELLED:
            raise ValueError(f"{what}: The model's tokenizer can't write JSON such as {SPELLED}.")
        vocabulary = model.config.get_text_config().vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        self.compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=MOST_CACHED)

    def options(self, schema: Json) -> dict[str, Any]:
        """Return `generate` arguments for answers of a schema. Raises ValueError if it can't be compiled."""
        from xgrammar.contrib.hf import LogitsProcessor

        try:
            self.jsonschema.validators.validator_for(schema).check_schema(schema)
            grammar = self.compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        except Exception as error:  # both packages may raise anything
            message = str(error).strip().split("\n")[0][:200]
            raise ValueError(f"{self.what}: This is not a JSON schema, or can't be compiled ({message}).") from None
        return {"logits_processor": [LogitsProcessor(grammar)]}

    def explain(self, text: str, schema: Json) -> str | None:
        """Return why a text is not valid JSON of a schema; None if it is."""
        try:
            self.jsonschema.validate(json.loads(text), schema)
        except Exception as error:  # includes broken references
            return str(error).split("\n")[0][:200]
        return None

    def check(self, caption: Caption, schema: Json) -> Caption:
        """Return a caption with an error if it does not fit the schema, for example because it was cut at its limit."""
        if (why := self.explain(caption.text or "", schema)) is None:
            return caption
        message = (
            f"{caption.path}: got {caption.tokens} tokens that {self.what} does not allow, expected JSON of it ({why})"
        )
        return replace(caption, text=None, error=caption.error or message)
