"""8-connected components of a boolean mask, and masks grown and shrunk by one pixel in eight directions."""

import numpy as np
import torch
import torch.nn.functional as F


def _largest(values: np.ndarray) -> np.ndarray:
    """The largest of each number and its eight neighbours, float32 (height, width)."""
    return F.max_pool2d(torch.from_numpy(values.astype(np.float32))[None], 3, 1, 1)[0].numpy()


def components(mask: np.ndarray) -> tuple[np.ndarray, int]:
    """Labels int32 (height, width), 0 outside and 1..n inside, in the order of first pixels, and n."""
    mark = np.where(mask, np.arange(mask.size, 0, -1, np.float32).reshape(mask.shape), 0)  # the first has the largest
    while not np.array_equal(spread := np.where(mask, _largest(mark), 0), mark):
        mark = spread
    firsts = np.unique(-mark[mask])
    return np.where(mask, np.searchsorted(firsts, -mark) + 1, 0).astype(np.int32), len(firsts)


def grow(mask: np.ndarray) -> np.ndarray:
    """A mask dilated."""
    return _largest(mask) > 0


def shrink(mask: np.ndarray) -> np.ndarray:
    """A mask eroded; outside the image counts as outside the mask."""
    return ~_largest(np.pad(~mask, 1, constant_values=True))[1:-1, 1:-1].astype(bool)
