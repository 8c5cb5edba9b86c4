"""Rule-based scores of generated text: VQA accuracy, letters and yes/no, BLEU, ROUGE-L and CIDEr-D.

Captions are split into lower-case words without punctuation; the published COCO scores use a Java tokenizer, so ours
differ from them by small amounts and are comparable among themselves. METEOR and SPICE are not supported: the published
versions are Java programs, and nltk's METEOR downloads WordNet. To compute them, use the texts in the task's result
file with the authors' evaluation.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

_NUMBERS = "none zero one two three four five six seven eight nine ten".split()
_DIGITS = {"none": "0"} | {word: str(i) for i, word in enumerate(_NUMBERS[1:])}


def words(text: str) -> list[str]:
    """Lower-case words and numbers of a text; apostrophes inside words are dropped."""
    return re.findall(r"\w+(?:\.\d+)?", text.lower().replace("'", "").replace("’", ""))


def normalised(answer: str) -> str:
    """An answer as VQA compares it: lower case, no punctuation or articles, number words as digits."""
    return " ".join(_DIGITS.get(w, w) for w in words(answer) if w not in ("a", "an", "the"))


def vqa_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """VQA accuracy (Antol et al. 2015): mean over annotators of min(1, agreeing others / 3); 0..1.

    With a single reference it is exact match.
    """
    if not answers:
        raise ValueError("VQA accuracy needs at least one reference answer")
    said = normalised(prediction)
    hits = [said == normalised(answer) for answer in answers]
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
    named = [c for c, choice in zip(letters, choices) if normalised(choice) and _contains(text, choice)]
    return named[0] if len(named) == 1 else None


def _contains(text: str, choice: str) -> bool:
    return f" {normalised(choice)} " in f" {normalised(text)} "


def yes_no(text: str) -> str | None:
    """`yes` or `no`, whichever word comes first; None if there is neither."""
    return next((w for w in words(text) if w in ("yes", "no")), None)


def _ngrams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]], order: int = 4) -> float:
    """Corpus BLEU (Papineni et al. 2002), 0..1, closest reference length, no smoothing."""
    _same_length(predictions, references)
    hits, totals, said, length = [0] * order, [0] * order, 0, 0
    for text, truths in zip(predictions, references):
        tokens, others = words(text), [words(t) for t in truths]
        said += len(tokens)
        length += min((len(o) for o in others), key=lambda n: (abs(n - len(tokens)), n))
        for n in range(order):
            own = _ngrams(tokens, n + 1)
            limit: Counter[tuple[str, ...]] = Counter()
            for other in others:
                limit |= _ngrams(other, n + 1)
            hits[n] += (own & limit).total()
            totals[n] += own.total()
    if min(hits) == 0:
        return 0.0
    precision = sum(math.log(h / t) for h, t in zip(hits, totals)) / order
    return math.exp(precision + min(0.0, 1 - length / said))


def rouge_l(prediction: str, references: Sequence[str], beta: float = 1.2) -> float:
    """ROUGE-L (Lin 2004), 0..1: best precision and best recall of the longest common subsequence over references."""
    tokens, precision, recall = words(prediction), 0.0, 0.0
    for other in map(words, references):
        row = [0] * (len(other) + 1)
        for a in tokens:
            diagonal = 0
            for j, b in enumerate(other, 1):
                diagonal, row[j] = row[j], diagonal + 1 if a == b else max(row[j], row[j - 1])
        if tokens and other:
            precision, recall = max(precision, row[-1] / len(tokens)), max(recall, row[-1] / len(other))
    if not precision or not recall:
        return 0.0
    return (1 + beta**2) * precision * recall / (recall + beta**2 * precision)


def cider_d(predictions: Sequence[str], references: Sequence[Sequence[str]], sigma: float = 6.0) -> list[float]:
    """CIDEr-D of every prediction (Vedantam et al. 2015): clipped TF-IDF cosine over 1- to 4-grams, times 10.

    Document frequencies are computed from these references, so the score of a caption depends on the whole set.
    """
    _same_length(predictions, references)
    truths = [[words(t) for t in group] for group in references]
    frequency: Counter = Counter()
    for group in truths:
        frequency.update({gram for tokens in group for n in (1, 2, 3, 4) for gram in _ngrams(tokens, n)})
    documents = math.log(max(len(truths), 1))

    def vectors(tokens: list[str]) -> list[dict]:
        return [
            {
                gram: count * (documents - math.log(max(1, frequency[gram])))
                for gram, count in _ngrams(tokens, n).items()
            }
            for n in (1, 2, 3, 4)
        ]

    def norm(vector: dict) -> float:
        return math.sqrt(sum(v * v for v in vector.values()))

    scores = []
    for text, group in zip(predictions, truths):
        tokens, total = words(text), 0.0
        own = vectors(tokens)
        for other in group:
            penalty = math.exp(-((len(tokens) - len(other)) ** 2) / (2 * sigma**2))
            for a, b in zip(own, vectors(other)):
                size = norm(a) * norm(b)
                shared = sum(min(v, b[gram]) * b[gram] for gram, v in a.items() if gram in b)
                total += penalty * shared / size / 4 if size else 0.0
        scores.append(10 * total / len(group))
    return scores


def _same_length(predictions: Sequence, references: Sequence) -> None:
    if len(predictions) != len(references):
        raise ValueError(f"different counts: {len(predictions)} predictions and {len(references)} reference sets")
    if any(not group for group in references):
        raise ValueError("every prediction needs at least one reference")
