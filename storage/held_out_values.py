"""What each held-out example measured in each version of a model, for differences between two of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from towline.storage.publish import replace_whole
from towline.storage.run_directory import RunDirectory


def keep_held_out(run: RunDirectory, version: int, sums: NDArray[np.float64], sizes: Sequence[int]) -> None:
    """
    Args:
        sums: [examples]; each of as many values as `sizes` says.
    """
    with replace_whole(run.held_out / f"version-{version:06d}.npy") as temporary, temporary.open("wb") as file:
        np.save(file, np.stack([sums, np.array(sizes, dtype=np.float64)], axis=1))


def read_held_out(run: RunDirectory, version: int) -> NDArray[np.float64]:
    """[examples, 2]: sums, and of how many values."""
    return np.load(run.held_out / f"version-{version:06d}.npy")
