"""What came of a scoring, added up one completion after the other: counts and times of each part, and examples."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from towline.launcher.score.disagreements import Disagreements
from towline.launcher.score.sample import Sample
from towline.launcher.text import printable
from towline.rollout.evaluation.statistics import mean_interval
from towline.storage.records import Score, ScoreStatus

MAX_FAILURES_SHOWN = 3
MAX_SLOWEST_SHOWN = 3
MAX_EXAMPLES = 2
"""Each, of the highest and of the lowest totals."""
NONE = "-"


@dataclass(slots=True)
class Tally:
    """Of one part, or of the total."""

    values: list[float] = field(default_factory=list[float])
    """Of the completions that have one."""
    seconds: list[float] = field(default_factory=list[float])
    """Of the completions whose time was measured."""
    num_failed: int = 0
    num_timed_out: int = 0

    def add(self, value: float, status: ScoreStatus, seconds: float) -> None:
        if status is ScoreStatus.OK:
            self.values.append(value)
        self.num_failed += status is ScoreStatus.FAILED
        self.num_timed_out += status is ScoreStatus.TIMEOUT
        if math.isfinite(seconds):
            self.seconds.append(seconds)

    @property
    def mean(self) -> float | None:
        return math.fsum(self.values) / len(self.values) if self.values else None

    @property
    def share_positive(self) -> float | None:
        return sum(value > 0 for value in self.values) / len(self.values) if self.values else None


class Report:
    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = weights
        self.parts = {name: Tally() for name in weights}
        self.total = Tally()
        self.disagreements = Disagreements()
        self.num_completions = 0
        self._totals: dict[int, list[float]] = {}
        self._failures: list[Sample] = []
        self._slowest: list[Sample] = []
        self._highest: list[Sample] = []
        self._lowest: list[Sample] = []

    @property
    def num_failed(self) -> int:
        """Completions of which a part failed or ran out of time: they have no total."""
        return self.total.num_failed + self.total.num_timed_out

    @property
    def num_prompts(self) -> int:
        return len(self._totals)

    def add(self, sample: Sample) -> None:
        score = sample.score
        self.num_completions += 1
        for name, tally in self.parts.items():
            tally.add(score.parts[name], score.part_status[name], score.part_seconds[name])
        self.total.add(score.total, score.status, score.seconds)
        self.disagreements.add(sample)
        totals = self._totals.setdefault(sample.prompt, [])
        _keep(self._slowest, sample, MAX_SLOWEST_SHOWN, lambda kept: kept.score.seconds)
        if score.status is not ScoreStatus.OK:
            self._failures += [sample] if len(self._failures) < MAX_FAILURES_SHOWN else []
            return
        totals.append(score.total)
        _keep(self._highest, sample, MAX_EXAMPLES, lambda kept: kept.score.total)
        _keep(self._lowest, sample, MAX_EXAMPLES, lambda kept: -kept.score.total)

    def show(self, console: Console) -> None:
        console.print(self._table())
        for line in self._lines():
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="")
        table.add_column("part", no_wrap=True)
        for name in ("weight", "mean", "> 0", "failed", "timed out", "p50", "p99", "max"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, tally in self.parts.items():
            table.add_row(Text(name), f"{self.weights[name]:g}", *_cells(tally))
        table.add_row("total", "", *_cells(self.total))
        return table

    def _lines(self) -> Iterator[str]:
        interval = mean_interval(list(self._totals.values()))
        if interval is not None:
            yield f"\ntotal     {interval}, 95 % interval over {_times(self.num_prompts, 'prompt')}"
        share = self.num_failed / self.num_completions if self.num_completions else 0.0
        yield f"failed    {self.num_failed:,} of {self.num_completions:,} ({share:.2%})"
        yield from (f"  {sample.where}   {failure_text(sample.score)}" for sample in self._failures)
        if self._slowest:
            yield "slowest"
            for sample in self._slowest:
                yield f"  {seconds_text(sample.score.seconds)}   {sample.where}   {excerpt(sample)}"
        if compared := list(self.disagreements.lines()):
            yield from ("against the earlier scores", *compared)
        yield from _examples("highest", self._highest)
        if self._lowest and self._lowest[0].score.total < self._highest[0].score.total:
            yield from _examples("lowest", self._lowest)


def failure_text(score: Score) -> str:
    failed = [name for name, status in score.part_status.items() if status is not ScoreStatus.OK]
    word = "timed out" if score.status is ScoreStatus.TIMEOUT else "failed"
    return f"{', '.join(failed)} {word}: {printable(score.detail)}"


def excerpt(sample: Sample) -> str:
    """The gold answer, and the end of the completion, where its answer is."""
    return f"gold {_shortened(sample.gold)}   > {_shortened(sample.completion)}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _cells(tally: Tally) -> Iterator[str]:
    mean, share = tally.mean, tally.share_positive
    yield NONE if mean is None else f"{mean:.4f}"
    yield NONE if share is None else f"{share:.1%}"
    yield f"{tally.num_failed:,}"
    yield f"{tally.num_timed_out:,}"
    ordered = sorted(tally.seconds)
    for wanted in (0.5, 0.99, 1.0):
        yield seconds_text(percentile(ordered, wanted)) if ordered else NONE


def _examples(title: str, samples: Sequence[Sample]) -> Iterator[str]:
    if samples:
        yield title
    for sample in samples:
        yield f"  {sample.score.total:.4g}   {sample.where}   {excerpt(sample)}"


def _keep(kept: list[Sample], sample: Sample, num: int, key: Callable[[Sample], float]) -> None:
    """Keep the `num` of the highest keys, and of equal ones the first."""
    if len(kept) < num or key(sample) > key(kept[-1]):
        kept.append(sample)
        kept.sort(key=key, reverse=True)
        del kept[num:]


def _shortened(text: str, num_chars: int = 60) -> str:
    line = " ".join(text[-4 * num_chars :].split())
    return printable(line if len(line) <= num_chars else f"…{line[-num_chars:]}")


def _times(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
