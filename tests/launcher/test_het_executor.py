"""Scripts and submissions, with small stand-ins for Slurm's commands on PATH."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission, FailedJobError

from towline.jobs.slurm.submission import Submission
from towline.launcher.het_executor import ComponentDied, HetSlurmExecutor, HetSlurmJob, NoCheckpointWarning
from towline.launcher.het_job import HetInfoWatcher
from towline.launcher.het_script import num_tasks
from towline.storage.errors import InputError, SlurmError

SBATCH = """
env > "$CALLS/environment"
printf '%s\\n' "$@" > "$CALLS/arguments"
echo "sbatch: lua: job 2 of 5 allowed"
echo "Submitted batch job 12"
"""
TRAINER = {"partition": "gpu", "nodes": 2, "gpus-per-node": 4, "exclusive": True, "time": "24:00:00"}
ROLLOUT = {"partition": "inference", "nodes": 4, "constraint": "a100&ib", "exclusive": False}
# case G4-20
HARD_TO_QUOTE = ["a b", "it's", 'x"y', "$HOME", "r(1)", "50%x", ""]


class Checkpointable:
    def __call__(self) -> str:
        return "done"

    def checkpoint(self) -> DelayedSubmission:
        return DelayedSubmission(self)


def echo(*given: str, last: int) -> tuple[object, ...]:
    return *given, last


def fail() -> None:
    raise ValueError("raised in the job")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a shell script on PATH under the name of one of Slurm's commands; returns where it may write."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path))

    def make(name: str, body: str) -> Path:
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
        return tmp_path

    return make


@pytest.fixture(autouse=True)
def _own_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HetSlurmJob, "watcher", HetInfoWatcher(delay_s=1))
    monkeypatch.setattr(HetSlurmJob, "_results_timeout_s", 0)


def test_one_component_is_an_ordinary_job() -> None:
    executor = HetSlurmExecutor("/runs/1", {"all": {"time": 30}}, python="python3", setup=["module load cuda"])
    assert (
        executor.script_text()
        == """\
#!/bin/bash
#SBATCH --job-name=towline
#SBATCH --output=/runs/1/%j_0_log.out
#SBATCH --error=/runs/1/%j_0_log.err
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@90
#SBATCH --requeue
#SBATCH --time=30

module load cuda
exec python3 -u -m towline.jobs.slurm.batch_entry /runs/1
"""
    )


def test_components_follow_the_leader() -> None:
    executor = HetSlurmExecutor("/my runs/1", {"trainer": TRAINER | {"signal": "B:USR2@300"}, "rollout": ROLLOUT})
    assert (
        executor.script_text("callable-2")
        == f"""\
#!/bin/bash
#SBATCH --job-name=towline
#SBATCH --output="/my runs/1/%j_0_log.out"
#SBATCH --error="/my runs/1/%j_0_log.err"
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@300
#SBATCH --requeue
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH hetjob
#SBATCH --partition=inference
#SBATCH --nodes=4
#SBATCH --constraint="a100&ib"

exec {shlex.quote(sys.executable)} -u -m towline.jobs.slurm.batch_entry '/my runs/1' callable-2
"""
    )


def test_three_components_have_two_separators() -> None:
    components = {"trainer": {"nodes": 1}, "rollout": {"nodes": 2}, "judge": {"nodes": 3}}
    lines = HetSlurmExecutor("/runs/1", components, python="python3").script_text().splitlines()
    assert lines[7:] == [
        "#SBATCH --nodes=1",
        "#SBATCH hetjob",
        "#SBATCH --nodes=2",
        "#SBATCH hetjob",
        "#SBATCH --nodes=3",
        "",
        "exec python3 -u -m towline.jobs.slurm.batch_entry /runs/1",
    ]


@pytest.mark.parametrize("name", ["a b", "it's", 'x"y', "$HOME", "r(1)", "#7", "a&b;c", "ü*?"])
def test_any_folder_reaches_python_unchanged(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    python = tmp_path / "my python"
    python.write_text(
        f"#!/bin/bash\nshift 3\nexec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"\n"
    )
    python.chmod(0o755)
    script = HetSlurmExecutor(folder, {"all": {}}, python=shlex.quote(str(python))).script_text()
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [str(folder)]


# case G4-20
@pytest.mark.parametrize("name", ["100%j", "50%x", "back\\slash", "two\nlines"])
def test_a_folder_that_sbatch_would_read_otherwise_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot hold a Slurm job"):
        HetSlurmExecutor(f"/my runs/{name}", {"all": {}})


@pytest.mark.parametrize(
    ("components", "words"),
    [
        ({}, "a job needs a component"),
        ({"a": {"array": "0-3"}}, "Slurm refuses arrays of heterogeneous jobs"),
        ({"a": {"--nodes": 1}}, "without dashes in front"),
        ({"a": {"gpus_per_node": 1}}, "'gpus_per_node' of component 'a'"),
        ({"a": {"parsable": True}}, "command line of sbatch"),
        ({"a": {}, "b": {"dependency": "afterok:7"}}, "'dependency' of component 'b'.* first component, 'a'"),
        ({"a": {"time": "1h"}}, "'time' of component 'a': '1h' is not a time limit"),
    ],
)
def test_options_that_slurm_would_refuse_or_ignore(components: dict[str, dict[str, str]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        HetSlurmExecutor("/runs/1", components)


def test_the_ranks_of_a_component_are_known_from_its_options() -> None:
    assert num_tasks({}, "a") == 1
    assert num_tasks({"nodes": 2}, "a") == 2
    assert num_tasks({"nodes": 2, "ntasks-per-node": "4"}, "a") == 8
    assert num_tasks({"nodes": "2-4", "ntasks": 3}, "a") == 3
    with pytest.raises(InputError, match="Give 'ntasks'"):
        num_tasks({"nodes": "2-4"}, "a")


def test_arrays_are_refused_with_the_reason() -> None:
    executor = HetSlurmExecutor("/runs/1", {"all": {}})
    for submit in (
        lambda: executor.map_array(echo, [1], [2]),
        lambda: executor.submit_array([fail]),
        lambda: executor.batch(),
    ):
        with pytest.raises(InputError, match="Slurm refuses arrays"):
            submit()


def test_everything_is_on_disk_before_sbatch_is_asked(tmp_path: Path, command: Callable[[str, str], Path]) -> None:
    command("sbatch", SBATCH + 'cp -r "$(dirname "$1")" "$CALLS/seen"')
    executor = HetSlurmExecutor(tmp_path / "run", {"trainer": TRAINER, "rollout": ROLLOUT})
    job = executor.submit(Checkpointable())
    assert (job.job_id, job.components) == ("12", {"trainer": "12+0", "rollout": "12+1"})
    assert sorted(path.name for path in (tmp_path / "seen").iterdir()) == [
        "callable.json",
        "callable.pkl",
        "callable.sh",
    ]
    assert (tmp_path / "seen/callable.sh").read_text() == executor.script_text()
    assert (tmp_path / "arguments").read_text().splitlines() == [str(tmp_path / "run/callable.sh")]
    submission = Submission.read(tmp_path / "seen/callable.json")
    assert submission == Submission.of(time="24:00:00", signal="B:USR2@90")
    assert isinstance(job.submission().function, Checkpointable)


def test_a_job_can_be_prepared_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    executor = HetSlurmExecutor(tmp_path, {"all": {}})
    script = executor.prepare(Checkpointable())
    assert script == tmp_path / "callable.sh"
    assert script.read_text() == executor.script_text()
    assert (tmp_path / "callable.pkl").stat().st_size > 0


def test_a_second_submission_leaves_the_first_alone(tmp_path: Path, command: Callable[[str, str], Path]) -> None:
    command("sbatch", SBATCH)
    executor = HetSlurmExecutor(tmp_path, {"all": {}})
    executor.submit(Checkpointable())
    first = (tmp_path / "callable.pkl").read_bytes()
    executor.submit(Checkpointable())
    assert (tmp_path / "callable.pkl").read_bytes() == first
    assert (tmp_path / "arguments").read_text().splitlines() == [str(tmp_path / "callable-2.sh")]
    assert (tmp_path / "callable-2.sh").read_text() == executor.script_text("callable-2")


def test_a_submission_from_inside_a_job_inherits_nothing(
    tmp_path: Path, command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # cases G4-10, G4-11
    command("sbatch", SBATCH)
    for name in (
        *("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND"),
        *("SBATCH_PARTITION", "PMIX_RANK", "RANK", "SLURM_CONF"),
    ):
        monkeypatch.setenv(name, "/inherited")
    HetSlurmExecutor(tmp_path, {"all": {}}).submit(Checkpointable())
    lines = (tmp_path / "environment").read_text().splitlines()
    assert [line for line in lines if line.endswith("/inherited")] == ["SLURM_CONF=/inherited"]
    assert os.environ["SLURM_CPU_BIND"] == "/inherited"


def test_a_callable_without_checkpoint_is_warned_of(tmp_path: Path, command: Callable[[str, str], Path]) -> None:
    # case G4-15
    command("sbatch", SBATCH)
    executor = HetSlurmExecutor(tmp_path, {"trainer": {}, "rollout": {}})
    with pytest.warns(NoCheckpointWarning, match=r"fail has no method `checkpoint`.* not requeued"):
        executor.submit(fail)
    with pytest.warns(NoCheckpointWarning, match="fail of component 'rollout'"):
        executor.submit_components({"trainer": Checkpointable(), "rollout": fail})


def test_components_have_a_job_each(tmp_path: Path, command: Callable[[str, str], Path]) -> None:
    command("sbatch", SBATCH)
    executor = HetSlurmExecutor(tmp_path, {"trainer": {"nodes": 2}, "rollout": {"ntasks": 3}})
    jobs = executor.submit_components({"rollout": Checkpointable(), "trainer": Checkpointable()})
    assert {name: (job.job_id, job.num_tasks) for name, job in jobs.items()} == {
        "trainer": ("12+0", 2),
        "rollout": ("12+1", 3),
    }
    assert jobs["rollout"].task(2).paths.result_pickle == tmp_path / "12+1_2_result.pkl"
    with pytest.raises(InputError, match=r"one function for each of trainer, rollout; found trainer"):
        executor.submit_components({"trainer": Checkpointable()})


def test_a_missing_sbatch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="sbatch is not on PATH"):
        HetSlurmExecutor(tmp_path, {"all": {}}).submit(Checkpointable())


@pytest.mark.filterwarnings("ignore::towline.launcher.het_executor.NoCheckpointWarning")
def test_result_and_traceback_come_back(tmp_path: Path, command: Callable[[str, str], Path]) -> None:
    """The script is really run, without a cluster: its batch step needs nothing of it but an id."""
    command("sbatch", 'SLURM_JOB_ID=12 bash "$1" > "$CALLS/log" 2>&1\necho "Submitted batch job 12"')
    executor = HetSlurmExecutor(
        tmp_path / "it's mine", {"all": {}}, setup=[f"export PYTHONPATH={Path(__file__).parent}"]
    )
    assert executor.submit(echo, *HARD_TO_QUOTE, last=7).result() == (*HARD_TO_QUOTE, 7)
    (tmp_path / "it's mine/12_0_result.pkl").unlink()
    with pytest.raises(FailedJobError, match=r"in fail\n(.*\n)*ValueError: raised in the job"):
        executor.submit(fail).result()


class Waits:
    """Until it is told to checkpoint."""

    def __init__(self, running: Path) -> None:
        self.running = running

    def __call__(self) -> None:
        self.running.touch()
        time.sleep(60)

    def checkpoint(self) -> DelayedSubmission:
        return DelayedSubmission(echo, "gone on", last=1)


def test_the_batch_shell_passes_its_signal_on_and_logs_are_appended(
    tmp_path: Path, command: Callable[[str, str], Path]
) -> None:
    # case G4-14: `B:` signals the shell alone, whose place Python has taken. Case G4-17: --open-mode
    command("scontrol", 'echo "$@" > "$CALLS/asked"')
    setup = [f"export PYTHONPATH={Path(__file__).parent}${{PYTHONPATH:+:$PYTHONPATH}}"]
    executor = HetSlurmExecutor(tmp_path / "run", {"all": {"time": 60}}, setup=setup)
    script = executor.prepare(Waits(tmp_path / "running"))
    assert {"#SBATCH --open-mode=append", "#SBATCH --signal=B:USR2@90"} <= set(script.read_text().splitlines())
    with subprocess.Popen(
        ["bash", script], env=os.environ | {"SLURM_JOB_ID": "12"}, stderr=subprocess.DEVNULL
    ) as shell:
        deadline = time.monotonic() + 30
        while not (tmp_path / "running").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        shell.send_signal(signal.SIGUSR2)
        shell.wait(30)
    assert (tmp_path / "asked").read_text() == "requeue 12\n"
    subprocess.run(["bash", script], env=os.environ | {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}, check=True)
    assert HetSlurmJob(tmp_path / "run", "12").result() == ("gone on", 1)


def test_a_job_that_died_says_which_component_how_and_where(
    tmp_path: Path, command: Callable[[str, str], Path]
) -> None:
    command("sacct", "printf '12+0|COMPLETED|0:0|n1\\n12+1|OUT_OF_MEMORY|0:125|n2\\n'")
    command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    (tmp_path / "12+1_0_log.err").write_text("Killed\n")
    job = HetSlurmJob(tmp_path, "12+1", components=["rollout"])
    with pytest.raises(ComponentDied) as died:
        job.result()
    text = str(died.value)
    assert "component rollout (12+1), rank 0, ended without a result" in text
    assert "rollout (12+1): OUT_OF_MEMORY, exit code 0:125, nodes n2" in text
    assert str(tmp_path / "12+1_0_log.err") in text
    assert text.endswith("Its last lines:\nKilled")
    assert str(job.exception()) == text


def test_a_log_of_ones_own_is_named(tmp_path: Path, command: Callable[[str, str], Path]) -> None:
    command("sbatch", SBATCH)
    command("sacct", "printf '12|NODE_FAIL|0:0|n1\\n'")
    command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    (tmp_path / "12.log").write_text("the end")
    executor = HetSlurmExecutor(tmp_path, {"all": {"output": f"{tmp_path}/%j.log", "error": False}})
    with pytest.raises(ComponentDied, match=rf"NODE_FAIL.*\nIts log: {tmp_path}/12\.log\nIts last lines:\nthe end"):
        executor.submit(Checkpointable()).result()


def test_cancel_ends_the_leader(tmp_path: Path, command: Callable[[str, str], Path]) -> None:
    command("scancel", 'printf "%s\\n" "$@" > "$CALLS/arguments"')
    HetSlurmJob(tmp_path, "12+1", components=["rollout"]).cancel()
    assert (tmp_path / "arguments").read_text() == "12\n"
