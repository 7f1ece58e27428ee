"""Each wire fires by a planted fault, once, and is silent in a healthy run."""

import pytest

from towline.storage.metrics import check_names
from towline.trainer.tripwires import EQUAL_STEPS, FIRST_STEPS, SCORING_STEPS, STILL_STEPS, Tripwires

HEALTHY = {
    "mismatch/k3": 1e-9,
    "loss/clipped_first": 0.0,
    "staleness/max": 0.0,
    "reward/useful_groups": 0.6,
    "reward/mean": 0.4,
    "loss/entropy": 1.2,
    "loss/kl": 0.01,
    "loss/gradient_norm": 0.3,
    "loss/learning_rate": 1e-6,
    "weights/moved": 1e-6,
    "check/fixed_gradient": 0.0,
    "check/fixed_graphs": 0.0,
    "check/kl_effect": 0.01,
    "check/split_logprob": 1e-6,
    "check/split_loss": 1e-6,
    "check/still_logprob": 0.0,
}


def wires(**settings) -> Tripwires:
    usual = {"engine_precision": "float32", "kl_beta": 0.04, "precision": "float32"}
    return Tripwires(**(usual | {"is_exact": True} | settings))


def judge(*rows, **settings) -> list[tuple[set[str], list[str]]]:
    """Of each step: the wires whose rule holds, and what was said."""
    judged = wires(**settings)
    found = []
    for step, row in enumerate(rows):
        metrics, sentences = judged.judge(step, HEALTHY | row)
        found.append(({name.removeprefix("tripwire/") for name, value in metrics.items() if value}, sentences))
    return found


def test_every_wire_is_a_metric_with_a_meaning():
    metrics, _ = wires().judge(0, HEALTHY)
    check_names(metrics)


def test_a_healthy_run_is_silent():
    learning = [{"loss/entropy": 1.2 - 0.05 * step, "loss/kl": 0.01 * step} for step in range(20)]
    assert judge(*learning) == [(set(), [])] * 20


@pytest.mark.parametrize(
    ("row", "name", "sentence"),
    [
        ({"mismatch/k3": 2e-4}, "mismatch", "engine and trainer disagree by 0.0002 nats a token"),
        ({"loss/clipped_first": 0.02}, "first_clipped", "2.0 % of the tokens are clipped before the first inner step"),
        ({"weights/moved": 0.0}, "still", "the optimiser does not reach them"),
        ({"check/fixed_gradient": 1e-3}, "fixed_gradient", "gradient (norm 0.001) in what must be constant"),
        ({"check/fixed_graphs": 2.0}, "fixed_gradient", "2 of these tensors carry one on"),
        ({"check/kl_effect": 0.0}, "kl_effect", "changes neither gradient nor advantages"),
        ({"check/split_logprob": 0.5}, "split", "other log-probs alone, by 0.5 nats a token"),
        ({"check/split_loss": 0.2}, "split", "another loss, by 0.2 of it"),
        ({"check/still_logprob": 1e-7}, "still_step", "changed log-probs by up to 1e-07 nats"),
    ],
)
def test_a_fault_of_one_step_fires_its_wire_alone(row, name, sentence):
    (before, fault) = judge({}, row)
    assert before == (set(), [])
    assert fault[0] == {name}
    (said,) = fault[1]
    assert said.startswith("step 1: ")
    assert sentence in said


def test_a_wire_speaks_once_until_it_was_silent_again():
    rows = ({"mismatch/k3": 2e-4}, {"mismatch/k3": 3e-4}, {}, {"mismatch/k3": 4e-4})
    said = [sentences for _, sentences in judge(*rows)]
    assert [len(sentences) for sentences in said] == [1, 0, 0, 1]


def test_the_policy_has_drifted_once_it_was_far_from_its_reference_for_three_steps():
    judged = judge(*({"loss/kl": kl} for kl in (0.7, 0.9, 0.4, 0.8, 0.7, 0.9, 0.6)))
    assert [names for names, _ in judged] == [set()] * 5 + [{"drift"}] * 2
    (said,) = judged[5][1]
    assert said.startswith("step 5: for 3 steps the policy has been 0.7 nats a token or more away from its reference")
    assert judged[6][1] == []


def test_bfloat16_engines_are_allowed_their_noise():
    assert judge({"mismatch/k3": 3e-3}, engine_precision="bfloat16") == [(set(), [])]
    assert judge({"mismatch/k3": 3e-2}, engine_precision="bfloat16")[0][0] == {"mismatch"}


def test_bfloat16_trainers_may_round_otherwise_alone():
    noise = {"check/split_logprob": 0.03, "check/split_loss": 0.03}
    assert judge(noise, precision="bfloat16") == [(set(), [])]
    assert judge(noise)[0][0] == {"split"}


def test_where_passes_are_not_exact_a_still_step_may_round():
    assert judge({"check/still_logprob": 1e-6}, is_exact=False) == [(set(), [])]
    assert judge({"check/still_logprob": 0.02}, is_exact=False)[0][0] == {"still_step"}


def test_a_policy_at_its_reference_has_no_kl_that_could_have_an_effect():
    assert judge({"loss/kl": 0.0, "check/kl_effect": float("nan")}) == [(set(), [])]


def test_clipping_of_stale_tokens_is_what_clips_are_for():
    assert judge({"loss/clipped_first": 0.1, "staleness/max": 1.0}) == [(set(), [])]


def test_equal_rewards_fire_after_some_steps_in_a_row():
    equal = {"reward/useful_groups": 0.0}
    found = judge(*[equal] * (EQUAL_STEPS - 1), {}, *[equal] * EQUAL_STEPS)
    assert [names for names, _ in found[:-1]] == [set()] * (2 * EQUAL_STEPS - 1)
    assert found[-1][0] == {"equal_rewards"}
    assert "nothing is learned" in found[-1][1][0]


def test_with_dynamic_sampling_a_useful_group_of_any_wave_counts():
    first_wave_equal = {"reward/useful_groups": 0.0, "rollouts/useful": 3.0}
    assert judge(*[first_wave_equal] * EQUAL_STEPS)[-1] == (set(), [])
    assert judge(*[{"reward/useful_groups": 0.0, "rollouts/useful": 0.0}] * EQUAL_STEPS)[-1][0] == {"equal_rewards"}


def test_a_collapse_of_the_entropy_is_measured_against_the_first_steps():
    rows = [{"loss/entropy": 1.0}] * FIRST_STEPS + [{"loss/entropy": 0.06}, {"loss/entropy": 0.04}]
    assert [names for names, _ in judge(*rows)][-2:] == [set(), {"entropy"}]


def test_a_nan_among_the_first_steps_does_not_blind_the_entropy_wire():
    """As the mean 0.5 of 0.2, 0.4 and 0.9: what is no number is in no mean."""
    first = [{"loss/entropy": value} for value in (0.2, float("nan"), 0.4, float("nan"), 0.9)]
    found = judge(*first, {"loss/entropy": 0.05 * 0.5 + 1e-3}, {"loss/entropy": 0.05 * 0.5 - 1e-3})
    assert [names for names, _ in found][-2:] == [set(), {"entropy"}]
    assert "has fallen from 0.5 to 0.024" in found[-1][1][0]


def test_a_policy_that_never_had_entropy_does_not_collapse():
    rows = [{"loss/entropy": 0.01}] * FIRST_STEPS + [{"loss/entropy": 1e-5}]
    assert judge(*rows)[-1] == (set(), [])


def test_a_reference_that_follows_the_policy_is_noticed():
    """At the first step both are the same model, and 0 is right."""
    found = judge({"loss/kl": 0.0}, *[{"loss/kl": 0.0}] * STILL_STEPS)
    assert [names for names, _ in found] == [set()] * STILL_STEPS + [{"kl_still"}]
    assert judge({"loss/kl": 0.0}, *[{"loss/kl": 0.0}] * STILL_STEPS, kl_beta=0.0)[-1] == (set(), [])


def test_without_a_learning_rate_nothing_has_to_move():
    warm_up = {"loss/learning_rate": 0.0, "weights/moved": 0.0, "loss/kl": 0.0}
    assert judge(*[warm_up] * 6) == [(set(), [])] * 6


def test_values_that_are_not_numbers_do_not_fire_a_wire_by_themselves():
    """They are told where they arise; a step without tokens of its own version has no mismatch."""
    nan = float("nan")
    assert judge({"mismatch/k3": nan, "loss/clipped_first": nan, "loss/kl": nan}) == [(set(), [])]


def test_after_a_resume_it_judges_by_the_steps_before_and_says_nothing_twice():
    judged = wires()
    # A value that was not finite is null in the file.
    judged.recall([HEALTHY | {"loss/entropy": 1.0, "mismatch/k3": None}] * FIRST_STEPS)
    judged.recall([HEALTHY | {"loss/kl": 0.7}] * 3)
    metrics, said = judged.judge(8, HEALTHY | {"loss/kl": 0.7, "loss/entropy": 0.04})
    assert metrics["tripwire/drift"] == metrics["tripwire/entropy"] == 1.0
    assert ["entropy has fallen from 1 to 0.04" in sentence for sentence in said] == [True]


def test_over_optimisation_of_a_reward_model_has_two_wires():
    """See test_over_optimisation. A resumed run knows the steps before."""
    models = {"trained_models": ("liked",), "watching_models": ("watcher",)}
    before = {"reward/part/liked": 0.0, "reward/spread/liked": 2.0, "reward/part/watcher": 1.0,
              "reward/spread/watcher": 1.0}  # fmt: skip
    after = before | {"reward/part/liked": 3.0, "reward/spread/liked": 0.9}
    judged = wires(**models)
    judged.recall([HEALTHY | before] * 20 + [HEALTHY | after] * 2)
    found = [judged.judge(22 + step, HEALTHY | after) for step in range(3)]
    assert [metrics["tripwire/narrowing_scores"] for metrics, _ in found] == [0.0, 1.0, 1.0]
    assert [metrics["tripwire/dissent"] for metrics, _ in found] == [1.0, 1.0, 1.0]
    assert [sentences for _, sentences in found][2] == []
    assert found[1][1][0].startswith("step 23: the scores of liked have come together")
    assert judge(*[before] * 20, *[after] * 20)[-1] == (set(), [])


def test_an_engine_that_computes_no_logprobs_of_the_policy_is_not_compared_with_it():
    assert judge({"mismatch/k3": 4.0, "loss/clipped_first": 0.9}, engine_precision=None) == [(set(), [])]


WAITS = {"seconds/step": 10.0, "seconds/wait": 6.0, "seconds/wait_scores": 4.0, "scoring/p99_s/format": 0.001,
         "scoring/p99_s/judge": 2.5}  # fmt: skip


def test_a_trainer_that_waits_for_scores_is_told_so_once():
    found = judge(*[WAITS] * 12)
    assert [names for names, _ in found] == [set()] * (SCORING_STEPS - 1) + [{"scoring"}] * (13 - SCORING_STEPS)
    (sentence,) = [sentence for _, sentences in found for sentence in sentences]
    assert sentence.startswith(
        "step 4: for 5 steps the trainer has waited longer for scores than for generation (4.0 s of 10.0 s a step): "
        "scoring is the bottleneck. The slowest reward is judge, p99 2.5 s. More workers: local.scorers"
    )


@pytest.mark.parametrize(
    "row",
    [
        {"seconds/wait_scores": 2.9},  # 3.1 s for generation
        {"seconds/wait": 0.9, "seconds/wait_scores": 0.9},  # of 10 s
        {"seconds/wait": 0.0, "seconds/wait_scores": 0.0},
    ],
)
def test_scoring_that_costs_less_is_not_worth_a_word(row):
    assert judge(*[WAITS | row] * 10) == [(set(), [])] * 10
    assert judge(*([WAITS] * 4 + [WAITS | row]) * 3) == [(set(), [])] * 15
