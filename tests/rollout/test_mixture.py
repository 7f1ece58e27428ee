import math
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.mixture import BUILT_IN, Reward, RewardPart, code_hash, load_reward, score
from towline.rollout.rewards.verdict import Verdict
from towline.storage.errors import ConfigError
from towline.storage.records import ScoreStatus


def _part(function: Reward, name: str = "part", weight: float = 1.0) -> RewardPart:
    return RewardPart(name=name, weight=weight, function=function)


def _write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_total_is_the_weighted_sum_and_each_part_is_kept() -> None:
    parts = [_part(load_reward("math_answer", Path()), "correct", 1.0), _part(lambda c, g: 3, "three", -0.5)]
    result = score(parts, "\\boxed{7}", "7")
    assert (result.parts, result.total, result.status) == ({"correct": 1.0, "three": 3.0}, -0.5, ScoreStatus.OK)
    assert result.seconds > 0


def test_a_failed_part_spoils_the_total_but_not_its_neighbours() -> None:
    parts = [_part(lambda c, g: 1 / 0, "broken", 0.0), _part(lambda c, g: 1.0, "fine")]
    result = score(parts, "", "")
    assert math.isnan(result.parts["broken"])
    assert math.isnan(result.total)
    assert (result.parts["fine"], result.status) == (1.0, ScoreStatus.FAILED)
    assert result.part_status == {"broken": ScoreStatus.FAILED, "fine": ScoreStatus.OK}
    assert result.seconds == sum(result.part_seconds.values()) > 0
    assert result.detail.startswith("broken: ZeroDivisionError: division by zero at ")
    assert __file__ in result.detail


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (2, 2.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (Verdict(value=0.5, detail="half"), 0.5),
    ],
)
def test_numbers_and_verdicts_are_values(answer: float | Verdict, value: float) -> None:
    result = score([_part(lambda c, g: answer)], "", "")
    assert (result.total, result.status) == (value, ScoreStatus.OK)


@pytest.mark.parametrize(
    "answer",
    [
        math.nan,
        math.inf,
        -math.inf,
        None,
        "1.0",
        [1.0],
        1j,
        10**400,
        Verdict(value=None),
        Verdict(value=math.nan),
        Verdict(value=1.0, status=ScoreStatus.FAILED),
    ],
    ids=repr,
)
def test_anything_else_is_a_failure_and_not_a_zero(answer: float) -> None:
    result = score([_part(lambda c, g: answer)], "", "")
    assert math.isnan(result.parts["part"])
    assert math.isnan(result.total)
    assert result.status == ScoreStatus.FAILED


def test_a_verdict_may_report_its_own_time_out() -> None:
    result = score([_part(lambda c, g: Verdict(value=None, status=ScoreStatus.TIMEOUT, detail="judge slow"))], "", "")
    assert (result.status, result.detail) == (ScoreStatus.TIMEOUT, "part: judge slow")


def test_an_error_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    path = _write(
        tmp_path, "mine.py", "import json", "def grade(completion, gold):", "    return json.loads(completion)"
    )
    result = score([_part(load_reward("mine.py:grade", tmp_path))], "{", "")
    assert "JSONDecodeError: Expecting property name enclosed in double quotes" in result.detail
    assert result.detail.endswith(f"at {path}:3")


def test_leaving_the_program_is_a_failure_of_the_part(tmp_path: Path) -> None:
    _write(tmp_path, "mine.py", "import sys", "def grade(completion, gold):", "    sys.exit(0)")
    assert score([_part(load_reward("mine.py:grade", tmp_path))], "", "").status == ScoreStatus.FAILED


@pytest.mark.parametrize("use", BUILT_IN)
def test_every_built_in_reward_grades(use: str) -> None:
    result = score([_part(load_reward(use, Path()))], "\\boxed{7}", "7")
    assert (result.total, result.status) == (1.0, ScoreStatus.OK)


def test_a_users_file_imports_its_neighbours_and_leaves_no_trace(tmp_path: Path) -> None:
    path_before = list(sys.path)
    rewards = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        _write(folder, "neighbour.py", f"VALUE = {value}")
        _write(folder, "mine.py", "from neighbour import VALUE", "def grade(completion, gold):", "    return VALUE")
        rewards.append(load_reward(f"{value}/mine.py:grade", tmp_path))
    assert [reward("", "") for reward in rewards] == [1, 2]
    assert sys.path == path_before
    assert "neighbour" not in sys.modules
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    for value in (1, 2):
        _write(tmp_path, "mine.py", "def grade(completion, gold):", f"    return {value}")
        assert load_reward("mine.py:grade", tmp_path)("", "") == value


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("math_anser", "did you mean 'math_answer'"),
        ("absent.py:grade", r"no Python file .*absent\.py"),
        ("mine.py:grad", r"mine\.py has no function 'grad'; did you mean 'grade'"),
        ("mine.py:VALUE", "no function 'VALUE'"),
        ("mine.py:one", r"one must take \(completion, gold\)"),
        ("syntax.py:grade", r"IndentationError: .*syntax\.py:2"),
        ("raises.py:grade", r"ModuleNotFoundError: No module named 'towline_absent' at .*raises\.py:2"),
        ("exits.py:grade", r"SystemExit: 3 at .*exits\.py:2"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_explained(tmp_path: Path, use: str, message: str) -> None:
    _write(tmp_path, "mine.py", "VALUE = 1", "def grade(completion, gold): return 1", "def one(completion): return 1")
    _write(tmp_path, "syntax.py", "def grade(completion, gold):", "return 1")
    _write(tmp_path, "raises.py", "", "import towline_absent")
    _write(tmp_path, "exits.py", "import sys", "sys.exit(3)")
    with pytest.raises(ConfigError, match=message):
        load_reward(use, tmp_path)


def test_the_code_hash_follows_the_code(tmp_path: Path) -> None:
    def hash_of(body: str) -> str:
        _write(tmp_path, "mine.py", "def grade(completion, gold):", f"    return {body}")
        return code_hash([_part(load_reward("mine.py:grade", tmp_path))])

    assert hash_of("1") == hash_of("1")
    assert hash_of("1") != hash_of("2")
    built_in = [_part(load_reward(use, tmp_path)) for use in ("math_answer", "format")]
    assert len({code_hash(built_in), code_hash(built_in[:1]), code_hash(built_in[1:])}) == 3


def test_a_reward_table_has_a_name_that_can_be_a_column() -> None:
    assert RewardConfig(use="math_answer", weight=1.0).part_name == "math_answer"
    assert RewardConfig(use="rewards/think.py:grade", weight=1.0).part_name == "think.grade"
    assert RewardConfig(use="rewards/think.py:grade", weight=1.0, name="think").part_name == "think"


@pytest.mark.parametrize(
    "table",
    [
        {"use": "format", "weight": math.nan},
        {"use": "format", "weight": math.inf},
        {"use": "", "weight": 1.0},
        {"use": "format"},
        {"use": "format", "weight": 1.0, "name": "a/b"},
        {"use": "format", "weight": 1.0, "wieght": 2.0},
    ],
)
def test_a_bad_reward_table_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RewardConfig.model_validate(table)
