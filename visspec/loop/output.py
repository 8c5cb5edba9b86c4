"""Output buffers of the loop: `TokenBuffer` holds ids on the host, `VectorBuffer` vectors and `ScaleBuffer` maps of ids
on the device. The loop copies each round to the host once. A buffer adds what it needs to that copy and receives its
part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visspec.distributions import categorical
from visspec.types import Draft, Request, Scores, Verdict


class TokenBuffer:
    """Tokens of every original row. A row ends at an end-of-sequence id, a stop function or the limit. `distributions`
    and `raw` hold the warped and the raw logits (V,) of every token, if requested with `keep_logits` and `keep_raw`.
    `finished` holds the rows that have ended.
    """

    def __init__(self, request: Request, rows: int):
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.distributions: list[list[Tensor]] = [[] for _ in range(rows)]
        self.raw: list[list[Tensor]] = [[] for _ in range(rows)]
        self.finished: set[int] = set()

    def columns(self, draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """Return what the buffer needs on the host: the ids of all nodes (B, N), and of the next one (B, 1)."""
        return draft.value, verdict.next[:, None]

    def new_tokens(self, path: list[int], values: list[int], following: list[int]) -> list[int]:
        """Return the ids that a row gained: those of its path without the root, then the next one."""
        return [values[n] for n in path[1:]] + following

    def append(self, row: int, new_tokens: list[int]) -> int:
        """Add a row's new tokens up to its first stop, as in plain decoding, and return how many were added."""
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
        """Store the distributions of the tokens just added, if the request asks for them."""
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
        """Return items of a row's nodes in the order of `values`."""
        return items

    def values(self, row: int) -> Tensor:
        """Return the tokens of an original row, (T,) on the CPU."""
        return torch.tensor(self.tokens[row], dtype=torch.long)

    def ids(self, row: int) -> Tensor:
        """Return prompt and tokens of an original row, (1, length)."""
        request, index = self.request.of(row)
        new_tokens = torch.tensor([self.tokens[row]], dtype=torch.long, device=request.prompt.device)
        return torch.cat([request.prompt[index : index + 1], new_tokens], dim=1)

    def join(self, other: TokenBuffer, rows: list[int], places: list[int]) -> None:
        """Copy rows of another buffer to these places; a place beyond the end is appended."""
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
    """Vectors of every original row; a row ends at the limit. `tokens` are their numbers 0, 1, 2, ... in each row.
    `distributions` and `raw` stay empty, since vectors have no logits.
    """

    def __init__(self, request: Request, rows: int):
        super().__init__(request, rows)
        self.held: list[list[Tensor]] = [[] for _ in range(rows)]  # one entry (gained, d) per round
        self._round: tuple[Draft, Verdict] | None = None

    def columns(self, draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """Return nothing for the nodes, and whether the next vector is finite, (B, 1)."""
        self._round = draft, verdict
        return verdict.path[:, :0], verdict.next.isfinite().all(dim=-1, keepdim=True).long()

    def new_tokens(self, path: list[int], values: list[int], following: list[int]) -> list[int]:
        """Return the nodes of the path that a row gained, without the root, then 0 for the next one."""
        if following != [1]:
            raise ValueError("model: The head returned a vector that is not finite.")
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
        """Store the vectors just added, on the device. The path of a chain is a range of its nodes."""
        assert self._round is not None
        draft, verdict = self._round
        self.held[row] += [draft.value[b, 1 : len(path)], verdict.next[b, None]]

    def ids(self, row: int) -> Tensor:
        """Return the prompt of an original row, (1, length), since vectors have no ids."""
        return self.request.prompt[row : row + 1]

    def values(self, row: int) -> Tensor:
        """Return the vectors of an original row, (T, d)."""
        return torch.cat(self.held[row])[: len(self.tokens[row])]


class ScaleBuffer(VectorBuffer):
    """Maps of codes of every original row, padded to one size. Node k has sizes[k] codes. A row ends at the limit."""

    def __init__(self, request: Request, rows: int, sizes: Sequence[int]):
        super().__init__(request, rows)
        self.sizes = sizes

    def columns(self, draft: Draft, verdict: Verdict) -> tuple[Tensor, Tensor]:
        self._round = draft, verdict
        return verdict.path[:, :0], verdict.path[:, :0]

    def new_tokens(self, path: list[int], values: list[int], following: list[int]) -> list[int]:
        return [*path[1:], 0]

    def maps(self, row: int) -> Tensor:
        """Return the padded maps of an original row, (n, S)."""
        return torch.cat(self.held[row])[: len(self.tokens[row])]

    def values(self, row: int) -> Tensor:
        """Return the codes of an original row, map after map."""
        return torch.cat([codes[:size] for codes, size in zip(self.maps(row), self.sizes)])
