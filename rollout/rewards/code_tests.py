"""Does a program pass its tests? It runs where it can do no harm and where its verdict cannot be faked.

Tests run in a process of their own (`sandbox/judge.py`), the program in another; arguments go in, plain values come
out, and comparing happens among the tests. So it pays nothing to exit early, to answer with an object that equals
everything, or to change what tests use. What such a program can still do is in docs/rewards.md.
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from towline.rollout.rewards.code_block import program
from towline.rollout.rewards.code_gold import StdioCases, read_gold
from towline.rollout.rewards.printed import difference
from towline.rollout.rewards.verdict import Verdict
from towline.rollout.sandbox.judge import PROGRAM_ENDED
from towline.rollout.sandbox.limits import Limits
from towline.rollout.sandbox.sandbox import ProgramOutcome, Sandbox, SandboxEnded, sandbox
from towline.storage.records import ScoreStatus

OUTPUT_LIMIT = "output_limit"
"""How the detail begins when a program printed too much."""
MAX_DETAIL_CHARS = 300
_Outcome = TypeVar("_Outcome")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """The built-in reward `code_tests`."""

    limits: Limits = field(default_factory=Limits)
    partial_credit: bool = False
    allow_unsandboxed: bool = False

    def with_options(
        self,
        *,
        limit_s: float | None = None,
        memory_mib: int | None = None,
        partial_credit: bool | None = None,
        allow_unsandboxed: bool | None = None,
    ) -> "CodeTests":
        """As the fields of the `[[rewards]]` table have it; None leaves what is."""
        return CodeTests(
            limits=Limits(
                seconds=self.limits.seconds if limit_s is None else limit_s,
                memory_mib=self.limits.memory_mib if memory_mib is None else memory_mib,
                output_bytes=self.limits.output_bytes,
            ),
            partial_credit=self.partial_credit if partial_credit is None else partial_credit,
            allow_unsandboxed=self.allow_unsandboxed if allow_unsandboxed is None else allow_unsandboxed,
        )

    def prepare(self) -> str:
        """Start this process's sandbox, so that no completion pays for that; says what shuts programs in.

        Raises:
            IsolationError: nothing here does, and it was not allowed.
        """
        return str(sandbox(allow_unsandboxed=self.allow_unsandboxed).isolation)

    def __call__(self, completion: str, gold: str) -> Verdict:
        """1.0 if the completion's program passes all the tests in gold, 0.0 if not; with partial credit their share.

        FAILED if the tests cannot be run.

        Raises:
            DataError: gold has no tests.
        """
        found = read_gold(gold)
        options: dict[str, Any] = {
            "limits": self.limits,
            "partial_credit": self.partial_credit,
            "allow_unsandboxed": self.allow_unsandboxed,
        }
        if isinstance(found, StdioCases):
            code = program(completion)
            return run_stdio(code, found.cases, **options) if code else _NO_CODE
        code = program(completion, found.prompt, *found.entry_points[:1])
        if not code:
            return _NO_CODE
        return run_tests(code, found.tests, setup=found.setup, entry_points=found.entry_points, **options)


_NO_CODE = Verdict(value=0.0, detail="no code")


def run_tests(
    code: str,
    tests: Sequence[str],
    limits: Limits | None = None,
    *,
    setup: str = "",
    entry_points: Sequence[str] = (),
    partial_credit: bool = False,
    allow_unsandboxed: bool = False,
) -> Verdict:
    """Run each test, such as `assert f(2) == 4`, against what the program defines.

    Args:
        setup: run before each test, on the tests' side.
        entry_points: names that are the program's even where the setup defines them. Other names that tests use and
            do not define are the program's as well, but for built-in ones and modules of the standard library.
        partial_credit: the share of tests passed, in place of all or nothing.

    Returns:
        FAILED, without a value, if the tests are at fault: there are none, they are no Python, or cannot be run.

    Raises:
        IsolationError: nothing on this machine shuts programs in, and `allow_unsandboxed` is not set.
    """
    limits = limits or Limits()
    if not tests:
        return _failed("there are no tests")

    def run(box: Sandbox) -> list[dict[str, Any]]:
        return box.run_tests(code, tests, setup, entry_points, limits, not partial_credit)

    reports = _in_sandbox(run, allow_unsandboxed)
    faults = [report["fault"] for report in reports if "fault" in report]
    if faults:
        return _failed(faults[0])
    passed = [report["test"] for report in reports if report.get("passed") is True]
    is_proved = passed == list(range(len(tests))) and {"done": True} in reports
    return _verdict(len(passed), len(tests), is_proved, _why(reports, len(tests), limits), partial_credit)


def _why(reports: Sequence[dict[str, Any]], num_tests: int, limits: Limits) -> str:
    """What went wrong first."""
    for report in reports:
        if "not_loaded" in report:
            return f"does not load: {report['not_loaded']}"
        if report.get("passed") is False:
            how = _how_it_ended(reports) if report["detail"] == PROGRAM_ENDED else ""
            return f"test {report['test'] + 1} of {num_tests}: {report['detail']}{how}"
        if "timed_out" in report:
            return f"not done within {limits.seconds:g} s"
        if "tests_ended" in report:  # no more memory or time for what the program gave them
            return f"the tests did not end by themselves ({_exit_text(report['tests_ended'])})"
    return f"the program ended{_how_it_ended(reports)}"


def _how_it_ended(reports: Sequence[dict[str, Any]]) -> str:
    code = next((report["ended"] for report in reports if "ended" in report), None)
    return "" if code is None else f" ({_exit_text(code)})"


def run_stdio(
    code: str,
    cases: Sequence[tuple[str, str]],
    limits: Limits | None = None,
    *,
    partial_credit: bool = False,
    allow_unsandboxed: bool = False,
) -> Verdict:
    """Run the program once for each case of standard input and the output that is expected, see `printed.difference`.

    It must end with exit code 0. The time limit is for all cases together.

    Args, Returns, Raises: as `run_tests`.
    """
    limits = limits or Limits()
    if not cases:
        return _failed("there are no cases")
    num_passed, first_why, seconds_left = 0, "", limits.seconds
    for number, (stdin, expected) in enumerate(cases, start=1):
        if seconds_left <= 0:
            first_why = first_why or f"case {number} of {len(cases)}: not done within {limits.seconds:g} s"
            break
        why, seconds = _run_case(code, stdin, expected, limits, seconds_left, allow_unsandboxed)
        seconds_left -= seconds
        num_passed += not why
        if why:
            first_why = first_why or f"case {number} of {len(cases)}: {why}"
            if not partial_credit:
                break
    if OUTPUT_LIMIT in first_why:
        first_why = f"{OUTPUT_LIMIT}: {first_why}"
    return _verdict(num_passed, len(cases), num_passed == len(cases), first_why, partial_credit)


def _run_case(
    code: str, stdin: str, expected: str, limits: Limits, seconds: float, allow_unsandboxed: bool
) -> tuple[str, float]:
    """Why it failed, empty if it did not, and how long it took."""
    allowed = max(limits.output_bytes, len(expected.encode(errors="surrogatepass")))
    own = Limits(seconds=seconds, memory_mib=limits.memory_mib, output_bytes=allowed)

    def run(box: Sandbox) -> ProgramOutcome:
        return box.run_program(code, stdin.encode(errors="surrogatepass"), own)

    outcome = _in_sandbox(run, allow_unsandboxed)
    if outcome.has_printed_too_much:
        why = f"{OUTPUT_LIMIT}, more than {allowed:,} bytes printed"
    elif outcome.has_timed_out:
        why = f"not done within {limits.seconds:g} s"
    elif outcome.exit_code != 0:
        last = outcome.error.strip().rpartition("\n")[2]
        why = f"{_exit_text(outcome.exit_code)}{f', {last}' if last else ''}"
    else:
        why = difference(outcome.output.decode(errors="replace"), expected) or ""
    return why, outcome.seconds


def _in_sandbox(run: Callable[[Sandbox], _Outcome], allow_unsandboxed: bool) -> _Outcome:
    """The zygote may be killed from outside, by a machine out of memory: then once more in a new one."""
    try:
        return run(sandbox(allow_unsandboxed=allow_unsandboxed))
    except SandboxEnded:
        return run(sandbox(allow_unsandboxed=allow_unsandboxed))


def _verdict(num_passed: int, num_tests: int, is_proved: bool, why: str, partial_credit: bool) -> Verdict:
    if is_proved:
        return Verdict(value=1.0)
    # Less than all: a program that ends after its last test has not passed either.
    share = min(num_passed, num_tests - 1) / num_tests if partial_credit else 0.0
    return Verdict(value=share, detail=_clean(f"{why}; {num_passed} of {num_tests} passed"))


def _failed(why: str) -> Verdict:
    return Verdict(value=None, status=ScoreStatus.FAILED, detail=_clean(f"gold_unusable: {why}"))


def _clean(detail: str) -> str:
    """Text of a program may hold half a surrogate pair."""
    return detail[: 2 * MAX_DETAIL_CHARS].encode(errors="backslashreplace").decode()[:MAX_DETAIL_CHARS]


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"exit code {code}"


grade = CodeTests()
