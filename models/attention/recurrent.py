"""Drafts for layers that keep a state instead of keys and values (linear attention, short convolutions).

Rejected tokens cannot be removed from a state. So the states are saved before a pass over a draft, and restored for
each row that did not accept all of the pass; the tokens that it accepted are then *replayed* at the front of its next
pass, before the next draft's nodes. A rejection costs no extra pass. Replays end with a pass that a row accepts whole,
or, if they grow to `MOST` tokens, with a pass over replayed tokens only.
If all states are windows of short convolutions, a pass keeps every window that it goes through, and nothing is
replayed.

Full attention works as usual: replayed tokens are written to the slots that they already have. Layers with a state
read a tree's paths from the root to each leaf as separate rows, which start from the row's state (`PathRows`). All
other layers see the nodes.

Shapes: B rows, R replayed tokens, N nodes, T = R + N nodes of a pass, P paths of a tree, D nodes of a path including
the replayed tokens before it, d hidden size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from visspec import tree as trees
from visspec.cache import SlotCache, gather_rows, to_device
from visspec.models.attention.pass_inputs import ModuleHooks
from visspec.types import Draft, Outcome, State, Tree

MOST = 32  # maximum replayed tokens per row
CHUNK = 64  # tokens that torch's gated delta rule pads a row to by default
MOST_BYTES = 1 << 28  # maximum for states at the ends of paths; beyond it, every path is replayed


def state_layers(config: PretrainedConfig) -> dict[int, Any]:
    """Create the layers of transformers' own cache that hold a state (some also keys and values), by number."""
    layers = enumerate(DynamicCache(config=config).layers)
    return {i: layer for i, layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)}


def state_modules(decoder: nn.Module, layers: Collection[int]) -> dict[int, nn.Module]:
    """Return the modules of a decoder that read and write the states of these layers, judged by what they call."""
    candidates: Iterator[tuple[Any, nn.Module]] = ((getattr(m, "layer_idx", None), m) for m in decoder.modules())
    return {index: module for index, module in candidates if index in layers and _writes_states(type(module))}


def _writes_states(kind: type[nn.Module]) -> bool:
    functions = (inspect.unwrap(value) for base in kind.__mro__ for value in vars(base).values() if callable(value))
    codes = (getattr(function, "__code__", None) for function in functions)
    return any(code is not None and "update_conv_state" in code.co_names for code in codes)


def states_of(layer: Any) -> list[tuple[dict, int, Tensor | None]]:
    """Return the states of a cache layer, each with its dictionary and its key."""
    both = layer.conv_states, layer.recurrent_states
    return [(states, i, state) for states in both for i, state in states.items()]


class RecurrentStateCheckpoints:
    """The states of a request, and the ids (B, R) of tokens that they do not include yet, left-aligned."""

    def __init__(self, layers: dict[int, Any], rows: int):
        self.layers = layers
        self.replayed = [0] * rows
        self.ids: Tensor | None = None
        self._kept: list[tuple[dict, int, Tensor]] = []
        self._before: list[int] = []
        self._paths: PathRows | None = None  # set if the latest pass was over a tree
        self._recorded = False  # whether the states hold all windows of the latest pass

    def check_written(self, model: PreTrainedModel) -> None:
        """Raise ValueError unless the model keeps the states of all these layers here."""
        for index, layer in self.layers.items():
            if not any(layer.has_previous_state.values()):
                raise ValueError(
                    f"model: {type(model).__name__} keeps the state of layer {index} outside of its cache."
                )

    def _states(self) -> list[tuple[dict, int]]:
        """Return where each tensor is: a dictionary of a layer, and a key."""
        entries = (one for layer in self.layers.values() for one in states_of(layer))
        return [(states, i) for states, i, state in entries if state is not None]

    def run(
        self,
        passing: Callable[[State, Draft], Any],
        state: State,
        draft: Draft,
        modules: dict[int, nn.Module],
    ) -> tuple[Any, Tensor | None]:
        """Run a pass over the replayed tokens and the draft.

        Args:
            passing: Runs a pass and returns its output.
            modules: The modules that keep the states, by layer.

        Returns:
            The output, and the positions (B, N) of each row's draft nodes in it, or None if there are no others.
        """
        nodes = draft.tree.size
        while max(self.replayed) > MOST or (nodes == 1 and len(set(self.replayed)) > 1):
            self._settle(passing, state)
        longest, device = max(self.replayed), draft.value.device
        self._paths = None if draft.tree.chain else PathRows(modules, self.layers, draft.tree, self.replayed)
        if longest == 0:
            self._before, self.ids = self.replayed, draft.value
            with ShortChunks(modules, nodes if self._paths is None else self._paths.width, device):
                return self._pass(passing, state, draft, nodes > 1), None
        assert self.ids is not None
        replayed_B1 = to_device(self.replayed, device)[:, None]
        at_BT = torch.arange(longest + nodes, device=device) - replayed_B1
        source_BT = torch.where(at_BT < 0, at_BT + replayed_B1, longest + at_BT.clamp(0, nodes - 1))
        self._before, self.ids = self.replayed, torch.cat([self.ids[:, :longest], draft.value], 1).gather(1, source_BT)
        if draft.tree.chain:
            tree = trees.chain(longest + nodes - 1, str(device))
        else:
            tree = append_to_replayed(draft.tree, replayed_B1, longest)
        with ShortChunks(modules, tree.size if self._paths is None else self._paths.width, device):
            output = self._pass(passing, state, Draft(self.ids, tree), True)
        return output, replayed_B1 + torch.arange(nodes, device=device)

    def _pass(self, passing: Callable[[State, Draft], Any], state: State, draft: Draft, keep: bool) -> Any:
        """Run a pass from the current states. `keep` saves them first; a pass over paths does not change them."""
        slots: SlotCache = state.cache.slots
        self._recorded = (keep or self._paths is not None) and all(map(_records_windows, self.layers.values()))
        for layer in self.layers.values():
            layer.record_past = self._recorded
        keep = keep and self._paths is None and not self._recorded
        self._kept = [(states, i, states[i].clone()) for states, i in self._states()] if keep else []
        lengths = slots.lengths
        if not any(self.replayed) and self._paths is None:
            return passing(state, draft)
        back = to_device(self.replayed, state.position.device)
        try:
            slots.lengths = [n - gone for n, gone in zip(lengths, self.replayed)]
            with self._paths or nullcontext():
                return passing(replace(state, position=state.position - back), draft)
        finally:
            slots.lengths = lengths

    def commit(self, outcome: Outcome, nodes: int) -> None:
        """Keep the new states of rows that accepted the whole pass; the others replay what they accepted."""
        paths, self._paths = self._paths, None
        if paths is not None:
            self._commit_path(paths, outcome)
            return
        if not self._kept and not self._recorded:
            self.replayed = [0] * len(self.replayed)
            return
        counts = [before + len(path) for before, path in zip(self._before, outcome.path)]
        width = max(self._before) + nodes
        self._take(counts, width)
        self.replayed = [0 if self._recorded or count == width else count for count in counts]

    def _commit_path(self, paths: PathRows, outcome: Outcome) -> None:
        """Like `commit`, for a tree: a row accepts the whole pass if it accepts a path of maximal length."""
        assert self.ids is not None
        device = self.ids.device
        nodes = [[*range(n), *(n + node for node in path)] for n, path in zip(self._before, outcome.path)]
        whole = [paths.ends_kept and (self._recorded or len(row) == paths.width) for row in nodes]
        longest = max(map(len, nodes))
        self.ids = self.ids.gather(1, to_device([row + [0] * (longest - len(row)) for row in nodes], device))
        if any(whole):
            paths.keep(to_device(whole, device), to_device([row[-1] for row in nodes], device))
        self.replayed = [0 if is_whole else len(row) for is_whole, row in zip(whole, nodes)]

    def _take(self, counts: list[int], width: int) -> None:
        """Restore the saved states, except of rows that accepted a whole pass of so many tokens. Windows are those
        after what a row accepted.
        """
        if self._recorded:
            for states, i in self._states():
                states[i] = _window(states[i], to_device(counts, states[i].device), states[i].shape[-1] - width)
        whole = [count == width for count in counts]
        if all(whole):
            return
        for states, i, saved in self._kept:
            if any(whole):
                new = to_device(whole, saved.device).view(-1, *[1] * (saved.dim() - 1))
                saved = torch.where(new, states[i], saved)
            states[i] = saved
        self._kept = []

    def _settle(self, passing: Callable[[State, Draft], Any], state: State) -> None:
        """Run a pass over the first replayed tokens only, as many as shorten the replays most over all rows."""
        assert self.ids is not None
        count = max(set(self.replayed) - {0}, key=lambda n: n * sum(r >= n for r in self.replayed))
        device = self.ids.device
        chain = trees.chain(count - 1, str(device))
        self._paths = None
        self._pass(passing, state, Draft(self.ids[:, :count].contiguous(), chain), True)
        gone = [count if r >= count else 0 for r in self.replayed]
        self._take(gone, count)
        at_BT = torch.arange(self.ids.shape[1], device=device) + to_device(gone, device)[:, None]
        self.ids = self.ids.gather(1, at_BT.clamp(max=self.ids.shape[1] - 1))
        self.replayed = [r - n for r, n in zip(self.replayed, gone)]

    def select(self, keep: list[int]) -> None:
        """Keep only these rows."""
        for states, i in self._states():
            states[i] = states[i][to_device(keep, states[i].device)]
        self.replayed = [self.replayed[b] for b in keep]
        if self.ids is not None:
            self.ids = self.ids[to_device(keep, self.ids.device)]

    def join(self, other: RecurrentStateCheckpoints, take: list[int]) -> None:
        """Add rows of another request."""
        for (states, i), (theirs, j) in zip(self._states(), other._states()):
            states[i] = torch.cat([states[i], theirs[j][to_device(take, states[i].device)]])
        if self.ids is not None:
            width = max(self.replayed)
            ids = self.ids.new_zeros(len(self.replayed) + len(take), max(width, max(other.replayed), 1))
            ids[: len(self.replayed), :width] = self.ids[:, :width]
            if other.ids is not None and (count := max(other.replayed)):
                ids[len(self.replayed) :, :count] = other.ids[take, :count]
            self.ids = ids
        self.replayed = self.replayed + [other.replayed[b] for b in take]


class ShortChunks(ModuleHooks):
    """Context in which torch's gated delta rule uses the `width` tokens of a row as its chunk. Otherwise it pads every
    row to `CHUNK` tokens, which makes the paths of a tree expensive.
    """

    def __init__(self, modules: dict[int, nn.Module], width: int, device: torch.device):
        super().__init__()
        short = device.type == "cpu" and 1 < width < CHUNK
        self.modules = [module for module in modules.values() if short and _takes_chunk_size(type(module).forward)]
        self.width = width

    def _put_up(self) -> list[RemovableHandle]:
        return [module.register_forward_pre_hook(self._before_call, with_kwargs=True) for module in self.modules]

    def _before_call(self, module: nn.Module, args: tuple, kwargs: dict | None = None) -> tuple[tuple, dict] | None:
        return (args, {**kwargs, "chunk_size": self.width}) if self.is_caller and kwargs is not None else None


@functools.cache
def _takes_chunk_size(forward: Callable) -> bool:
    """Return whether a module passes its keyword arguments on to torch's gated delta rule."""
    rule = inspect.unwrap(forward).__globals__.get("torch_chunk_gated_delta_rule")
    return rule is not None and "chunk_size" in inspect.signature(rule).parameters


class PathRows(ModuleHooks):
    """Context in which layers with a state read a tree as its paths from the root to each leaf, one row each.

    A module reads P rows of D nodes for each row of the batch, from copies of the row's state. Each node's output is
    taken from one of the paths that contain it. The states in the cache stay those before the pass.

    Args:
        modules: The modules that keep the states, by layer.
        layers: The cache layers of these modules.
        tree: The draft's tree.
        replayed: Number of tokens that each row replays before it.
    """

    def __init__(self, modules: dict[int, nn.Module], layers: dict[int, Any], tree: Tree, replayed: list[int]):
        super().__init__()
        self.modules, self.layers = modules, layers
        longest, replayed_B1 = max(replayed), to_device(replayed, tree.parent.device)[:, None]
        path_BPD, of_BN = trees.tree_cache(tree, path_rows)
        rows, (self.paths, own) = len(replayed_B1), path_BPD.shape[1:]
        self.width = longest + own
        at_BD = torch.arange(self.width, device=path_BPD.device) - replayed_B1
        own_BPD = path_BPD.expand(rows, -1, -1).gather(2, at_BD.clamp(0, own - 1)[:, None].expand(-1, self.paths, -1))
        read_BPD = torch.where(at_BD[:, None] < 0, at_BD[:, None], own_BPD) + replayed_B1[..., None]
        self.read = read_BPD.flatten(1)
        at_BT = torch.arange(longest + tree.size, device=path_BPD.device) - replayed_B1
        node_BT = at_BT.clamp(0, tree.size - 1)
        path_BT, depth_BT = (x.expand(rows, -1).gather(1, node_BT) for x in (of_BN, tree.depth))
        self.given = replayed_B1 + torch.where(at_BT < 0, at_BT, path_BT * self.width + depth_BT)
        self._before: dict[int, list[tuple[dict, int, Tensor | None]]] = {}
        self._ends: list[tuple[dict, int, Tensor]] = []
        self._bytes = 0

    @property
    def ends_kept(self) -> bool:
        """Return whether the states at the ends of all paths take at most `MOST_BYTES`."""
        return self._bytes <= MOST_BYTES

    def _put_up(self) -> list[RemovableHandle]:
        modules = self.modules.values()
        entering = [module.register_forward_pre_hook(self._before_call, with_kwargs=True) for module in modules]
        return entering + [module.register_forward_hook(self._after_call) for module in modules]

    def _before_call(self, module: nn.Module, args: tuple, kwargs: dict | None = None) -> tuple[tuple, dict] | None:
        if not self.is_caller or kwargs is None:
            return None
        hidden_BTd = args[0] if args else kwargs["hidden_states"]
        hidden_BXd = gather_rows(hidden_BTd, self.read.to(hidden_BTd.device))
        hidden_XDd = hidden_BXd.view(-1, self.width, hidden_BTd.shape[-1])
        kwargs = {name: None if name == "attention_mask" else value for name, value in kwargs.items()}  # no padding
        if args:
            args = (hidden_XDd, *args[1:])
        else:
            kwargs["hidden_states"] = hidden_XDd
        self._before[id(module)] = entries = states_of(self.layers[module.layer_idx])  # type: ignore[index]
        for states, i, state in entries:
            states[i] = None if state is None else state.repeat_interleave(self.paths, 0)
        return args, kwargs

    def _after_call(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if not self.is_caller:
            return None
        for states, i, saved in self._before.pop(id(module)):
            if (state := states[i]) is not None:
                self._bytes += state.nbytes
                self._ends.append((states, i, state))
                if not self.ends_kept:
                    self._ends.clear()
                states[i] = torch.zeros_like(state[:: self.paths]) if saved is None else saved
        return tuple(map(self._gather_nodes, output)) if isinstance(output, tuple) else self._gather_nodes(output)

    def _gather_nodes(self, found_XDd: Tensor) -> Tensor:
        """Select the nodes' outputs from those of their paths."""
        outputs_BXd = found_XDd.reshape(len(self.read), -1, found_XDd.shape[-1])
        return gather_rows(outputs_BXd, self.given.to(outputs_BXd.device))

    def keep(self, whole_B: Tensor, last_B: Tensor) -> None:
        """Give rows the states, or the window, at the end of the path that contains their last node."""
        place_B = self.given.gather(1, last_B[:, None])[:, 0]
        path_B = torch.arange(len(place_B), device=place_B.device) * self.paths + place_B // self.width
        for states, i, ends in self._ends:
            device, size = ends.device, states[i].shape[-1]
            state = ends[path_B.to(device)]
            if state.shape[-1] > size:
                state = _window(state, (place_B % self.width + 1).to(device), size)
            whole = whole_B.to(device).view(-1, *[1] * (ends.dim() - 1))
            states[i] = torch.where(whole, state, states[i])


def _records_windows(layer: Any) -> bool:
    """Return whether the states of a layer are only windows of a convolution, and the layer can keep all of a pass."""
    return hasattr(layer, "record_past") and all(state is None for state in layer.recurrent_states.values())


def _window(windows_BCT: Tensor, taken_B: Tensor, size: int) -> Tensor:
    """Select the window (B, C, size) after so many of a pass's tokens from its concatenated windows."""
    at_BK = taken_B[:, None] + torch.arange(size, device=taken_B.device)
    return windows_BCT.gather(2, at_BK[:, None].expand(-1, windows_BCT.shape[1], -1))


def path_rows(tree: Tree) -> tuple[Tensor, Tensor]:
    """Return the paths to a tree's leaves.

    Returns:
        (1|B, P, D) nodes of the paths, padded with the root; (1|B, N) the number of a path that contains the node. On a
        CUDA device, where counting leaves would synchronize, every node counts as one.
    """
    parent_BN = tree.parent
    inner_BN = torch.zeros(len(parent_BN), tree.size + 1, dtype=torch.long, device=parent_BN.device)
    inner_BN = inner_BN.scatter(1, parent_BN + 1, 1)[:, 1:]
    count = tree.size if parent_BN.is_cuda else int((1 - inner_BN).sum(dim=1).max())
    leaf_BP = inner_BN.argsort(dim=1, stable=True)[:, :count, None]  # followed by inner nodes in rows with fewer leaves
    path_BPD = trees.paths(tree).gather(1, leaf_BP.expand(-1, -1, tree.levels + 1)).clamp(min=0)
    return path_BPD, tree.ancestor.gather(1, leaf_BP.expand(-1, -1, tree.size)).long().argmax(dim=1)


def append_to_replayed(tree: Tree, replayed_B1: Tensor, longest: int) -> Tree:
    """Append a draft's tree to the tokens that each row replays. Rows that replay fewer tokens are padded at the end
    with children of the first one, which nothing reads.
    """
    rows, size = len(replayed_B1), longest + tree.size
    place = torch.arange(size, device=replayed_B1.device)
    at_BT = place - replayed_B1
    own_BT = tree.parent.expand(rows, -1).gather(1, at_BT.clamp(0, tree.size - 1)) + replayed_B1
    parent_BT = torch.where(at_BT < 0, place - 1, torch.where(at_BT < tree.size, own_BT, 0))
    return trees.from_parents(parent_BT, longest + tree.levels)
