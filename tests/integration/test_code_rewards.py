"""GRPO learns from programs that are run: over two seeds with real parts (`learning.py`), and in one whole run.

The model completes functions as two examples in the prompt ask, and is judged by tests with other numbers.
"""

import json
from collections import Counter

import psutil
import pytest

from integration.learning import TASKS, learn, pooled_difference, table
from integration.runs import ROOT, LiveRun
from towline.rollout.evaluation.statistics import mean_interval
from towline.rollout.rewards.code_tests import grade
from towline.rollout.sandbox.sandbox import sandbox
from towline.storage.ledger import read_scored_shard, sealed_chunks
from towline.storage.records import ScoreStatus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / "models/tiny-code").is_dir(), reason="models/tiny-code is missing: run env/setup.sh"
    ),
]
EXPERIMENT = TASKS["code"][0]
SEEDS = (0, 1)
NUM_STEPS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run, with the processes below it that were seen after its first step."""
    run = LiveRun(tmp_path_factory.mktemp("code"), f"steps={NUM_STEPS}", experiment=EXPERIMENT)
    try:
        run.wait_until(lambda: run.rows, "first step")
        run.seen = psutil.Process(run.process.pid).children(recursive=True)
        run.commands = [_command(process) for process in run.seen]
        run.code = run.wait()
        yield run
    finally:
        run.kill()


def _command(process: psutil.Process) -> str:
    """Empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _sheets(run, step):
    return [read_scored_shard(path)[1] for path in sealed_chunks(run.folder / "rollouts", step)]


def _groups(run, steps):
    """Rewards of the completions of each prompt."""
    for step in steps:
        for path in sealed_chunks(run.folder / "rollouts", step):
            shard, sheet = read_scored_shard(path)
            totals = iter(score.total for score in sheet.scores)
            yield from ([next(totals) for _ in group.completions] for group in shard.groups)


def test_the_tests_of_the_data_pass_what_they_ask_for_and_nothing_else():
    rows = [json.loads(line) for line in (ROOT / "data/code/train.jsonl").read_text().splitlines()]
    answers = sorted({row["answer"] for row in rows})
    assert len(answers) == 8
    for row in rows[:10]:
        gold = json.dumps(row["tests"])
        assert [answer for answer in answers if grade(f" {answer}", gold).value == 1.0] == [row["answer"]]


def test_more_held_out_functions_pass_tests_that_were_not_trained_on(tmp_path):
    learned = learn(["GRPO"], SEEDS, tmp_path, "code")
    print(f"\n{table(learned)}")
    assert all(len(one.before) == len(one.after) == 200 for one in learned["GRPO"])
    assert all(row["reward/failed"] == 0 for one in learned["GRPO"] for row in one.rows)
    assert pooled_difference(learned["GRPO"]).low > 0


def test_the_mean_reward_of_a_whole_run_rises(run):
    assert run.code == 0, run.text
    first, last = (mean_interval(list(_groups(run, steps))) for steps in (range(2), range(NUM_STEPS - 2, NUM_STEPS)))
    assert first.high < last.low, f"{first} to {last}"


def test_every_completion_has_a_score_and_wrong_programs_have_a_reason(run):
    sheets = [sheet for step in range(NUM_STEPS) for sheet in _sheets(run, step)]
    scores = [score for sheet in sheets for score in sheet.scores]
    assert len(scores) == NUM_STEPS * 16 * 8
    assert {score.status for score in scores} == {ScoreStatus.OK}
    assert all(score.parts == {"code_tests": score.total} for score in scores)
    whys = Counter(score.detail for score in scores if score.total == 0)
    assert whys.pop("", 0) == 0
    assert {score.detail for score in scores if score.total == 1} == {""}
    for why in ("test 1 of 1: AssertionError", "does not load: SyntaxError", "the program raised NameError: name 'x"):
        assert any(why in detail for detail in whys), whys


def test_the_ledger_says_what_shut_the_programs_in(run):
    isolations = {sheet.isolation for step in range(NUM_STEPS) for sheet in _sheets(run, step)}
    assert isolations == {str(sandbox().isolation)}
    assert "seccomp" in isolations.pop()


def test_no_process_of_the_programs_is_left(run):
    assert any("towline.rollout.sandbox.zygote" in command for command in run.commands), run.commands
    _, left = psutil.wait_procs(run.seen, timeout=10)
    assert [command for process in left if (command := _command(process))] == []
    assert run.processes() == []
