"""95 % intervals of a share, and of the mean of several shares, as in benchmarks that average tasks."""

import math
from collections.abc import Sequence


def wilson(hits: float, n: int) -> tuple[float, float]:
    """Return the interval of a share of n (Wilson 1927)."""
    z, share = 1.96, hits / n
    centre, spread = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max((centre - spread) / (1 + z * z / n), 0.0), min((centre + spread) / (1 + z * z / n), 1.0)


def of_mean_share(counts: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return the interval of the unweighted mean of independent shares, given as (hits, n). The distances of Wilson's
    limits from each share are added in quadrature, below and above (Zou and Donner 2008).
    """
    shares = [hits / n for hits, n in counts]
    limits = [wilson(hits, n) for hits, n in counts]
    mean = sum(shares) / len(shares)
    lower = math.hypot(*(share - low for share, (low, _) in zip(shares, limits))) / len(shares)
    upper = math.hypot(*(high - share for share, (_, high) in zip(shares, limits))) / len(shares)
    return max(mean - lower, 0.0), min(mean + upper, 1.0)
