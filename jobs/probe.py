"""Does every engine compute with the weights it was given? Judged on a fixed text, after each commit.

A digest proves that the bytes arrived. It does not prove that they are used: an output head that keeps a packed copy
of the old weights passes the digest and generates from a mixture.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from towline.storage.errors import ProbeError

FLOAT32_BOUND = 1e-4
"""Largest difference of a log-prob between two float32 implementations, nats; 2e-5 to 6e-5 were measured."""
_CALIBRATED_MARGIN = 3.0
_CONCLUSIVE = 4.0
_PROVEN = 2.0
"""The same for the start's large step: a model of 0.65 M parameters in bfloat16 reaches 3.3, a stale engine 1."""


def probe_tokens(vocabulary_size: int, length: int) -> list[int]:
    """A fixed text of any vocabulary: the same for every process and run."""
    return [int(token) for token in np.random.default_rng(20_240_229).integers(0, vocabulary_size, length)]


@dataclass(slots=True)
class Probe:
    """Compares engines with the trainer, whose log-probs under new and previous weights are known.

    Float32 has a fixed bound. In bfloat16 two implementations differ by as much as rounding makes them differ for this
    model, which is measured when the run starts (`calibrate`).
    """

    is_float32: bool
    _bound: float = FLOAT32_BOUND
    _noise: float = FLOAT32_BOUND / 10
    _noises: list[tuple[float, float]] = field(default_factory=list)
    _is_proof: bool = False
    """The next judgement is of a large step: one that cannot be told apart means that the engines are wrong."""

    def calibrate(self, engines: list[list[float]], trainer: NDArray[np.float32]) -> None:
        """Measure the engines' noise after a step too large to overlook, which `judge` must then be able to tell."""
        self._is_proof = True
        if self.is_float32:
            return
        for engine in engines:
            distance = np.abs(np.array(engine) - trainer)
            self._noises.append((float(distance.max()), float(distance.mean())))
        self._bound = _CALIBRATED_MARGIN * max(largest for largest, _ in self._noises)
        self._noise = max(mean for _, mean in self._noises)

    def judge(
        self,
        version: int,
        engines: list[list[float]],
        new: NDArray[np.float32],
        previous: NDArray[np.float32],
    ) -> dict[str, float]:
        """Compare and return the metrics.

        Args:
            engines: each engine's log-probs of the probe text, nats.
            new: the trainer's, under the weights that were published.
            previous: the trainer's, under those published before.

        Raises:
            ProbeError: an engine is beyond the bound, or nearer to the previous weights than to the new ones; or the
                large step after a calibration cannot be told apart.
        """
        values = {"probe/new": 0.0, "probe/old": float("inf"), "probe/verdict": 1.0}
        moved = float(np.abs(new - previous).mean())
        is_conclusive = moved > _CONCLUSIVE * self._noise
        must_conclude, self._is_proof = self._is_proof, False
        if must_conclude and not moved > _PROVEN * self._noise:
            # Otherwise an engine that kept old weights would be calibrated on itself, and its error called noise.
            raise ProbeError(
                f"version {version}: a large step moved the log-probs of the probe text by {moved:.2g} nats (mean), "
                f"but engines and trainer differ by {self._noise:.2g}: new weights cannot be told from old ones. "
                "Either an engine does not use what it receives, or the two compute too differently."
            )
        for number, engine in enumerate(engines):
            to_new, to_old = np.abs(np.array(engine) - new), np.abs(np.array(engine) - previous)
            if (is_conclusive or must_conclude) and to_new.mean() > to_old.mean() / 2:
                raise ProbeError(
                    f"engine {number} does not use the weights of version {version}: its log-probs of the probe text "
                    f"are {to_new.mean():.2g} nats from the new weights and {to_old.mean():.2g} from the previous "
                    "ones (means). The stream was received whole, so the engine keeps an old copy somewhere."
                )
            if not to_new.max() <= self._bound:  # a NaN is beyond every bound
                raise ProbeError(
                    f"engine {number}, version {version}: a log-prob of the probe text differs by {to_new.max():.2g} "
                    f"nats from the trainer's; at most {self._bound:.2g} is expected of the same weights."
                )
            values["probe/new"] = max(values["probe/new"], float(to_new.max()))
            values["probe/old"] = min(values["probe/old"], float(to_old.max()))
        # A step too small to be told apart proves nothing, and is not reported as a success.
        values["probe/verdict"] = float(is_conclusive)
        return values
