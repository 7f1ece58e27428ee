"""The breakdown of a start, by times worked out by hand."""

from typing import Any

import pytest

from towline.jobs.start_up import Milestones, has_started, start_up_lines

MILESTONES = Milestones(began=100.0, supervised=100.5, asked=100.6, stored=102.6, launched=102.7)


def beat(**phases: float) -> dict[str, Any]:
    return {"phases": {name.replace("_", " "): when for name, when in phases.items()}}


def beats() -> dict[str, Any]:
    return {
        # The second rank comes 1.5 s later; they then need 0.2 s to meet.
        "trainer.0": beat(began=103.0, start=108.0, join=108.1, load=109.8, loaded=112.0, ready=120.4),
        "trainer.1": beat(began=103.2, start=109.5, join=109.6, load=109.8, loaded=112.5),
        "rollout.0": beat(began=103.1, start=110.0, load=110.1, wait_for_the_trainer=119.0),
        "rollout.1": beat(began=103.1, start=110.0, load=110.1, wait_for_the_trainer=120.0),
        "scorer.0": beat(began=103.0, start=104.0),
    }


def test_what_is_ours_is_apart_from_imports_loading_and_slurm():
    # supervisor 0.1 + 0.1, ranks 0.2, from the last engine's load to ready 0.4
    assert list(start_up_lines(MILESTONES, beats())) == [
        "start-up 20.4 s, of which 0.8 s are Towline's own: "
        "supervisor 0.2, ranks meet 0.2, trainer and engines meet 0.4",
        "  imports of the supervisor 0.5 s, control store (imports torch) 2.0 s, processes begin in 0.5 s",
        "  trainer   imports 6.3 s   loads 2.7 s",
        "  engines   imports 6.9 s   load 9.9 s",
    ]


def test_a_run_has_started_when_its_first_rank_is_ready():
    assert has_started(beats())
    later = beats()
    del later["trainer.0"]["phases"]["ready"]
    assert not has_started(later)
    assert not has_started({})


@pytest.mark.parametrize(("name", "phase"), [("trainer.1", "loaded"), ("rollout.1", "wait for the trainer")])
def test_a_heartbeat_that_lags_behind_is_waited_for(name: str, phase: str):
    behind = beats()
    del behind[name]["phases"][phase]
    assert not has_started(behind)
