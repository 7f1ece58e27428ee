"""HumanEval's tasks, a wrong solution to each, and what plain Python says of them.

    python tests/humaneval.py > tests/golds/humaneval_mutants.json

searches the wrong solutions again: the first mutant of each that the task's own tests find.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mutants import mutants

DATA = Path(__file__).parents[1] / ".." / "shared" / "data" / "humaneval.jsonl"
CHOSEN = Path(__file__).parent / "golds" / "humaneval_mutants.json"
"""Task → which of its mutants."""
LIMIT_S = 5
"""Of plain Python, for one program."""
PLAIN = r"""
import json, signal, sys
def late(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, late)
for line in sys.stdin:
    program, limit_s = json.loads(line)
    signal.alarm(limit_s)
    try:
        exec(compile(program, "program", "exec"), {"__name__": "program"})
        ended = "passed"
    except Exception as error:
        ended = type(error).__name__
    signal.alarm(0)
    print(json.dumps(ended))
"""
"""All that it takes to run tests that nobody tries to cheat."""

Row = dict[str, Any]


def rows() -> list[Row]:
    return [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


def solution(row: Row) -> str:
    return row["prompt"] + row["canonical_solution"]


def wrong_solutions(row: Row) -> Iterator[str]:
    return mutants(solution(row), row["prompt"].count("\n") + 1, row["task_id"])


def chosen_wrong_solutions() -> list[tuple[Row, str]]:
    chosen = json.loads(CHOSEN.read_text())
    return [(row, next(islice(wrong_solutions(row), chosen[row["task_id"]], None))) for row in rows()]


def plainly(programs: list[tuple[Row, str]]) -> list[str]:
    """How the tests of each row end with a program: "passed", or the name of an exception."""
    lines = [
        json.dumps([f"{program}\n{row['test']}\ncheck({row['entry_point']})\n", LIMIT_S]) for row, program in programs
    ]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    # Solutions may print as well: what we print comes last in its line, and is quoted.
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]


def main() -> None:
    found = {}
    for row in rows():
        for number, program in enumerate(wrong_solutions(row)):
            (ended,) = plainly([(row, program)])
            if ended not in ("passed", "TimeoutError"):
                found[row["task_id"]] = number
                break
    print(json.dumps(found, indent=0))


if __name__ == "__main__":
    main()
