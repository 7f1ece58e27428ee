"""A step's batch from the waves that are in the ledger, and its times."""

from types import SimpleNamespace

import pytest

from sealed_waves import lose, seal, seal_wave
from towline.jobs import trainer_rollouts
from towline.jobs.failed_scores import FailedScores
from towline.jobs.recorded_wave import read_wave
from towline.jobs.trainer_rollouts import LiveRollouts, RecordedRollouts, step_metrics
from towline.jobs.work import Workload, training_work
from towline.storage.errors import LedgerError
from towline.storage.metrics import check_names


@pytest.fixture
def work(run, make_experiment) -> Workload:
    """Of 2 prompts a wave and at most 3 waves, which use up the dataset."""
    return training_work(make_experiment(rollout={"prompts_per_step": 2, "chunk_prompts": 1, "max_waves": 3}), run)


def recorded(work: Workload) -> RecordedRollouts:
    return RecordedRollouts(work, FailedScores(0.1))


def useful(row: int) -> list[float]:
    return [0.0, 1.0]


def equal(row: int) -> list[float]:
    return [1.0, 1.0]


def rows_of(work: Workload, step: int, wave: int) -> list[int]:
    return [row for _, rows in work.chunks(step, wave) for row in rows]


def trained(work: Workload, step: int) -> list[int]:
    return [scored.group.prompt.row for scored in recorded(work).read(step).trained]


def test_one_wave_is_read_as_it_is(run, make_experiment):
    work = training_work(make_experiment(), run)
    seal_wave(work, 1, rewards=equal)
    batch = recorded(work).read(1)
    assert batch.trained == batch.drawn
    assert [scored.group.prompt.row for scored in batch.drawn] == rows_of(work, 1, 0)
    assert batch.metrics == {}


def test_no_wave_is_read_beyond_a_full_batch(work: Workload):
    seal_wave(work, 0, rewards=useful)
    assert trained(work, 0) == rows_of(work, 0, 0)


def test_waves_are_read_until_the_batch_is_full(work: Workload):
    first, second = rows_of(work, 0, 0), rows_of(work, 0, 1)
    seal_wave(work, 0, 0, rewards=lambda row: useful(row) if row == first[1] else equal(row))
    seal_wave(work, 0, 1, rewards=useful)
    seal_wave(work, 0, 2, rewards=useful)  # of an attempt that needed it; this one does not
    batch = recorded(work).read(0)
    assert [scored.group.prompt.row for scored in batch.trained] == [first[1], second[0]]
    assert batch.metrics == {"rollouts/waves": 2, "rollouts/useful": 3, "rollouts/surplus": 1}
    assert [scored.group.prompt.row for scored in batch.drawn] == first


def test_a_step_without_a_useful_group_reads_every_wave_and_trains_on_the_first(work: Workload):
    for wave in range(3):
        seal_wave(work, 2, wave, rewards=equal)
    batch = recorded(work).read(2)
    assert trained(work, 2) == rows_of(work, 2, 0)
    assert batch.metrics == {"rollouts/waves": 3, "rollouts/useful": 0, "rollouts/surplus": 0}


def test_waves_that_the_ledger_lacks_are_no_empty_ones(work: Workload, clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("towline.jobs.recorded_wave.time", clock)
    seal_wave(work, 0, rewards=equal)
    with pytest.raises(LedgerError, match=r"wave-1/chunk-000.h5 or its scores are not there"):
        recorded(work).read(0)


def test_times_of_waves_add_up_and_losses_are_of_all_their_prompts(work: Workload, run, store):
    """An hour, a night or another attempt may lie between two waves; nobody generated meanwhile."""
    seal_wave(work, 0, 0, rewards=equal, began=10.0, ended=12.0, took_s=0.25)
    (lost, _), (kept, rows) = work.chunks(0, 1)
    lose(work, lost, run, store)
    seal(work, kept, rows, began=5000.0, ended=5003.0, took_s=0.5)
    metrics = step_metrics([read_wave(work, 0, wave) for wave in range(2)])
    times = {name: value for name, value in metrics.items() if not name.startswith("scoring/")}
    assert times == {"seconds/generate": 5.0, "seconds/score": 1.0, "rollouts/lost": 0.25}
    check_names(metrics)


class AsksAgain:
    """An agreement of one rank: asks once a second until there is an answer."""

    def __init__(self, clock, happens) -> None:
        self.clock, self.happens = clock, happens

    def wait(self, phase, decide):
        while (decision := decide()) is None:
            self.clock.sleep(1.0)
            self.happens(self.clock.now)
        return decision


def test_time_counts_as_waiting_for_scores_from_when_all_is_generated(work: Workload, store, clock, monkeypatch):
    monkeypatch.setattr(trainer_rollouts, "time", clock)
    (first, _), (second, _) = work.chunks(0)
    began = clock.now
    # Seconds after the beginning. The first chunk waits for its scores while the second is being generated.
    events = {1: f"sealed/{first}", 6: f"sealed/{second}", 7: f"scored/{second}", 9: f"scored/{first}"}

    def happens(now: float) -> None:
        if (what := events.get(round(now - began))) is not None:
            store.set(f"{work.name}/{what}", "")

    role = SimpleNamespace(store=store, is_stopping=False, heartbeat=SimpleNamespace(beat=lambda: None))
    rollouts = LiveRollouts(role, work, AsksAgain(clock, happens), None, FailedScores(0.1))
    assert rollouts._wait_for(0, 0) == "train"
    assert rollouts._waited_for_scores_s == 3.0
    assert rollouts._wait_for(0, 0) == "train"  # known at once: as with staleness, where it was ready before
    assert rollouts._waited_for_scores_s == 3.0


def test_each_rewards_times_are_metrics(work: Workload):
    seal_wave(work, 0, 0, rewards=useful)
    metrics = step_metrics([read_wave(work, 0, 0)])
    check_names(metrics)
    times = {name: seconds for name, seconds in metrics.items() if name.startswith("scoring/")}
    assert times == pytest.approx({f"scoring/{name}_s/exact": 0.1 for name in ("p50", "p99", "max")})
