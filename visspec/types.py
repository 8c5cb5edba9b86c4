"""Records passed between the stages of a round, and the base classes of targets, drafters, rules and orders.

Shapes: B rows, N draft nodes, D path length, L prompt length, V vocabulary, F features. All ids are int64.
A *node* is the unit of commitment. Node 0 of a draft is the pending token: committed, but not yet in the cache.
Records are frozen; `State` is the only mutable object of a request.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visspec.distributions import Categorical, DenoisingSteps, Distribution

TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
GUARANTEES = ("approximate", "exact for the declared target", "exact")  # weakest first
FREE = -1  # in `Request.fixed`: a position without a fixed token
MAX_NODES = 1024  # maximum number of nodes of a draft, root included
Tokenizer = Any  # a tokenizer of transformers, or anything that is called like one
Processor = Any  # a processor of transformers, or anything that is called like one and has its `tokenizer`
ConfiguredModel = Any  # a model of transformers, or one of ours that is configured like one


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Args:
        temperature: 0 for greedy decoding.
        top_k: Number of tokens to keep; 0 keeps all.
        top_p: Probability mass to keep; 1 keeps all.
        guidance: Classifier-free guidance scale, which the target applies first; 1 disables it.
        processors: transformers-style callables (ids (1, length), logits (1, V)) -> logits. They are called in order,
            for every node with that node's prefix, before temperature, top-k and top-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    guidance: float = 1.0
    processors: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()

    def __post_init__(self):
        for name, fits, expected in (
            ("temperature", self.temperature == 0 or TINY <= self.temperature <= HUGE, "0 or a positive float32"),
            ("top_k", self.top_k >= 0, "a count of at least 0"),
            ("top_p", 0 <= self.top_p <= 1, "a probability"),
            ("guidance", 0 <= self.guidance <= HUGE, "a number of at least 0"),
        ):
            if not fits:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @cached_property
    def row_processors(self) -> tuple[RowProcessor, ...]:
        """The processors that may force tokens."""
        return tuple(each for each in self.processors if isinstance(each, RowProcessor))


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
    """A tree of proposed nodes. X is the shape of a node's value: () for an id. `q` is the distribution from which each
    node was sampled, given its earlier siblings. None means that nodes are point masses: deterministic, or sampled with
    the noise of the target's own tokens. Only rules that draw their own random numbers support q.
    """

    value: Tensor  # (B, N, *X); any valid value if a node is not real
    tree: Tree
    q: Distribution | None = None  # row 0 unused
    real: Tensor | None = None  # (B, N) bool: false for padding nodes, never accepted; ignored for the root

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
    """One batch to decode. `inputs` is passed to the target's `prefill`; the loop uses the other fields."""

    inputs: Any
    prompt: Tensor  # (B, L) input ids, padding included
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()
    stop: Callable[[Tensor], bool] | None = None  # called with (1, length) ids after each token; True ends the row
    generators: Sequence[torch.Generator] | None = None  # one per row; None with greedy sampling
    on_tokens: Callable[[list[int]], bool | None] | None = None  # batch of one: called after each round; True ends it
    on_round: Callable[[State], None] | None = None  # called after each round, between passes
    keep_logits: bool = False  # store the warped distribution of every emitted token
    keep_raw: bool = False  # store the target's unprocessed logits of every emitted token
    keep_cache: bool = False  # store keys and values of finished rows, to continue from the output
    media: Mapping[str, Any] = field(default_factory=dict)  # pixel values etc. for drafters with a vision tower
    copies: int = 1  # sequences per prompt (num_return_sequences)
    fixed: Tensor | None = None  # (>= max_new_tokens,) grammar: the fixed token of each position, or FREE
    grid: tuple[int, int] | None = None  # rows and columns of an image's tokens
    order: tuple[int, ...] | None = None  # for any-order targets: the place of each code in drawing order; None: raster
    each: list[Request] = field(default_factory=list)  # the requests of the rows, if several were batched
    prefix: Any = None  # prompt prefixes to store or reuse (`models.decoder.prefix`), read by the prefill
    reused: list[int] = field(default_factory=list)  # per row, prompt tokens taken from the prefix cache

    def of(self, row: int) -> tuple[Request, int]:
        """Return the request that holds a row's limit, ends, processors and prompt, and the row's index in it."""
        return (self.each[row], 0) if self.each else (self, row)

    @property
    def samplings(self) -> list[Sampling]:
        """The sampling parameters of the rows, or of all of them."""
        return [own.sampling for own in self.each] if self.each else [self.sampling]

    @property
    def visits(self) -> Sequence[int]:
        """Places of an image's codes in the order of an any-order target."""
        assert self.grid is not None
        return range(self.grid[0] * self.grid[1]) if self.order is None else self.order


class RowProcessor:
    """Base class of logits processors that are called for one row at a time, with any prefix."""

    def __call__(self, ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
        return torch.stack([self.row(b, *inputs) for b, inputs in enumerate(zip(ids_BL, scores_BV))])

    def row(self, index: int, ids_L: Tensor, scores_V: Tensor) -> Tensor:
        """Return the scores (V,) after the ids (L,) of an original row."""
        raise NotImplementedError

    def forced_token(self, index: int, ids: list[int]) -> int | None:
        """Return the only token that can follow the ids, or of a forced text its longest first token; None if
        unknown.
        """
        return None


@dataclass(frozen=True)
class NodeProcessor:
    """A logits processor that treats the prefix as a set of ids and only checks whether its length is below `least`.
    All nodes of a draft are therefore scored in one call, in which shorter prefixes repeat an id.
    """

    processor: Callable[[Tensor, Tensor], Tensor]
    least: int = 0

    def __call__(self, ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
        return self.processor(ids_BL, scores_BV)

    def alike(self, shortest: int, longest: int) -> bool:
        """Return whether prefixes of these lengths lie on the same side of `least`."""
        return longest < self.least or shortest >= self.least


class Structure(NamedTuple):
    """Structure of a draft: maximum nodes per level that have children (1: a chain), and without root in total."""

    width: int = 0  # 0: chosen by the drafter
    nodes: int = 0

    def size(self, levels: int) -> int:
        """Return the number of nodes in `levels` levels; one per level if the structure is unknown."""
        if self.width <= 1 or not levels:
            return levels
        return min(self.nodes, self.width * (1 + self.width * (levels - 1)))


OWN = Structure()


class Round(NamedTuple):
    """One pass over a draft, for every row that was live."""

    levels: int  # maximum depth of the draft over rows
    committed: list[int]  # tokens of each row; the last one is not drafted
    had_rejection: list[bool]  # whether a node below the end of the accepted path was rejected


@dataclass
class Trace:
    """Statistics of a request, by round. Times are host seconds until each stage's call returns."""

    times: dict[str, float] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    origin: list[list[str]] = field(default_factory=list)  # per row and token: plain, drafted, bonus, corrected
    latest: dict[str, float] = field(default_factory=dict)  # seconds of each stage in the latest round
    faults: int = 0  # number of invalid drafts and exceptions of the drafter
    calls: Counter[str] = field(default_factory=Counter)  # network calls outside passes: "head", "draft_head"
    gave_up: int = 0  # rounds without drafting because it would not save time
    nodes: int = 1  # nodes of the latest pass, root included
    requested: int = 0  # levels requested from the drafter in the latest round
    structure: Structure = OWN  # structure requested from the drafter
    counted: bool = False  # whether the latest request was for a number of nodes (`State.worth`) instead of levels
    chain: list[int] = field(default_factory=list)  # per row, tokens that first children alone would have committed
    context: int = 0  # length of the longest row so far, prompt included; the cost of a pass depends on it
    memory: dict[str, int] = field(default_factory=dict)  # bytes of the target's caches, if it reports them


@dataclass
class State:
    """The mutable state of a request. Finished rows are removed; `rows` has the original indices of the others."""

    request: Request
    pending: Tensor  # (B, *X) committed, not yet cached
    position: Tensor  # (B,) position id of the pending node
    cache: Any  # the target's cache
    rows: list[int]
    output: Any  # a `loop.decode.TokenBuffer`, or the subclass that the target needs
    noise: Any = None  # random numbers, `sampling.BufferedNoise`; None with greedy sampling
    drift: Tensor | None = None  # (original rows,) summed over the rounds
    memory: Any = None  # the drafter's per-request state
    target: Target | None = None  # for drafters that run the target's layers or read its keys and values
    # maps the expected tokens of drafts of 1, 2, ... nodes (root included) to the number of nodes to draft
    worth: Callable[[Sequence[float]], int] = len
    # for drafters with `traits.copies`: levels and structure to draft, and how often its first level is rejected
    offer: tuple[int, Structure, float] | None = None
    drafting: bool = True  # false once the drafter has failed in this request
    refused: Tensor | None = None  # () number of invalid drafted nodes, on the device
    trace: Trace = field(default_factory=Trace)

    @property
    def structure(self) -> Structure:
        """The structure to draft in, one of those that the drafter offers."""
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
        """Counter of network calls outside target passes. Drafters and rules add to it."""
        return self.trace.calls

    @property
    def budget(self) -> int:
        """The largest number of tokens that any live row may still emit."""
        return max(map(self.room, self.rows))

    def room(self, row: int) -> int:
        """Return the number of tokens that an original row may still emit.

        Args:
            row: Original number of the row.
        """
        own = self.request.each[row] if self.request.each else self.request
        return own.max_new_tokens - len(self.output.tokens[row])

    def ids(self, row: int) -> Tensor:
        """Return prompt and emitted tokens of an original row, (1, length).

        Args:
            row: Original number of the row.
        """
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
    steps: DenoisingSteps | None = None  # schedule of the denoising chains that vectors are sampled with
    size: int = 0  # size of the vectors
    layers: int = 0  # number of layers, if some of them can be run alone (`Target.partial`)
    scales: tuple[int, ...] = ()  # codes of each node of an image, where nodes are maps
    any_order: bool = False  # images can be decoded in any order of their places (`Request.order`)
    guarantee: str = "exact"  # the strongest that a setup may promise
    prompt_ids: int = 0  # number of ids that may occur in a prompt, if larger than `vocab`
    declared: str = ""  # for a guarantee that holds for a declared target: a description of its distribution

    @property
    def chains(self) -> tuple[int, int]:
        """(steps, size) of denoising chains. Raises ValueError for a target of ids."""
        if self.steps is None:
            raise ValueError("target: got a model of ids, expected one of vectors.")
        return len(self.steps), self.size


class Target:
    """Base class of targets: the model to accelerate.

    `state` is the state of a request, `keep` and `take` are indices of its live rows. Methods that a target does not
    support raise ValueError.
    """

    capabilities: Capabilities
    passes: Any = None  # compiled passes (`models.runner`), if any
    recorder: Any = None  # records passes as CUDA graphs, if enabled

    def record(self, asked: bool | None, compile: bool = False) -> None:
        """Prepare to record passes as CUDA graphs. Called once, before any request. By default passes run eagerly.

        Args:
            asked: True warns if passes can't be recorded; None records them where that is faster.
            compile: Whether to record compiled layers.
        """
        if asked:
            warnings.warn(
                f"graphs: {type(self).__name__} does not support CUDA graphs. It runs eagerly.",
                RuntimeWarning,
                stacklevel=3,
            )

    def fix_widths(self) -> None:
        """Make the result of each row independent of its batch (`models.runner.widths`). Called once, before any
        request.
        """
        raise ValueError(f"batch_invariant: got {type(self).__name__}, expected text, or images in raster order.")

    @property
    def device(self) -> torch.device:
        """The device of ids and distributions."""
        raise NotImplementedError

    def prefill(self, request: Request) -> tuple[State, Scores]:
        """Run the prompt.

        Args:
            request: The request.

        Returns:
            The new state, and scores with distributions (B, 1) after the prompt and features (B, L, F).
        """
        raise NotImplementedError

    def verify(self, state: State, draft: Draft) -> Scores:
        """Run one pass over all nodes of all live rows.

        Args:
            state: The state of the request.
            draft: Nodes to score; node 0 is the pending token.

        Returns:
            Scores with distributions (B, N).
        """
        raise NotImplementedError

    def partial(self, state: State, value: Tensor, level: int, skip: frozenset[int]) -> Tensor:
        """Return the logits (B, V) after one node of a chain, computed without some layers.

        Call it for the nodes in order of their levels, the pending node first. `verify` overwrites what it caches.

        Args:
            value: The node (B,).
            level: The level of the node below the pending one.
            skip: Indices of the layers to leave out.
        """
        raise ValueError(f"drafter: {type(self).__name__} can't run single layers. Choose another drafter.")

    def keys_and_values(self, state: State, layers: Sequence[int]) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """Return read-only keys and values (B, H, S, E) of layers, and a mask (B, S) of committed slots (None: all).

        Args:
            state: The request.
            layers: Indices of layers.
        """
        raise ValueError(f"drafter: {type(self).__name__} does not expose keys and values. Choose another drafter.")

    def law(self, request: Request) -> Callable[[Tensor], Tensor] | None:
        """Return a function from hidden states (..., X), the "states" in `Scores.aux`, to log-distributions (..., V).
        They are correct up to a constant and ignore the grammar. The function may be wrong, so compare its results with
        those of a pass. None if the head can't be run alone.

        Args:
            request: The request.
        """
        return None

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        """Keep the accepted nodes in the cache.

        Args:
            state: The request.
            draft: The round's draft.
            outcome: What the host knows of the round: lengths and paths.
        """

    def select(self, state: State, keep: list[int]) -> None:
        """Keep only these live rows, given by index.

        Args:
            state: The request.
            keep: Indices of the live rows to keep.
        """

    @property
    def pads(self) -> bool:
        """Return whether prompts of different lengths can be prefilled together with the same results."""
        return False

    def finish(self, state: State) -> None:
        """Release what the request borrowed. Called when a request has ended, unless an exception ended it.

        Args:
            state: The request.
        """

    def join(self, state: State, other: State, take: list[int]) -> None:
        """Append live rows of another request to the live rows.

        Args:
            state: The state to extend.
            other: The other request's state, which is not changed.
            take: Indices of the rows to add.

        Raises:
            ValueError: If the target does not support it.
        """
        raise ValueError(f"stream: {type(self).__name__} does not support adding rows to a running batch.")

    def revise(self, state: State, value: Tensor, where: Tensor, seen: Tensor) -> Scores:
        """Run one pass over positions of an image in any order.

        Args:
            value: Tokens (B, N) to run.
            where: Positions (B, N) of the tokens.
            seen: Attention mask of the tokens, True where one attends to a slot.
        """
        raise ValueError(f"order: {type(self).__name__} can only decode in raster order.")


@dataclass(frozen=True)
class DrafterTraits:
    """Traits of a drafter, checked once when a setup is built."""

    levels: int = 8  # maximum draft depth
    feature_layers: tuple[int, ...] = ()  # layers of the target whose hidden states it reads
    embeddings: bool = False  # whether it reads the input embeddings of the prompt
    samples: bool = False  # whether its drafts are always samples from q
    trees: bool = False  # whether its drafts branch
    adaptive_depth: bool = True  # False: use a fixed depth, e.g. if drafts improve over several passes
    whole_images: bool = False  # whether it can draft a whole image (`sketch`)
    distribution: type[Distribution] = Categorical  # of the values it drafts
    joins: bool = False  # whether rows can enter a running batch (`join`)
    partial: bool = False  # whether it runs single layers of the target (`Target.partial`)
    any_order: bool = False  # whether it only drafts for any-order targets
    counts_nodes: bool = False  # whether it asks `State.worth` how many nodes to draft
    copies: int = 0  # maximum levels of drafts from the context alone; if these do not pay, it drafts `State.offer`
    own_noise: bool = False  # whether q is sampled with its own random numbers, which serve several rounds
    ahead: int = 0  # any-order targets: number of later codes whose distributions it reads, `aux["ahead"]`


class Drafter:
    """Base class of drafters, which propose tokens cheaply. A drafter may serve several requests and threads at once.
    It must not write to its arguments; data about a request goes to `state.memory`. `state` is the state of a request,
    `keep` and `take` are indices of its live rows.
    """

    traits = DrafterTraits()
    passes: Any = None  # its compiled calls, if any
    recorder: Any = None  # records its calls as CUDA graphs, if enabled
    saved_as = ""  # "network": it saves its weights (`save_pretrained`); "model": its weights belong to another model

    @property
    def structures(self) -> Sequence[Structure]:
        """Structures that the drafter supports, narrower ones first."""
        return (OWN,)

    def restrict_to_chains(self) -> None:
        """Draft chains only, because target or rule do not support trees. A drafter without chains is rejected."""

    def compile(self) -> None:
        """Compile the drafter's passes. Called after `attach` with `compile=True`, unless the target's passes are
        recorded; a no-op by default.
        """

    def record(self) -> None:
        """Prepare to record calls as CUDA graphs. Called if the target's passes are recorded; a no-op by default."""

    def save_pretrained(self, folder: Path, record: dict[str, Any]) -> None:
        """Write configuration and weights. Only for drafters whose `saved_as` is "network".

        Args:
            folder: The folder to write to.
            record: Provenance to store with the weights.
        """
        raise NotImplementedError

    def export(self, folder: str | Path, form: str, verifier: str | None = None) -> None:
        """Write the drafter for other engines.

        Args:
            folder: The folder to write to.
            form: The name of a form that other engines read.
            verifier: Name of the target, for forms that contain it.

        Raises:
            ValueError: If the form cannot represent this drafter.
        """
        kind = type(self).__name__
        raise ValueError(f"form: {kind} has no form {form!r}. Other engines can't read this drafter.")

    def attach(self, target: Any) -> None:
        """Connect to the model or image family. Called when a setup is built, and after device or dtype changed.

        Args:
            target: The transformers model, or the image family.
        """

    def start(self, state: State, scores: Scores) -> None:
        """Process the scores of the prefill. Called once per request.

        Args:
            state: The request.
            scores: The target's distribution and features after the prompt.
        """

    def propose(self, state: State, depth: int) -> Draft:
        """Propose a draft.

        Args:
            state: The state of the request.
            depth: Maximum number of levels. A draft may have fewer, never more.
        """
        raise NotImplementedError

    def observe(self, state: State, draft: Draft, scores: Scores, verdict: Verdict, outcome: Outcome) -> None:
        """Process the result of a round, after which `state` has advanced.

        Args:
            draft: The draft that was verified.
            scores: The target's scores of its nodes.
            verdict: The result of the acceptance rule, on the device.
            outcome: The verdict as Python lists.
        """

    def finish(self, state: State) -> None:
        """Release what the request used. Called when a request has ended, unless an exception ended it.

        Args:
            state: The request.
        """

    def select(self, state: State, keep: list[int]) -> None:
        """Keep only these live rows, given by index.

        Args:
            state: The request.
            keep: Indices of the live rows to keep.
        """

    def join(self, state: State, other: State, take: list[int]) -> None:
        """Add live rows of another request after its `start`. Only called with `traits.joins`.

        Args:
            state: The state that was extended. Its last len(take) `rows` are the new ones.
            other: The state of the other request. `other.memory` must still serve the rows that were not taken.
            take: Indices of the rows in `other.rows`.
        """

    def sketch(self, state: State) -> Tensor:
        """Draft whole images after the prefill. Returns codes (B, rows * columns) of the live rows, in raster order.

        Args:
            state: The request.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class RuleTraits:
    """Traits of an acceptance rule."""

    guarantee: str = "approximate"  # or "exact", "exact for the declared target"
    judges_draws: bool = False  # whether it supports sampled drafts with their distribution q
    chains_only: bool = False  # whether trees are unsupported
    whole_images: bool = False  # whether it can verify all positions of a drafted image at once
    distribution: type[Distribution] = Categorical  # of the nodes it verifies
    whole_chains: bool = False  # whether it depends on later drafts, which must be drawn anew each round

    @property
    def keeps_tokens(self) -> bool:
        """Return whether the tokens of a given seed do not depend on drafts."""
        return self.guarantee == "exact" and not self.judges_draws


class Acceptance:
    """Base class of acceptance rules, which select the accepted nodes of a draft."""

    traits = RuleTraits()
    capabilities = Capabilities()  # those of the target

    def bind(self, capabilities: Capabilities) -> None:
        """Adapt the rule to a target. Called on a copy of the user's rule when a setup is built.

        Args:
            capabilities: Those of the target.
        """
        self.capabilities = capabilities

    def allow_graphs(self) -> None:
        """Prepare to record parts of verdicts as CUDA graphs, on devices with graphs. A no-op by default."""

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> Any:
        """Create the random numbers of a request, a `sampling.BufferedNoise`.

        Args:
            generators: One generator per row.
            width: Width of the target's distributions.
        """
        raise NotImplementedError

    def __call__(self, draft: Draft, scores: Scores, noise: Any) -> Verdict:
        """Select the accepted nodes.

        Args:
            draft: The nodes.
            scores: The target's distributions after each node.
            noise: Random numbers; None for greedy decoding.
        """
        raise NotImplementedError

    @property
    def inner(self) -> Acceptance:
        """The innermost rule of a wrapped rule, used in statistics."""
        return self


class Order:
    """Base class of the orders in which positions are generated."""

    name = ""  # in arguments and records
    raster = False  # sequential, with drafts verified by the loop
    visits = False  # whether it sets the order in which an any-order target draws; the loop decodes either way
    # of the nodes that it can decode; raster decodes nodes of any kind
    distribution: type[Distribution] = Categorical

    def bind(self, rule: Acceptance, drafter: Drafter | None) -> Order:
        """Return this order for the rule and drafter of a setup. Raises ValueError if they are incompatible.

        Args:
            rule: The acceptance rule.
            drafter: The drafter; None for plain decoding.
        """
        return self

    def decode(
        self,
        target: Target,
        drafter: Drafter | None,
        rule: Acceptance,
        request: Request,
        length_policy: Any,
    ) -> State:
        """Decode a batch. Returns the finished state.

        Args:
            drafter: None for plain decoding.
            length_policy: Chooses the draft length of each round (`loop.draft_length.DraftLengthPolicy`).
        """
        raise NotImplementedError
