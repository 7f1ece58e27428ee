"""What each held-out example measured in each version of a model, for differences between two of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from towline.storage.publish import replace_whole
from towline.storage.run_directory import RunDirectory


def keep_held_out(
    run: RunDirectory,
    version: int,
    sums: NDArray[np.float64],
    sizes: Sequence[int],
    margins: NDArray[np.float64] | None = None,
) -> None:
    """
    Args:
        sums: [examples]; each of as many values as `sizes` says.
        margins: [examples], of pairs: score of chosen - score of rejected.
    """
    columns = [sums, np.array(sizes, dtype=np.float64), *([] if margins is None else [margins])]
    with replace_whole(run.held_out / f"version-{version:06d}.npy") as temporary, temporary.open("wb") as file:
        np.save(file, np.stack(columns, axis=1))


def read_held_out(run: RunDirectory, version: int) -> NDArray[np.float64]:
    """[examples, 2 or 3]: sums, of how many values, and the margins of pairs that were scored."""
    return np.load(run.held_out / f"version-{version:06d}.npy")
