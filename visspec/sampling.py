"""From logits to laws, and from laws to tokens.

Shapes: B rows, N nodes, T positions, V vocabulary. Laws are float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from visspec import kernels
from visspec import tree as trees
from visspec.laws import Categorical
from visspec.noise import Noise
from visspec.types import Draft, Sampling, State


def warp(logits: Tensor, sampling: Sampling, uncond: Tensor | None = None) -> Tensor:
    """Guidance (with `uncond`), temperature, top-k, top-p, as `kernels.guided_warp` says. (..., V) -> (..., V) float32.

    Cut entries become -inf. Greedy sampling mixes alone: of the logits only their argmax counts. Not for autograd.
    """
    if uncond is None and (sampling.greedy or not (0 < sampling.top_k < logits.shape[-1] or sampling.top_p < 1.0)):
        logits = logits.float()  # nothing to fuse
        return logits if sampling.greedy or sampling.temperature == 1.0 else logits / sampling.temperature
    width = logits.shape[-1]
    z_RV = kernels.guided_warp(
        logits.reshape(-1, width),
        None if uncond is None else uncond.reshape(-1, width),
        sampling.guidance, sampling.temperature, sampling.top_k, sampling.top_p, scores=True,
    )  # fmt: skip
    return z_RV.view_as(logits)


def process(logits_BNV: Tensor, draft: Draft, state: State, uncond_BNV: Tensor | None = None) -> Tensor:
    """Mix, run the request's processors at every node, each with its real prefix (prompt, emitted tokens, path), warp.

    Processors may look at the history, and nodes of one draft have different ones, so each node is handed over alone;
    this is the slow, general road and costs one more synchronisation.
    """
    sampling = state.request.sampling
    if not sampling.processors:
        return warp(logits_BNV, sampling, uncond_BNV)
    logits_BNV = warp(logits_BNV, replace(sampling, temperature=0.0), uncond_BNV).clone()
    rows, batch = len(state.rows), state.request.prompt.shape[0]
    path = trees.paths(draft.tree).expand(rows, -1, -1).tolist()
    for b, row in enumerate(state.rows):
        prefix = state.ids(b)[0]  # ends with the pending token, node 0 of every path; empty below an embedded prompt
        for n in range(draft.tree.size):
            steps = draft.value[b, [i for i in path[b][n][1:] if i >= 0]]
            ids = torch.cat([prefix, steps]).expand(batch, -1)  # a setting may differ between the rows of a batch
            scores = logits_BNV[b, n].expand(batch, -1).clone()
            for processor in sampling.processors:
                scores = processor(ids, scores)
            logits_BNV[b, n] = scores[row]
    return warp(logits_BNV, sampling)


def choose(law: Categorical, depth_N: Tensor, noise: Noise | None, levels: int) -> Tensor:
    """The token that each node's law yields under its position's noise: (B, N). Without noise: the argmax.

    depth_N (1|B, N) says which position after the pending token a node decides.
    """
    logits_BNV = law.logits
    if noise is None:
        return logits_BNV.argmax(dim=-1)
    window_BTV = noise.window(levels + 1)
    rows, size, vocab = logits_BNV.shape
    if depth_N.shape[0] == 1:
        perturbed = logits_BNV + window_BTV[:, depth_N[0]]
    else:
        perturbed = logits_BNV + window_BTV.gather(1, depth_N[..., None].expand(rows, size, vocab))
    return perturbed.argmax(dim=-1)


def propose(logits_BV: Tensor, state: State, level: int) -> tuple[Tensor, Categorical | None]:
    """One drafted token a row, in the form that the request's rule can judge: (tokens (B,), the law or None).

    Greedy: the argmax. Otherwise as the request's noise says (`Noise.draft`): the argmax under the very noise of that
    position (level 0 is the position after the pending token), a point mass; or a real draw, and the law it came from.
    """
    law = Categorical(warp(logits_BV, state.request.sampling))
    return (law.logits.argmax(dim=-1), None) if state.noise is None else state.noise.draft(law, level)
