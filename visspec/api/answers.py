"""Answers in OpenAI's form: completions, their counts, and log-probabilities of their tokens."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from visspec.loop.stats import added_text
from visspec.loop.stream import Answer
from visspec.types import Processor

LEAST = -9999.0  # OpenAI's value for a token without probability
CONTEXT = 3  # tokens: a character of UTF-8 has one more at most
Entries = list[dict[str, Any]]  # OpenAI's logprobs, one for each token


@dataclass(frozen=True)
class Piece:
    """What a round added to choice `index` of a streamed answer. logprobs: None where none were asked for."""

    index: int
    text: str
    logprobs: Entries | None = None


@dataclass(frozen=True)
class TextResult:
    """A finished choice. message: as parsed, its text and calls; logprobs: of all its tokens, or of a streamed answer
    those that no piece had; tokens: their number; prompt: that of the prompt's; ended: OpenAI's `finish_reason`.
    """

    index: int
    message: dict[str, Any]
    tokens: int
    prompt: int
    ended: str
    answer: Answer
    logprobs: Entries | None = None


def response_template(processor: Processor, model: PreTrainedModel) -> Any:
    """How a model writes its messages, for `parse_response`: as its tokenizer says, or transformers knows of its type;
    None if neither does.
    """
    if (own := getattr(processor.tokenizer, "response_template", None)) is not None:
        return own
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # transformers' own server, which needs more than is installed here
        return None
    return get_response_template(processor, model)


def parsed_message(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form from that of transformers' `parse_response`."""
    calls = []
    for call in parsed.get("tool_calls") or ():
        name, given = call["function"]["name"], call["function"].get("arguments") or {}
        function = {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}
        calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
    text = parsed.get("content")
    return {"content": text, "tool_calls": calls} if calls else {"content": text or ""}


def token_logprobs(
    decode: Callable[[list[int]], str], before: Sequence[int], tokens: Sequence[int], logits_TV: Tensor, top: int
) -> Entries:
    """An entry for each of T tokens: the text that it adds behind those before, its log-softmax of `logits_TV`, and the
    same of the `top` most likely ones in its place. `bytes` is None of a token that ends within a character.
    """
    logits_TV = logits_TV.float()
    total_T1, best = logits_TV.logsumexp(dim=-1, keepdim=True), logits_TV.topk(min(top, logits_TV.shape[-1]))
    own_T1 = logits_TV.gather(1, torch.tensor(tokens, device=logits_TV.device)[:, None])
    values_TK = (torch.cat([own_T1, best.values], dim=1) - total_T1).tolist()
    context, entries = list(before[-CONTEXT:]), []
    for token, likely, values in zip(tokens, best.indices.tolist(), values_TK):
        text = decode(context)
        texts = [added_text(text, decode([*context, id])) for id in (token, *likely)]
        own, *others = map(_entry, texts, values)
        entries.append(own | {"top_logprobs": others})
        context = [*context, token][-CONTEXT:]
    return entries


def _entry(text: str, logprob: float) -> dict[str, Any]:
    spelled = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": spelled}


def completion(name: str, id: str, model: str, *choices: dict[str, Any]) -> dict[str, Any]:
    """The frame of a completion, or of a piece of a streamed one."""
    return {"id": id, "object": name, "created": int(time.time()), "model": model, "choices": choices}


def choice(index: int, logprobs: Entries | None, ended: str | None, **content: dict[str, Any]) -> dict[str, Any]:
    """A choice of a completion: its `message`, or a `delta` of a streamed one."""
    given = None if logprobs is None else {"content": logprobs, "refusal": None}
    return {"index": index, **content, "logprobs": given, "finish_reason": ended}


def usage(results: Collection[TextResult]) -> dict[str, Any]:
    """Counts of a completion. The prompt counts once. Beyond OpenAI's own: tau, tokens of a round."""
    prompt, new = max(result.prompt for result in results), sum(result.tokens for result in results)
    rounds = [one for result in results for one in result.answer.rounds]
    accepted = sum(result.answer.origin[: result.tokens].count("drafted") for result in results)
    details = {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(one.levels for one in rounds) - accepted,
        "tau": sum(one.committed[0] for one in rounds) / max(len(rounds), 1),
    }
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return counts | {"completion_tokens_details": details}
