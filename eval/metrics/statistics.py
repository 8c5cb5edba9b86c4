"""Mean and covariance of features, streamed, merged across shards, in float64 and always centred.

Raw second moments lose precision if features are far from zero; centred scatter matrices merged pairwise (Chan, Golub
and LeVeque 1979) do not. Up to as many rows as dimensions, the rows are kept as well, because the
distance of rank-deficient Gaussians is computed from them (`fid.trace_of_root`).

Every image counts once. With ids passed to `update`, repeats within an object are dropped. Repeats between objects
can't be removed, so merging such objects raises: split the images with `shard`.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TypeVar

import torch

Item = TypeVar("Item")


def shard(items: Sequence[Item], rank: int, world: int) -> Sequence[Item]:
    """One process's shard of a list: every item is in exactly one shard, without padding (torch's DistributedSampler
    repeats items to make shards equal, which changes the mean).
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in 0..{world - 1}, not {rank}")
    return items[rank::world]


class GaussianStats:
    """n, mean (d,) and centred scatter (d, d) = sum of (x - mean)(x - mean)^T, float64 on the CPU.

    `rows` holds the n <= d feature rows (n, d), or None once there are more; `ids` the 8-byte digests of the ids seen,
    if they were given. Merging is associative and commutative up to rounding.
    """

    def __init__(self, dim: int):
        if dim < 1:
            raise ValueError(f"dim must be at least 1, not {dim}")
        self.dim = dim
        self.n = 0
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64)
        self.rows: torch.Tensor | None = torch.zeros(0, dim, dtype=torch.float64)
        self.ids: set[int] = set()

    def update(self, features: torch.Tensor, ids: Iterable[str] | None = None) -> "GaussianStats":
        """Add a batch (n, d) of any floating dtype; ValueError for another width or a value that is not finite.

        ids: the image of each row; rows of images that were added before are skipped.
        """
        if features.ndim != 2 or features.shape[1] != self.dim:
            raise ValueError(f"features must be (n, {self.dim}), not {tuple(features.shape)}")
        x = features.detach().to("cpu", torch.float64)
        if not torch.isfinite(x).all():
            bad = int((~torch.isfinite(x)).any(1).sum())
            raise ValueError(f"features must be finite, {bad} of {len(x)} rows are not")
        x = x if ids is None else x[self._new(list(ids), len(x))]
        if len(x):
            mean = x.mean(0)
            centred = x - mean
            self._add(len(x), mean, centred.T @ centred, x)
        return self

    def _new(self, ids: list[str], rows: int) -> list[int]:
        """Indices of the rows with new ids, which are then stored."""
        if len(ids) != rows:
            raise ValueError(f"different counts: {len(ids)} ids and {rows} feature rows")
        found = []
        for i, name in enumerate(ids):
            key = int.from_bytes(sha256(str(name).encode()).digest()[:8], "big", signed=True)
            if key not in self.ids:
                self.ids.add(key)
                found.append(i)
        return found

    def merge(self, other: "GaussianStats") -> "GaussianStats":
        """Merge another object, which is not changed. ValueError if both contain the same image."""
        if other.dim != self.dim:
            raise ValueError(f"statistics of {other.dim} dimensions cannot be merged into {self.dim}")
        if twice := len(self.ids & other.ids):
            raise ValueError(
                f"{twice} images are in both statistics, expected none (a sampler that pads repeats images: "
                "split them with visspec.eval.metrics.statistics.shard)"
            )
        self.ids |= other.ids
        if other.n:
            self._add(other.n, other.mean, other.scatter, other.rows)
        return self

    def _add(self, n: int, mean: torch.Tensor, scatter: torch.Tensor, rows: torch.Tensor | None) -> None:
        total = self.n + n
        shift = mean - self.mean
        self.scatter = self.scatter + scatter + torch.outer(shift, shift) * (self.n * n / total)
        self.mean = self.mean + shift * (n / total)
        if self.rows is None or rows is None or total > self.dim:
            self.rows = None
        else:
            self.rows = torch.cat([self.rows, rows])
        self.n = total

    @property
    def covariance(self) -> torch.Tensor:
        """Unbiased covariance (d, d); ValueError with fewer than two rows."""
        if self.n < 2:
            raise ValueError(f"a covariance needs at least 2 images, not {self.n}")
        return self.scatter / (self.n - 1)

    def factor(self) -> torch.Tensor | None:
        """Centred rows over sqrt(n - 1), (n, d), whose Gram matrix is the covariance; None if rows are not kept."""
        return None if self.rows is None or self.n < 2 else (self.rows - self.mean) / (self.n - 1) ** 0.5

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that `from_state_dict` restores."""
        out = {"n": torch.tensor(self.n), "mean": self.mean, "scatter": self.scatter}
        out |= {"ids": torch.tensor(sorted(self.ids))} if self.ids else {}
        return out if self.rows is None else out | {"rows": self.rows}

    @classmethod
    def from_state_dict(cls, state: dict[str, torch.Tensor]) -> "GaussianStats":
        """Restore an object from its state; ValueError if shapes or dtypes do not match."""
        missing = {"n", "mean", "scatter"} - state.keys()
        if missing:
            raise ValueError(f"statistics lack {', '.join(sorted(missing))}")
        mean, scatter, rows = state["mean"], state["scatter"], state.get("rows")
        n, d = int(state["n"]), len(mean)
        fits = mean.ndim == 1 and scatter.shape == (d, d) and (rows is None or rows.shape == (n, d))
        if not fits or {mean.dtype, scatter.dtype} != {torch.float64}:
            raise ValueError(
                f"statistics have shapes {tuple(mean.shape)}, {tuple(scatter.shape)} or a dtype not float64"
            )
        out = cls(d)
        out.n, out.mean, out.scatter, out.rows = n, mean.clone(), scatter.clone(), rows
        out.ids = set(state["ids"].tolist()) if "ids" in state else set()
        return out


def merged(parts: list[GaussianStats]) -> GaussianStats:
    """Merge all parts as a balanced tree; the parts are not changed."""
    if not parts:
        raise ValueError("there are no statistics to merge")
    layer = [GaussianStats(parts[0].dim).merge(part) for part in parts]
    while len(layer) > 1:
        layer = [a.merge(b) for a, b in zip(layer[::2], layer[1::2])] + (layer[-1:] if len(layer) % 2 else [])
    return layer[0]
