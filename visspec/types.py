"""Records that pass between the stages of a round, and the protocols the stages obey.

Shapes: B rows, N draft nodes, D path length, L prompt length, V vocabulary, F features. All ids are int64.
A *node* is the unit of commitment. Node 0 of a draft is the pending token: committed, not yet in the cache.
Records are frozen; `State` is the only mutable object of a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visspec.laws import Categorical, Law

TINY = torch.finfo(torch.float32).tiny
FREE = -1  # in a grammar (`Request.fixed`): a position that may hold any token
MAX_NODES = 1024  # of a draft, its root included


@dataclass(frozen=True)
class Sampling:
    """How a law is made from logits. temperature 0 is greedy; top_k 0 and top_p 1 switch those cuts off.

    `processors` are transformers-style callables (ids (1, length), logits (1, V)) -> logits, called in order at every
    node with that node's real prefix, before temperature, top-k and top-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    guidance: float = 1.0  # classifier-free guidance scale, mixed by the target before everything else; 1 is none
    processors: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()

    def __post_init__(self):
        for name, fits, expected in (
            ("temperature", self.temperature == 0 or TINY <= self.temperature < inf, "0 or a positive float32 number"),
            ("top_k", self.top_k >= 0, "a count of at least 0"),
            ("top_p", 0 <= self.top_p <= 1, "a probability"),
            ("guidance", 0 <= self.guidance < inf, "a number of at least 0"),
        ):
            if not fits:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, eq=False)
class Tree:
    """Shape of a draft. The leading dimension is 1 when all rows share the shape, else B."""

    parent: Tensor  # (1|B, N) index of the parent node; the root's is -1; parents come before children
    depth: Tensor  # (1|B, N) levels below the root
    ancestor: Tensor  # (1|B, N, N) bool: [n, m] is true when m is n or above n
    levels: int  # greatest depth, known to the host
    chain: bool  # true when node n's parent is n - 1 in every row

    @property
    def size(self) -> int:
        return self.parent.shape[-1]


@dataclass(frozen=True)
class Draft:
    """A tree of proposed nodes. X is the shape of a node's value: () for an id.

    `q` is the law that each node was drawn from, given the siblings before it. None says that nodes are point masses:
    fixed before the target's coin for that position is tossed, or coupled to the very noise the target will use. Only a
    rule that tosses its own coins may be given a q.
    """

    value: Tensor  # (B, N, *X); any possible value where a node is not real
    tree: Tree
    q: Law | None = None  # row 0 unused
    real: Tensor | None = (
        None  # (B, N) bool: false where a row has no such node, which can't be accepted; the root's is not read
    )

    @property
    def levels(self) -> int:
        return self.tree.levels


@dataclass(frozen=True)
class Scores:
    """What one pass of the target says about a draft."""

    law: Law  # after each node (B, N), warped (temperature, cuts, processors)
    features: Tensor | None = None  # (B, N, F) hidden states of the declared layers, concatenated
    aux: Mapping[str, Any] = field(default_factory=dict)  # with keep_raw: "raw", (B, N, V) unwarped logits


@dataclass(frozen=True)
class Verdict:
    """What an acceptance rule decided. `path` starts with node 0 and is padded with -1."""

    path: Tensor  # (B, D)
    length: Tensor  # (B,) nodes on the path, node 0 included
    next: Tensor  # (B, *X) bonus, residual or repaired value: the next pending node
    drift: Tensor | None = None  # (B,) estimate of this round's total variation; None for exact rules
    displacement: Tensor | None = None  # (B,) latent distance to what the exact rule would have given, expected, summed


@dataclass(frozen=True)
class Outcome:
    """A verdict on the host: the result of the round's one synchronisation."""

    path: list[list[int]]  # accepted node indices of each row, node 0 first
    tokens: list[list[int]]  # tokens that each row gained: the path without its root, then `next`


@dataclass
class Request:
    """One batch to decode. `inputs` is what the target's `prefill` takes; everything else belongs to the loop."""

    inputs: Any
    prompt: Tensor  # (B, L) ids as the user gave them, padding included
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()
    stop: Callable[[Tensor], bool] | None = None  # called with (1, length) ids after each token; true ends the row
    generators: Sequence[torch.Generator] | None = None  # one per row; None with greedy sampling
    on_tokens: Callable[[list[int]], None] | None = None  # batch 1 only: called with each round's new tokens
    on_round: Callable[[State], None] | None = None  # called after each round, between passes
    keep_logits: bool = False  # keep the warped law at every emitted token
    keep_raw: bool = False  # keep the target's logits at every emitted token, before processors and warp
    keep_cache: bool = False  # keep keys and values of rows that leave, for whoever goes on from the answer
    media: Mapping[str, Any] = field(default_factory=dict)  # raw images and such, for drafters with eyes of their own
    copies: int = 1  # rows made of each prompt (num_return_sequences)
    fixed: Tensor | None = None  # (>= max_new_tokens,) grammar: the token a position must hold, or FREE
    grid: tuple[int, int] | None = None  # rows and columns of an image's tokens

    @cached_property
    def stride(self) -> int:
        """Positions from an image's token to the one below it, read from the device once; ValueError without a grid."""
        if self.grid is None:
            raise ValueError("grid: got None, expected the rows and columns of an image")
        ends = 0 if self.fixed is None else int((self.fixed[: self.max_new_tokens] != FREE).sum())
        return self.grid[1] + (ends >= self.grid[0])  # one more where every row ends in grammar


class Round(NamedTuple):
    """One pass over a draft, for every row that was live."""

    levels: int  # of the draft: its deepest row's
    gained: list[int]  # tokens, the last of them not drafted
    tried: list[bool]  # whether a node was drafted below the accepted path's end, and so turned down


@dataclass
class Trace:
    """What happened, round by round. Times are host seconds; a stage's time ends when its call returns."""

    times: dict[str, float] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    origin: list[list[str]] = field(default_factory=list)  # per row and token: plain, drafted, bonus, corrected
    latest: dict[str, float] = field(default_factory=dict)  # seconds of each stage's newest run
    faults: int = 0  # drafts refused or drafters that raised
    gave_up: int = 0  # rounds in which drafting was judged not to pay

    @contextmanager
    def stage(self, name: str):
        start = time.perf_counter()
        yield
        self.latest[name] = time.perf_counter() - start
        self.times[name] = self.times.get(name, 0.0) + self.latest[name]


@dataclass
class State:
    """The one mutable object of a request. Rows leave it as they finish; `rows` keeps their original index."""

    request: Request
    pending: Tensor  # (B, *X) committed, not yet cached
    position: Tensor  # (B,) position id of the pending node
    cache: Any  # the target's cache
    rows: list[int]
    tape: Any  # what the request has produced, `tape.Ids`; the target chooses it
    noise: Any = None
    meters: dict[str, Tensor] = field(default_factory=dict)  # drift and displacement, (original rows,), summed
    memory: Any = None  # the drafter's per-request state
    request_view: Any = None  # what its drafter sees of the request (`view.RequestView`)
    drafting: bool = True  # false once the drafter has failed in this request
    refused: Tensor | None = None  # () count of drafted nodes that could not be, on the device
    trace: Trace = field(default_factory=Trace)

    @property
    def tokens(self) -> list[list[int]]:
        """Emitted tokens of every original row."""
        return self.tape.tokens

    @property
    def finished(self) -> set[int]:
        """Original rows that have ended."""
        return self.tape.finished

    @property
    def live(self) -> bool:
        return bool(self.rows)

    @property
    def budget(self) -> int:
        """Nodes that the live row with the fewest so far may still gain."""
        return self.request.max_new_tokens - min(len(self.tokens[r]) for r in self.rows)

    def ids(self, live_row: int) -> Tensor:
        """Prompt and emitted tokens of a live row, (1, length)."""
        return self.tape.ids(self.rows[live_row])


@dataclass(frozen=True)
class Capabilities:
    """What a target can do. Pairings are checked against this once, when they are built."""

    trees: bool = True
    vocab: int = 0
    hidden: int = 0
    family: str = ""
    never_drafted: frozenset[int] = frozenset()  # ids that stand for image, video or audio content
    feature_layers: tuple[int, ...] = ()
    codebook: Tensor | None = None  # (codes, E) float32 as the image decoder looks codes up; ids beyond it are grammar
    law: type[Law] = Categorical  # of its nodes


class Target:
    """Base class of targets: the model whose law is kept."""

    capabilities: Capabilities

    @property
    def device(self) -> torch.device:
        """Where ids and laws live."""
        raise NotImplementedError

    def prefill(self, request: Request) -> tuple[State, Scores]:
        """Run the prompt. Scores: laws (B, 1) after it, features (B, L, F)."""
        raise NotImplementedError

    def verify(self, state: State, draft: Draft) -> Scores:
        """One pass over all nodes of all live rows."""
        raise NotImplementedError

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        """Keep the accepted nodes in the cache."""

    def select(self, state: State, keep: list[int]) -> None:
        """Drop all live rows but these."""

    def revise(self, state: State, value: Tensor, where: Tensor, seen: Tensor) -> Scores:
        """One pass over places of an image in any order. Raises ValueError for a target that can't run one."""
        raise ValueError(f"order: got {type(self).__name__}, expected a target that can decode out of raster order")


@dataclass(frozen=True)
class DrafterTraits:
    """What a drafter can do and needs. Pairings are checked against this once, when they are built."""

    levels: int = 8  # greatest depth
    feature_layers: tuple[int, ...] = ()  # hidden states of the target that it reads
    embeddings: bool = False  # whether it reads the input embeddings of the prompt
    samples: bool = False  # its drafts are always real draws from q
    trees: bool = False  # its drafts branch
    adaptive_depth: bool = True  # false: drafts improve from pass to pass, so one pass does not show what a depth gains
    whole_images: bool = False  # it can draft a whole image (`sketch`)


class Drafter:
    """Base class of drafters: cheap proposers. `propose` may draft fewer levels than asked, never more.

    `state` is a `view.View`: everything can be read, `state.memory` alone can be set. One drafter may serve many
    requests at once, in many threads: what belongs to a request is kept in `state.memory`.
    """

    traits = DrafterTraits()

    def attach(self, target: Any) -> None:
        """Called with the model (for images its family) when the two are paired, and again when its device or dtype has
        changed.
        """

    def start(self, state: State, scores: Scores) -> None:
        """Called after the prefill, with its scores."""

    def propose(self, state: State, depth: int) -> Draft:
        raise NotImplementedError

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Called after each round."""

    def select(self, state: State, keep: list[int]) -> None:
        """Drop all live rows but these."""

    def sketch(self, state: State) -> Tensor:
        """(B, rows * columns) codes of whole images, in raster order, for the live rows after the prefill."""
        raise NotImplementedError


@dataclass(frozen=True)
class RuleTraits:
    """What an acceptance rule guarantees, judges and needs."""

    guarantee: str = "approximate"  # or "exact", "exact for the declared target"
    judges_draws: bool = False  # sampled drafts are judged by the law q that they report
    chains_only: bool = False  # it judges no trees
    whole_images: bool = False  # it can judge all places of a drafted image at once
    law: type[Law] = Categorical  # of the nodes it judges


class Acceptance:
    """Base class of acceptance rules: what of a draft is kept."""

    traits = RuleTraits()

    def bind(self, capabilities: Capabilities) -> None:
        """Called with those of the target when the two are paired, on a copy of the rule that was given."""

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> Any:
        """The numbers of a request, one generator a row; `width` is the law's."""
        raise NotImplementedError

    def __call__(self, draft: Draft, scores: Scores, noise: Any) -> Verdict:
        """noise None: greedy decoding."""
        raise NotImplementedError

    @property
    def inner(self) -> Acceptance:
        """The rule itself, without what may be wrapped around it; statistics name it."""
        return self


class Order:
    """Base class: in which order the positions of an output are decided."""

    raster = False  # one after the other, with drafts verified by the loop
    drafts = True  # whether a drafter takes part

    def joined(self, rule: Acceptance, drafter: Drafter | None) -> Order:
        """This order with the rule and the drafter of a pairing. Raises ValueError where it does not go with them."""
        return self

    def decode(self, target: Target, drafter: Drafter | None, rule: Acceptance, request: Request, pace: Any) -> State:
        """Decode a batch. Returns the finished state."""
        raise NotImplementedError
