"""8-connected components of a boolean mask, by runs and union-find, in numpy alone."""

import numpy as np


def _runs(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, first column and one-past-last column of every horizontal run of a mask (height, width)."""
    padded = np.zeros((mask.shape[0], mask.shape[1] + 2), np.int8)
    padded[:, 1:-1] = mask
    step = np.diff(padded, axis=1)
    rows, starts = np.nonzero(step == 1)
    return rows, starts, np.nonzero(step == -1)[1]


def components(mask: np.ndarray) -> tuple[np.ndarray, int]:
    """Labels int32 (height, width), 0 outside and 1..n inside, and n; diagonal neighbours are connected."""
    rows, starts, ends = (values.tolist() for values in _runs(mask))
    parent = list(range(len(rows)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    above: list[int] = []
    current: list[int] = []
    row = -1
    for i in range(len(rows)):
        if rows[i] != row:
            above = current if rows[i] == row + 1 else []
            current, row = [], rows[i]
        for j in above:
            if starts[j] <= ends[i] and ends[j] >= starts[i]:
                a, b = root(i), root(j)
                parent[max(a, b)] = min(a, b)
        current.append(i)
    labels = np.zeros(mask.shape, np.int32)
    number: dict[int, int] = {}
    for i in range(len(rows)):
        labels[rows[i], starts[i] : ends[i]] = number.setdefault(root(i), len(number) + 1)
    return labels, len(number)


def grow(mask: np.ndarray) -> np.ndarray:
    """A mask dilated by one pixel in eight directions."""
    wide = np.pad(mask, 1)
    tall = wide[:-2] | wide[1:-1] | wide[2:]
    return tall[:, :-2] | tall[:, 1:-1] | tall[:, 2:]


def shrink(mask: np.ndarray) -> np.ndarray:
    """A mask eroded by one pixel in eight directions; outside the image counts as outside the mask."""
    wide = np.pad(mask, 1)
    tall = wide[:-2] & wide[1:-1] & wide[2:]
    return tall[:, :-2] & tall[:, 1:-1] & tall[:, 2:]
