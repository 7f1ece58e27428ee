"""The same verdicts in the main thread and outside it, in a forked and in a spawned process, and without asserts."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from verdicts_anywhere import verdicts

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
GRADE = """
def grade(completion, gold):
    assert completion != "raise", "asserts are of the reward, whatever runs it"
    while completion == "hang":
        pass
    return len(completion)
"""


def test_verdicts_do_not_depend_on_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GRADE)
    here = verdicts(str(tmp_path))
    assert here.count("mine.grade: no answer within 1 s") == 1
    assert here.count("asserts are of the reward") == 1
    found: dict[str, str] = {}
    thread = threading.Thread(target=lambda: found.update(thread=verdicts(str(tmp_path))))
    thread.start()
    thread.join()
    script = TESTS / "verdicts_anywhere.py"
    search = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    launches = {
        what: subprocess.Popen(
            [sys.executable, *flags, script, tmp_path, how],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": search},
        )
        for what, flags, how in (("fork", [], "fork"), ("spawn", [], "spawn"), ("-O", ["-O"], "here"))
    }
    for what, launch in launches.items():
        output, _ = launch.communicate(timeout=60)
        assert launch.returncode == 0
        found[what] = output.strip()
    assert found == dict.fromkeys(("thread", "fork", "spawn", "-O"), here)
