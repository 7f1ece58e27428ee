import pytest
from submitit.slurm.slurm import _parse_node_list

from towline.jobs.slurm.text import (
    JobId,
    expand_nodes,
    first_word,
    is_success,
    is_terminal,
    outside_a_job,
    parse_job_id,
    submitted_job_id,
    time_limit_s,
)
from towline.storage.errors import SlurmError


# case G4-06
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", JobId("12")),
        ("12_3", JobId("12", array=3)),
        ("12_0", JobId("12", array=0)),
        ("12+0", JobId("12", component=0)),
        ("12_[0-3%2]", JobId("12", array=(0, 1, 2, 3))),
        ("12_[0-1,3-4]", JobId("12", array=(0, 1, 3, 4))),
        ("12_[0-6:3]", JobId("12", array=(0, 3, 6))),
        ("12.batch", JobId("12", step="batch")),
        ("12+1.0", JobId("12", component=1, step="0")),
        ("12_3.extern", JobId("12", array=3, step="extern")),
    ],
)
def test_job_ids(text: str, expected: JobId) -> None:
    assert parse_job_id(text) == expected


@pytest.mark.parametrize("text", ["", "JobID", "12+", "12_[0-3", "12 13", "a12"])
def test_what_is_no_job_id_is_refused(text: str) -> None:
    with pytest.raises(SlurmError, match="is not a job id of Slurm"):
        parse_job_id(text)


# case G4-07
@pytest.mark.parametrize(
    ("stdout", "id"),
    [
        ("sbatch: lua: job 2 of 5 allowed\nSubmitted batch job 991\n", "991"),
        ("Submitted batch job 5 on cluster alpha\n", "5"),
        ("5;alpha\n", "5"),
        ("991\n", "991"),
        ("quota: 40\nSubmitted batch job 7\n", "7"),
    ],
)
def test_the_id_is_found_among_messages_of_the_site(stdout: str, id: str) -> None:
    assert submitted_job_id(stdout) == id


def test_output_without_an_id_is_an_error_that_quotes_it() -> None:
    with pytest.raises(SlurmError, match="'job 2 of 5 allowed'"):
        submitted_job_id("job 2 of 5 allowed\n")


# case G4-26
@pytest.mark.parametrize(
    ("state", "terminal", "success"),
    [
        ("CANCELLED by 1000", True, False),
        ("CANCELLED+", True, False),
        ("OUT_OF_ME+", True, False),
        ("OUT_OF_MEMORY", True, False),
        ("NODE_FAIL", True, False),
        ("TIMEOUT", True, False),
        ("BOOT_FAIL", True, False),
        ("DEADLINE", True, False),
        ("PREEMPTED", True, False),
        ("FAILED", True, False),
        ("LAUNCH_FAILED", True, False),
        ("REVOKED", True, False),
        ("REQUEUED", False, None),
        ("COMPLETING", False, None),
        ("COMPLETED", True, True),
        ("RUNNING", False, None),
        ("SUSPENDED", False, None),
        ("REQUEUE_HOLD", False, None),
        ("CONFIGURING", False, None),
        ("", False, None),
    ],
)
def test_states(state: str, terminal: bool, success: bool | None) -> None:
    assert is_terminal(state) == terminal
    assert is_success(state) is success


def test_a_preempted_job_that_is_requeued_has_not_ended() -> None:
    # case G4-26
    assert not is_terminal("PREEMPTED", requeued=True)
    assert is_terminal("FAILED", requeued=True)


def test_the_first_word_is_the_state() -> None:
    assert [first_word(text) for text in ("CANCELLED by 1000", "CANCELLED+", "OUT_OF_ME+", "RUNNING", " ")] == [
        *("CANCELLED", "CANCELLED", "OUT_OF_MEMORY", "RUNNING", "")
    ]


# case G4-30
@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        (90, 5400),
        ("10:30", 630),
        ("1:30:00", 5400),
        ("2-12", 216000),
        ("1-00:30", 88200),
        ("1-00:00:30", 86430),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
    ],
)
def test_time_limits(text: str | int, seconds: int | None) -> None:
    assert time_limit_s(text) == seconds


def test_limits_can_be_compared_with_that_of_a_partition() -> None:
    # case G4-30
    limits = ["90", "10:30", "1:30:00", "2-12", "1-00:30", "1-00:00:30"]
    most = time_limit_s("1-00:00:00")
    assert most == 86400
    assert [(time_limit_s(limit) or 0) > most for limit in limits] == [False, False, False, True, True, True]


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "1-", "-5", "Partition_Limit"])
def test_what_is_no_time_limit_is_refused(text: str) -> None:
    with pytest.raises(SlurmError, match="is not a time limit"):
        time_limit_s(text)


# case G4-01
@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("n[001-003,007],gpu-a[1-2]", ["n001", "n002", "n003", "n007", "gpu-a1", "gpu-a2"]),
        ("box[1,2]", ["box1", "box2"]),
        ("red,green,blue", ["red", "green", "blue"]),
        ("gpu-od-dy-x4-[1-4]", ["gpu-od-dy-x4-1", "gpu-od-dy-x4-2", "gpu-od-dy-x4-3", "gpu-od-dy-x4-4"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("c10a-s17,c11a-s12", ["c10a-s17", "c11a-s12"]),
        ("jz-ia810", ["jz-ia810"]),
        ("rack[0-1]n[1,3]", ["rack0n1", "rack0n3", "rack1n1", "rack1n3"]),
    ],
)
def test_node_lists(nodes: str, names: list[str]) -> None:
    assert expand_nodes(nodes) == tuple(names)
    assert _parse_node_list(nodes) == names, "submitit, which knows the nodes inside a job, must agree"


@pytest.mark.parametrize("nodes", ["", "(null)", "None assigned"])
def test_a_job_that_waits_has_no_nodes(nodes: str) -> None:
    assert expand_nodes(nodes) == ()


@pytest.mark.parametrize("nodes", ["n[1", "n1]", "n[1-]", "a,,b", "n[a-b]"])
def test_broken_node_lists_are_refused(nodes: str) -> None:
    with pytest.raises(SlurmError, match="expected one like"):
        expand_nodes(nodes)


def test_a_new_submission_inherits_nothing_of_the_job_around_it() -> None:
    # cases G4-10, G4-11
    kept = {"PATH": "/bin", "HOME": "/root", "SLURM_CONF": "/etc/slurm.conf", "RANKING": "1", "CUDA_HOME": "/cuda"}
    of_the_job = dict.fromkeys(
        [
            *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_JOB_ID", "SLURM_CPU_BIND", "SLURM_CPUS_PER_TASK"),
            *("SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "SALLOC_ACCOUNT", "PMI_RANK", "PMI2_X", "PMIX_RANK"),
            *("OMPI_COMM_WORLD_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        ],
        "1",
    )
    environment = kept | of_the_job
    assert outside_a_job(environment) == kept
    assert environment == kept | of_the_job
