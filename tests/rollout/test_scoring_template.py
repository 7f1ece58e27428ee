"""Rewards are loaded once, and workers are copies of the process that did; or where that is not safe, they are not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scoring_pools import children, is_running, rewards, wait_until
from towline.rollout import scoring
from towline.rollout.scoring import ScoringPool
from towline.storage.errors import ConfigError
from towline.storage.records import ScoreStatus

LIMIT_S = 0.2
GRADE = """
import os, time
from pathlib import Path
with (Path(__file__).parent / "loads").open("a") as file:
    file.write("x")

def grade(completion, gold):
    if completion == "leave":
        os._exit(1)
    if completion == "hang":
        time.sleep(60)
    return len(completion)
"""


def _scores(pool: ScoringPool) -> list[tuple[ScoreStatus, float]]:
    items = [("a", ""), ("hang", ""), ("leave", ""), ("ab", ""), ("hang", ""), ("abc", "")]
    return [(score.status, score.total) for score in pool.score_many(items)]


def _check(scores: list[tuple[ScoreStatus, float]]) -> None:
    statuses = [status.name for status, _ in scores]
    assert statuses == ["OK", "TIMEOUT", "FAILED", "OK", "TIMEOUT", "OK"]
    assert [total for status, total in scores if status is ScoreStatus.OK] == [1.0, 2.0, 3.0]


def test_rewards_are_loaded_once_however_many_workers_are_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GRADE)
    with ScoringPool(rewards("mine.py:grade"), 2, LIMIT_S, tmp_path) as pool:
        _check(_scores(pool))
        assert pool.why_slow_starts == ""
    assert (tmp_path / "loads").read_text() == "x"


def test_a_file_that_starts_threads_is_loaded_by_each_worker(tmp_path: Path) -> None:
    threads = "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
    (tmp_path / "mine.py").write_text(threads + GRADE)
    before = children()
    with ScoringPool(rewards("mine.py:grade"), 1, LIMIT_S, tmp_path) as pool:
        _check(_scores(pool))
        assert pool.why_slow_starts.startswith("loading rewards mine.py:grade starts threads (1: ")
        assert len(pool.code_hash) == 32
    # By the template, by the first worker, by those after two time-outs and after two ends.
    assert (tmp_path / "loads").read_text() == "x" * 6
    assert children() <= before


def test_what_loading_starts_lives_as_long_as_the_pool(tmp_path: Path) -> None:
    start = "import subprocess\nSERVER = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    (tmp_path / "mine.py").write_text(start + GRADE.replace("len(completion)", "SERVER.pid"))
    with ScoringPool(rewards("mine.py:grade"), 1, LIMIT_S, tmp_path) as pool:
        first, hung, then = pool.score_many([("a", ""), ("hang", ""), ("b", "")])
        server = int(then.total)
        assert (first.total, hung.status) == (server, ScoreStatus.TIMEOUT)
        assert is_running(server)
    assert not is_running(server)


def test_a_file_that_changed_before_it_was_loaded_again_ends_the_scoring(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GRADE)
    others = children()
    with ScoringPool(rewards("mine.py:grade"), 1, 60.0, tmp_path) as pool:
        path.write_text(GRADE + "\n\n")

        def kill_template(num_done: int, num_items: int) -> None:
            for child in children() - others:
                os.kill(child, signal.SIGKILL)

        with pytest.raises(ConfigError, match="are others than those this pool loaded first"):
            pool.score_many([("hang", "")], kill_template)


def test_rewards_that_do_not_load_in_time_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "START_LIMIT_S", 0.3)
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(600)\n")
    before = children()
    with pytest.raises(ConfigError, match=r"rewards mine\.py:grade: nothing came within 0\.3 s while a worker loaded"):
        ScoringPool(rewards("mine.py:grade"), 1, LIMIT_S, tmp_path)
    assert wait_until(lambda: children() <= before)


@pytest.mark.parametrize("moment", ["load", "free", "hang", "daemon"])
def test_everything_ends_with_a_parent_that_is_killed(tmp_path: Path, moment: str) -> None:
    note = f"import os, time\nfrom pathlib import Path\nPIDS = Path({str(tmp_path)!r}) / 'pids'\n"
    grade = (
        "def note():\n    with PIDS.open('a') as file:\n        file.write(f'{os.getpid()}\\n')\n"
        "note()\n"
        "def grade(completion, gold):\n"
        "    note()\n"
        "    if completion == 'daemon' and os.fork() == 0:\n"
        "        os.setsid()\n        note()\n        time.sleep(600)\n"
        "    time.sleep(0 if completion == 'free' else 600)\n    return 1\n"
    )
    wait = "note()\ntime.sleep(600)\n" if moment == "load" else ""
    (tmp_path / "mine.py").write_text(note + grade + wait)
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom towline.rollout.rewards.config import RewardConfig\n"
        "from towline.rollout.scoring import ScoringPool\n"
        "pool = ScoringPool([RewardConfig(use='mine.py:grade', weight=1.0)], 1, 600.0, Path(sys.argv[1]))\n"
        "pool.score_many([(sys.argv[2], '')])\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), moment])
    try:
        num_noted = {"load": 2, "free": 2, "hang": 2, "daemon": 3}[moment]
        assert wait_until(lambda: len(_noted(tmp_path)) >= num_noted, 20.0)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not any(map(is_running, _noted(tmp_path))))


def _noted(folder: Path) -> list[int]:
    pids = folder / "pids"
    return list(map(int, pids.read_text().split())) if pids.exists() else []
