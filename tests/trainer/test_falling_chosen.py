from towline.trainer.falling_chosen import FALLING_STEPS, FallingChosen


def said(rewards):
    wire = FallingChosen()
    return [wire.judge(step, reward) for step, reward in enumerate(rewards)]


def test_it_speaks_once_ten_steps_were_below_the_reference_and_is_silent_until_it_was_not():
    sentences = said([0.1] + [-0.2] * (FALLING_STEPS + 2) + [0.3] + [-0.1] * FALLING_STEPS)
    assert [step for step, text in enumerate(sentences) if text is not None] == [10, 23]
    assert sentences[10].startswith("step 10: for 10 steps the chosen completions have been less likely")


def test_after_a_resume_it_judges_by_the_steps_before_and_says_nothing_twice():
    told, fresh = FallingChosen(), FallingChosen()
    told.recall([-0.1] * FALLING_STEPS)
    fresh.recall([-0.1] * (FALLING_STEPS - 1))
    assert told.judge(FALLING_STEPS, -0.1) is None
    assert fresh.judge(FALLING_STEPS - 1, -0.1) is not None


def test_rewards_above_the_reference_or_not_a_number_say_nothing():
    assert said([0.5] * 20) == [None] * 20
    assert said([float("nan")] * 20) == [None] * 20
