"""Records passed between the stages of a round, and the base classes of targets, drafters, rules and orders.

Shapes: B rows, N draft nodes, D path length, L prompt length, V vocabulary, F features. All ids are int64.
A *node* is the unit of commitment. Node 0 of a draft is the pending token: committed, not yet in the cache.
Records are frozen; `State` is the only mutable object of a request.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from visspec.distributions import Categorical, DenoisingSteps, Distribution

TINY = torch.finfo(torch.float32).tiny
GUARANTEES = ("approximate", "exact for the declared target", "exact")  # from the weakest
FREE = -1  # in `Request.fixed`: a position without a fixed token
MAX_NODES = 1024  # maximum number of nodes of a draft, root included


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. temperature 0 is greedy; top_k 0 and top_p 1 disable them.

    `processors` are transformers-style callables (ids (1, length), logits (1, V)) -> logits, called in order for every
    node with that node's prefix, before temperature, top-k and top-p.
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
    ancestor: Tensor  # (1|B, N, N) bool: [n, m]: m is n or an ancestor of n
    levels: int  # maximum depth, a Python int
    chain: bool  # true when node n's parent is n - 1 in every row

    @cached_property
    def size(self) -> int:
        return self.parent.shape[-1]


@dataclass(frozen=True)
class Draft:
    """A tree of proposed nodes. X is the shape of a node's value: () for an id.

    `q` is the distribution that each node was sampled from, given the siblings before it. None: nodes are point masses,
    that is deterministic, or sampled with the same noise as the target's tokens. Only rules that use their own random
    numbers support q.
    """

    value: Tensor  # (B, N, *X); any valid value if a node is not real
    tree: Tree
    q: Distribution | None = None  # row 0 unused
    real: Tensor | None = (
        None  # (B, N) bool: false for padding nodes, which are never accepted; the root's entry is ignored
    )

    @property
    def levels(self) -> int:
        return self.tree.levels


@dataclass(frozen=True)
class Scores:
    """Result of one target pass over a draft."""

    distribution: Distribution  # after each node (B, N), warped (temperature, cuts, processors)
    features: Tensor | None = None  # (B, N, F) hidden states of the declared layers, concatenated
    # with `keep_raw`: "raw", (B, N, V) raw logits; with `DrafterTraits.ahead` A: "ahead", (B, N, A, V) warped logits
    aux: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Result of an acceptance rule. `path` starts with node 0 and is padded with -1."""

    path: Tensor  # (B, D)
    length: Tensor  # (B,) nodes on the path, node 0 included
    next: Tensor  # (B, *X) bonus, residual or repaired value: the next pending node
    drift: Tensor | None = None  # (B,) estimate or bound of this round's total variation; None: exact, or not measured


@dataclass(frozen=True)
class Outcome:
    """A verdict as Python lists, after the round's only synchronisation."""

    path: list[list[int]]  # accepted node indices of each row, node 0 first
    tokens: list[list[int]]  # new tokens of each row: the path without its root, then `next`
    draft_lengths: list[int] = field(default_factory=list)  # levels of each row's chain; of a tree, of the draft


@dataclass
class Request:
    """One batch to decode. `inputs` is passed to the target's `prefill`; the other fields are used by the loop."""

    inputs: Any
    prompt: Tensor  # (B, L) input ids, padding included
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()
    stop: Callable[[Tensor], bool] | None = None  # called with (1, length) ids after each token; true ends the row
    generators: Sequence[torch.Generator] | None = None  # one per row; None with greedy sampling
    on_tokens: Callable[[list[int]], bool | None] | None = None  # batch 1: called with a round's tokens; true ends it
    on_round: Callable[[State], None] | None = None  # called after each round, between passes
    keep_logits: bool = False  # store the warped distribution of every emitted token
    keep_raw: bool = False  # store the target's unprocessed logits of every emitted token
    keep_cache: bool = False  # store keys and values of finished rows, to continue from the output
    media: Mapping[str, Any] = field(default_factory=dict)  # pixel values etc., for drafters with a vision tower
    copies: int = 1  # sequences per prompt (num_return_sequences)
    fixed: Tensor | None = None  # (>= max_new_tokens,) grammar: the fixed token of each position, or FREE
    grid: tuple[int, int] | None = None  # rows and columns of an image's tokens
    order: tuple[int, ...] | None = None  # any-order targets: the place of each code, as they are drawn; None: raster
    each: list[Request] = field(default_factory=list)  # a request of one row per row, if rows were put together
    prefix: Any = None  # what of its prompts is kept or known (`models.decoder.prefix`); the prefill takes it
    reused: list[int] = field(default_factory=list)  # of each row, tokens of its prompt that the prefill did not read

    def of(self, row: int) -> tuple[Request, int]:
        """The request that a row's limit, ends, processors and prompt come from, and the row's index in it."""
        return (self.each[row], 0) if self.each else (self, row)

    @property
    def visits(self) -> Sequence[int]:
        """Places of an image's codes in the order in which an any-order target draws them."""
        assert self.grid is not None
        return range(self.grid[0] * self.grid[1]) if self.order is None else self.order


class Tokenizer(Protocol):
    """Turns texts into ids and back, as those of transformers do."""

    padding_side: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ids of texts."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of ids."""


class Processor(Protocol):
    """Turns texts and pictures into a model's inputs, as those of transformers do."""

    tokenizer: Tokenizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A model's inputs."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of ids."""


class ConfiguredModel(Protocol):
    """A model of transformers, or one of ours that is configured like them."""

    config: Any

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


class RowProcessor:
    """Base class of logits processors that are called for one row at a time, at any prefix. Others are called with the
    shape that the request's prompts have.
    """

    def __call__(self, ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
        return torch.stack([self.row(b, *given) for b, given in enumerate(zip(ids_BL, scores_BV))])

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        """The scores (V,) behind ids of an original row."""
        raise NotImplementedError

    def forced(self, index: int, ids: list[int]) -> int | None:
        """The only token possible behind ids, or the longest one where all begin the same text; None where there is a
        choice, or it is not known.
        """
        return None


@dataclass(frozen=True)
class NodeProcessor:
    """A logits processor that reads a prefix's ids as a set, and of its length only whether it is below `least`: all
    nodes of a draft are scored in one call, shorter prefixes with an id repeated.
    """

    processor: Callable[[Tensor, Tensor], Tensor]
    least: int = 0

    def __call__(self, ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
        return self.processor(ids_BL, scores_BV)

    def alike(self, shortest: int, longest: int) -> bool:
        """Whether prefixes of these lengths are on one side of `least`."""
        return longest < self.least or shortest >= self.least


NoiseT = TypeVar("NoiseT", default=Any)  # random numbers of a request: a `sampling.BufferedNoise`


class Structure(NamedTuple):
    """Of a draft: most nodes of a level that others hang from, 1 for a chain, and of the tree without its root."""

    width: int = 0  # 0: the drafter's own
    nodes: int = 0

    def size(self, levels: int) -> int:
        """Nodes of so many levels; one a level where the structure is unknown."""
        if self.width <= 1 or not levels:
            return levels
        return min(self.nodes, self.width * (1 + self.width * (levels - 1)))


OWN = Structure()


class Round(NamedTuple):
    """One pass over a draft, for every row that was live."""

    levels: int  # maximum depth of the draft over rows
    committed: list[int]  # tokens, the last of them not drafted
    had_rejection: list[bool]  # whether a node below the end of the accepted path was rejected


@dataclass
class Trace:
    """Statistics of a request, by round. Times are host seconds until each stage's call returns."""

    times: dict[str, float] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    origin: list[list[str]] = field(default_factory=list)  # per row and token: plain, drafted, bonus, corrected
    latest: dict[str, float] = field(default_factory=dict)  # seconds of each stage in the latest round
    faults: int = 0  # number of invalid drafts and exceptions of the drafter
    calls: Counter[str] = field(default_factory=Counter)  # of networks beside the passes: "head", "draft_head"
    gave_up: int = 0  # rounds without drafting because it would not save time
    nodes: int = 1  # of the latest pass, its root included
    requested: int = 0  # levels that the drafter was asked for in the latest round
    structure: Structure = OWN  # that it was asked for
    counted: bool = False  # whether the latest draft was asked for by its nodes (`State.worth`), not by levels
    chain: list[int] = field(default_factory=list)  # tokens that first children alone would have committed, of each row
    context: int = 0  # tokens of the longest row so far, prompt included: passes cost more behind long ones
    memory: dict[str, int] = field(default_factory=dict)  # bytes of the target's caches, where it reports them


@dataclass
class State:
    """The mutable state of a request. Finished rows are removed; `rows` has the original indices of the others."""

    request: Request
    pending: Tensor  # (B, *X) committed, not yet cached
    position: Tensor  # (B,) position id of the pending node
    cache: Any  # the target's cache
    rows: list[int]
    output: Any  # a `loop.output.TokenBuffer`, which the target chooses
    noise: Any = None  # random numbers, `sampling.BufferedNoise`; None with greedy sampling
    drift: Tensor | None = None  # (original rows,) summed over the rounds
    memory: Any = None  # the drafter's per-request state
    target: Target | None = None  # for drafters that run its layers or read its keys and values
    # given the tokens that drafts of 1, 2, ... nodes (the root included) are expected to commit, how many nodes pay
    worth: Callable[[Sequence[float]], int] = len
    offer: tuple[int, Structure] | None = None  # levels and structure where such nodes do not pay (`traits.copies`)
    drafting: bool = True  # false once the drafter has failed in this request
    refused: Tensor | None = None  # () number of invalid drafted nodes, on the device
    trace: Trace = field(default_factory=Trace)

    @property
    def structure(self) -> Structure:
        """The structure to draft in, of those that the drafter offers."""
        return self.trace.structure

    @property
    def tokens(self) -> list[list[int]]:
        """Emitted tokens of every original row."""
        return self.output.tokens

    @property
    def finished(self) -> set[int]:
        """Original rows that have ended."""
        return self.output.finished

    @property
    def calls(self) -> Counter[str]:
        """Calls of networks beside the passes, to be counted here."""
        return self.trace.calls

    @property
    def live(self) -> bool:
        return bool(self.rows)

    @property
    def budget(self) -> int:
        """Remaining number of tokens of the live row with the most of them."""
        return max(map(self.room, self.rows))

    def room(self, row: int) -> int:
        """Remaining number of tokens of an original row."""
        own = self.request.each[row] if self.request.each else self.request
        return own.max_new_tokens - len(self.output.tokens[row])

    def ids(self, row: int) -> Tensor:
        """Prompt and emitted tokens of an original row, (1, length)."""
        return self.output.ids(row)


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a target, checked once when a setup is built."""

    trees: bool = True
    vocab: int = 0
    never_drafted: frozenset[int] = frozenset()  # placeholder ids of image, video or audio content
    feature_layers: tuple[int, ...] = ()
    codebook: Tensor | None = None  # (codes, E) float32 as used by the image decoder; larger ids are grammar
    distribution: type[Distribution] = Categorical  # of its nodes
    steps: DenoisingSteps | None = None  # of the chains that vectors are sampled by
    size: int = 0  # of these vectors
    layers: int = 0  # of which some can be run alone (`Target.partial`)
    scales: tuple[int, ...] = ()  # codes of each node of an image, where nodes are maps
    any_order: bool = False  # images in any order of their places (`Request.order`)
    guarantee: str = "exact"  # the strongest that a setup may promise
    prompt_ids: int = 0  # number of ids that a prompt may have, where it is more than `vocab`
    declared: str = ""  # with a guarantee for the declared target: its distribution, in words

    @property
    def chains(self) -> tuple[int, int]:
        """(steps, size) of chains. Raises ValueError for a target of ids."""
        if self.steps is None:
            raise ValueError("target: got a model of ids, expected one of vectors")
        return len(self.steps), self.size


class Target:
    """Base class of targets: the model to accelerate."""

    capabilities: Capabilities
    passes: Any = None  # compiled ones (`models.runner`), if it has any
    recorder: Any = None  # what records them as CUDA graphs, if they are

    def record(self, asked: bool | None) -> None:
        """Called once where passes may be recorded as CUDA graphs (None: where that pays), before any request; by
        default they run as they are, which a warning says if it was asked for.
        """
        if asked:
            warnings.warn(
                f"graphs: got {type(self).__name__}, expected a target whose passes are recorded; it runs eager",
                RuntimeWarning,
                stacklevel=3,
            )

    def fix_widths(self) -> None:
        """Compute each row as it is alone, whatever runs beside it (`models.runner.widths`). Called once, before any
        request. Raises ValueError if the target doesn't support it.
        """
        raise ValueError(f"batch_invariant: got {type(self).__name__}, expected text, or images in raster order")

    @property
    def device(self) -> torch.device:
        """Where ids and distributions live."""
        raise NotImplementedError

    def prefill(self, request: Request) -> tuple[State, Scores]:
        """Run the prompt. Scores: distributions (B, 1) after it, features (B, L, F)."""
        raise NotImplementedError

    def verify(self, state: State, draft: Draft) -> Scores:
        """One pass over all nodes of all live rows."""
        raise NotImplementedError

    def partial(self, state: State, value: Tensor, level: int, skip: frozenset[int]) -> Tensor:
        """Logits (B, V) after one node of a chain (B,), `level` below the pending one, without the layers in `skip`.

        Nodes come in order of their levels, the pending one first. What is stored of them is overwritten by `verify`.
        """
        raise ValueError(f"drafter: got one that runs the target's layers, which {type(self).__name__} can't run alone")

    def stored(self, state: State, layers: Sequence[int]) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """Keys and values (B, H, S, E) of some layers, not to be written to, and which of the slots are committed
        tokens, (B, S) bool; None where all are.
        """
        raise ValueError(f"drafter: got one that reads keys and values, which {type(self).__name__} does not show")

    def law(self, request: Request) -> Callable[[Tensor], Tensor] | None:
        """A function from the "states" (..., X) in the `aux` of scores to the log-distributions (..., V) of a request,
        up to a constant and without grammar; None where the head can't be run again. It may be wrong: compare.
        """
        return None

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        """Keep the accepted nodes in the cache."""

    def select(self, state: State, keep: list[int]) -> None:
        """Keep only these live rows."""

    @property
    def pads(self) -> bool:
        """Whether prompts of different length can be prefilled together, each row as it is alone."""
        return False

    def finish(self, state: State) -> None:
        """Called when a request has ended, unless an exception ended it: give back what it borrowed."""

    def join(self, state: State, other: State, take: list[int]) -> None:
        """Add the live rows `take` of another request behind the live rows; `other` is not changed.

        Raises ValueError if the target doesn't support it.
        """
        raise ValueError(f"stream: got {type(self).__name__}, expected a target that takes rows into a running batch")

    def revise(self, state: State, value: Tensor, where: Tensor, seen: Tensor) -> Scores:
        """One pass over positions of an image in any order. Raises ValueError if the target doesn't support it."""
        raise ValueError(f"order: got {type(self).__name__}, expected a target that can decode out of raster order")


@dataclass(frozen=True)
class DrafterTraits:
    """Traits of a drafter, checked once when a setup is built."""

    levels: int = 8  # maximum draft depth
    feature_layers: tuple[int, ...] = ()  # hidden states of the target that it reads
    embeddings: bool = False  # whether it reads the input embeddings of the prompt
    samples: bool = False  # its drafts are always samples from q
    trees: bool = False  # its drafts branch
    adaptive_depth: bool = True  # false: use a fixed depth, e.g. if drafts improve over several passes
    whole_images: bool = False  # it can draft a whole image (`sketch`)
    distribution: type[Distribution] = Categorical  # of the values it drafts
    joins: bool = False  # rows can enter a running batch (`join`)
    partial: bool = False  # it runs some of the target's own layers (`Target.partial`)
    any_order: bool = False  # it drafts for any-order targets alone
    counts_nodes: bool = False  # it asks `State.worth` how many nodes of its draft pay
    copies: int = 0  # most levels of its copies, as many nodes as pay; where none pay, it drafts `State.offer`
    own_noise: bool = False  # draws that it reports come from numbers of its own, which serve several rounds
    ahead: int = (
        0  # distributions of so many later codes after each node that it reads, of any-order targets: `aux["ahead"]`
    )


class Drafter:
    """Base class of drafters: cheap proposers. `propose` may draft fewer levels than asked, never more.

    A drafter must not write to its arguments, except that it stores data about a request in `state.memory`: it may be
    used by several requests and threads at once.
    """

    traits = DrafterTraits()
    passes: Any = None  # its calls, compiled, if it has any
    recorder: Any = None  # its calls recorded as CUDA graphs, if they are
    saved_as = ""  # "network": it writes its weights (`save_pretrained`); "model": they are those of a model it runs

    @property
    def structures(self) -> Sequence[Structure]:
        """Structures that it can draft in, narrower ones first."""
        return (OWN,)

    def restrict_to_chains(self) -> None:
        """Called where the target or the rule takes no trees. A drafter that only drafts trees is refused then."""

    def compile(self) -> None:
        """Called after `attach` where compiled passes were asked for; by default a drafter runs as it is."""

    def record(self) -> None:
        """Called where the target's passes are recorded; by default a drafter runs as it is."""

    def save_pretrained(self, folder: Path, record: dict[str, Any]) -> None:
        """Write configuration, weights and provenance, of drafters that are saved as a network."""
        raise NotImplementedError

    def export(self, folder: str | Path, form: str, verifier: str | None = None) -> None:
        """Write the drafter for other engines, for one of which `verifier` names the target. Raises ValueError if they
        have no form of this name for it.
        """
        kind = type(self).__name__
        raise ValueError(f"form: got {form!r} for a {kind}, which other engines can't read, expected another drafter")

    def attach(self, target: Any) -> None:
        """Called with the model (for images its family) when a setup is built, and again after its device or dtype
        changed.
        """

    def start(self, state: State, scores: Scores) -> None:
        """Called after the prefill, with its scores."""

    def propose(self, state: State, depth: int) -> Draft:
        raise NotImplementedError

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Called after each round."""

    def finish(self, state: State) -> None:
        """Called when a request has ended, unless an exception ended it."""

    def select(self, state: State, keep: list[int]) -> None:
        """Drop all live rows but these."""

    def join(self, state: State, other: State, take: list[int]) -> None:
        """Add live rows of another request, started and not observed: its rows `[other.rows[b] for b in take]` are now
        the last len(take) of `state.rows`. Only called with `traits.joins`; `other.memory` must still serve the rows
        that were not taken.
        """

    def sketch(self, state: State) -> Tensor:
        """(B, rows * columns) codes of whole images, in raster order, for the live rows after the prefill."""
        raise NotImplementedError


@dataclass(frozen=True)
class RuleTraits:
    """Traits of an acceptance rule."""

    guarantee: str = "approximate"  # or "exact", "exact for the declared target"
    judges_draws: bool = False  # supports sampled drafts with their distribution q
    chains_only: bool = False  # trees are not supported
    whole_images: bool = False  # can verify all positions of a drafted image at once
    distribution: type[Distribution] = Categorical  # of the nodes it verifies
    whole_chains: bool = False  # what it accepts depends on drafts behind: they have to be drawn afresh in each round

    @property
    def keeps_tokens(self) -> bool:
        """Whether the tokens of a seed do not depend on drafts."""
        return self.guarantee == "exact" and not self.judges_draws


class Acceptance(Generic[NoiseT]):
    """Base class of acceptance rules, which select the accepted nodes of a draft."""

    traits = RuleTraits()

    def bind(self, capabilities: Capabilities) -> None:
        """Called with the target's capabilities when a setup is built, on a copy of the given rule."""

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> NoiseT:
        """Random numbers for a request, one generator per row; `width` is that of the distribution."""
        raise NotImplementedError

    def __call__(self, draft: Draft, scores: Scores, noise: NoiseT | None) -> Verdict:
        """noise None: greedy decoding."""
        raise NotImplementedError

    @property
    def inner(self) -> Acceptance:
        """The innermost rule, for wrapped rules; used in statistics."""
        return self


class DraftLengthPolicy:
    """Base class (`loop.draft_length`). `depth` is called before each round, `observe` after it.

    Args:
        levels: Maximum number of levels.
    """

    structures: Sequence[Structure] = (OWN,)  # that the drafter offers; the chosen one is `state.trace.structure`
    counts_nodes, copies = False, 0  # the drafter's traits

    def __init__(self, levels: int = 8):
        if not isinstance(levels, int) or not 1 <= levels < MAX_NODES:
            raise ValueError(f"levels: got {levels!r}, expected a whole number from 1 to {MAX_NODES - 1}")
        self.levels = levels

    def limit(self, state: State) -> int:
        """Levels that a draft may have in this round: one token of the budget is the target's own."""
        return max(min(self.levels, state.budget - 1), 0)

    def depth(self, state: State) -> int:
        """Levels to draft in this round; 0 for none. Stored in `state.trace.requested`."""
        raise NotImplementedError

    def pad(self, state: State, nodes: int) -> int:
        """Size to pad a draft of so many nodes to, because a pass over it takes less time."""
        return nodes

    def observe(self, trace: Trace) -> None:
        """The latest round has ended: `trace.rounds[-1]`, `trace.latest`."""


class Order:
    """Base class of the orders in which positions are generated."""

    name = ""  # as users write it and records hold it
    raster = False  # sequential, with drafts verified by the loop
    visits = False  # whether it says in which order an any-order target draws; the loop decodes in any case
    # of the nodes of targets that it takes; every target's where it is raster
    distribution: type[Distribution] = Categorical

    def bind(self, rule: Acceptance, drafter: Drafter | None) -> Order:
        """This order with the rule and drafter of a setup. Raises ValueError if they are incompatible."""
        return self

    def decode(
        self,
        target: Target,
        drafter: Drafter | None,
        rule: Acceptance,
        request: Request,
        length_policy: DraftLengthPolicy,
    ) -> State:
        """Decode a batch. Returns the finished state."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrainingBatch:
    """Prompts and the target's answers to them, recorded (`train.capture`). Row b has lengths[b] answer tokens, stop
    included; M is the longest.
    """

    ids: Tensor  # (B, L + M) prompts (left-padded) and answers (right-padded)
    prompt_length: int
    lengths: list[int]
    features: Tensor  # (B, L + M - 1, F)
    states: Tensor  # (B, M - 1, X) after each answer token, what `law` reads
    law: Callable[[Tensor], Tensor]  # states (..., X) -> log-distributions (..., V), up to a constant; float32
    width: int  # V
    best: Tensor  # (B, M - 1) the likeliest token after each answer token
    positions: Tensor  # (B, L + M - 1), or (3, B, L + M - 1)
    attention: Tensor | None  # (B, L) bool
    embeddings: Tensor | None  # (B, L, d) input embeddings of the prompt
    host_ids: Tensor  # `ids`, `attention` and the number above all positions on the CPU: no step waits for the device
    host_attention: Tensor | None
    reach: int

    @property
    def logits(self) -> Tensor:
        """(B, M - 1, V): all log-distributions at once, which take much memory where V is large."""
        return self.law(self.states)


class Prediction(NamedTuple):
    """One step of a rollout: what predicts the distributions after T answer tokens of each row."""

    states: Tensor  # (B, T, d), of which the drafter's `trained_logits` are
    weight: Tensor  # (B, T) of each in the loss; 0 or False where none counts
    place: Tensor | None = None  # (B, T) indices of the answer tokens, below M - 1; None: T of them from the first


Rollout = Sequence[Prediction]


class TrainedDrafter(Protocol):
    """A drafter with a network, as the trainer sees it. It is trained on batches of answers of its target."""

    traits: DrafterTraits
    head: nn.Module
    borrowed: tuple[nn.Module, ...]  # modules of the target, frozen in training
    ids: Tensor | None  # the ids that its logits are of; None: all

    def rollout(self, lesson: TrainingBatch, steps: int) -> Rollout:
        """Its predictions along the answers, each step fed by the one before."""

    def trained_logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Logits (..., V) of predicted states (..., d) after these answer tokens (...), by the trained weights."""

    def refresh(self) -> None:
        """Called when the weights have changed."""

    def save_pretrained(self, folder: Path, record: dict[str, Any]) -> None:
        """Write its configuration, weights and provenance."""
