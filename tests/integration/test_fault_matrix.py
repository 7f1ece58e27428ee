"""Kill or stop any process of a run at any moment: it goes on, or it ends in time, says who was first, and resumes.

In the end the bits are those of a run that nothing happened to. The trainer is real (two ranks of DeepSpeed under
mpirun), so are supervisor, store and scorer; the engine is scripted, which makes a run take seconds.
"""

import signal
import time
from pathlib import Path

import pytest

from integration.bits import differences
from integration.fault_runs import HELD_BY, NUM_STEPS, STALL_S, begun, held
from integration.runs import MODEL, LiveRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
ENDED_WITHIN_S = 60.0
SURVIVED = ("rollout.0", "scorer.0")

KILLS = [(name, signal.SIGKILL) for name in ("supervisor", "store", "rollout.0", "scorer.0", "trainer.0", "trainer.1")]
STOPS = [(name, signal.SIGSTOP) for name, _ in KILLS]
IN_CI = {
    ("supervisor", signal.SIGKILL, "publishing"),
    ("store", signal.SIGKILL, "generating"),
    ("rollout.0", signal.SIGKILL, "publishing"),
    ("scorer.0", signal.SIGKILL, "generating"),
    ("trainer.1", signal.SIGKILL, "training"),
    ("rollout.0", signal.SIGSTOP, "publishing"),
    ("trainer.1", signal.SIGSTOP, "training"),
}
MATRIX = [
    pytest.param(
        name, number, moment,
        id=f"{name}-{number.name}-{moment}",
        marks=() if (name, number, moment) in IN_CI else pytest.mark.matrix,
    )
    for name, number in KILLS + STOPS
    for moment in HELD_BY
]  # fmt: skip


@pytest.mark.parametrize(("name", "number", "moment"), MATRIX)
def test_after_a_fault_a_run_has_the_bits_of_an_undisturbed_one(
    undisturbed: Path, tmp_path: Path, name: str, number: signal.Signals, moment: str
):
    with begun(tmp_path) as run:
        with held(run, moment, for_good=number is signal.SIGSTOP and name == HELD_BY[moment]):
            run.find(name).send_signal(number)
            struck = time.monotonic()
        if name == "supervisor":
            _without_supervisor(run, number)
        elif name in SURVIVED:
            assert run.wait() == 0, run.text
            assert f"! {name}" in run.text
        else:
            code = run.wait()
            limit = ENDED_WITHIN_S + (STALL_S if number is signal.SIGSTOP else 0)
            assert time.monotonic() - struck < limit, run.text
            assert code == 3, run.text
            assert f"live FAILED: {name}" in run.text
            assert "towline resume" in run.text
            assert run.state["status"] == "failed"
        run.wait_until_gone(30)
        # With -rP these lines are the table of docs/reliability.md.
        end = f"ended after {time.monotonic() - struck:.1f} s" if run.state["status"] != "done" else "went on"
        print(f"FAULT {name} {number.name} {moment}: {end}")
        if run.state["status"] != "done":
            run.resume()
            assert run.wait() == 0, run.text
        assert run.state["status"] == "done"
        assert differences(undisturbed, run.folder) == []
        assert not list(run.folder.rglob(".*.tmp"))


def _without_supervisor(run: LiveRun, number: signal.Signals) -> None:
    """Killed: the others end by themselves. Stopped: they go on, and it finds them done."""
    if number is signal.SIGKILL:
        run.process.wait()
        run.wait_until_gone(ENDED_WITHIN_S)
        return
    try:
        run.wait_until(lambda: len(run.rows) == NUM_STEPS, "last step, without a supervisor")
    finally:
        run.process.send_signal(signal.SIGCONT)
    assert run.wait() == 0, run.text


def test_an_engine_killed_between_the_first_byte_and_the_commit_is_replaced(undisturbed: Path, tmp_path: Path):
    with begun(tmp_path) as run:
        store, trainer = run.store(), run.find("trainer.0")
        for _ in range(20):
            serial = store.get("publish")["serial"] + 1
            store.wait(f"form/{serial}", 30)
            trainer.send_signal(signal.SIGSTOP)
            is_under_way = store.get(f"outcome/{serial}") is None
            if is_under_way:
                run.find("rollout.0").kill()
            trainer.send_signal(signal.SIGCONT)
            if is_under_way:
                break
        assert is_under_way
        assert run.wait() == 0, run.text
        assert "! rollout.0: killed by SIGKILL" in run.text
        assert differences(undisturbed, run.folder) == []
