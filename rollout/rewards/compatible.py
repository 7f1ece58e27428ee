"""Which rewards go together. Reasons are told before anything starts."""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from towline.rollout.rewards.config import CODE_TESTS, RewardConfig


def refuse_impossible(rewards: Sequence[RewardConfig]) -> None:
    """
    Raises:
        ValueError: parts that could not be told apart, could never count, or would teach nothing.
    """
    names = [reward.part_name for reward in rewards]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two rewards are called {twice[0]}; give one of them another `name`")
    by_name = dict(zip(names, rewards, strict=True))
    for reward in rewards:
        for other, least in reward.when.items():
            _refuse_condition(reward, other, least, by_name)
    try:
        TopologicalSorter({name: by_name[name].when for name in names}).prepare()
    except CycleError as error:
        raise ValueError(
            f"rewards: the conditions go round in a circle: {' when '.join(error.args[1])}. Remove one of them"
        ) from error
    _refuse_nothing_to_learn(rewards)
    _refuse_watching_itself(rewards)


def refuse_slow_tests(rewards: Sequence[RewardConfig], limit_s: float) -> None:
    """
    Args:
        limit_s: scoring.limit_s, wall time of one completion.

    Raises:
        ValueError: a program could use up the time of the whole completion, and would have no score in place of 0.
    """
    together = sum(reward.tests_limit_s for reward in rewards)
    if together and together >= limit_s:
        raise ValueError(
            f"rewards: {CODE_TESTS} may take limit_s = {together:g} s, and scoring.limit_s is {limit_s:g} s: a program "
            f"that never ends would have no score in place of 0. Set scoring.limit_s to {together + 1:g} or more, or "
            "lower limit_s of the part"
        )


def _refuse_condition(reward: RewardConfig, other: str, least: float, by_name: dict[str, RewardConfig]) -> None:
    name = reward.part_name
    if other == name:
        raise ValueError(f"rewards: {name} cannot be its own condition; name another part in `when`")
    if other not in by_name:
        raise ValueError(f"rewards: {name} counts when {other}, which is no part; there are: {', '.join(by_name)}")
    condition = by_name[other]
    if condition.counts_tokens:
        raise ValueError(
            f"rewards: {name} counts when {other}, which counts tokens; a condition must be a part that judges the text"
        )
    if condition.is_reward_model and reward.judges_text:
        raise ValueError(
            f"rewards: {name} counts when {other}, a reward model, which is asked after the parts that judge the text; "
            f"let {other} count when {name}, or condition another reward model or a part that counts tokens on it"
        )
    if not condition.is_unbounded and not 0 < least <= 1:
        fault = "always" if least <= 0 else "never"
        raise ValueError(
            f"rewards: {name} counts when {other} is at least {least:g}: {fault}, for {condition.use} is from 0 to 1. "
            "Choose a value above 0 and at most 1"
        )


def _refuse_nothing_to_learn(rewards: Sequence[RewardConfig]) -> None:
    judges = [reward for reward in rewards if not reward.counts_tokens]
    if not judges:
        raise ValueError(
            f"rewards: {rewards[0].use} alone teaches to say nothing; add a reward that judges what a completion says"
        )
    if not any(reward.weight for reward in judges):
        raise ValueError(
            f"rewards: {', '.join(reward.part_name for reward in judges)}: every weight is 0, so that nothing is "
            "learnt from what a completion says. Give one of them a weight"
        )
    if sum(reward.is_length for reward in rewards) > 1:
        raise ValueError('rewards: use = "length" comes more than once; it can be one part only')


def _refuse_watching_itself(rewards: Sequence[RewardConfig]) -> None:
    models = [reward for reward in rewards if reward.is_reward_model]
    trained = {reward.model: reward.part_name for reward in models if reward.weight}
    for reward in models:
        if not reward.weight and reward.model in trained:
            raise ValueError(
                f"rewards: {reward.part_name} has the model of {trained[reward.model]} and would watch itself; name "
                "one that was trained on other pairs"
            )
