"""What the scores of reward models say of a policy that has found what they overrate, by hand-worked rows."""

import pytest

from towline.trainer.over_optimisation import WINDOW_STEPS, OverOptimisation


def row(**parts):
    """Part → its mean and its spread in a step."""
    return {
        name: value
        for part, (mean, spread) in parts.items()
        for name, value in ((f"reward/part/{part}", mean), (f"reward/spread/{part}", spread))
    }


def verdicts(rows, trained=("liked",), watching=()):
    """After each step: whether the scores have come together, and whether a watcher dissents."""
    watch = OverOptimisation(trained, watching)
    found = []
    for step in rows:
        watch.note(step)
        found.append((watch.narrowing(), watch.dissent()))
    return found


def first(sentences):
    return next((step for step, sentence in enumerate(sentences) if sentence is not None), None)


def narrowing(rows, **names):
    return [sentence for sentence, _ in verdicts(rows, **names)]


def dissent(rows):
    return [sentence for _, sentence in verdicts(rows, watching=("watcher",))]


WIDE, NARROW = row(liked=(1.0, 2.0)), row(liked=(2.5, 0.9))


def test_scores_that_rise_and_come_together_fire():
    """With k narrow ones among the last ten: a spread of 2 - 0.11 k, which is below 0.8 of 2 for k = 4, and a mean
    of 1 + 0.15 k, which is a quarter of a spread higher, 0.5, for k = 4 too."""
    found = narrowing([WIDE] * WINDOW_STEPS + [NARROW] * WINDOW_STEPS + [NARROW] * 5)
    assert first(found) == 2 * WINDOW_STEPS - 1
    assert "come together, to a spread of 0.9 from 2, while their mean rose from 1 to 2.5" in found[-1]
    assert all(sentence is not None for sentence in found[2 * WINDOW_STEPS - 1 :])
    longer = narrowing([WIDE] * 2 * WINDOW_STEPS + [NARROW] * WINDOW_STEPS)
    assert first(longer) == 2 * WINDOW_STEPS + 3


@pytest.mark.parametrize(
    "later",
    [
        row(liked=(2.5, 1.61)),  # 0.805 of the spread is left
        row(liked=(1.49, 1.0)),  # a rise of 0.245 of it
        row(liked=(-2.5, 1.0)),  # a fall
        row(liked=(9.0, 2.5)),
    ],
)
def test_a_rise_or_a_narrowing_alone_does_not(later):
    assert first(narrowing([WIDE] * 30 + [later] * 30)) is None


def test_a_slow_narrowing_is_measured_against_the_widest_window():
    """Ever less in 100 steps, after it grew at first: no two neighbouring windows differ by much."""
    grow = [row(liked=(0.0, 1.0 + 0.05 * step)) for step in range(20)]
    shrink = [row(liked=(0.02 * step, 2.0 - 0.01 * step)) for step in range(100)]
    found = first(narrowing(grow + shrink))
    assert found is not None
    assert first(narrowing(shrink[:40])) is None


def test_scores_that_move_to_and_fro_are_silent():
    rows = [row(liked=(1.0 + (0.6 if step % 3 else -0.6), 1.0 + 0.3 * (step % 2))) for step in range(200)]
    assert first(narrowing(rows)) is None


def test_the_sentence_names_the_watchers_and_of_several_models_the_one():
    rows = [row(other=(0.0, 1.0), liked=(1.0, 2.0), judge=(0.0, 1.0))] * 20
    rows += [row(other=(0.0, 1.0), liked=(2.5, 1.0), judge=(1.0, 1.0))] * 10
    found = narrowing(rows, trained=("other", "liked"), watching=("judge",))
    assert found[-1].startswith("the scores of liked have come together")
    assert "at whether judge rose with it" in found[-1]


def test_a_watcher_that_rises_too_is_content():
    rows = [row(liked=(0.1 * step, 1.0), watcher=(0.01 * step, 1.0)) for step in range(100)]
    assert first(dissent(rows)) is None


def test_a_watcher_that_stands_still_dissents_once_the_other_has_risen():
    """The first window, steps 0 to 9, stays the best: its mean is 0.45. A window around 0.95 ends at step 14, but it
    overlaps; the first that does not is of steps 10 to 19."""
    rows = [row(liked=(0.1 * step, 1.0), watcher=(3.0, 1.0)) for step in range(100)]
    found = dissent(rows)
    assert first(found) == 2 * WINDOW_STEPS - 1
    assert (
        "liked have risen from 0.45 to 1.45 while those of watcher, which is not trained on, went from 3 to 3"
        in (found[2 * WINDOW_STEPS - 1])
    )


def test_a_watcher_that_falls_after_it_rose_dissents():
    """Gao et al., figure 1. It is best in steps 21 to 30, then it falls, and stays above where it began."""
    up = [row(liked=(0.02 * step, 1.0), watcher=(0.02 * step, 1.0)) for step in range(30)]
    down = [row(liked=(0.6 + 0.02 * step, 1.0), watcher=(0.6 - 0.005 * step, 1.0)) for step in range(60)]
    found = first(dissent(up + down))
    assert found is not None
    assert 40 < found < 70
    assert first(dissent(up)) is None


def test_where_nothing_rises_nobody_dissents():
    rows = [row(liked=(1.0 - 0.01 * step, 1.0), watcher=(1.0 - 0.02 * step, 1.0)) for step in range(100)]
    assert first(dissent(rows)) is None


def test_a_step_without_any_score_is_left_out():
    nothing = row(liked=(float("nan"), float("nan")))
    rows = [one for wide in [WIDE] * 20 + [NARROW] * 10 for one in (wide, nothing, {})]
    assert first(narrowing(rows)) == 3 * 23


def test_without_reward_models_nothing_is_said():
    assert first(narrowing([WIDE] * 20 + [NARROW] * 20, trained=())) is None
