"""Speculative Verdict (arXiv 2510.20812): several small models answer, agreement selects, a large one decides.

This is *selection*: the answer is not distributed as the large model's own. With l_b(y) the mean log-probability of an
answer's tokens under model b, a peer b that answered y_b differs from y_a by max(0, l_b(y_b) - l_b(y_a)). A draft's
score is the mean over its peers, and the lowest are chosen. The published code uses the sum instead of the mean, takes
the absolute value and counts the question's tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch.nn import functional as F

from visspec.api.captions import chat_prompt, prepare
from visspec.api.text.accelerate import Accelerated
from visspec.api.text.queueing import of_ids
from visspec.types import Processor

TEMPLATE = "{question}\n\nOthers who saw the picture said:\n{paths}\n\nDecide, and answer the question: {question}"
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")  # up to two nested levels of braces
SAMPLED = ("do_sample", "temperature", "top_k", "top_p", "seed")


class Member(NamedTuple):
    """A model that answers, with its processor."""

    name: str
    fast: Accelerated
    processor: Processor


def decide(
    members: Sequence[Member], judge: Member, image: Image.Image, question: str, *, keep: int = 3,
    seed: int = 0, **generate: Any,
) -> dict[str, Any]:  # fmt: skip
    """Ask all members, and then the judge (greedily), which reads the `keep` drafts that their peers agree with most.

    Args:
        members: The models that draft answers.
        judge: The model that decides.
        image: The picture.
        question: The question.
        keep: Number of drafts that the judge reads.
        seed: For ties among drafts of equal score, and with `do_sample` for the drafts.
        generate: Arguments of `generate`.

    Returns:
        "answer", "text" and "prompt" of the judge, "guarantee", "drafts" (name, text, answer, error, score, chosen) and
            "likelihoods" [b][a], the mean log-probability of draft a's answer under model b, or None.
    """
    if len(members) < 2:
        raise ValueError(f"drafts: got {len(members)}, expected two models or more.")
    if not 1 <= keep <= len(members):
        raise ValueError(f"keep: got {keep!r}, expected a whole number from 1 to {len(members)}, the drafts.")
    drafts: list[dict[str, Any]] = []
    for member in members:
        text, error = "", "got no answer"
        try:
            text = ask(member, image, question, seed=seed, **generate)
        except (ValueError, RuntimeError) as failure:
            error = str(failure).splitlines()[0]
        answer = answer_of(text)
        drafts.append({"name": member.name, "text": text, "answer": answer})
        drafts[-1]["error"] = None if answer else f"{member.name}: {error}"
    table = [[likelihood(member, image, question, draft["answer"]) for draft in drafts] for member in members]
    scores = disagreement(table)
    chosen = choose(scores, keep, torch.Generator().manual_seed(seed))
    for i, draft in enumerate(drafts):
        draft |= {"score": scores[i], "chosen": i in chosen}
    paths = "\n".join(f"{n}. {drafts[i]['text']}" for n, i in enumerate(chosen, 1))
    prompt = TEMPLATE.format(question=question, paths=paths) if chosen else question
    text = ask(judge, image, prompt, **{k: v for k, v in generate.items() if k not in SAMPLED})
    record = {"answer": answer_of(text), "text": text, "prompt": prompt, "guarantee": "selection (not lossless)"}
    return record | {"drafts": drafts, "likelihoods": table}


def ask(member: Member, image: Image.Image, question: str, do_sample: bool = False, **generate: Any) -> str:
    """Return a model's answer."""
    inputs = prepare(member.processor, [image], question, member.fast.model)
    tokens = member.fast.run(**inputs, do_sample=do_sample, **generate).state.tokens[0]
    return member.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def answer_of(text: str) -> str:
    """Return the answer in a text: inside the last <answer></answer>, or else the last \\boxed{}, or else all of it."""
    return (TAGGED.findall(text) or BOXED.findall(text) or [text])[-1].strip()


@torch.inference_mode()
def likelihood(member: Member, image: Image.Image, question: str, answer: str) -> float | None:
    """Return the mean log-probability of an answer's tokens after the question; None if it is not finite."""
    model, processor = member.fast.model, member.processor
    spoken = answer if chat_prompt(processor, question)[-1:].isspace() else f" {answer}"
    ids = processor.tokenizer(spoken, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
    if not answer or not (count := ids.shape[1]):
        return None
    inputs = prepare(processor, [image], question, model)
    length = inputs["input_ids"].shape[1]
    batch = {name: F.pad(value, (0, count)) if of_ids(value, length) else value for name, value in inputs.items()}
    batch["input_ids"][:, length:], batch["attention_mask"][:, length:] = ids, 1
    if "logits_to_keep" in signature(model.forward).parameters:
        batch["logits_to_keep"] = count + 1
    logits_1NV = model(**batch).logits[:, -count - 1 : -1]
    mean = -float(F.cross_entropy(logits_1NV[0].float(), ids[0]))
    return mean if math.isfinite(mean) else None


def disagreement(table: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return each draft's score from "likelihoods": the mean over peers, None if no pair is complete."""
    scores: list[float | None] = []
    for a in range(len(table)):
        pairs = [(row[b], row[a]) for b, row in enumerate(table) if b != a]
        gaps = [max(0.0, own - theirs) for own, theirs in pairs if own is not None and theirs is not None]
        scores.append(sum(gaps) / len(gaps) if gaps else None)
    return scores


def choose(scores: Sequence[float | None], keep: int, generator: torch.Generator) -> list[int]:
    """Return the drafts with the lowest scores, in order; ties are broken at random. Others need a score."""
    lots = torch.rand(len(scores), generator=generator).tolist()
    ranked = sorted((score, lot, i) for i, (score, lot) in enumerate(zip(scores, lots)) if score is not None)
    return sorted(i for _, _, i in ranked[:keep])
