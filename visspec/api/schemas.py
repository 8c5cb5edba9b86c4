"""Answers that are JSON of a schema. The grammar is xgrammar's, an optional package: pip install 'visspec[grammar]'."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from visspec.api.captions import Caption
from visspec.api.sources import need
from visspec.io.files import Json
from visspec.types import ConfiguredModel, Tokenizer

EXTRA = "grammar"
SPELLED = '{"a": [-1.5, true]}'  # what a tokenizer must write as it is
UNENFORCED = {"not", "if", "then", "else", "multipleOf", "uniqueItems", "contains", "minContains", "maxContains"} | {
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
}
REPLACING = ("$ref", "anyOf", "oneOf", "allOf")  # what stands beside one of them is passed over
CONSTRAINTS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern"} | {
    *("items", "prefixItems", "minItems", "maxItems", "properties", "required", "additionalProperties"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
}
LOOK_AHEAD = re.compile(r"\(\?[=!]")
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
        if (keyword := unenforced_keyword(schema)) is not None:  # of what is a schema
            raise ValueError(f"{self.what}: the grammar does not enforce {keyword!r} here, leave it out of the schema")
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


def unenforced_keyword(schema: Any) -> str | None:
    """The first keyword of a schema that xgrammar passes over, though an answer may break it."""
    if not isinstance(schema, dict):
        return None
    for name, value in schema.items():
        remote = name == "$ref" and value != "#" and not str(value).startswith("#/")
        ahead = name == "pattern" and LOOK_AHEAD.search(str(value)) is not None
        several = name == "allOf" and len(value) > 1
        length = name in ("minLength", "maxLength") and "pattern" in schema
        if name in UNENFORCED or remote or ahead or several or length:
            return name
    own = [name for name in schema if name in CONSTRAINTS]
    beside = [name for name in REPLACING if name in schema]
    if own and (beside or not {"type", "properties", "items", "prefixItems"} & schema.keys()):
        return (beside or own)[0]
    if set(schema.get("required", ())) - set(schema.get("properties", ())):
        return "required"
    below = [schema.get(name) for name in ("items", "additionalProperties", "propertyNames")]
    below += [one for name in (*REPLACING[1:], "prefixItems") for one in schema.get(name, ())]
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        below += schema.get(name, {}).values()
    return next((found for one in below if (found := unenforced_keyword(one)) is not None), None)
