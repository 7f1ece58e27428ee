"""What `towline run` shows while it runs: a bar on a terminal, else plain lines, one a step."""

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from towline.jobs.step_lines import evaluation_line, step_line


class RunProgress:
    """An `Observer` of the supervisor. Used as a context: the bar is taken away at the end, the lines stay."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._phases: dict[str, str] = {}
        self._has_begun = False
        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=num_steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_attempt(self, number: int) -> None:
        """The first lines have said it."""

    def on_phases(self, phases: dict[str, str]) -> None:
        changed = {name: phase for name, phase in phases.items() if self._phases.get(name) != phase}
        self._phases |= changed
        text = phases_line(self._phases)
        self._bar.update(self._task, description=text)
        if changed and not self._has_begun and not self._console.is_terminal:
            self._say(f"starting  {text}")

    def on_step(self, row: dict[str, Any]) -> None:
        self._has_begun = True
        self._say(step_line(row, self._num_steps))
        self._bar.update(self._task, completed=row["step"] + 1)

    def on_evaluation(self, row: dict[str, Any]) -> None:
        self._has_begun = True
        self._say(evaluation_line(row))

    def on_event(self, text: str) -> None:
        self._say(f"! {text}")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)


def phases_line(phases: Mapping[str, str]) -> str:
    """Each process with what it does; ranks and engines that do the same are written once."""
    doing: dict[str, list[str]] = {}
    for name, phase in phases.items():
        doing.setdefault(f"{name.partition('.')[0]} {phase}", []).append(name)
    return " · ".join(f"{len(names)} {text}" if len(names) > 1 else text for text, names in doing.items())
