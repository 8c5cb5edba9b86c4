"""Table of the ids that a model ranks highest after each id of its vocabulary, for the drafter `context`.

Nothing is trained and no data is read. The ids are the nodes of one wide level below the end of a prompt, so one pass
covers `NODES` ids of the vocabulary.

Shapes: N nodes, V vocabulary, K candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.cache import to_device
from visspec.distributions import categorical, topk
from visspec.loop.decode import open_request
from visspec.models.lookup.context import CANDIDATES
from visspec.types import Draft, Request, Target

NODES = 512  # maximum per pass


@torch.inference_mode()
def successors(target: Target, request: Request, last: int) -> Tensor:
    """Return the ids that a target ranks highest after each id at the start of an answer.

    Args:
        target: A target that verifies trees.
        request: One row, with the prompt of an answer without its last token.
        last: That token, the root of the nodes.

    Returns:
        (V, K) int32, best first.

    Raises:
        ValueError: The target verifies chains only.
    """
    if not target.capabilities.trees:
        raise ValueError("target: got a model that verifies chains only, so its table would take a pass for each id.")
    state, _ = open_request(target, Exact(), request)
    device, vocab, best = state.pending.device, target.capabilities.vocab, []
    for first in tqdm(range(0, vocab, NODES), desc="successors", mininterval=2.0):
        ids = [last, *range(first, min(first + NODES, vocab))]
        star = Draft(to_device([ids], device), trees.static((-1, *(len(ids) - 1) * (0,)), str(device)))
        logits_NV = categorical(target.verify(state, star).distribution).logits[0, 1:]
        best.append(topk(logits_NV, min(CANDIDATES, vocab))[1].int())
    return torch.cat(best)
