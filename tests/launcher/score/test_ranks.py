"""Under a real mpirun, as 1 and as 4 ranks with one worker each."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launches import launch_ranks
from scoring_pools import is_running, wait_until
from towline.storage.ledger import read_scores, sealed_chunks, sealed_steps
from towline.storage.run_directory import RunDirectory

WORKER = Path(__file__).with_name("rank_worker.py")
LINES = (
    {"completion": r"so \boxed{7}", "answer": "7"},
    {"completion": "raise", "answer": "7"},
    *({"completion": rf"so \boxed{{{number}}}", "answer": str(number % 3)} for number in range(40)),
    {"completion": "loop", "answer": "7"},
    {"completion": ["7", "raise", r"\boxed{7}"], "answer": "7"},
)
TOKENS = '\n[[rewards]]\nuse = "overlong"\nweight = 1.0\ncache_tokens = 2\n'
TASKS = [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
]


def over_ranks(folder: Path, num_ranks: int, *lines: Sequence[object], code: int = 0) -> list[list[tuple[int, str]]]:
    """The exit code and the words of every rank, for each of the command lines; `code` is what mpirun ends with."""
    texts = [["score", *map(str, line), "--workers", "1", "--mpi"] for line in lines]
    log = folder / "mpirun.log"
    process = launch_ranks(WORKER, num_ranks, log, folder, json.dumps(texts))
    try:
        assert process.wait(timeout=30) == code, log.read_text()
    finally:
        process.kill()
    found = [[folder / f"{number}.{rank}.json" for rank in range(num_ranks)] for number in range(len(lines))]
    return [[tuple(json.loads(path.read_text())) for path in paths] for paths in found]


def counts(text: str) -> list[list[str]]:
    """The head, the rows of the table without the times, and the interval of the total."""
    head, _, rest = text.partition("\npart ")
    table, _, below = rest.partition("\n\n")
    return [head.splitlines(), *(line.split()[:-6] for line in table.splitlines()[1:]), below.splitlines()[:2]]


def untimed(score: dict[str, Any]) -> dict[str, Any]:
    parts = {name: part | {"seconds": None} for name, part in score["parts"].items()}
    return score | {"seconds": None, "parts": parts}


def scores_of(path: Path) -> list[Any]:
    scores = [json.loads(line)["towline_score"] for line in path.read_text().splitlines()]
    return [list(map(untimed, score)) if isinstance(score, list) else untimed(score) for score in scores]


def take_second_scores(run: RunDirectory) -> list[Any]:
    """What `towline score` has sealed beside each shard, without times; it is removed."""
    found = []
    for shard in (shard for step in sealed_steps(run.rollouts) for shard in sealed_chunks(run.rollouts, step)):
        (second,) = shard.parent.glob("*.scores-*.h5")
        sheet = read_scores(shard, second.name.partition(".scores-")[2].removesuffix(".h5"))
        scores = [(one.parts, one.status, repr(one.total), one.detail) for one in sheet.scores]
        found.append((second.name, sheet.weights, sheet.code_hash, sheet.shard_digest, scores))
        second.unlink()
    return found


@pytest.mark.slow
def test_all_ranks_score_as_one_process_does(desk, project, run: RunDirectory) -> None:
    """Lines of every kind, a mixture that counts tokens, and the shards of a run."""
    desk.write("a.jsonl", *LINES)
    desk.write("b.jsonl", *({"completion": r"\boxed{1}", "answer": "1", "num_tokens": n % 5} for n in range(20)))
    project.file.write_text(project.file.read_text() + TOKENS)
    own = run.root.parent / "run.toml"
    own.write_text(f'[[rewards]]\nuse = "{desk.folder}/own.py:grade"\nweight = 1.0\n')
    commands = [
        ["a.jsonl", "--rewards", desk.rewards],
        ["b.jsonl", "--rewards", project.file],
        [run.root, "--rewards", own],
    ]
    wanted = []
    for number, line in enumerate(commands[:2]):
        wanted.append(counts(desk.score(*line, "--output", f"{number}-0.jsonl")))
    wanted.append(counts(desk.score(*commands[2])))
    sealed = take_second_scores(run)
    for size in (1, 4):
        outputs = [["--output", desk.folder / f"{number}-{size}.jsonl"] for number in range(2)]
        given = [[*line, *output] for line, output in zip(commands, [*outputs, []], strict=True)]
        said = over_ranks(desk.folder, size, *given)
        assert [counts(first[1]) for first, *_ in said] == wanted
        assert [first[0] for first, *_ in said] == [0, 0, 0]
        assert [others for _, *others in said] == [[(0, "")] * (size - 1)] * 3
        for number in range(2):
            assert scores_of(desk.folder / f"{number}-{size}.jsonl") == scores_of(desk.folder / f"{number}-0.jsonl")
        assert take_second_scores(run) == sealed


@pytest.mark.slow
def test_what_ends_rank_0_ends_all_with_its_exit_code_and_is_said_once(desk) -> None:
    (desk.folder / "broken.py").write_text("def grade(completion, gold): ...\n\nraise OSError('no such disk')\n")
    broken = desk.folder / "broken.toml"
    broken.write_text('[[rewards]]\nuse = "broken.py:grade"\nweight = 1.0\n')
    good = desk.write("good.jsonl", LINES[0])
    failing = desk.write("failing.jsonl", LINES[1])
    bad = desk.write("bad.jsonl", LINES[0], "nonsense")
    all_failed, unloadable, tried, piped, no_rewards, unreadable = over_ranks(
        desk.folder, 4, [failing, "--rewards", desk.rewards], [good, "--rewards", broken],
        [good, "--rewards", desk.rewards, "--dry-run"], ["-"], [good], [bad, "--rewards", desk.rewards], code=2,
    )  # fmt: skip
    assert [code for code, _ in all_failed] == [1] * 4
    assert all_failed[0][1].endswith("FAILED    no completion could be scored\n")
    ended = (unloadable, tried, piped, no_rewards, unreadable)
    assert [code for said in ended for code, _ in said] == [2] * 20
    assert [text for said in (all_failed, *ended) for _, text in said[1:]] == [""] * 18
    assert unloadable[0][1].startswith("ranks 0, 1, 2, 3: ConfigError: ")
    assert unloadable[0][1].count("no such disk") == 1
    assert tried[0][1] == "--dry-run tries a few completions with one worker, in one process: leave out --mpi.\n"
    assert piped[0][1].startswith("--mpi does not take standard input")
    assert no_rewards[0][1].startswith(f"{good} has no rewards of its own")
    assert unreadable[0][1] == "bad.jsonl:2: not JSON at column 1: Expecting value\n"


@pytest.mark.slow
def test_when_a_rank_is_killed_all_processes_end(desk) -> None:
    (desk.folder / "own.py").write_text(
        "import os, time\n\n\ndef grade(completion, gold):\n"
        "    open(f'{os.path.dirname(__file__)}/{os.getpid()}.pid', 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
    )
    desk.rewards.write_text('[[rewards]]\nuse = "own.py:grade"\nweight = 1.0\n[scoring]\nlimit_s = 60.0\n')
    path = desk.write("a.jsonl", *({"completion": str(number), "answer": "1"} for number in range(50)))
    line = ["score", str(path), "--rewards", str(desk.rewards), "--workers", "1", "--mpi"]
    process = launch_ranks(WORKER, 4, desk.folder / "mpirun.log", desk.folder, json.dumps([line]))
    try:
        assert wait_until(lambda: len(list(desk.folder.glob("*.pid"))) == 8, limit_s=20), "a rank has nothing to score"
        started = {file.stem: int(file.read_text() or 0) for file in desk.folder.glob("*.pid")}
        os.kill(started["2"], signal.SIGKILL)
        assert process.wait(timeout=15) != 0
        assert wait_until(lambda: not any(map(is_running, started.values())), limit_s=10), "a process is left"
    finally:
        process.kill()


@pytest.mark.parametrize(("size", "rank"), TASKS)
def test_several_tasks_without_mpi_are_refused_once(
    desk, size: str, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = desk.write("a.jsonl", LINES[0])
    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(rank, "0")
    said = desk.score(path, code=2)
    assert said == ("4 tasks of `towline score` were started, and each would score everything: add --mpi, so that they "
                    "share the work, or start one task.\n")  # fmt: skip
    monkeypatch.setenv(rank, "3")
    assert desk.score(path, code=2) == ""


@pytest.mark.slow
def test_tasks_that_are_worlds_of_one_are_refused_once(desk, monkeypatch: pytest.MonkeyPatch) -> None:
    path = desk.write("a.jsonl", LINES[0])
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    said = desk.score(path, "--mpi", code=2)
    assert said.startswith("MPI: 4 tasks were started, but each sees a world of 1 and would score everything.")
    assert "`srun --mpi=list`" in said
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert desk.score(path, "--mpi", code=2) == ""


def test_a_batch_script_is_one_task_however_many_its_job_may_start(desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert desk.score(desk.write("a.jsonl", LINES[0])).startswith("a.jsonl   1 completions")
