"""What a request has produced so far, as the loop keeps it. `Ids` holds tokens on the host.

The loop reads a round on the host once. A tape adds what it needs to that read, and takes its part of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visspec.laws import categorical
from visspec.types import Draft, Request, Scores, Verdict


class Ids:
    """Tokens of every original row, and where they end: at an end-of-sequence id, a stop function or the limit.

    tokens: lists of ids. laws, raw: with `keep_logits`, `keep_raw`, the warped and the raw logits of every token, (V,).
    finished: rows that have ended.
    """

    def __init__(self, request: Request, rows: int):
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.laws: list[list[Tensor]] = [[] for _ in range(rows)]
        self.raw: list[list[Tensor]] = [[] for _ in range(rows)]
        self.finished: set[int] = set()

    def parts(self, draft: Draft, verdict: Verdict) -> list[Tensor]:
        """Columns (B, *) that the round's read brings to the host: the ids of all nodes, and the one that follows."""
        return [draft.value, verdict.next[:, None]]

    def gained(self, path: list[int], values: list[int], following: list[int]) -> list[int]:
        """Ids that a row gained: those of its path without the root, then the next one."""
        return [*(values[n] for n in path[1:]), *following]

    def append(self, row: int, gained: list[int]) -> int:
        """Add a row's new tokens up to its first stop, and return how many were added.

        Tokens behind a stop inside an accepted path are dropped, so the output is what plain decoding gives.
        """
        request, tokens = self.request, self.tokens[row]
        before = len(tokens)
        for token in gained:
            tokens.append(token)
            over = token in request.eos or len(tokens) >= request.max_new_tokens
            if over or (request.stop is not None and request.stop(self.ids(row))):
                self.finished.add(row)
                break
        if request.on_tokens is not None:
            request.on_tokens(tokens[before:])
        return len(tokens) - before

    def keep(self, row: int, b: int, path: list[int], scores: Scores) -> None:
        """Keep the laws that gave the tokens just added, where the request asks for them."""
        count = len(self.tokens[row])
        if self.request.keep_logits:
            self.laws[row].extend(categorical(scores.law).logits[b, path[: count - len(self.laws[row])]])
        if self.request.keep_raw:
            self.raw[row].extend(scores.aux["raw"][b, path[: count - len(self.raw[row])]])

    def ids(self, row: int) -> Tensor:
        """Prompt and tokens of an original row, (1, length)."""
        prompt = self.request.prompt
        gained = torch.tensor([self.tokens[row]], dtype=torch.long, device=prompt.device)
        return torch.cat([prompt[row : row + 1], gained], dim=1)
