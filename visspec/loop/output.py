"""What a request has produced so far, as the loop keeps it: `TokenBuffer` holds ids on the host, `VectorBuffer` vectors
and `ScaleBuffer` maps of ids on the device.

The loop reads a round on the host once. A buffer adds what it needs to that read, and takes its part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visspec.distributions import categorical
from visspec.types import Draft, Request, Scores, Verdict


class TokenBuffer:
    """Tokens of every original row, and where they end: at an end-of-sequence id, a stop function or the limit.

    distributions, raw: with `keep_logits`, `keep_raw`, the warped and the raw logits of every token, (V,). finished:
    rows that have ended.
    """

    def __init__(self, request: Request, rows: int):
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.distributions: list[list[Tensor]] = [[] for _ in range(rows)]
        self.raw: list[list[Tensor]] = [[] for _ in range(rows)]
        self.finished: set[int] = set()

    def columns(self, draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """What the round's read brings to the host: the ids of all nodes (B, N), and the one that follows (B, 1)."""
        return draft.value, verdict.next[:, None]

    def new_tokens(self, path: list[int], values: list[int], following: list[int]) -> list[int]:
        """Ids that a row gained: those of its path without the root, then the next one."""
        return [values[n] for n in path[1:]] + following

    def append(self, row: int, new_tokens: list[int]) -> int:
        """Add a row's new tokens up to its first stop, and return how many were added.

        Tokens behind a stop inside an accepted path are dropped, so the output is what plain decoding gives.
        """
        request, tokens = self.request.of(row)[0], self.tokens[row]
        before = len(tokens)
        for token in new_tokens:
            tokens.append(token)
            over = token in request.eos or len(tokens) >= request.max_new_tokens
            if over or (request.stop is not None and request.stop(self.ids(row))):
                self.finished.add(row)
                break
        return len(tokens) - before

    def record(self, row: int, b: int, path: list[int], count: int, scores: Scores) -> None:
        """Keep the distributions that gave the tokens just added, where the request asks for them."""
        nodes = path[:count]
        if self.request.keep_logits:
            self.distributions[row].extend(categorical(scores.distribution).logits[b, nodes])
        if self.request.keep_raw:
            self.raw[row].extend(scores.aux["raw"][b, nodes])

    def tell(self, row: int, count: int) -> None:
        """Call the request's `on_tokens` with the tokens just added."""
        on_tokens, tokens = self.request.of(row)[0].on_tokens, self.tokens[row]
        if on_tokens is not None and on_tokens(tokens[len(tokens) - count :]):
            self.finished.add(row)

    def in_raster_order(self, row: int, items: list[Any]) -> list[Any]:
        """Something about each node of an original row, in the order of `values`."""
        return items

    def values(self, row: int) -> Tensor:
        """Tokens of an original row, (T,) on the CPU."""
        return torch.tensor(self.tokens[row], dtype=torch.long)

    def ids(self, row: int) -> Tensor:
        """Prompt and tokens of an original row, (1, length)."""
        request, index = self.request.of(row)
        new_tokens = torch.tensor([self.tokens[row]], dtype=torch.long, device=request.prompt.device)
        return torch.cat([request.prompt[index : index + 1], new_tokens], dim=1)

    def join(self, other: TokenBuffer, rows: list[int], places: list[int]) -> None:
        """Take over rows of another buffer, at these places; a place that is not there yet is the next one."""
        for row, place in zip(rows, places):
            if place == len(self.tokens):
                for kept in (self.tokens, self.distributions, self.raw):
                    kept.append([])
            self.tokens[place], self.distributions[place], self.raw[place] = (
                other.tokens[row],
                other.distributions[row],
                other.raw[row],
            )
            self.finished.discard(place)


class VectorBuffer(TokenBuffer):
    """Vectors of every original row; a row ends at the limit. `tokens` are their numbers, 0, 1, 2, ... in each row;
    `distributions` and `raw` stay empty, for vectors have no logits.
    """

    def __init__(self, request: Request, rows: int):
        super().__init__(request, rows)
        self.held: list[list[Tensor]] = [[] for _ in range(rows)]  # of each round: (gained, d)
        self._round: tuple[Draft, Verdict] | None = None

    def columns(self, draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """Nothing, and (B, 1): 1 where what was drawn is finite."""
        self._round = draft, verdict
        return verdict.path[:, :0], verdict.next.isfinite().all(dim=-1, keepdim=True).long()

    def new_tokens(self, path: list[int], values: list[int], following: list[int]) -> list[int]:
        """Nodes of the path that a row gained, without the root, then 0 for the next one."""
        if following != [1]:
            raise ValueError("model: got a vector that is not finite from its head, expected finite numbers")
        return [*path[1:], 0]

    def append(self, row: int, new_tokens: list[int]) -> int:
        """Count a row's new vectors up to the limit, and return how many were added."""
        tokens = self.tokens[row]
        count = min(len(new_tokens), self.request.max_new_tokens - len(tokens))
        tokens.extend(range(len(tokens), len(tokens) + count))
        if len(tokens) >= self.request.max_new_tokens:
            self.finished.add(row)
        return count

    def record(self, row: int, b: int, path: list[int], count: int, scores: Scores) -> None:
        """Keep the vectors just added, on the device. A path of a chain is a range of its nodes."""
        assert self._round is not None
        draft, verdict = self._round
        self.held[row] += [draft.value[b, 1 : len(path)], verdict.next[b, None]]

    def ids(self, row: int) -> Tensor:
        """The prompt of an original row, (1, length): vectors have no ids."""
        return self.request.prompt[row : row + 1]

    def values(self, row: int) -> Tensor:
        """Vectors of an original row, (T, d)."""
        return torch.cat(self.held[row])[: len(self.tokens[row])]


class ScaleBuffer(VectorBuffer):
    """Maps of codes of every original row, padded to one size; node k has sizes[k] codes. Rows end at the limit."""

    def __init__(self, request: Request, rows: int, sizes: Sequence[int]):
        super().__init__(request, rows)
        self.sizes = sizes

    def columns(self, draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor]:
        self._round = draft, verdict
        return verdict.path[:, :0], verdict.path[:, :0]

    def new_tokens(self, path: list[int], values: list[int], following: list[int]) -> list[int]:
        return [*path[1:], 0]

    def maps(self, row: int) -> Tensor:
        """(n, S) maps of an original row, padded."""
        return torch.cat(self.held[row])[: len(self.tokens[row])]

    def values(self, row: int) -> Tensor:
        """Codes of an original row, map after map."""
        return torch.cat([codes[:size] for codes, size in zip(self.maps(row), self.sizes)])
