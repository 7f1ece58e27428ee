"""A reward model and its watcher: two runs on disjoint halves of the pairs, and how far they agree on held-out ones.

A policy that is trained against the first learns what that one alone overrates; the second, which has seen none of its
annotations, need not rise with it (Gao et al. 2022, arXiv:2210.10760; Coste et al. 2023, arXiv:2310.02743).
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from towline.jobs.experiment import RewardModelExperiment
from towline.jobs.step_lines import number
from towline.rollout.evaluation.statistics import Interval, accuracy_interval
from towline.storage.example_config import Half
from towline.storage.held_out_values import read_held_out
from towline.storage.run_directory import RunDirectory, read_jsonl


def watched_runs(experiment: RewardModelExperiment, base: str) -> list[RewardModelExperiment]:
    """
    Args:
        base: name of the first; the watcher's begins with it.
    """
    return [
        _on_half(experiment, "first", name=base, seed=experiment.seed),
        # With the first one's head and order of examples it would err more like that one.
        _on_half(experiment, "second", name=f"{base}-watcher", seed=experiment.seed + 1),
    ]


def _on_half(experiment: RewardModelExperiment, half: Half, *, name: str, seed: int) -> RewardModelExperiment:
    return experiment.model_copy(
        update={
            "watcher": False,
            "seed": seed,
            # Disjoint are only halves of one seed.
            "data": experiment.data.model_copy(update={"half": half, "half_seed": experiment.seed}),
            "run": experiment.run.model_copy(update={"name": name}),
        }
    )


def watcher_lines(experiments: Sequence[RewardModelExperiment]) -> Iterator[str]:
    """A row for each model, and how the two agree on the same held-out pairs.

    Args:
        experiments: the first and its watcher, whose runs are done.
    """
    runs = [RunDirectory.open(one.run.root / str(one.run.name)) for one in experiments]
    last = [read_jsonl(run.evaluations)[-1] for run in runs]
    width = max(len(run.root.name) for run in runs)
    yield f"{'run':{width}}  {'pair accuracy':25}  {'margin':>8}  {'calibration error':>17}"
    for run, row in zip(runs, last, strict=True):
        accuracy = Interval(estimate=row["estimate"], low=row["low"], high=row["high"])
        margin, error = number(row["margin"], ".3f"), number(row["calibration_error"], ".3f")
        yield f"{run.root.name:{width}}  {accuracy!s:25}  {margin:>8}  {error:>17}"
    (hits_P, _, margins_P), (watcher_hits_P, _, watcher_margins_P) = (
        read_held_out(run, row["version"]).T for run, row in zip(runs, last, strict=True)
    )
    same = accuracy_interval(int((hits_P == watcher_hits_P).sum()), len(hits_P))
    yield (
        f"same verdict on {same} of {len(hits_P)} held-out pairs ({chance_agreement(hits_P, watcher_hits_P):.3f} if "
        "they erred independently)"
    )
    yield f"correlation of margins {number(correlation(margins_P, watcher_margins_P), '.3f')}"


def chance_agreement(one_P: NDArray[np.float64], other_P: NDArray[np.float64]) -> float:
    """Share of the same verdicts that two such models would have if neither's said anything of the other's.

    Source: Cohen 1960, Educ. Psychol. Meas. 20, 37-46, p_c.

    Args:
        one_P, other_P: 1, 1/2 for a tie, or 0, of each pair.
    """
    return sum(float((one_P == verdict).mean() * (other_P == verdict).mean()) for verdict in (0.0, 0.5, 1.0))


def correlation(one_P: NDArray[np.float64], other_P: NDArray[np.float64]) -> float | None:
    """Pearson's; None where one of them is the same for every pair."""
    if np.ptp(one_P) == 0 or np.ptp(other_P) == 0:
        return None
    return float(np.corrcoef(one_P, other_P)[0, 1])
