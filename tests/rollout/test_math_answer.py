import json
import math
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

import math_cases
import math_verdicts
from towline.rollout.rewards.math_answer import GOLD_UNPARSEABLE, equivalent, grade
from towline.rollout.rewards.mathematics.comparison import compare
from towline.rollout.rewards.mixture import RewardPart, code_hash
from towline.rollout.rewards.verdict import Verdict
from towline.storage.records import ScoreStatus

CASES = [pytest.param(*case, id=f"{case[0]}-{number}") for number, case in enumerate(math_cases.PAIRS)]
RESPONSES = [pytest.param(*case, id=f"{case[0]}-{number}") for number, case in enumerate(math_cases.RESPONSES)]


@pytest.mark.parametrize(("_case", "gold", "prediction", "is_equal"), CASES)
def test_verdict_on_a_pair_whichever_side_is_gold(_case: str, gold: str, prediction: str, is_equal: bool) -> None:
    assert equivalent(prediction, gold) is is_equal
    assert equivalent(gold, prediction) is is_equal


@pytest.mark.parametrize(("_case", "gold", "completion", "value"), RESPONSES)
def test_a_completion_is_paid_for_its_final_answer(_case: str, gold: str, completion: str, value: float) -> None:
    verdict = grade(completion, gold)
    assert (verdict.value, verdict.status) == (value, ScoreStatus.OK)


def test_an_answer_equals_itself_in_every_case() -> None:
    for answer in sorted({text for _, *pair, _ in math_cases.PAIRS for text in pair} - {"", "\\text{ }"}):
        assert equivalent(answer, answer) is True
        assert equivalent(f" \\displaystyle {answer}\\, ", answer) is True, answer


@pytest.mark.parametrize(
    "gold",
    [
        "", "   ", "It costs\n#### ", "\\boxed{}", "see the figure above", "See figure.", "refer to the diagram",
        "answers will vary", "Answers may vary", "The proof is left to the reader.", "N/A", "????", "\\frac{1}{", "(3,",
    ],
)  # fmt: skip
def test_a_gold_answer_that_cannot_be_read_is_flagged_and_never_pays(gold: str) -> None:
    """G1-52"""
    for completion in ("\\boxed{3}", "anything", f"\\boxed{{{gold}}}"):
        verdict = grade(completion, gold)
        assert (verdict.value, verdict.status) == (None, ScoreStatus.FAILED)
        assert verdict.detail.startswith(GOLD_UNPARSEABLE)


@pytest.mark.parametrize("gold", ["\\int x\\,dx", "x \\equiv 3 \\pmod 5", "\\sum_{k=1}^n a_k"])
def test_notation_that_is_not_read_pays_for_the_same_text_only(gold: str) -> None:
    assert grade(f"\\boxed{{ {gold} }}", gold).value == 1.0
    other = grade("\\boxed{7}", gold)
    assert (other.value, other.status) == (None, ScoreStatus.FAILED)
    assert other.detail.startswith(GOLD_UNPARSEABLE)


def test_what_cannot_be_told_says_why() -> None:
    prediction, gold = "\\sin(1 + 10^{-7000})", "\\sin 1"
    verdict = grade(f"\\boxed{{{prediction}}}", gold)
    assert (verdict.value, verdict.status) == (None, ScoreStatus.FAILED)
    assert "cannot tell whether" in verdict.detail
    assert "20000 bits" in compare(prediction, gold).reason


PAIRS_OF_EACH_KIND = [(gold, prediction) for _, gold, prediction, _ in math_cases.PAIRS[::5]] + [
    ("3", answer) for answer in math_cases.HOSTILE.values() if len(answer) < 10_000
]


def test_eight_threads_give_the_verdicts_of_the_main_thread() -> None:
    """G1-54"""
    expected = math_verdicts.values(PAIRS_OF_EACH_KIND)
    found: dict[int, list[float | None]] = {}
    threads = [
        threading.Thread(target=lambda number=number: found.update({number: math_verdicts.values(PAIRS_OF_EACH_KIND)}))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(8)] == [expected] * 8


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_new_process_gives_the_same_verdicts(method: str) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        assert pool.submit(math_verdicts.values, PAIRS_OF_EACH_KIND).result(60) == math_verdicts.values(
            PAIRS_OF_EACH_KIND
        )


@pytest.mark.parametrize(("flags", "hash_seed"), [(["-O"], "0"), ([], "1"), (["-OO"], "2")])
def test_an_optimised_interpreter_and_any_hash_seed_give_the_same_verdicts(flags: list[str], hash_seed: str) -> None:
    program = (
        "import json, sys\n"
        "from towline.rollout.rewards.math_answer import grade\n"
        "pairs = json.load(sys.stdin)\n"
        "print(json.dumps([grade(f'\\\\boxed{{{p}}}', g).value for g, p in pairs]))"
    )
    result = subprocess.run(
        [sys.executable, *flags, "-c", program],
        input=json.dumps(PAIRS_OF_EACH_KIND), capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert json.loads(result.stdout) == math_verdicts.values(PAIRS_OF_EACH_KIND)


def test_importing_the_grader_loads_neither_sympy_nor_torch() -> None:
    program = "import sys, towline.rollout.rewards.math_answer as m; print({'sympy', 'torch'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("name", math_cases.HOSTILE)
def test_a_hostile_answer_is_wrong_and_costs_little(name: str) -> None:
    """G1-55, G1-56, G1-59: without any limit from outside."""
    answer = math_cases.HOSTILE[name]
    started = time.process_time()
    for gold in ("3", "x = 4", "\\sqrt{2}", "\\{1, 2\\}", "(0, 1)"):
        verdict = grade(f"\\boxed{{{answer}}}", gold)
        assert verdict == Verdict(value=0.0, detail=verdict.detail)
        assert equivalent(gold, answer) is False
    assert time.process_time() - started < 5.0  # ten verdicts; each of them is bounded near 0.3 s


@pytest.mark.parametrize("name", [name for name in math_cases.HOSTILE if name not in math_cases.NOT_CLOSED])
def test_a_hostile_gold_answer_is_no_danger_either(name: str) -> None:
    verdict = grade("\\boxed{3}", math_cases.HOSTILE[name])
    assert verdict.value in (0.0, None)
    assert not math.isnan(verdict.seconds)


def test_the_code_hash_covers_every_file_of_the_grader(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), read_bytes(path))[1])
    code_hash([RewardPart(name="correct", weight=1.0, function=grade)])
    assert {"math_answer.py", "boxed.py", "parser.py", "numerics.py", "comparison.py", "work.py"} <= set(read)
