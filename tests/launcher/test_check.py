from pathlib import Path

import pytest

from fake_slurm import FakeSlurm
from towline.launcher.check import report_lines
from towline.launcher.cli import command


def report(project, *overrides: str) -> list[str]:
    return list(report_lines(project.read(*overrides)[1], project.look(*overrides)))


def test_the_report_shows_model_data_rewards_and_plan(project) -> None:
    lines = report(project)
    assert lines[0] == f"model   {project.model}   320 parameters, 2 layers, context 32 tokens"
    assert lines[1].startswith("data    train   3 prompts, 0 of them again, 0 rows rejected")
    assert lines[2] == "        tokens: 2 median, 2 p95, 2 max"
    assert lines[3:5] == ["        row 0, answer a b", "          | a b"]
    assert "reward  1.0 · exact_match" in lines
    text = "\n".join(lines)
    assert "trainer 1 rank   state 5.00 KiB a rank (weights 640 B, gradients 640 B, master 1.25 KiB" in text
    assert "= 33,554,432 tokens of 32 B" in text
    assert "free   fits" in text
    assert lines[-1] == "nothing wrong was found"


def test_the_report_says_what_waves_cost_and_where_the_overlong_penalty_begins(project) -> None:
    rewards = 'rewards=[{use="exact_match",weight=1.0},{use="overlong",weight=0.5,cache_tokens=3}]'
    text = "\n".join(report(project, "rollout.prompts_per_step=1", "rollout.max_waves=3", rewards))
    assert "reward  1.0 · exact_match + 0.5 · overlong\n        overlong   0 up to 1 tokens, -1 at 4\n" in text
    assert "1 prompts of 2 completions, in up to 3 waves, each after the other's scores: up to 3 times as long" in text
    assert text.endswith("nothing wrong was found")
    assert "waves" not in "\n".join(report(project))


def test_the_report_says_when_length_counts_and_where_an_own_reward_is(project) -> None:
    (project.folder / "mine.py").write_text("def grade(completion, gold): return 1\n")
    rewards = (
        f'rewards=[{{use="exact_match",weight=1.0}},{{use="{project.folder}/mine.py:grade",weight=0.1}},'
        '{use="length",weight=0.2,target_tokens=2,when={exact_match=1.0},converged={min_reward=0.9,window=5}}]'
    )
    lines = report(project, rewards)
    place = lines.index(
        "reward  1.0 · exact_match + 0.1 · mine.grade + "
        "0.2 · (length where exact_match ≥ 1.0 once the rest has converged)"
    )
    assert lines[place + 1].startswith("        mine.grade   ")
    assert lines[place + 1].endswith("mine.py:grade")
    assert lines[place + 2] == (
        "        length   0 up to 2 tokens, -1 at 4   counts once 5 steps have a mean reward of at least 0.9, "
        "less than 0.02 from that of the 5 before"
    )


def test_rejected_rows_are_shown_by_line_beside_the_good_ones(project) -> None:
    with (project.folder / "train.jsonl").open("a") as file:
        file.write("{}\n")
    text = "\n".join(report(project))
    assert "data    train   3 prompts, 0 of them again, 1 rows rejected" in text
    assert 'train.jsonl:4: field "prompt" is missing' in text
    assert text.endswith("1 problem, 0 warnings")


def test_a_run_that_is_too_big_is_said_not_to_fit(project) -> None:
    lines = report(project, "steps=1000000000000")
    assert any("disk" in line and line.endswith("does not fit") for line in lines)


def test_check_lists_all_problems_and_exits_with_2(project, capsys: pytest.CaptureFixture[str]) -> None:
    (project.model / "model.safetensors").unlink()
    (project.folder / "held_out.jsonl").unlink()
    assert command(["check", str(project.file)]) == 2
    text = capsys.readouterr().out
    assert text.count("FAILED  ") == 2
    assert not project.runs.exists()


@pytest.fixture
def cluster(project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of a profile with two GPUs a node, and a variable that the experiment uses."""
    monkeypatch.setattr("towline.launcher.prompt_preflight.can_tokenize", lambda: False)
    project.change('model = "model"', 'model = "${MODELS}/model"')
    group = 'sbatch = { partition = "gpu", gpus-per-node = 2, time = "12:00:00" }'
    path = tmp_path / "here.toml"
    path.write_text(f'name = "here"\n[vars]\nMODELS = "{project.folder}"\n[trainer]\n{group}\n[rollout]\n{group}\n')
    return str(path)


def test_for_a_cluster_the_job_is_told_and_nothing_is_made(
    project, cluster: str, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["check", str(project.file), "--cluster", cluster, "-o", "nodes.rollout=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    plan = next(number for number, line in enumerate(lines) if line.startswith("plan    trainer 2 ranks"))
    assert lines[plan + 1].startswith("        rollout 6 engines")
    assert lines[plan + 2].endswith("not compared: this is not where it will run")
    assert lines[plan + 5 : plan + 8] == [
        "layout  heterogeneous job: trainer 1 node + rollout 3 nodes",
        "cost    up to 48.0 node-hours an attempt, no nodes.max_node_hours",
        "limit   12 h: a checkpoint in time, then requeue",
    ]
    assert not project.runs.exists()
    assert slurm.calls("sbatch") == []


def test_a_run_of_adapters_says_how_many_parameters_are_trained(project, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["check", str(project.file), "-o", "trainer.lora.rank=4"]) == 0
    plan = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("        LoRA "))
    assert plan.endswith("parameters of rank 4 are trained beside 320 frozen ones")


def test_adapters_that_cannot_be_counted_are_said_to_be_unknown(project, capsys: pytest.CaptureFixture[str]) -> None:
    (project.model / "model.safetensors").rename(project.model / "pytorch_model.bin")
    assert command(["check", str(project.file), "-o", "trainer.lora.rank=4"]) == 0
    assert "LoRA    an unknown number (weights are pickles) of parameters of rank 4" in capsys.readouterr().out


def test_what_the_partition_refuses_is_among_the_problems(
    project, cluster: str, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.fails("scontrol", "Partition gpu not found")
    (project.folder / "held_out.jsonl").unlink()
    assert command(["check", str(project.file), "--cluster", cluster]) == 2
    said = capsys.readouterr().out
    assert "FAILED  partition gpu of profile here does not exist here" in said
    assert said.count("FAILED  ") == 2


def test_without_a_cluster_its_variables_are_not_known(
    project, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["check", str(project.file)]) == 2
    assert "${MODELS} is not a variable of the cluster profile" in capsys.readouterr().err


def test_a_hub_name_is_refused_in_the_clusters_words(
    project, cluster: str, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["check", str(project.file), "--cluster", cluster, "-o", "policy.model=Qwen/Qwen2.5-7B"]) == 2
    assert 'policy.model "Qwen/Qwen2.5-7B" is a Hub name; here\'s compute nodes are offline' in capsys.readouterr().out
