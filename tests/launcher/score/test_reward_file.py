from pathlib import Path

import pytest

from towline.launcher.score.reward_file import read_rewards
from towline.storage.errors import InputError

TABLES = '[[rewards]]\nuse = "math_answer"\nweight = 1.0\n'


def test_a_file_of_tables_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "rewards.toml"
    path.write_text(TABLES + "[scoring]\nlimit_s = 2.5\n")
    rewards = read_rewards(path)
    assert (rewards.weights, rewards.scoring.limit_s, rewards.max_completion_tokens) == (
        {"math_answer": 1.0},
        2.5,
        None,
    )


def test_of_an_experiment_only_the_rewards_are_looked_at(tmp_path: Path) -> None:
    """Its model and its data may be on a cluster that is not here."""
    path = tmp_path / "experiment.toml"
    path.write_text(
        'objective = "grpo"\nsteps = 3\n[policy]\nmodel = "${MODELS}/X"\n[rollout]\nmax_completion_tokens = 64\n'
        + TABLES
    )
    rewards = read_rewards(path)
    assert (rewards.weights, rewards.max_completion_tokens) == ({"math_answer": 1.0}, 64)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"rewards\.toml:1: rewards is missing"),
        ("rewards = []\n", r"rewards\.toml:1: rewards: Tuple should have at least 1 item"),
        (TABLES + "wieght = 2\n", r"rewards\.toml:4: rewards\.0\.wieght is not a field\. Did you mean weight\?"),
        (TABLES + "[trainer]\n", r"rewards\.toml:4: trainer is not a field\."),
        (TABLES.replace("math", "maths"), r"rewards\.toml:2: rewards\.use: maths_answer is not .* mean math_answer\? "),
        (TABLES.replace("math_answer", "x.py:f"), r"rewards\.toml:2: rewards\.use: there is no Python file .*/x\.py"),
        (TABLES.replace("1.0", "nan"), r"rewards\.toml:3: rewards\.0\.weight"),
        (TABLES + TABLES, r"rewards\.toml:1: two rewards are called math_answer"),
        (TABLES + "when = { format = 1.0 }\n", r"math_answer counts when format, which is no part"),
        ("[[rewards]\n", r"rewards\.toml:1: not valid TOML"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "rewards.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=problem):
        read_rewards(path)
