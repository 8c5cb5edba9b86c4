"""Speculative Verdict (arXiv 2510.20812): several small models answer, agreement selects, a large one decides.

This is *selection*: the answer is not distributed as the large model's own. With l_b(y) the mean log-probability of an
answer's tokens under model b, a peer b that answered y_b differs from y_a by max(0, l_b(y_b) - l_b(y_a)). A draft's
score is the mean over its peers, and the lowest are chosen.
"""

import re
from typing import Any, NamedTuple, cast

import torch
from PIL import Image
from torch.nn import functional as F

from visspec.api.captions import chat_prompt, prepare
from visspec.api.text.accelerate import Accelerated
from visspec.api.text.queueing import of_ids
from visspec.types import Processor

TEMPLATE = "{question}\n\nOthers who saw the picture said:\n{paths}\n\nDecide, and answer the question: {question}"
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


class Member(NamedTuple):
    """A model that answers, with its processor."""

    name: str
    fast: Accelerated
    processor: Processor


def decide(
    members: list[Member], judge: Member, image: Image.Image, question: str, *, keep: int = 3,
    max_new_tokens: int = 128, **sampling: Any,
) -> dict[str, Any]:  # fmt: skip
    """Ask all members, and then the judge (greedily), which reads the `keep` drafts that their peers agree with most.

    Ties go to earlier members. `sampling` has arguments of `generate` for the drafts. Returns the judge's "answer" and
    "prompt", the "guarantee", the answers ("drafts"), "scores" of the ones that are not empty, and "chosen" numbers.
    """
    if len(members) < 2:
        raise ValueError(f"drafts: got {len(members)}, expected two models or more.")
    texts = [ask(member, image, question, max_new_tokens=max_new_tokens, **sampling) for member in members]
    drafts = [answer_of(text) for text in texts]
    valid = [i for i, answer in enumerate(drafts) if answer]
    table = [[likelihood(members[b], image, question, drafts[a]) for a in valid] for b in valid]
    scores = dict(zip(valid, disagreement(table))) if len(valid) > 1 else {}
    best = sorted(sorted(scores, key=scores.__getitem__)[:keep])
    paths = "\n".join(f"{number}. {texts[i]}" for number, i in enumerate(best, 1))
    prompt = TEMPLATE.format(question=question, paths=paths) if best else question
    answer = answer_of(ask(judge, image, prompt, max_new_tokens=max_new_tokens, do_sample=False))
    record = {"answer": answer, "prompt": prompt, "guarantee": "selection (not lossless)"}
    return record | {"drafts": drafts, "scores": scores, "chosen": best}


def ask(member: Member, image: Image.Image, question: str, **generate: Any) -> str:
    """Return a model's answer."""
    inputs = prepare(member.processor, [image], question, member.fast.model)
    tokens = member.fast.run(**inputs, **generate).state.tokens[0]
    return member.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def answer_of(text: str) -> str:
    """Return what is inside the last <answer></answer> of a text, or else all of it."""
    return (TAGGED.findall(text) or [text])[-1].strip()


@torch.inference_mode()
def likelihood(member: Member, image: Image.Image, question: str, answer: str) -> float:
    """Return the mean log-probability of an answer's tokens after the question."""
    model, processor = cast(Any, member.fast.model), member.processor
    spoken = answer if chat_prompt(processor, question)[-1:].isspace() else f" {answer}"
    ids = processor.tokenizer(spoken, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
    inputs, count = prepare(processor, [image], question, model), ids.shape[1]
    length = inputs["input_ids"].shape[1]
    batch = {name: F.pad(value, (0, count)) if of_ids(value, length) else value for name, value in inputs.items()}
    batch["input_ids"][:, length:], batch["attention_mask"][:, length:] = ids, 1
    if model._supports_logits_to_keep():
        batch["logits_to_keep"] = count + 1
    return -float(F.cross_entropy(model(**batch).logits[0, -count - 1 : -1].float(), ids[0]))


def disagreement(table: list[list[float]]) -> list[float]:
    """Return each answer's score from a table [b][a] of the likelihood of answer a under model b."""
    gaps = [[max(0.0, row[b] - value) for value in row] for b, row in enumerate(table)]  # 0 for a model's own answer
    return [sum(column) / (len(table) - 1) for column in zip(*gaps)]
