"""From an experiment and a profile to what sbatch gets, with a stand-in for sbatch on the PATH."""

import os
from pathlib import Path

import pytest

from fake_slurm import FakeSlurm
from towline.jobs.experiment import ExperimentConfig
from towline.jobs.load_experiment import recorded_experiment
from towline.jobs.slurm.profile import ClusterProfile
from towline.launcher.cli import command
from towline.launcher.on_cluster import components_of, placed
from towline.launcher.profile_file import load_profile
from towline.launcher.submit import prepare, signal_option, submit_experiment
from towline.storage.errors import InputError, SlurmError
from towline.storage.run_directory import RunDirectory, read_jsonl

PROFILE = """\
name = "here"

[folders]
runs = "cluster-runs"

[trainer]
sbatch = { partition = "gpu", gpus-per-node = 4, time = "24:00:00" }

[rollout]
sbatch = { partition = "gpu", gpus-per-node = 2, time = "24:00:00" }

[scorer]
sbatch = { partition = "cpu", cpus-per-task = 8, time = "24:00:00" }

[smoke]
sbatch = { partition = "debug", gpus-per-node = 2, cpus-per-task = 3, time = "00:15:00" }
"""
SBATCH = """\
env > "$0.environment"
cat "$1" > "$0.script"
echo "sbatch: a word from the site"
echo "Submitted batch job 481516"
"""


@pytest.fixture
def cluster(project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The profile's file. The experiment leaves open where runs are made; commands are typed in the project."""
    project.change('\n[run]\nroot = "runs"\n', "")
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr("towline.launcher.prompt_preflight.can_tokenize", lambda: False)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    path = tmp_path / "here.toml"
    path.write_text(PROFILE)
    return path


@pytest.fixture
def sbatch(slurm: FakeSlurm) -> Path:
    """Where its script and its environment are written down: `.script` and `.environment` behind this path."""
    (slurm.folder / "sbatch").write_text(f'#!/bin/sh\necho "$*" >> "$0.calls"\n{SBATCH}')
    return slurm.folder / "sbatch"


def submit(project, cluster: Path, *arguments: str) -> int:
    return command(["submit", str(project.file), "--cluster", str(cluster), *arguments])


def directives(script: str) -> list[list[str]]:
    """Options of each component, in order."""
    parts = script.split("#SBATCH hetjob\n")
    return [[line[len("#SBATCH --") :] for line in part.splitlines() if line.startswith("#SBATCH --")]
            for part in parts]  # fmt: skip


def script_of(project, cluster: Path, *overrides: str, smoke: bool = False) -> list[list[str]]:
    prepared = prepare(project.file, str(cluster), overrides, smoke=smoke)
    return directives(prepared.executor.script_text())


def change(cluster: Path, *pairs: tuple[str, str]) -> None:
    for old, new in pairs:
        assert old in cluster.read_text()
        cluster.write_text(cluster.read_text().replace(old, new, 1))


def numbers(project, cluster: Path, *overrides: str, smoke: bool = False) -> ExperimentConfig:
    return placed(project.read(*overrides)[1], load_profile(str(cluster)), smoke=smoke)


def test_submit_says_what_was_submitted_and_what_comes_next(
    project, cluster: Path, sbatch: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.answers("squeue", "N/A")
    assert submit(project, cluster, "-o", "run.name=first", "-o", "nodes={trainer = 2, max_node_hours = 9}") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("plan    trainer 8 ranks   state ")
    assert said[-5:-3] == [
        "layout  heterogeneous job: trainer 2 nodes + rollout 1 node",
        "cost    up to 72.0 node-hours an attempt, 9 in all; then it stops",
    ]
    assert said[-3] == "limit   24 h: a checkpoint in time, then requeue"
    assert said[-2] == "Submitted 481516   run first   no estimate of the start yet"
    assert said[-1] == "next    towline status first --root cluster-runs"


def test_a_submitted_run_is_queued_and_noted(project, cluster: Path, sbatch: Path) -> None:
    assert submit(project, cluster, "-o", "run.name=first") == 0
    run = RunDirectory.open(project.folder / "cluster-runs" / "first")
    assert run.read_state()["status"] == "queued"
    (row,) = read_jsonl(run.submissions)
    assert (row["job"], row["submission"], row["smoke"]) == ("481516", 0, False)
    assert row["components"] == {"trainer": "481516+0", "rollout": "481516+1"}
    assert ClusterProfile.model_validate_json(run.cluster.read_text()).name == "here"
    assert recorded_experiment(run.config.read_text()).local.engines == 2
    assert (run.code / "towline" / "jobs" / "supervisor.py").is_file()


def test_what_sbatch_gets_is_the_script_in_the_run_folder(project, cluster: Path, sbatch: Path) -> None:
    assert submit(project, cluster, "-o", "run.name=first") == 0
    run = project.folder / "cluster-runs" / "first"
    assert Path(f"{sbatch}.calls").read_text() == f"{run}/slurm/callable.sh\n"
    script = Path(f"{sbatch}.script").read_text()
    assert script == (run / "slurm" / "callable.sh").read_text()
    assert f"#SBATCH --output={run}/logs/batch.log\n" in script
    assert (run / "logs").is_dir()


def test_the_job_around_us_is_not_passed_on(
    project, cluster: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    assert submit(project, cluster) == 0
    lines = Path(f"{sbatch}.environment").read_text().splitlines()
    assert [line for line in lines if line.startswith(("SLURM", "SBATCH"))] == ["SLURM_CONF=/etc/slurm.conf"]


def test_a_dry_run_prints_the_script_and_submits_nothing(
    project, cluster: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(project, cluster, "-o", "run.name=dry", "--dry-run") == 0
    run = project.folder / "cluster-runs" / "dry"
    said = capsys.readouterr()
    assert said.out == (run / "slurm" / "callable.sh").read_text()
    assert said.err.startswith("plan    ")
    assert said.err.endswith(
        "Nothing was submitted. Run folder cluster-runs/dry is made; sbatch of this text starts it.\n"
    )
    assert not Path(f"{sbatch}.calls").exists()
    assert not RunDirectory(run).submissions.exists()
    assert (run / "slurm" / "callable.pkl").is_file()


@pytest.fixture
def pairs(project, cluster: Path, monkeypatch: pytest.MonkeyPatch):
    """Starting a tokenizer takes seconds."""
    monkeypatch.setattr("towline.launcher.example_preflight.can_tokenize", lambda: False)
    project.learn_from_pairs("dpo")
    return project


SWEEP = ("-o", "run.name=first", "-o", "sweep.beta=[0.1, 0.2]")


def test_several_runs_are_a_job_each(pairs, cluster: Path, sbatch: Path) -> None:
    assert submit(pairs, cluster, *SWEEP) == 0
    for beta in (0.1, 0.2):
        run = RunDirectory.open(pairs.folder / "cluster-runs" / f"first-beta-{beta}")
        assert recorded_experiment(run.config.read_text()).trainer.beta == beta
        assert run.read_state()["status"] == "queued"
    assert len(Path(f"{sbatch}.calls").read_text().splitlines()) == 2


def test_no_job_is_submitted_where_the_second_could_not_be(
    pairs, cluster: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pairs.folder / "cluster-runs" / "first-beta-0.2").mkdir(parents=True)
    assert submit(pairs, cluster, *SWEEP) == 2
    assert "first-beta-0.2 exists; nothing is overwritten" in capsys.readouterr().err
    assert not (pairs.folder / "cluster-runs" / "first-beta-0.1").exists()
    assert not Path(f"{sbatch}.calls").exists()


def test_what_takes_one_run_refuses_several(
    pairs, cluster: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(pairs, cluster, *SWEEP, "--dry-run") == 2
    said = capsys.readouterr().err
    assert "is 2 runs, which is a job each: a dry run shows one. Add -o trainer.beta=VALUE and take" in said
    with pytest.raises(InputError, match="is 2 runs, which is a job each: this submits one"):
        submit_experiment(pairs.file, cluster=str(cluster), overrides=(SWEEP[3],))
    assert not Path(f"{sbatch}.calls").exists()


def test_a_reward_model_and_its_watcher_are_a_job_each(
    pairs, cluster: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs.change('"dpo"', '"reward_model"\nwatcher = true')
    assert submit(pairs, cluster, "--dry-run") == 2
    one = ("-o", "watcher=false", "-o", "data.half=first", "-o", "data.half_seed=0")
    assert f"a dry run shows one. Add {' '.join(one)} for the first." in capsys.readouterr().err
    assert submit(pairs, cluster, "--dry-run", *one) == 0
    assert not Path(f"{sbatch}.calls").exists()
    assert submit(pairs, cluster, "-o", "run.name=first") == 0
    for name, half in (("first", "first"), ("first-watcher", "second")):
        run = RunDirectory.open(pairs.folder / "cluster-runs" / name)
        assert recorded_experiment(run.config.read_text()).data.half == half


def test_from_python_a_job_comes_back(project, cluster: Path, sbatch: Path) -> None:
    # case G4-15: no warning, which would be an error here: what is sent has a checkpoint
    job = submit_experiment(project.file, cluster=str(cluster), overrides=("run.name=first",))
    assert job.job_id == "481516"
    assert hasattr(job.submission().function, "checkpoint")


def test_a_refusal_leaves_the_name_free_for_the_next_try(project, cluster: Path, slurm: FakeSlurm) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid account")
    with pytest.raises(SlurmError, match="Invalid account"):
        submit_experiment(project.file, cluster=str(cluster), overrides=("run.name=first",))
    assert not (project.folder / "cluster-runs" / "first").exists()


@pytest.mark.parametrize(
    ("overrides", "change_of_profile", "message"),
    [
        (["-o", "policy.model=gone"], None, "gone"),
        (["-o", "rewards=[]"], None, "rewards"),
        ([], ('time = "24:00:00"', 'time = "soon"'), "profile here: option 'time' of component 'trainer': 'soon'"),
        ([], ("gpus-per-node = 2, time", "gpus_per_node = 2, time"), "'gpus_per_node' of component 'rollout'"),
        ([], ("gpus-per-node = 2, time", "signal = 3, time"), "'signal' of component 'rollout' is for the whole job"),
        ([], ('runs = "cluster-runs"', 'runs = "100%j"'), "100%j"),
        ([], ('runs = "cluster-runs"', 'runs = "$NOT_SET_HERE/runs"'), "names a variable that is not set here"),
    ],
)
def test_what_is_wrong_leaves_nothing_behind(
    overrides: list[str], change_of_profile: tuple[str, str] | None, message: str, project, cluster: Path,
    sbatch: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if change_of_profile:
        change(cluster, change_of_profile)
    before = sorted(project.folder.rglob("*"))
    assert submit(project, cluster, *overrides) == 2
    assert message in capsys.readouterr().err
    assert sorted(project.folder.rglob("*")) == before
    assert not Path(f"{sbatch}.calls").exists()


def test_problems_of_experiment_and_partition_come_together(
    project, cluster: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.answers("scontrol", "PartitionName=gpu QoS=N/A MaxTime=12:00:00")
    (project.model / "model.safetensors").unlink()
    assert submit(project, cluster) == 2
    said = capsys.readouterr().err
    assert "model.safetensors" in said
    assert "trainer.sbatch.time = 24:00:00 of profile here is more than partition gpu allows (12:00:00)" in said
    assert not (project.folder / "cluster-runs").exists()


def test_a_controller_that_does_not_answer_is_a_warning(
    project, cluster: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.is_silent()
    assert submit(project, cluster, "--dry-run") == 0
    assert "! the limits of the partitions are not known: `scontrol" in capsys.readouterr().err


def test_ranks_and_engines_are_one_a_gpu(project, cluster: Path) -> None:
    local = numbers(project, cluster, "nodes.trainer=2", "nodes.rollout=3").local
    assert (local.trainer_ranks, local.engines) == (8, 6)


def test_tasks_of_a_node_count_before_gpus(project, cluster: Path) -> None:
    change(cluster, ("gpus-per-node = 4", "gpus-per-node = 4, ntasks-per-node = 2, cpus-per-task = 5"),
           ("gpus-per-node = 2, time", "ntasks-per-node = 3, time"))  # fmt: skip
    local = numbers(project, cluster, "nodes.trainer=2", "local.engine_threads=7").local
    assert (local.trainer_ranks, local.engines, local.trainer_threads, local.engine_threads) == (4, 3, 5, 7)


def test_without_nodes_there_is_one_of_each(project, cluster: Path) -> None:
    experiment = numbers(project, cluster)
    assert experiment.nodes is not None
    assert (experiment.nodes.trainer, experiment.nodes.rollout, experiment.nodes.scorer) == (1, 1, 0)


def test_a_smoke_test_has_one_of_each_whatever_the_nodes(project, cluster: Path) -> None:
    experiment = numbers(project, cluster, "nodes={trainer = 2, scorer = 1, max_node_hours = 5}", smoke=True)
    assert experiment.nodes is not None
    assert (experiment.nodes.trainer, experiment.nodes.scorer, experiment.nodes.max_node_hours) == (1, 0, 5)
    local = experiment.local
    assert (local.trainer_ranks, local.engines, local.trainer_threads, local.engine_threads) == (1, 1, 3, 3)


def test_nodes_that_grade_have_a_worker_a_cpu(project, cluster: Path) -> None:
    with_nodes = numbers(project, cluster, "nodes.scorer=2", "local.scorers=3")
    assert (with_nodes.num_scorers, with_nodes.local.scorers) == (2, 8)
    without = numbers(project, cluster, "nodes.scorer=0", "local.scorers=3")
    assert (without.num_scorers, without.local.scorers) == (1, 3)


def test_fixed_bits_need_one_thread(project, cluster: Path) -> None:
    change(cluster, ("gpus-per-node = 4", "gpus-per-node = 4, cpus-per-task = 5"))
    fixed = ("deterministic=true", "rollout.max_staleness=0", "rollout.precision=float32", "trainer.precision=float32")
    local = numbers(project, cluster, *fixed).local
    assert (local.trainer_threads, local.engine_threads) == (1, 1)


@pytest.mark.parametrize(
    ("time", "lead_s"),
    [("24:00:00", 300), ("1-0", 300), ("00:30:00", 90), ("30", 90), ("2", 10), ("00:02:00", 10), ("", 300),
     ("UNLIMITED", 300)],
)  # fmt: skip
def test_the_second_warning_comes_in_proportion(time: str, lead_s: int) -> None:
    assert signal_option(time) == f"B:USR2@{lead_s}"


def test_the_groups_are_components_with_their_own_options(project, cluster: Path, slurm: FakeSlurm) -> None:
    trainer, rollout, scorer = script_of(project, cluster, "run.name=a", "nodes={trainer = 2, rollout = 3, scorer = 1}")
    assert trainer[0] == "job-name=a"
    assert "requeue" in trainer
    assert trainer[-5:] == ["nodes=2", "ntasks-per-node=4", "partition=gpu", "gpus-per-node=4", "time=24:00:00"]
    assert rollout == ["nodes=3", "ntasks-per-node=2", "partition=gpu", "gpus-per-node=2", "time=24:00:00"]
    assert scorer == ["nodes=1", "ntasks-per-node=1", "partition=cpu", "cpus-per-task=8", "time=24:00:00"]


def test_a_smoke_test_is_one_small_job(project, cluster: Path, slurm: FakeSlurm) -> None:
    (options,) = script_of(project, cluster, "nodes.trainer=2", smoke=True)
    assert options[-6:] == ["nodes=1", "ntasks-per-node=1", "partition=debug", "gpus-per-node=2", "cpus-per-task=3",
                            "time=00:15:00"]  # fmt: skip
    assert "signal=B:USR2@45" in options


def test_one_job_has_the_nodes_of_all(project, cluster: Path, slurm: FakeSlurm) -> None:
    change(cluster, ('name = "here"', 'name = "here"\nlayout = "single"'), ("gpus-per-node = 2", "gpus-per-node = 4"))
    (options,) = script_of(project, cluster, "nodes={trainer = 2, rollout = 3, scorer = 1}")
    assert "nodes=6" in options


def test_a_job_that_lives_without_a_node_says_so_in_each_component(project, cluster: Path, slurm: FakeSlurm) -> None:
    change(cluster, ('name = "here"', 'name = "here"\non_node_loss = "continue"'))
    components = script_of(project, cluster, "nodes.scorer=1")
    assert ["no-kill" in options for options in components] == [True, True, True]


@pytest.mark.parametrize("mode", ["off", "resubmit"])
def test_a_job_that_is_not_requeued_says_so(mode: str, project, cluster: Path, slurm: FakeSlurm) -> None:
    change(cluster, ('name = "here"', f'name = "here"\ncontinue = "{mode}"'))
    trainer, rollout = script_of(project, cluster)
    assert "no-requeue" in trainer
    assert "requeue" not in trainer
    assert "no-requeue" not in rollout


def test_an_option_that_is_false_is_left_out(project, cluster: Path, slurm: FakeSlurm) -> None:
    change(cluster, ("gpus-per-node = 4, time", "signal = false, requeue = false, ntasks-per-node = false, time"),
           ("gpus-per-node = 2, time", 'exclusive = true, hint = "", time'))  # fmt: skip
    trainer, rollout = script_of(project, cluster)
    assert not [option for option in trainer if option.startswith(("signal", "requeue", "ntasks-per-node"))]
    assert "exclusive" in rollout


def test_nodes_that_failed_are_left_out_beside_the_profiles_own(project, cluster: Path) -> None:
    change(cluster, ("gpus-per-node = 4", 'gpus-per-node = 4, exclude = "n1"'))
    experiment = numbers(project, cluster)
    components = components_of(load_profile(str(cluster)), experiment, smoke=False, exclude=("n7", "n8"))
    assert [options["exclude"] for options in components.values()] == ["n1,n7,n8", "n7,n8"]


def test_modules_and_setup_come_before_the_snapshot(project, cluster: Path, slurm: FakeSlurm) -> None:
    software = '[software]\nmodules = ["cuda/12.4", "a b"]\nsetup = ["ulimit -n 65536"]\n\n[trainer]'
    change(cluster, ("[trainer]", software))
    prepared = prepare(project.file, str(cluster), ("run.name=a",), smoke=False)
    lines = prepared.executor.script_text().splitlines()
    start = lines.index("module load cuda/12.4 || exit 1")
    assert lines[start : start + 3] == [
        "module load cuda/12.4 || exit 1",
        "module load 'a b' || exit 1",
        "ulimit -n 65536",
    ]
    assert lines[start + 3] == f"export PYTHONPATH={prepared.run.code}${{PYTHONPATH:+:$PYTHONPATH}}"


def test_variables_of_the_profile_are_known_in_paths(project, cluster: Path, slurm: FakeSlurm) -> None:
    project.change('model = "model"', 'model = "${MODELS}/model"')
    with pytest.raises(InputError, match=r"\$\{MODELS\} is not a variable of the cluster profile"):
        prepare(project.file, str(cluster), (), smoke=False)
    change(cluster, ("[folders]", f'[vars]\nMODELS = "{project.folder}"\n\n[folders]'))
    assert prepare(project.file, str(cluster), (), smoke=False).experiment.policy.folder == project.model
