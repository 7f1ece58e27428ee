"""Jobs that could never start are found before they wait."""

from pathlib import Path

import pytest

from fake_slurm import FakeSlurm
from towline.jobs.slurm.profile import ClusterProfile, Option
from towline.launcher.partition import max_jobs_per_user, partition, partition_problems
from towline.storage.errors import SlurmError

PROFILE = ClusterProfile(name="here")
SCONTROL = """\
for name; do :; done
case $name in
  day) echo "PartitionName=day AllowGroups=ALL QoS=N/A MaxNodes=UNLIMITED MaxTime=1-00:00:00 State=UP" ;;
  free) echo "PartitionName=free QoS=N/A MaxTime=UNLIMITED State=UP" ;;
  debug) echo "PartitionName=debug QoS=one MaxTime=00:15:00 State=UP" ;;
  busy) echo "PartitionName=busy QoS=one MaxTime=00:30:00 State=UP" ;;
  *) echo "Partition $name not found" >&2; exit 1 ;;
esac
"""


@pytest.fixture(autouse=True)
def commands(slurm: FakeSlurm) -> FakeSlurm:
    script = slurm.folder / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$*" >> {script}.calls\n{SCONTROL}')
    slurm.answers("sacctmgr", "1")
    return slurm


def problems(**components: dict[str, Option]) -> list[str]:
    return partition_problems(PROFILE, components)


# case G4-30
@pytest.mark.parametrize("time", ["90", "10:30", "1:30:00", "24:00:00", "23:59:00", "1-0", "1440", 1440, "0-24:00"])
def test_a_job_within_the_limit_may_start(time: Option) -> None:
    assert problems(trainer={"partition": "day", "time": time}) == []


# case G4-30
@pytest.mark.parametrize("time", ["2-12", "1-00:30", "1-00:00:30", "1-00:00:01", "1441", 1441, "UNLIMITED", 0])
def test_a_job_over_the_limit_is_refused(time: Option) -> None:
    assert problems(trainer={"partition": "day", "time": time}) == [
        f"trainer.sbatch.time = {time} of profile here is more than partition day allows (1-00:00:00)."
    ]


@pytest.mark.parametrize("time", ["2-12", "UNLIMITED"])
def test_a_partition_without_a_limit_takes_any(time: str) -> None:
    assert problems(trainer={"partition": "free", "time": time}) == []


def test_without_a_time_the_partition_has_one() -> None:
    assert problems(trainer={"partition": "day"}) == []


def test_a_partition_that_is_not_there_is_named_once(commands: FakeSlurm) -> None:
    group: dict[str, Option] = {"partition": "gpu", "time": "1:00"}
    assert problems(trainer=group, rollout=group) == [
        "partition gpu of profile here does not exist here: `sinfo -s` lists those that do."
    ]
    assert commands.calls("scontrol") == ["--oneliner show partition gpu"]


def test_of_several_partitions_one_must_allow_the_time() -> None:
    assert problems(trainer={"partition": "debug,day", "time": "12:00:00"}) == []
    (problem,) = problems(trainer={"partition": "debug,day", "time": "2-0"})
    assert "more than partition debug or day allows (00:15:00 or 1-00:00:00)" in problem
    (problem,) = problems(trainer={"partition": "day,gpu"})
    assert problem.startswith("partition gpu of profile here does not exist")


def test_two_components_do_not_start_where_a_user_runs_one_job() -> None:
    group: dict[str, Option] = {"partition": "debug", "time": 10}
    (problem,) = problems(trainer=group, rollout=group)
    assert "partition debug lets a user run 1 job at a time (QoS one)" in problem
    assert 'Set layout = "single" in profile here' in problem
    assert problems(smoke=group) == []


def test_partitions_that_share_a_qos_share_its_limit() -> None:
    assert len(problems(trainer={"partition": "debug"}, rollout={"partition": "busy"})) == 1


def test_one_component_in_the_limited_partition_is_enough_room() -> None:
    assert problems(trainer={"partition": "day"}, rollout={"partition": "debug"}) == []


@pytest.mark.parametrize("said", ["2", "", "none"])
def test_enough_jobs_or_no_known_limit_are_accepted(said: str, commands: FakeSlurm) -> None:
    commands.answers("sacctmgr", said)
    assert problems(trainer={"partition": "debug"}, rollout={"partition": "debug"}) == []


def test_a_cluster_without_accounting_knows_no_limit(commands: FakeSlurm) -> None:
    commands.fails("sacctmgr", "Slurm accounting storage is disabled")
    assert max_jobs_per_user("one") is None


def test_a_controller_that_is_away_is_not_a_missing_partition(commands: FakeSlurm) -> None:
    commands.is_silent()
    with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
        partition("day")


def test_without_slurms_commands_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert problems(trainer={"partition": "gpu"}) == []
