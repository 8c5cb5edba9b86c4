"""Context drafter: one tree per row from the context and earlier passes. Nothing is trained and no network runs.

Three sources propose the tokens below a node:

* matches: the continuations of earlier occurrences of the row's last tokens in its prompt and output (prompt lookup;
  Saxena, 2023);
* answers: the same in the answers of finished requests (SuffixDecoding; Oliaro et al., arXiv 2411.04975);
* candidates: the tokens that the target ranked highest after the same token or pair of tokens last time, in text or in
  a draft (token recycling; Luo et al., arXiv 2408.08696). For tokens not seen yet they come from a table, if the
  drafter has one (`successors`).

Each proposal has an acceptance probability that is learned online, by source, length of the match or rank, and depth. A
token that two sources propose has 1 - (1 - p)(1 - q). The tree is grown best-first by the product of probabilities
along the path, and the draft-length policy keeps as many nodes as pay (`State.worth`). Rates are learned from every
proposal below an accepted node, drafted or not, so text that repeats nothing costs no drafts.

Shapes: B rows, N nodes, M accepted nodes, V vocabulary, K candidates.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from visspec import tree as trees
from visspec.cache import to_device
from visspec.distributions import categorical, topk
from visspec.io.checkpoint import check_folder, read_tensors, write_folder
from visspec.models.decoder.target import vocabulary
from visspec.models.drafting.checkpoint import write_provenance
from visspec.models.lookup.text_index import LENGTHS, MATCHES, Pointer, TextIndex
from visspec.types import Draft, Drafter, DrafterTraits, Outcome, Scores, State, Verdict

SOURCES = ("matches", "answers", "candidates")
BEFORE = 4  # prompt tokens kept in front of an answer
MOST_ANSWERS = 1 << 16  # tokens of kept answers, about 40 MB; beyond that the memory is cleared
CANDIDATES = 10  # tokens kept of those that the target ranked highest
MOST_CANDIDATES = 1 << 17  # tokens and pairs that have candidates, about 40 MB; beyond that the table is cleared
LONG = 3  # tokens of a match that leaves little to the candidates
DEPTHS = 4  # number of depths with their own rates; deeper levels share the last one
FORGET, WEIGHT = 0.998, 4.0  # decay of rates per observation, and the prior's weight in observations
FIRST_NODES = 4  # initial size of a tree; it only grows further while more nodes may pay
LEAST = 0.008  # minimum probability of a drafted node
LEAST_BESIDE, MOST_BESIDE = 0.03, 12  # minimum probability, and number, of nodes beside another drafter's
MATCH_PRIOR = (0.9, 0.85, 0.7, 0.5, 0.35, 0.15)  # rate of the newest occurrence, by length; older ones decay by 0.8
PAIR_PRIOR = (0.5, 0.12, 0.07, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01)  # rate of candidates after two tokens, by rank
TOKEN_PRIOR = (0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01)  # rate after one token
# Rates are numbered: matches by length and occurrence, then answers likewise, then candidates in nine groups of ranks.
# A group combines the match at the node (long, short, none) with what the candidates follow (two tokens; one token,
# while others follow two; only one token).
FIRST_ANSWER = len(LENGTHS) * MATCHES
FIRST_GROUP = 2 * FIRST_ANSWER
BESIDE_LONG = 0.15  # scales these priors next to a long match, so that the first copied document gets long drafts
ALONE = (PAIR_PRIOR, tuple(p / 4 for p in TOKEN_PRIOR), TOKEN_PRIOR)
GROUPS = tuple(tuple(share * p for p in group) for share in (BESIDE_LONG, 1, 1) for group in ALONE)

CandidateTable = dict[Hashable, list[int]]  # keys: a token, or a pair of tokens
Place = tuple[CandidateTable, tuple[int, int], bool]  # the table, a token and its predecessor, whether it was accepted


class SourceRates:
    """How often the proposals of each source are accepted, by depth."""

    def __init__(self) -> None:
        matches = 2 * [p * 0.8**k for p in MATCH_PRIOR for k in range(MATCHES)]
        priors = [*matches, *(p for group in GROUPS for p in group)]
        self.prior = [p for p in priors for _ in range(DEPTHS)]
        self.rate = list(self.prior)
        self.hits, self.tries = [0.0] * len(self.rate), [0.0] * len(self.rate)

    def learn(self, key: int, hit: bool) -> None:
        self.hits[key] = FORGET * self.hits[key] + hit
        self.tries[key] = FORGET * self.tries[key] + 1.0
        self.rate[key] = (self.hits[key] + WEIGHT * self.prior[key]) / (self.tries[key] + WEIGHT)


@dataclass(slots=True)
class Proposal:
    """A token proposed below a node: its sources (keys of `SourceRates`) and the continuations of its matches."""

    keys: list[int] = field(default_factory=list)
    pointers: list[Pointer] = field(default_factory=list)


@dataclass(slots=True)
class Node:
    """A node of a row's tree, and the proposals below it."""

    token: int
    parent: int
    depth: int
    reach: float  # probability that the path to it is accepted
    pointers: list[Pointer]
    below: dict[int, Proposal] = field(default_factory=dict)


@dataclass
class Shared:
    """Data that rows and requests share."""

    candidates: CandidateTable = field(default_factory=dict)
    rates: SourceRates = field(default_factory=SourceRates)
    answers: TextIndex = field(default_factory=TextIndex)
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while an answer is added
    successors: Tensor | None = None  # (V, K), for tokens without candidates

    def ranked(self, token: int) -> Sequence[int]:
        candidates = self.candidates.get(token, ())
        return candidates if candidates or self.successors is None else self.successors[token].tolist()

    def add(self, answer: Sequence[int]) -> None:
        with self.lock:
            if len(self.answers.ids) + len(answer) > MOST_ANSWERS:
                self.answers = TextIndex()
            index = self.answers
            index.append([*answer, -1])
            index.start = len(index.ids)


class RowContext:
    """Prompt and output of a row, and its newest tree.

    Args:
        prompt: The row's ids.
        shared: Learned data, of this row or of all rows.
        sources: The entries of `SOURCES` that propose tokens.
    """

    def __init__(self, prompt: Sequence[int], shared: Shared, sources: Sequence[str] = SOURCES):
        self.shared, self.sources, self.rates = shared, sources, shared.rates
        self.index, self.prompt = TextIndex(), len(prompt)
        self.ids = self.index.ids
        self.tree: list[Node] = []
        self.heap: list[tuple[float, int, int, int]] = []  # (-reach, order, parent, token) of possible next nodes
        self._append(prompt)

    def extend(self, output: Sequence[int]) -> None:
        self._append(output[len(self.ids) - self.prompt :])

    def _append(self, tokens: Sequence[int]) -> None:
        if "matches" in self.sources:
            self.index.append(tokens)
        else:
            self.ids += tokens

    def end(self) -> None:
        if "answers" in self.sources:
            self.shared.add(self.ids[max(self.prompt - BEFORE, 0) :])

    def matches(self) -> list[Pointer]:
        """Return the continuations of the longest matches, the newest first."""
        pointers = self.index.matches(self.ids, 0) if "matches" in self.sources else []
        if "answers" in self.sources:
            pointers += self.shared.answers.matches(self.ids[-LENGTHS[0] :], FIRST_ANSWER)
        return pointers

    def grow(self, nodes: int, depth: int, chain: bool = False) -> list[Node]:
        """Grow a tree (or chain) of the `nodes` nodes with the highest acceptance probabilities, root first."""
        self.tree, self.heap = [Node(self.ids[-1], -1, 0, 1.0, self.matches())], []
        self._propose(0, self.heap)
        return self.widen(nodes, depth, chain)

    def widen(self, nodes: int, depth: int, chain: bool = False) -> list[Node]:
        """Grow the newest tree to at most `nodes` nodes."""
        heap = self.heap
        while heap and len(self.tree) <= nodes:
            reach, _, parent, token = heapq.heappop(heap)
            if chain:
                heap.clear()
            parent_node = self.tree[parent]
            self.tree.append(Node(token, parent, parent_node.depth + 1, -reach, parent_node.below[token].pointers))
            self._propose(len(self.tree) - 1, heap if parent_node.depth + 1 < depth else [])
        return self.tree

    def _propose(self, index: int, heap: list[tuple[float, int, int, int]]) -> None:
        """Collect the sources' proposals below a node in `Node.below`, and add them to the heap."""
        node, rate = self.tree[index], self.rates.rate
        level, proposals, longest = min(node.depth, DEPTHS - 1), node.below, 0
        least = LEAST / node.reach
        for source, ids, place in node.pointers:
            if place < len(ids) and ids[place] >= 0:
                proposal = proposals.setdefault(ids[place], Proposal())
                proposal.keys.append(source * DEPTHS + level)
                proposal.pointers.append((source, ids, place + 1))
                longest = max(longest, LENGTHS[source % FIRST_ANSWER // MATCHES])
        previous = self.tree[node.parent].token if index else self.ids[-2] if len(self.ids) > 1 else -1
        pair, alone = self.shared.candidates.get((previous, node.token), ()), self.shared.ranked(node.token)
        group = 3 * (0 if longest >= LONG else 1 if longest else 2)
        for g, ranked in ((group, pair), (group + (1 if pair else 2), alone)):
            for rank, token in enumerate(ranked):
                key = (FIRST_GROUP + g * CANDIDATES + rank) * DEPTHS + level
                if rate[key] >= least or token in proposals:
                    proposals.setdefault(token, Proposal()).keys.append(key)
        probabilities = {token: 1.0 - prod(1.0 - rate[key] for key in each.keys) for token, each in proposals.items()}
        scale = node.reach / max(sum(probabilities.values()), 1.0)  # at most one sibling can be accepted
        for token, probability in probabilities.items():
            if probability * scale >= LEAST:
                heapq.heappush(heap, (-probability * scale, len(heap), index, token))

    def pairs(self, size: int, added: int) -> list[tuple[int, int]]:
        """Return (predecessor, token) for the first `size` nodes of the newest tree, or for its root alone.

        Args:
            added: Number of tokens appended to the text since.
        """
        tree, root = self.tree[:size], len(self.ids) - added - 1
        previous = self.ids[root - 1] if root else -1
        return [(previous, self.ids[root]), *((tree[node.parent].token, node.token) for node in tree[1:])]

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that followed the newest tree's root."""
        tree, self.tree = self.tree, []
        at: int | None = 0 if tree else None
        for token in tokens:
            if at is None:
                return
            for proposed, proposal in tree[at].below.items():
                for key in proposal.keys:
                    self.rates.learn(key, proposed == token)
            at = next((n for n, node in enumerate(tree) if node.parent == at and node.token == token), None)


class Memory:
    """The drafter's memory of a request. The target's candidates are copied to the host without synchronizing."""

    def __init__(self, rows: list[RowContext]):
        self.rows, self.size = rows, 1  # nodes of the drafted trees, including the root
        self.offset = 0  # nodes of another drafter between the root and these trees
        self.copies: list[tuple[list[Place], Tensor, torch.cuda.Event | None]] = []  # pending copies

    def send(self, places: list[Place], values_MK: Tensor, ids_MK: Tensor) -> None:
        """Start copying the highest ranked ids of these places to the host.

        Args:
            values_MK: Their logits; ids with a logit of -inf are dropped.
        """
        ids_MK = ids_MK.masked_fill(values_MK.isneginf(), -1)
        if not ids_MK.is_cuda:
            self.copies.append((places, ids_MK, None))
            return
        host = torch.empty(ids_MK.shape, dtype=ids_MK.dtype, pin_memory=True).copy_(ids_MK, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self.copies.append((places, host, arrived))

    def receive(self) -> None:
        """Store the copies that have arrived; the rest is checked again in the next round."""
        while self.copies and (self.copies[0][2] is None or self.copies[0][2].query()):
            places, ids_MK, _ = self.copies.pop(0)
            for (candidates, pair, accepted), best in zip(places, ids_MK.tolist()):
                if len(candidates) > MOST_CANDIDATES:
                    candidates.clear()
                candidates[pair[1]] = ids = [id for id in best if id >= 0]
                if accepted or pair not in candidates:  # a rejected draft does not replace a result from accepted text
                    candidates[pair] = ids


class ContextDrafter(Drafter):
    """Drafts one tree per row from its context and earlier passes.

    Args:
        nodes: Maximum number of nodes of a tree, not counting its root.
        levels: Maximum number of levels of a tree.
        sources: Sources of tokens, some of "matches", "answers" and "candidates", joined by "+".
        shared: Whether rows and requests share what they learn. Rules with their own random numbers (`rejection` and
            the relaxed ones) never share, because the tokens of a seed depend on the draft there.
        successors: (V, K) ids that the target ranks highest after each id (`models.lookup.successors`), best first.
    """

    def __init__(
        self,
        nodes: int = 32,
        levels: int = 16,
        sources: str = "+".join(SOURCES),
        shared: bool = True,
        successors: Tensor | None = None,
    ):
        for name, value in (("nodes", nodes), ("levels", levels)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.sources = tuple(sources.split("+"))
        if unknown := [name for name in self.sources if name not in SOURCES]:
            raise ValueError(f"sources: unknown {unknown[0]!r}. Choose from {', '.join(SOURCES)}, joined by '+'.")
        self.nodes, self.levels, self.shared = nodes, levels, shared
        self.traits = DrafterTraits(levels=levels, trees=True, joins=True, counts_nodes=True)
        self.common = Shared(successors=successors if "candidates" in self.sources else None)
        self.saved_as = "" if successors is None else "network"

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: PreTrainedModel, **options: Any) -> ContextDrafter:
        """Load a drafter with a table that `save_pretrained` wrote.

        Raises:
            ValueError: The table was made for another vocabulary.
        """
        table_VK = read_tensors(check_folder(folder), ["successors"])["successors"]
        if len(table_VK) != (size := vocabulary(model)):
            raise ValueError(f"drafter: {folder} is made for {len(table_VK):,} ids, but the model has {size:,}.")
        return cls(**options, successors=table_VK.int())

    def save_pretrained(self, folder: str | Path, record: dict[str, Any]) -> None:
        table_VK = self.common.successors
        assert table_VK is not None, "a drafter without a table has nothing to save"
        kind = torch.uint16 if len(table_VK) <= 1 << 16 else torch.int32
        write_folder(
            folder, {"successors": table_VK.to(kind)}, {"kind": "context", "target": record.get("target_sizes", {})}
        )
        write_provenance(folder, record)

    def start(self, state: State, scores: Scores) -> None:
        shared = self.shared and (state.noise is None or not state.noise.samples)
        rows = [
            RowContext(ids, self.common if shared else Shared(successors=self.common.successors), self.sources)
            for ids in state.request.prompt.tolist()
        ]
        state.memory = Memory(rows)

    def propose(self, state: State, depth: int) -> Draft:
        memory: Memory = state.memory
        memory.receive()
        contexts = [memory.rows[row] for row in state.rows]
        nodes, chain = min(FIRST_NODES, self.nodes), not self.traits.trees
        for row, context in zip(state.rows, contexts):
            context.extend(state.tokens[row])
            context.grow(nodes, depth, chain)
        while True:
            reaches = zip_longest(*([node.reach for node in each.tree[1:]] for each in contexts), fillvalue=0.0)
            gains = [sum(reach) / len(contexts) for reach in reaches]
            more = self.nodes - nodes if any(each.heap for each in contexts) else 0
            gains += more * gains[-1:]  # an upper bound: further nodes are worth at most as much as the last one
            memory.size = state.worth(list(accumulate(gains, initial=1.0)))
            if memory.size <= nodes + 1 or not more:
                return _draft(state.pending, [each.tree[: memory.size] for each in contexts])
            nodes = min(2 * nodes, self.nodes)
            for context in contexts:
                context.widen(nodes, depth, chain)

    def widen(self, state: State, draft: Draft, missed: float) -> Draft:
        """Return another drafter's draft, followed by this one's most probable nodes if these may be added to it.

        Args:
            missed: Estimated share of drafts none of whose nodes is accepted.
        """
        memory: Memory = state.memory
        memory.size = 1
        if draft.q is not None or not self.traits.trees:
            return draft
        row_trees = []
        for row in state.rows:
            tree = memory.rows[row].grow(MOST_BESIDE, draft.levels)
            row_trees.append(tree[: 1 + sum(node.reach * missed >= LEAST_BESIDE for node in tree[1:])])
        memory.size, memory.offset = max(map(len, row_trees)), draft.tree.size - 1
        return draft if memory.size == 1 else trees.union(draft, _draft(state.pending, row_trees))

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        memory: Memory = state.memory
        places: list[Place] = []
        nodes: list[tuple[int, int]] = []
        for b, (row, path, new) in enumerate(zip(state.rows, outcome.path, outcome.tokens)):
            context = memory.rows[row]
            context.extend(state.tokens[row])
            if "candidates" in self.sources and row not in state.finished:
                pairs = context.pairs(memory.size, len(new))
                at = [n and n + memory.offset for n in range(len(pairs))]
                order = sorted(range(len(pairs)), key=lambda n: at[n] in path)  # accepted ones last, so that they win
                places += [(context.shared.candidates, pairs[n], at[n] in path) for n in order]
                nodes += [(b, at[n]) for n in order]
            context.learn(new)
            if row in state.finished:
                context.end()
        memory.size, memory.offset = 1, 0
        if nodes:
            b_M, n_M = to_device([list(column) for column in zip(*nodes)], state.pending.device)
            logits_BNV = categorical(scores.distribution).logits
            values_BNK, ids_BNK = topk(logits_BNV, min(CANDIDATES, logits_BNV.shape[-1]))  # before indexing: no copies
            memory.send(places, values_BNK[b_M, n_M], ids_BNK[b_M, n_M])

    def join(self, state: State, other: State, take: list[int]) -> None:
        for b, row in zip(take, state.rows[-len(take) :]):
            state.memory.rows[row : row + 1] = [other.memory.rows[other.rows[b]]]

    def restrict_to_chains(self) -> None:
        self.traits = replace(self.traits, trees=False)


def prompt_lookup(nodes: int = 16, levels: int = 8) -> ContextDrafter:
    """Draft chains from what followed earlier occurrences of the row's last tokens in its prompt and output."""
    drafter = ContextDrafter(nodes, levels, "matches", shared=False)
    drafter.restrict_to_chains()
    return drafter


def token_recycling(nodes: int = 32, levels: int = 8, shared: bool = True) -> ContextDrafter:
    """Draft trees of the tokens that the target ranked highest after each token in earlier passes."""
    return ContextDrafter(nodes, levels, "candidates", shared)


def _draft(pending_B: Tensor, row_trees: list[list[Node]]) -> Draft:
    """Build a draft with one tree per row; smaller trees are padded with nodes that are not real."""
    device, size, fewest = pending_B.device, max(map(len, row_trees)), min(map(len, row_trees))
    if size == 1:
        return trees.empty_draft(pending_B)
    if all(node.parent == n - 1 for tree in row_trees for n, node in enumerate(tree)):
        return trees.ragged_draft(pending_B, [[node.token for node in tree[1:]] for tree in row_trees])
    rows = [[(n.token, n.parent) for n in tree] + [(0, 0)] * (size - len(tree)) for tree in row_trees]
    token_BN, parent_BN = to_device(rows, device).unbind(-1)
    value_BN = torch.cat([pending_B[:, None], token_BN[:, 1:]], dim=1)
    levels = max(node.depth for tree in row_trees for node in tree)
    count_B1 = to_device([[len(tree)] for tree in row_trees], device)
    real_BN = None if fewest == size else torch.arange(size, device=device) < count_B1
    return Draft(value_BN, trees.from_parents(parent_BN, max(levels, 1)), real=real_BN)
