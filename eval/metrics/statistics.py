"""Mean and covariance of features, streamed, merged across shards, in float64 and always centred.

Raw second moments lose precision if features are far from zero; centred scatter matrices merged pairwise (Chan, Golub
and LeVeque 1979) do not. Up to as many rows as dimensions, the rows are kept as well, because the
distance of rank-deficient Gaussians is computed from them (`fid.trace_of_root`).
"""

import torch


class GaussianStats:
    """n, mean (d,) and centred scatter (d, d) = sum of (x - mean)(x - mean)^T, float64 on the CPU.

    `rows` holds the n <= d feature rows (n, d), or None once there are more. Merging is associative and commutative up
    to rounding.
    """

    def __init__(self, dim: int):
        if dim < 1:
            raise ValueError(f"dim must be at least 1, not {dim}")
        self.dim = dim
        self.n = 0
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64)
        self.rows: torch.Tensor | None = torch.zeros(0, dim, dtype=torch.float64)

    def update(self, features: torch.Tensor) -> "GaussianStats":
        """Add a batch (n, d) of any floating dtype; ValueError for another width or a value that is not finite."""
        if features.ndim != 2 or features.shape[1] != self.dim:
            raise ValueError(f"features must be (n, {self.dim}), not {tuple(features.shape)}")
        x = features.detach().to("cpu", torch.float64)
        if not torch.isfinite(x).all():
            bad = int((~torch.isfinite(x)).any(1).sum())
            raise ValueError(f"features must be finite, {bad} of {len(x)} rows are not")
        if len(x):
            mean = x.mean(0)
            centred = x - mean
            self._add(len(x), mean, centred.T @ centred, x)
        return self

    def merge(self, other: "GaussianStats") -> "GaussianStats":
        """Merge another object, which is not changed."""
        if other.dim != self.dim:
            raise ValueError(f"statistics of {other.dim} dimensions cannot be merged into {self.dim}")
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
            shapes = f"{tuple(mean.shape)}, {tuple(scatter.shape)}"
            raise ValueError(f"statistics have shapes {shapes} or a dtype not float64")
        out = cls(d)
        out.n, out.mean, out.scatter, out.rows = n, mean.clone(), scatter.clone(), rows
        return out


def merge_parts(parts: list[GaussianStats]) -> GaussianStats:
    """All parts in one object; the parts are not changed."""
    whole = GaussianStats(parts[0].dim)
    for part in parts:
        whole.merge(part)
    return whole
