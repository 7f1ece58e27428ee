"""A reward as one line: `1.0 · math_answer + 0.1 · format`."""

from collections.abc import Sequence

from towline.rollout.rewards.config import RewardConfig


def formula(rewards: Sequence[RewardConfig]) -> str:
    first, *others = rewards
    return _term(first.weight, first) + "".join(
        f" {'-' if reward.weight < 0 else '+'} {_term(abs(reward.weight), reward)}" for reward in others
    )


def _term(weight: float, reward: RewardConfig) -> str:
    value = reward.part_name if reward.floor is None else f"max({reward.part_name}, {reward.floor})"
    conditions = [f"{name} ≥ {least}" for name, least in reward.when.items()]
    where = [f"where {' and '.join(conditions)}"] if conditions else []
    once = ["once the rest has converged"] if reward.converged is not None else []
    qualified = " ".join([value, *where, *once])
    return f"{weight} · {value if qualified == value else f'({qualified})'}"
