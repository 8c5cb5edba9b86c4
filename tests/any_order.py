"""Draft and verification by tables, in any order: what `Ahead` makes of them, by enumeration in float64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch

from tests.distributions import verdicts
from visspec.distributions import Categorical
from visspec.models.randar.ahead import Ahead
from visspec.types import Outcome, Scores, Verdict


def distributions(model, prefix_BPd, codes_BT, order_BT, attention_BP=None):
    """Logits (B, T, V) of a RandAR for codes in each row's order, in one pass. attention: mask of the prefix."""
    pairs = torch.stack([model.query(order_BT), model.embed(codes_BT)], dim=2)  # a query, its code, the next query ...
    prefix, inputs = prefix_BPd.shape[1], pairs.flatten(1, 2)[:, :-1]
    at_BS = model.config.prefix + order_BT.repeat_interleave(2, dim=1)[:, :-1]
    first_BP = torch.arange(prefix).expand(len(at_BS), -1)
    mask = None
    if attention_BP is not None:
        size = prefix + inputs.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril().repeat(len(at_BS), 1, 1)
        mask[:, :, :prefix] &= attention_BP[:, None]
        mask |= torch.eye(size, dtype=torch.bool)  # padding attends to itself
        mask = mask[:, None]
    hidden = model(torch.cat([prefix_BPd, inputs], dim=1), torch.cat([first_BP, at_BS], dim=1), mask)
    return model.head(hidden.last_hidden_state[:, prefix::2])


class Said:
    """Noise that gives these values, and reports the law that they are draws from."""

    samples = True

    def __init__(self, values):
        self.values = values

    def draft(self, distribution, level):
        return torch.tensor([self.values[level]]), distribution


def process(toy, levels, drafter=None, keep=verdicts):
    """The joint law of all codes in the order, and the mean number of passes, the prefill among them."""
    drafter = drafter or Ahead(levels)
    distribution = torch.zeros((toy.vocab,) * toy.length, dtype=torch.float64)
    passes, branches = 1.0, {}
    state = SimpleNamespace(rows=[0], memory=None)
    drafter.start(state, Scores(Categorical(torch.zeros(1)), aux={"ahead": toy.ahead((), levels)[None, None]}))
    for y, weight in enumerate(toy.p(()).tolist()):
        branches[(y,)] = (weight, state.memory)
    while branches:
        new: dict = {}
        for committed, (weight, memory) in branches.items():
            if len(committed) == toy.length:
                distribution[committed] += weight
                continue
            passes += weight
            for after, share, remembered in rounds(toy, drafter, committed, memory, levels, keep):
                new[after] = (new.get(after, (0.0, None))[0] + weight * share, remembered)
        branches = new
    return distribution, passes


def rounds(toy, drafter, committed, memory, levels, keep):
    """(committed codes, probability, the drafter's memory) after a round."""
    room = toy.length - len(committed) - 1
    depth = min(levels, room)
    for values in itertools.product(range(toy.vocab), repeat=depth):
        pending = torch.tensor(committed[-1:])
        state = SimpleNamespace(noise=Said(values), memory=memory, budget=room + 1, pending=pending)
        draft = drafter.propose(state, levels)
        nodes = draft.tree.size
        chance = 1.0 if nodes == 1 else float(draft.q.p[0, range(1, nodes), list(values)].prod())
        prefix = [(*committed, *values[:n]) for n in range(nodes)]
        aux = {"ahead": torch.stack([toy.ahead(context, levels) for context in prefix])[None]}
        for gained, share in keep(toy.p, committed, draft):
            length = torch.tensor([len(gained)])
            path = torch.tensor([[*range(len(gained)), *[-1] * (nodes - len(gained))]])
            verdict = Verdict(path, length, torch.tensor([gained[-1]]))
            drafter.observe(state, draft, Scores(None, aux=aux), verdict, Outcome([], [list(gained)]))
            yield (*committed, *gained), chance * share, state.memory
