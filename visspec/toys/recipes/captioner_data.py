"""Training batches of the captioner's text model: token ids, the loss weight of every position, image features.

Every row starts with the same prefix, `<s> user : <image>*36`, so that image features lie at fixed positions; rows
are padded on the right, which a causal model without padding needs no mask for.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from visspec.toys.recipes.captioner_vision import SIDE
from visspec.toys.world.worlds import World

IMAGE_TOKENS = SIDE * SIDE
FIRST_SEED = 1 << 28  # scenes the vision stage has not seen, still below the held-out ones
QUESTION_SHARE = 1 / 8
GROUP = 4  # batches drawn and sorted together
FACT_WEIGHT = 3.0  # words that must be read from the image weigh more than the sentences around them


@dataclass(frozen=True)
class CaptionBatch:
    """ids int64 (B, L), weight float32 (B, L): loss weight of predicting that token, 0 for prompts and padding."""

    scenes: list
    ids: torch.Tensor
    weight: torch.Tensor


def _turns(world: World, scene, rng: np.random.Generator) -> list[tuple[str, str]]:
    """(request, answer) turns of one row: a caption, or several questions in random order."""
    if rng.random() >= QUESTION_SHARE:
        requests = world.captions.requests
        return [(requests[int(rng.integers(len(requests)))], world.captions.caption(scene, rng))]
    asked = world.captions.questions(scene)
    return [asked[i] for i in rng.permutation(len(asked))[:7]]


class Encoder:
    """Turns sampled rows into ids and weights by one table look-up a word."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, world: World):
        self.world, self.fact_words = world, world.captions.fact_words()
        self.table = tokenizer.get_vocab()
        self.pad, self.eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.first_image = 3  # after "<s> user :"
        self.prefix = self._ids("<s> user :") + [self.table["<image>"]] * IMAGE_TOKENS

    def _ids(self, text: str) -> list[int]:
        return [self.table[word] for word in text.split()]

    def row(self, turns: list[tuple[str, str]]) -> tuple[list[int], list[float]]:
        """Ids and weights of one conversation about one image."""
        ids, weight = list(self.prefix), [0.0] * len(self.prefix)
        for i, (request, answer) in enumerate(turns):
            asked = self._ids(("" if i == 0 else "user : ") + request + " assistant :")
            said = answer.split()
            ids += asked + self._ids(answer) + [self.eos]
            weight += [0.0] * len(asked) + [FACT_WEIGHT if w in self.fact_words else 1.0 for w in said] + [1.0]
        return ids, weight

    def batches(self, step: int, rows: int, rank: int = 0, workers: int = 1) -> list[CaptionBatch]:
        """This worker's next GROUP batches of `rows` fresh rows; a pure function of the arguments.

        Rows are sorted by length, to save padding and to give all workers equally long rows at the same step.
        """
        rng = np.random.default_rng(FIRST_SEED + step)
        share = rows * workers
        scenes = [self.world.captioned(FIRST_SEED + step * share + i) for i in range(share * GROUP)]
        coded = [(scene, *self.row(_turns(self.world, scene, rng))) for scene in scenes]
        coded.sort(key=lambda item: len(item[1]))
        return [self._pad(coded[i * share : (i + 1) * share][rank::workers]) for i in rng.permutation(GROUP)]

    def _pad(self, coded: list[tuple[object, list[int], list[float]]]) -> CaptionBatch:
        length = max(len(ids) for _, ids, _ in coded)
        ids = np.full((len(coded), length), self.pad, np.int64)
        weight = np.zeros((len(coded), length), np.float32)
        for row, (_, row_ids, row_weight) in enumerate(coded):
            ids[row, : len(row_ids)], weight[row, : len(row_ids)] = row_ids, row_weight
        return CaptionBatch([scene for scene, _, _ in coded], torch.from_numpy(ids), torch.from_numpy(weight))
