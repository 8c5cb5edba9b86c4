"""Rule-based scores of generated text: VQA accuracy, letters and yes/no, BLEU, ROUGE-L and CIDEr-D.

BLEU is sacrebleu's; ROUGE-L and CIDEr-D are those of the COCO caption evaluation (pycocoevalcap).

Captions are split into lower-case words without punctuation; the published COCO scores use a Java tokenizer, so ours
differ from them by small amounts and are comparable among themselves. METEOR and SPICE are not supported: the published
versions are Java programs, and nltk's METEOR downloads WordNet. To compute them, use the texts in the task's result
file with the authors' evaluation.
"""

import re
from collections.abc import Sequence
from itertools import zip_longest

_NUMBERS = "none zero one two three four five six seven eight nine ten".split()
_DIGITS = {"none": "0"} | {word: str(i) for i, word in enumerate(_NUMBERS[1:])}


def words(text: str) -> list[str]:
    """Lower-case words and numbers of a text; apostrophes inside words are dropped."""
    return re.findall(r"\w+(?:\.\d+)?", text.lower().replace("'", "").replace("’", ""))


def normalise_answer(answer: str) -> str:
    """An answer as VQA compares it: lower case, no punctuation or articles, number words as digits."""
    return " ".join(_DIGITS.get(w, w) for w in words(answer) if w not in ("a", "an", "the"))


def vqa_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """VQA accuracy (Antol et al. 2015): mean over annotators of min(1, agreeing others / 3); 0..1.

    With a single reference it is exact match.
    """
    if not answers:
        raise ValueError("VQA accuracy needs at least one reference answer")
    said = normalise_answer(prediction)
    hits = [said == normalise_answer(answer) for answer in answers]
    if len(hits) == 1:
        return float(hits[0])
    return sum(min(1.0, (sum(hits) - hit) / 3) for hit in hits) / len(hits)


def letter(text: str, choices: Sequence[str]) -> str | None:
    """The option letter in a text, alone or as in "the answer is B", else that of the only choice it contains."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)]
    patterns = (
        rf"^\W*([{letters}])(?:\W|$)",
        rf"(?i:answer|option|choice)(?i:\s+is)?\W*\(?([{letters}])(?:\W|$)",
        rf"\(([{letters}])\)",
        rf"(?:^|\s)([{letters}])[.:)]?\s*$",
    )
    for i, pattern in enumerate(patterns):
        found = re.search(pattern, text.strip())
        # "A cat" begins with an article, not with an option letter.
        if found and not (i == 0 and re.match(r"A\s+[a-z]", text.strip())):
            return found[1]
    said = f" {normalise_answer(text)} "
    short = zip(letters, map(normalise_answer, choices))
    named = [c for c, choice in short if choice and f" {choice} " in said]
    return named[0] if len(named) == 1 else None


def yes_no(text: str) -> str | None:
    """`yes` or `no`, whichever word comes first; None if there is neither."""
    return next((w for w in words(text) if w in ("yes", "no")), None)


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU (Papineni et al. 2002), 0..1, closest reference length, no smoothing."""
    _same_length(predictions, references)
    import sacrebleu

    columns = list(zip_longest(*(map(_tokenise, group) for group in references)))  # None where a text has fewer
    scorer = sacrebleu.BLEU(smooth_method="none", tokenize="none", max_ngram_order=4, force=True)
    return scorer.corpus_score([_tokenise(text) for text in predictions], columns).score / 100


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """ROUGE-L (Lin 2004), 0..1: best precision and best recall of the longest common subsequence over references."""
    from pycocoevalcap.rouge.rouge import Rouge

    truths = [text for text in map(_tokenise, references) if text]  # it would count an empty text as one word
    text = _tokenise(prediction)
    return float(Rouge().calc_score([text], truths)) if text and truths else 0.0


def cider_d(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """CIDEr-D of every prediction (Vedantam et al. 2015): clipped TF-IDF cosine over 1- to 4-grams, times 10.

    Document frequencies are computed from these references, so the score of a caption depends on the whole set.
    """
    _same_length(predictions, references)
    from pycocoevalcap.cider.cider import Cider

    truths = {i: [_tokenise(text) for text in group] for i, group in enumerate(references)}
    if not any(text for group in truths.values() for text in group):
        return [0.0] * len(truths)
    given = {i: [_tokenise(text)] for i, text in enumerate(predictions)}
    return Cider().compute_score(truths, given)[1].tolist()


def _tokenise(text: str) -> str:
    return " ".join(words(text))


def _same_length(predictions: Sequence, references: Sequence) -> None:
    if len(predictions) != len(references):
        raise ValueError(f"different counts: {len(predictions)} predictions and {len(references)} reference sets")
    if any(not group for group in references):
        raise ValueError("every prediction needs at least one reference")
