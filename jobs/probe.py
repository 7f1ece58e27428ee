"""Does every engine compute with the weights it was given? Judged on a fixed text, after each commit.

A digest proves that the bytes arrived. It does not prove that they are used: an output head that keeps a packed copy
of the old weights passes the digest and generates from a mixture.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from towline.storage.errors import ProbeError

FLOAT32_BOUND = 1e-4
"""Largest difference of a log-prob between two float32 implementations, nats; 2e-5 to 6e-5 were measured."""
_MAX_MARGIN = 4.0
_MEAN_MARGIN = 3.0
"""Noise of other weights in units of the measured: 0.8 to 2.8 (largest) and 0.9 to 2.4 (mean) for two models in
bfloat16, perturbed by 5 to 20 %; an engine of SmolLM2 with a stale output head reached 8.9 and 9.0 at 10 %."""
_CONCLUSIVE = 4.0
"""A step that moved the log-probs by this many times the noise (means) is told from one that did not arrive."""


def probe_tokens(vocabulary_size: int, length: int) -> list[int]:
    """A fixed text of any vocabulary: the same for every process and run."""
    return [int(token) for token in np.random.default_rng(20_240_229).integers(0, vocabulary_size, length)]


@dataclass(slots=True)
class Probe:
    """Compares engines with the trainer, whose log-probs under new and previous weights are known.

    Float32 has a fixed bound. In bfloat16 two implementations differ by as much as rounding makes them differ for this
    model: measured when the run starts, on the weights that both read from the model folder. Nothing has been sent
    then, so an engine that keeps old weights cannot pass for a noisy one.
    """

    is_float32: bool
    _max_bound: float = FLOAT32_BOUND
    _mean_bound: float = FLOAT32_BOUND
    _noise: float = FLOAT32_BOUND / 10
    _size: float = float("inf")
    """Mean size of the log-probs at calibration, nats: rounding errors grow with what is rounded."""

    def calibrate(self, engines: list[list[float]], trainer: NDArray[np.float32]) -> None:
        """Measure the engines' noise: `engines` and `trainer` are log-probs under the same weights, nats."""
        if self.is_float32:
            return
        distances = [np.abs(np.array(engine) - trainer) for engine in engines]
        self._noise = max(float(distance.mean()) for distance in distances)
        self._max_bound = _MAX_MARGIN * max(float(distance.max()) for distance in distances)
        self._mean_bound = _MEAN_MARGIN * self._noise
        self._size = float(np.abs(trainer).mean())

    def judge(
        self,
        version: int,
        engines: list[list[float]],
        new: NDArray[np.float32],
        previous: NDArray[np.float32],
        *,
        must_conclude: bool = False,
    ) -> dict[str, float]:
        """Compare and return the metrics.

        Args:
            engines: each engine's log-probs of the probe text, nats.
            new: the trainer's, under the weights that were published.
            previous: the trainer's, under those published before.
            must_conclude: the step is large; not to tell it apart is an error too.

        Raises:
            ProbeError: an engine is beyond the bounds, or nearer to the previous weights than to the new ones.
        """
        values = {"probe/new": 0.0, "probe/old": float("inf"), "probe/verdict": 1.0}
        growth = max(1.0, float(np.abs(new).mean()) / self._size)
        max_bound, mean_bound = growth * self._max_bound, growth * self._mean_bound
        moved = float(np.abs(new - previous).mean())
        is_conclusive = moved > _CONCLUSIVE * growth * self._noise
        if must_conclude and not is_conclusive:
            raise ProbeError(
                f"version {version}: a large step moved the log-probs of the probe text by {moved:.2g} nats (mean), "
                f"but engines and trainer differ by {self._noise:.2g} on the same weights: new weights cannot be told "
                "from old ones. The two compute too differently; float32 on both sides tells them apart."
            )
        for number, engine in enumerate(engines):
            to_new, to_old = np.abs(np.array(engine) - new), np.abs(np.array(engine) - previous)
            if is_conclusive and to_new.mean() > to_old.mean() / 2:
                raise ProbeError(
                    f"engine {number} does not use the weights of version {version}: its log-probs of the probe text "
                    f"are {to_new.mean():.2g} nats from the new weights and {to_old.mean():.2g} from the previous "
                    "ones (means). The stream was received whole, so the engine keeps an old copy somewhere."
                )
            # Written so that a NaN is beyond every bound.
            if not (to_new.max() <= max_bound and to_new.mean() <= mean_bound):
                raise ProbeError(
                    f"engine {number}, version {version}: log-probs of the probe text differ from the trainer's by "
                    f"{to_new.max():.2g} nats at most and {to_new.mean():.2g} in the mean; of the same weights at "
                    f"most {max_bound:.2g} and {mean_bound:.2g} are expected. The engine computes with "
                    "other weights, or with a part of them."
                )
            values["probe/new"] = max(values["probe/new"], float(to_new.max()))
            values["probe/old"] = min(values["probe/old"], float(to_old.max()))
        # A step too small to be told apart proves nothing, and is not reported as a success.
        values["probe/verdict"] = float(is_conclusive)
        return values
