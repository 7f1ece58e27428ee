import subprocess
import sys

import pytest

from towline.storage.errors import ConfigError
from towline.storage.schedule import PromptSchedule, sampling_seed


def flat(schedule: PromptSchedule, steps: range) -> list[int]:
    return [row for step in steps for row in schedule.rows(step)]


def test_a_resumed_schedule_gives_each_row_of_the_epoch_once_in_the_uninterrupted_order():
    # case G3-35: 48 samples, stopped after 15, second epoch too
    uninterrupted = flat(PromptSchedule(48, 1, 0), range(96))
    before = flat(PromptSchedule(48, 1, 0), range(15))
    after = flat(PromptSchedule(48, 1, 0), range(15, 96))
    assert before + after == uninterrupted
    assert sorted(uninterrupted[:48]) == sorted(uninterrupted[48:]) == list(range(48))
    assert uninterrupted[:48] != uninterrupted[48:]


def test_a_schedule_goes_on_past_an_epoch_boundary():
    # case G3-36: 40 steps an epoch, 2 epochs, checkpoint at step 40
    schedule = PromptSchedule(160, 4, 3)
    resumed = [schedule.rows(step) for step in range(40, 80)]
    assert len(resumed) == 40
    assert sorted(row for rows in resumed for row in rows) == list(range(160))


def test_step_counts_whole_batches():
    # case G3-37: batch 2, accumulation 4, resumed at step 3: 24 samples are behind
    schedule = PromptSchedule(100, 2 * 4, 0)
    behind = flat(schedule, range(3))
    assert len(set(behind)) == 24
    assert flat(schedule, range(12)) == behind + flat(schedule, range(3, 12))


@pytest.mark.parametrize(("num_rows", "prompts_per_step"), [(10, 4), (7, 5), (9, 8), (13, 13), (5, 1), (100, 64)])
def test_no_row_repeats_within_an_epoch_or_within_a_step(num_rows: int, prompts_per_step: int):
    schedule = PromptSchedule(num_rows, prompts_per_step, 11)
    num_epochs = 3 * prompts_per_step
    order = flat(schedule, range(num_epochs * num_rows // prompts_per_step))
    for epoch in range(num_epochs):
        assert sorted(order[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows)), epoch
    for start in range(0, len(order), prompts_per_step):
        assert len(set(order[start : start + prompts_per_step])) == prompts_per_step, start


def test_steps_can_be_asked_for_in_any_order():
    forward = {step: PromptSchedule(23, 7, 5).rows(step) for step in range(40)}
    backward = {step: PromptSchedule(23, 7, 5).rows(step) for step in reversed(range(40))}
    assert forward == backward


def test_seeds_give_different_orders():
    assert len({PromptSchedule(50, 50, seed).rows(0) for seed in (0, 1, 2**62, 2**63 - 1)}) == 4


def test_waves_of_a_step_share_no_row():
    schedule = PromptSchedule(20, 5, 0, max_waves=4)
    for step in range(10):
        waves = [schedule.rows(step, wave) for wave in range(4)]
        assert sorted(row for rows in waves for row in rows) == list(range(20)), step


def test_more_waves_than_the_dataset_has_rows_for_are_refused():
    assert len(PromptSchedule(7, 3, 0, max_waves=2).rows(2, 1)) == 3
    with pytest.raises(
        ConfigError, match=r"max_waves \(3\) must be from 1 to 2, as often as 3 prompts go into the 7 rows"
    ):
        PromptSchedule(7, 3, 0, max_waves=3)


def test_how_many_waves_may_follow_changes_none_of_them():
    few, many = PromptSchedule(20, 5, 0, max_waves=2), PromptSchedule(20, 5, 0, max_waves=4)
    assert [few.rows(3, wave) for wave in range(2)] == [many.rows(3, wave) for wave in range(2)]
    assert few.rows(3) == PromptSchedule(20, 5, 0).rows(3)


def test_further_waves_of_two_steps_are_drawn_differently():
    schedule = PromptSchedule(1000, 10, 0, max_waves=3)
    others = {schedule.rows(step, wave) for step in range(20) for wave in (1, 2)}
    assert len(others) == 40


def test_more_prompts_than_rows_are_refused():
    with pytest.raises(ConfigError, match=r"prompts_per_step \(101\) must be from 1 to the 100 rows"):
        PromptSchedule(100, 101, 0)
    with pytest.raises(ConfigError, match=r"prompts_per_step \(0\)"):
        PromptSchedule(100, 0, 0)
    with pytest.raises(ConfigError, match=r"^trainer.batch_size \(101\) must be from 1 to the 100 rows"):
        PromptSchedule(100, 101, 0, key="trainer.batch_size")


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_does_not_fit_is_refused(seed: int):
    with pytest.raises(ConfigError, match="seed"):
        PromptSchedule(10, 2, seed)


def test_rows_are_plain_integers():
    assert all(type(row) is int for wave in (0, 1) for row in PromptSchedule(10, 3, 0, 2).rows(0, wave))


def test_rows_are_those_of_every_other_machine():
    """Changing these numbers would make every run of an older version resume with other prompts."""
    schedule = PromptSchedule(10, 4, 7, max_waves=2)
    assert [schedule.rows(step) for step in range(5)] == [
        (6, 3, 9, 1),
        (2, 0, 5, 7),
        (8, 4, 1, 9),
        (2, 8, 5, 0),
        (4, 3, 7, 6),
    ]
    assert schedule.rows(2, 1) == (6, 7, 0, 3)
    assert PromptSchedule(7473, 4, 2**63 - 1).rows(400_000) == (4480, 2355, 1364, 1794)


def test_sampling_seeds_are_those_of_every_other_machine():
    assert sampling_seed(0, 0, 0, 0, 0) == 7712375960500741298
    assert sampling_seed(7, 123, 1, 4567, 3) == 4978331110158189544


def test_sampling_seeds_differ_in_every_argument_and_fit_the_engine():
    numbers = [
        (s, t, w, r, n) for s in range(3) for t in range(5) for w in range(2) for r in range(9) for n in range(8)
    ]
    seeds = {sampling_seed(*each) for each in numbers}
    assert len(seeds) == len(numbers)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_another_process_computes_the_same():
    program = (
        "from towline.storage.schedule import PromptSchedule, sampling_seed;"
        "print(PromptSchedule(10, 4, 7, 2).rows(3, 1), sampling_seed(7, 3, 1, 2, 0))"
    )
    here = f"{PromptSchedule(10, 4, 7, 2).rows(3, 1)} {sampling_seed(7, 3, 1, 2, 0)}"
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "12345"}
    there = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here
