"""Speculative Verdict (arXiv 2510.20812): several small models answer, agreement selects, a large one decides.

This is *selection*: the answer is the large model's, given what the chosen ones said, and has another distribution than
its answer alone. Every draft's answer is read by every peer in one pass. With l_b(y) the mean log-probability of an
answer's own tokens under model b (question and image before it, not counted), a peer b that answered y_b differs from
y_a by max(0, l_b(y_b) - l_b(y_a)); a draft's score is the mean over the peers that could be asked, and the lowest are
chosen. The published code sums in place of the mean, so a model with missing peers looks better; takes the absolute
value, so a peer that likes y_a *more* than its own answer speaks against it; and counts the question's tokens.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch.nn import functional as F

from visspec.api.accelerate import Accelerated
from visspec.api.captions import chat_prompt, prepare
from visspec.api.queueing import of_ids
from visspec.types import Processor

GUARANTEE = "selection (not lossless)"
TEMPLATE = "{question}\n\nOthers who saw the picture said:\n{paths}\n\nDecide, and answer the question: {question}"
PATH = "{number}. {text}"
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Member:
    """A model that answers, with its processor."""

    name: str
    fast: Accelerated
    processor: Processor


@dataclass(frozen=True)
class CandidateAnswer:
    """What a drafting model said. score: the lower, the more its peers agree; None if none could be asked."""

    name: str
    text: str
    answer: str
    score: float | None = None
    chosen: bool = False
    error: str | None = None


@dataclass(frozen=True)
class AgreementResult:
    """The judge's answer. likelihoods: [b][a], the mean log-probability of draft a's answer under model b, or None."""

    text: str
    answer: str
    drafts: list[CandidateAnswer]
    likelihoods: list[list[float | None]] = field(repr=False)
    prompt: str
    tokens: int
    guarantee: str = GUARANTEE


class Panel:
    """Drafting models and a judge. keep: how many drafts the judge reads. template: what it is asked, with {question}
    and {paths}; without {paths} it decides for itself. Raises ValueError for fewer than two members.
    """

    def __init__(self, members: Sequence[Member], judge: Member, *, keep: int = 3, template: str = TEMPLATE):
        if len(members) < 2:
            raise ValueError(f"drafts: got {len(members)}, expected two models or more")
        if not isinstance(keep, int) or not 1 <= keep <= len(members):
            raise ValueError(f"keep: got {keep!r}, expected a whole number from 1 to {len(members)}, the drafts")
        self.members, self.judge, self.keep, self.template = list(members), judge, keep, template

    def __call__(self, image: Image.Image, question: str, *, seed: int = 0, **generate: Any) -> AgreementResult:
        """Ask all members, and the judge (greedily). seed: for draws among drafts of equal score; with `do_sample`
        also for what is drafted. generate: arguments of generate.
        """
        said = [self._draft_answer(member, image, question, generate | {"seed": seed}) for member in self.members]
        table = [
            [None if draft.error is not None else likelihood(member, image, question, draft.answer) for draft in said]
            for member in self.members
        ]
        scores = disagreement(table)
        chosen = choose(scores, self.keep, torch.Generator().manual_seed(seed))
        drafts = [
            CandidateAnswer(d.name, d.text, d.answer, score, i in chosen, d.error)
            for i, (d, score) in enumerate(zip(said, scores))
        ]
        paths = "\n".join(PATH.format(number=n, text=drafts[i].text) for n, i in enumerate(chosen, 1))
        prompt = self.template.format(question=question, paths=paths) if chosen else question
        decided = {k: v for k, v in generate.items() if k not in SAMPLED} | {"do_sample": False}
        text, tokens = ask(self.judge, image, prompt, decided)
        return AgreementResult(text, answer_of(text), drafts, table, prompt, tokens)

    def _draft_answer(
        self, member: Member, image: Image.Image, question: str, generate: dict[str, Any]
    ) -> CandidateAnswer:
        try:
            text = ask(member, image, question, generate)[0]
        except (ValueError, RuntimeError) as error:
            return CandidateAnswer(member.name, "", "", error=f"{member.name}: {str(error).splitlines()[0]}")
        answer = answer_of(text)
        return CandidateAnswer(member.name, text, answer, error=None if answer else f"{member.name}: got no answer")


SAMPLED = ("do_sample", "temperature", "top_k", "top_p", "seed")


def ask(member: Member, image: Image.Image, question: str, generate: Mapping[str, Any]) -> tuple[str, int]:
    """What a model answers, and its number of tokens."""
    inputs = prepare(member.processor, [image], question, member.fast.model)
    tokens = member.fast.run(**inputs, **generate).state.tokens[0]
    return member.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip(), len(tokens)


def answer_of(text: str) -> str:
    """The span of a text that answers: inside the last <answer></answer>, or else the last \\boxed{}, or else all."""
    if tagged := TAGGED.findall(text):
        return tagged[-1].strip()
    if (start := text.rfind(r"\boxed{")) >= 0:
        depth = 0
        for end in range(start + 6, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + 7 : end].strip()
    return text.strip()


@torch.inference_mode()
def likelihood(member: Member, image: Image.Image, question: str, answer: str) -> float | None:
    """Mean log-probability of an answer's tokens behind the question. None if there is no finite one."""
    model, processor = member.fast.model, member.processor
    inputs = prepare(processor, [image], question, model)
    prompt = chat_prompt(processor, question)
    spoken = answer if prompt[-1:].isspace() else f" {answer}"  # as a tokenizer would have it behind the prompt
    ids = processor.tokenizer(spoken, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
    count, length = ids.shape[1], inputs["input_ids"].shape[1]
    if count == 0:
        return None
    new = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    extended: dict[str, Any] = {
        name: torch.cat([value, new.get(name, value.new_zeros(1, count))], dim=1) if of_ids(value, length) else value
        for name, value in inputs.items()
    }
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        extended["logits_to_keep"] = count + 1
    logits_1NV = model(**extended).logits[:, -count - 1 : -1]
    found = -float(F.cross_entropy(logits_1NV[0].float(), ids[0]))
    return found if math.isfinite(found) else None


def disagreement(table: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Each draft's score from `AgreementResult.likelihoods`: mean over peers, None where no pair is complete."""
    scores: list[float | None] = []
    for a in range(len(table)):
        pairs = [(table[b][b], table[b][a]) for b in range(len(table)) if b != a]
        gaps = [max(0.0, own - theirs) for own, theirs in pairs if own is not None and theirs is not None]
        scores.append(sum(gaps) / len(gaps) if gaps else None)
    return scores


def choose(scores: Sequence[float | None], keep: int, generator: torch.Generator) -> list[int]:
    """The drafts of the lowest scores, in their order; draws are by lot, and what has no score comes last.

    A draft without an answer is None in all its pairs, and is not chosen.
    """
    lots = torch.rand(len(scores), generator=generator).tolist()
    ranked = sorted((score, lot, i) for i, (score, lot) in enumerate(zip(scores, lots)) if score is not None)
    return sorted(i for _, _, i in ranked[:keep])
