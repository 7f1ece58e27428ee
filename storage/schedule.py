"""Which rows and which sampling seeds a step uses: pure functions of (seed, step, wave), with no state to restore."""

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from towline.storage.errors import ConfigError

_WAVE_STREAM = 1 << 63
"""Keys of the per-step streams lie above those of the epochs."""


@dataclass(frozen=True, slots=True)
class PromptSchedule:
    """The prompts of every step, by dataset row.

    Wave 0 walks through shuffled epochs: no row comes twice within an epoch. A step's further waves go on, in an order
    of the step's own, through the rows that the step has not had: no row comes twice within a step.
    """

    num_rows: int
    prompts_per_step: int
    seed: int
    """0 ≤ seed < 2**63."""
    max_waves: int = 1
    key: str = "rollout.prompts_per_step"
    """What an experiment calls `prompts_per_step`, for messages."""

    def __post_init__(self) -> None:
        if not 1 <= self.prompts_per_step <= self.num_rows:
            raise ConfigError(
                f"{self.key} ({self.prompts_per_step}) must be from 1 to the {self.num_rows} rows of the "
                "dataset: a step never holds a row twice"
            )
        if self.max_waves < 1 or self.max_waves * self.prompts_per_step > self.num_rows:
            raise ConfigError(
                f"rollout.max_waves ({self.max_waves}) must be from 1 to {self.num_rows // self.prompts_per_step}, as "
                f"often as {self.prompts_per_step} prompts go into the {self.num_rows} rows of the dataset: a step "
                "never holds a prompt twice"
            )
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed ({self.seed}) must be from 0 to 2**63 - 1")

    def rows(self, step: int, wave: int = 0) -> tuple[int, ...]:
        """Return the `prompts_per_step` dataset rows, all different, of one wave; steps and waves count from 0."""
        assert step >= 0, step
        assert 0 <= wave < self.max_waves, wave
        batch = self._batch(step)
        if wave == 0:
            return tuple(batch.tolist())
        others = _shuffled(self.num_rows, self.seed, _WAVE_STREAM + step)
        rest = others[~np.isin(others, batch)]
        start = (wave - 1) * self.prompts_per_step
        return tuple(rest[start : start + self.prompts_per_step].tolist())

    def _batch(self, step: int) -> NDArray[np.int64]:
        epoch, start = divmod(step * self.prompts_per_step, self.num_rows)
        order = _epoch_order(self.num_rows, self.prompts_per_step, self.seed, epoch)
        batch = order[start : start + self.prompts_per_step]
        if (still_needed := self.prompts_per_step - len(batch)) == 0:
            return batch
        following = _epoch_order(self.num_rows, self.prompts_per_step, self.seed, epoch + 1)
        return np.concatenate([batch, following[:still_needed]])


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, prompts_per_step: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Order the rows of one epoch, such that a step that straddles its beginning has no row twice.

    How an epoch begins depends on how the one before ended, back to the last epoch that began with a step.
    """

    def straddled(epoch: int) -> int:
        """Number of rows that the step at the beginning of the epoch took from the epoch before."""
        return epoch * num_rows % prompts_per_step

    first = epoch
    while straddled(first):
        first -= 1
    order = _shuffled(num_rows, seed, first)
    for later in range(first + 1, epoch + 1):
        taken = order[num_rows - straddled(later) :]
        order = _begin_without(_shuffled(num_rows, seed, later), taken, prompts_per_step - straddled(later))
    return order


def _begin_without(order: NDArray[np.int64], taken: NDArray[np.int64], num_first: int) -> NDArray[np.int64]:
    """Let the first `num_first` rows not in `taken` come first; the order is kept otherwise."""
    is_first = np.zeros(len(order), dtype=np.bool_)
    is_first[np.flatnonzero(~np.isin(order, taken))[:num_first]] = True
    return np.concatenate([order[is_first], order[~is_first]])


def _shuffled(num_rows: int, seed: int, stream: int) -> NDArray[np.int64]:
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(np.arange(num_rows, dtype=np.int64))


def sampling_seed(seed: int, step: int, wave: int, row: int, sample: int) -> int:
    """Return the engine's seed, 0 ≤ seed < 2**63, for one completion: the same whichever engine serves it."""
    packed = struct.pack("<5Q", seed, step, wave, row, sample)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
