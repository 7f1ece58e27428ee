"""A user's own file: what it may import, what its errors say, what its fingerprint covers."""

import sys
from pathlib import Path

import pytest

from towline.rollout.rewards.mixture import RewardPart, code_hash, load_reward, score
from towline.storage.errors import ConfigError
from towline.storage.records import ScoreStatus


def _write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def _part(folder: Path, use: str = "mine.py:grade") -> RewardPart:
    return RewardPart(name="part", weight=1.0, function=load_reward(use, folder))


def test_an_error_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    path = _write(
        tmp_path, "mine.py", "import json", "def grade(completion, gold):", "    return json.loads(completion)"
    )
    result = score([_part(tmp_path)], "{", "")
    assert "JSONDecodeError: Expecting property name enclosed in double quotes" in result.detail
    assert result.detail.endswith(f"at {path}:3")


def test_leaving_the_program_is_a_failure_of_the_part(tmp_path: Path) -> None:
    _write(tmp_path, "mine.py", "import sys", "def grade(completion, gold):", "    sys.exit(0)")
    assert score([_part(tmp_path)], "", "").status == ScoreStatus.FAILED


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
        return code_hash([_part(tmp_path)])

    assert hash_of("1") == hash_of("1")
    assert hash_of("1") != hash_of("2")
    built_in = [_part(tmp_path, use) for use in ("math_answer", "format")]
    assert len({code_hash(built_in), code_hash(built_in[:1]), code_hash(built_in[1:])}) == 3


def test_the_code_hash_covers_the_neighbours_that_a_file_imports(tmp_path: Path) -> None:
    _write(tmp_path, "mine.py", "import helper", "def grade(completion, gold):", "    return helper.value()")
    _write(tmp_path, "helper.py", "from lib.deep import VALUE", "def value(): return VALUE")
    _write(tmp_path, "lib/__init__.py")
    _write(tmp_path, "lib/deep.py", "VALUE = 1")
    _write(tmp_path, "stranger.py", "VALUE = 1")
    first = code_hash([_part(tmp_path)])
    _write(tmp_path, "stranger.py", "VALUE = 2")
    assert code_hash([_part(tmp_path)]) == first
    _write(tmp_path, "lib/deep.py", "VALUE = 2")
    part = _part(tmp_path)
    assert part.function("", "") == 2
    second = code_hash([part])
    _write(tmp_path, "helper.py", "from lib.deep import VALUE", "def value(): return VALUE + 1")
    third = code_hash([_part(tmp_path)])
    assert len({first, second, third}) == 3


def test_the_code_hash_covers_a_file_that_only_hands_on_what_its_neighbour_defines(tmp_path: Path) -> None:
    hashes = set()
    for bonus in (1, 2):
        _write(tmp_path, "mine.py", "import helper", f"helper.BONUS = {bonus}", "from helper import grade")
        _write(tmp_path, "helper.py", "def grade(completion, gold): return BONUS")
        hashes.add(code_hash([_part(tmp_path)]))
    assert len(hashes) == 2


def test_a_copy_of_the_folder_elsewhere_has_the_same_code_hash(tmp_path: Path) -> None:
    for name in ("here", "there"):
        _write(tmp_path / name, "mine.py", "import helper", "def grade(completion, gold): return helper.VALUE")
        _write(tmp_path / name, "helper.py", "VALUE = 1")
    assert code_hash([_part(tmp_path / "here")]) == code_hash([_part(tmp_path / "there")])


def test_another_function_condition_or_floor_is_another_code_hash_and_another_weight_is_not(tmp_path: Path) -> None:
    _write(tmp_path, "mine.py", "def grade(completion, gold): return 1", "def other(completion, gold): return 1")
    grade, other = (load_reward(f"mine.py:{name}", tmp_path) for name in ("grade", "other"))

    def hash_of(function=grade, **rule) -> str:
        return code_hash([RewardPart(**{"name": "part", "weight": 1.0, "function": function} | rule)])

    assert hash_of(weight=2.0) == hash_of()
    assert len({hash_of(), hash_of(other), hash_of(floor=0.0), hash_of(when={"a": 1.0}), hash_of(name="a")}) == 5


def test_two_functions_of_one_file_share_what_it_holds(tmp_path: Path) -> None:
    _write(
        tmp_path,
        "mine.py",
        "seen = []",
        "def add(completion, gold): seen.append(completion); return 0",
        "def count(completion, gold): return len(seen)",
    )
    add, count = (load_reward(f"mine.py:{name}", tmp_path) for name in ("add", "count"))
    add("a", "")
    assert count("b", "") == 1


def test_an_error_in_a_neighbour_names_its_line(tmp_path: Path) -> None:
    _write(tmp_path, "mine.py", "import helper", "def grade(completion, gold): return helper.value(completion)")
    helper = _write(tmp_path, "helper.py", "def value(text):", "    return int(text)")
    assert score([_part(tmp_path)], "x", "").detail.endswith(f"at {helper}:2")


def test_any_callable_may_grade(tmp_path: Path) -> None:
    _write(
        tmp_path,
        "mine.py",
        "import functools",
        "class Grader:",
        "    def __call__(self, completion, gold): return 3",
        "grade = Grader()",
        "partial = functools.partial(lambda bonus, completion, gold: bonus, 4)",
    )
    for name, value in (("grade", 3), ("partial", 4)):
        part = _part(tmp_path, f"mine.py:{name}")
        assert score([part], "", "").total == value
        assert len(code_hash([part])) == 32
