"""Score completions in warm worker processes that can be killed.

    with ScoringPool(rewards, num_workers=4, limit_s=5.0, folder=folder) as pool:
        scores = pool.score_many((completion.text, prompt.answer) for ...)    # in the order of the items
        print(*pool.timings.lines(), sep="\n")

A reward function can loop for ever, hold the interpreter in one big multiplication, end its process or fork. None of
that can be caught inside the process, so the limit is kept here: each completion has `limit_s` of wall time from when
a worker begins with it; then the worker is killed with everything it started, and the status is TIMEOUT. A worker that
ends by itself is replaced and its completion tried once more, then FAILED. Neither ever becomes a 0.

Workers are copies of a template process that has loaded the rewards (`scoring_template.py`), so another one is there
in milliseconds. Small items are handed out several at once. Not for several threads at once.
"""

import hashlib
import math
import select
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self

from towline.rollout.rewards.compatible import refuse_slow_tests
from towline.rollout.rewards.config import RewardConfig
from towline.rollout.score_call import OnProgress, ScoreCall, item_number
from towline.rollout.score_timings import ScoreTimings
from towline.rollout.scoring_messages import LENGTH, Message, Outcome, read_score
from towline.rollout.scoring_processes import Template, TemplateEnded, Worker, WorkerEnded
from towline.rollout.scoring_queue import Item, Task, TaskQueue
from towline.storage.errors import ConfigError, RewardError
from towline.storage.records import Score, ScoreStatus

START_LIMIT_S = 120.0
"""For loading the rewards from a cold parallel file system; no part of any completion's limit."""
ANSWER_LIMIT_S = 20.0
"""For the template to start or end a worker."""
MAX_TRIES = 2
MAX_TEMPLATES_IN_VAIN = 3
"""How often in a row the template may end without a single score in between."""
MAX_CACHED = 20_000
MAX_FINISHED = 1000
"""Outcomes that wait for `collect`, where most come from the cache."""
MAX_ITEM_CHARS = 8 * 2**20
"""Of completion and gold answer together. Longer ones are not graded."""
DEFAULT_MEMORY_GIB = 2.0

TICK_S = 0.25
"""Longest wait without looking around: for progress, for the caller's signals."""


class ScoringPool:
    def __init__(
        self,
        parts_spec: Sequence[RewardConfig],
        num_workers: int,
        limit_s: float,
        folder: Path,
        memory_gib: float = DEFAULT_MEMORY_GIB,
    ) -> None:
        """Load the rewards and start the workers, so that a bad reward is found here.

        Args:
            parts_spec: the `[[rewards]]` tables.
            limit_s: wall time for one completion, all parts together.
            folder: what the paths in `use` are relative to.
            memory_gib: address space of a worker, beyond what it takes when the rewards are loaded.
        """
        names = [part.part_name for part in parts_spec]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"rewards: expected one or more parts with different names, found {names}; set `name`")
        if num_workers < 1 or not 0 < limit_s < math.inf or not 0 < memory_gib < math.inf:
            raise ConfigError(
                "scoring needs num_workers >= 1, limit_s > 0 and memory_gib > 0, found "
                f"{num_workers}, {limit_s} and {memory_gib}"
            )
        try:
            refuse_slow_tests(parts_spec, limit_s)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.isolation = ""
        """What shuts in the programs that a reward runs; empty if none does."""
        self.code_hash = ""
        """Fingerprint of the reward code, as it was loaded."""
        self.timings = ScoreTimings()
        self.why_slow_starts = ""
        """Why workers are no copies of a template, and load the rewards themselves; empty if they are copies."""
        self._uses = [part.use for part in parts_spec]
        self._names, self._limit_s, self.num_workers = names, limit_s, num_workers
        self._setup: Message = {
            "rewards": [(part.use, asdict(part.term), part.options) for part in parts_spec],
            "folder": str(folder.absolute()),
            "max_bytes": round(memory_gib * 2**30),
            "forks": True,
        }
        self._template: Template | None = None
        self._workers: list[Worker] = []
        self._num_started = 0
        self._num_templates_in_vain = 0
        self._queue = TaskQueue(num_workers)
        self._finished: list[Outcome] = []
        self._cache: OrderedDict[bytes, Score] = OrderedDict()
        self._is_closed = False
        try:
            while not (self._workers and all(worker.is_ready for worker in self._workers)):
                self._advance(TICK_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every worker with what it started. Safe to call twice."""
        self._is_closed = True
        while self._workers:
            self._workers.pop().close()
        if self._template is not None:
            self._template.close()
            self._template = None

    def score_many(
        self, items: Iterable[Item], on_progress: OnProgress | None = None, where: Callable[[int], str] = item_number
    ) -> list[Score]:
        """Score `(completion, gold)` pairs; the result is in their order, whichever finishes first.

        Args:
            items: taken one by one, as there is room for them.
            on_progress: what it raises ends the call; the pool stays usable.
            where: names an item by its number, from 0, in `timings`.
        """
        call = ScoreCall(items, self.timings, on_progress, where)
        try:
            while not call.is_done:
                while self.has_room and call.has_more and (taken := call.take()) is not None:
                    self.submit(*taken)
                for outcome in self.collect(TICK_S):
                    call.note(outcome)
                call.report()
        finally:
            self.abandon()
        return call.scores()

    @property
    def has_room(self) -> bool:
        """Whether to `submit` more before the next `collect`."""
        return self._queue.has_room and len(self._finished) < MAX_FINISHED

    @property
    def is_idle(self) -> bool:
        """Everything that was submitted has been collected."""
        return not (self._queue or self._finished or any(worker.batch for worker in self._workers))

    def submit(self, ticket: int, item: Item) -> None:
        """Queue an item; `collect` gives its outcome back under the same ticket."""
        assert not self._is_closed, "the pool is closed"
        if (num_chars := len(item[0]) + len(item[1])) > MAX_ITEM_CHARS:
            what = f"completion and gold answer have {num_chars:,} characters, more than {MAX_ITEM_CHARS:,}: not read"
            score = self._unscored(ScoreStatus.FAILED, math.nan, what, None)
            self._finished.append(Outcome(ticket=ticket, score=score))
            return
        key = _key(item, self.code_hash)
        if (cached := self._cache.get(key)) is not None:
            self._finished.append(Outcome(ticket=ticket, score=cached, is_cached=True))
            return
        self._queue.append(Task(ticket=ticket, item=item, key=key))

    def collect(self, wait_s: float) -> list[Outcome]:
        """What has finished; waits for something to happen, at most `wait_s`."""
        if not self.is_idle:
            self._advance(0.0 if self._finished else wait_s)
        finished, self._finished = self._finished, []
        return finished

    def abandon(self) -> None:
        """Forget what was submitted and not collected: answers to it would belong to a call that has ended."""
        for worker in [worker for worker in self._workers if worker.batch]:
            self._give_up(worker)
        self._queue.clear()
        self._finished.clear()

    def _advance(self, wait_s: float) -> None:
        """Give every free worker something to do, wait for something to happen, and see to it."""
        if self._template is None:
            self._template = self._load_template()
        template = self._template
        try:
            self._hear(template)
            self._start_missing(template)
            self._hand_out()
            self._wait(template, wait_s)
            self._hear(template)
            for worker in list(self._workers):
                self._attend(template, worker)
        except TemplateEnded:
            self._lose(template)

    def _load_template(self) -> Template:
        """
        Raises:
            ConfigError: the rewards cannot be loaded, or are others than at first.
        """
        template = Template(self._setup, self.num_workers)
        try:
            answer = template.answer(START_LIMIT_S)
            if "ready" in answer:
                self._note_code_hash(answer["ready"])
                return template
            if "cannot_load" in answer:
                raise ConfigError(answer["cannot_load"])
            if "threads" not in answer:
                template.kill()
                raise ConfigError(self._loading(f"nothing came within {START_LIMIT_S:g} s"))
        except TemplateEnded:
            raise ConfigError(self._loading(f"the process ended ({template.close()})")) from None
        except BaseException:
            template.close()
            raise
        template.close()
        self._do_without_copies(answer["threads"])
        return self._load_template()

    def _do_without_copies(self, threads: Sequence[str]) -> None:
        self._setup["forks"] = False
        self.why_slow_starts = (
            f"loading rewards {', '.join(self._uses)} starts threads ({len(threads)}: "
            f"{', '.join(sorted(set(threads)))}), and a process with threads cannot be copied: each worker loads them "
            "itself, also after each time-out. Start threads when they are first needed instead"
        )

    def _note_code_hash(self, code_hash: str | None) -> None:
        if code_hash is None:  # each worker will say
            return
        if self.code_hash not in ("", code_hash):
            raise ConfigError(
                f"rewards {', '.join(self._uses)} are others than those this pool loaded first: two versions would be "
                "mixed. Put the files back, or start anew"
            )
        self.code_hash = code_hash

    def _start_missing(self, template: Template) -> None:
        for slot in sorted(set(range(self.num_workers)) - {worker.slot for worker in self._workers}):
            self._num_started += 1
            self._workers.append(template.start_worker(self._num_started, slot))

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.is_free and self._queue:
                worker.give(self._queue.next_batch())

    def _wait(self, template: Template, wait_s: float) -> None:
        """Until there is something to read or write, or a limit is over."""
        poll = select.poll()
        poll.register(template, select.POLLIN)
        for worker in self._workers:
            if worker.is_ending:  # its socket is at its end for ever
                continue
            poll.register(worker, select.POLLIN | (select.POLLOUT if worker.unsent else 0))
            if worker.batch:
                wait_s = min(wait_s, self._limit_s - worker.elapsed_s() + 0.001)
        poll.poll(1000 * max(0.0, wait_s))

    def _hear(self, template: Template) -> None:
        for message in template.heard():
            worker = next((worker for worker in self._workers if worker.number == message["ended"]), None)
            if worker is None:  # we gave it up
                continue
            with suppress(WorkerEnded):
                if not worker.is_ending:
                    self._take_replies(worker)  # its last words count
            if worker in self._workers:
                self._mourn(worker, f"{worker.why_ending or 'the worker ended'} ({message['how']})")

    def _attend(self, template: Template, worker: Worker) -> None:
        """
        Raises:
            TemplateEnded: it does not do what it was asked to.
        """
        if not worker.is_ending:
            try:
                self._take_replies(worker)
            except WorkerEnded as error:
                template.end_worker(worker)  # which also tells how it ended
                worker.end(str(error))
        if worker.is_ending or not worker.is_ready:
            limit_s = ANSWER_LIMIT_S if worker.is_ending or self._setup["forks"] else START_LIMIT_S
            if worker.elapsed_s() > limit_s:
                template.kill()
                raise TemplateEnded
        elif worker.batch and worker.elapsed_s() > self._limit_s:
            self._time_out(worker)

    def _take_replies(self, worker: Worker) -> None:
        for reply in worker.exchange():
            if "number" in reply:
                self._finish(worker, reply)
            elif "ready" in reply:
                self._note_code_hash(reply["ready"])
                self.isolation = reply["isolation"]
                worker.is_ready = True
            elif "cannot_load" in reply:
                raise ConfigError(reply["cannot_load"])
            elif "leaves" in reply:
                self._give_up(worker)
                return
            else:
                raise WorkerEnded("the worker sent no proper reply")

    def _finish(self, worker: Worker, reply: Message) -> None:
        """The first item of the batch is done, and the next one begins."""
        if not worker.batch or reply["number"] != worker.batch[0].ticket:
            raise WorkerEnded("the worker answered what was not asked")
        task, seconds = worker.batch.popleft(), worker.elapsed_s()
        worker.began = time.monotonic()
        if "error" in reply:
            score = self._unscored(ScoreStatus.FAILED, seconds, reply["error"], self._part(reply["place"]))
        else:
            score = read_score(reply["score"])
            self._remember(task, score)
            self._queue.pace.note(score.seconds)
        self._finished.append(Outcome(ticket=task.ticket, score=score))
        self._num_templates_in_vain = 0

    def _time_out(self, worker: Worker) -> None:
        task, seconds = worker.batch.popleft(), worker.elapsed_s()
        score = self._unscored(
            ScoreStatus.TIMEOUT, seconds, f"no answer within {self._limit_s:g} s", self._asked(worker)
        )
        self._finished.append(Outcome(ticket=task.ticket, score=score))
        self._give_up(worker)

    def _give_up(self, worker: Worker) -> None:
        """End it, and let others have what it did not begin with."""
        assert self._template is not None
        self._template.end_worker(worker)
        self._remove(worker)

    def _remove(self, worker: Worker) -> None:
        self._workers.remove(worker)
        self._queue.put_back(worker.batch)
        worker.close()

    def _mourn(self, worker: Worker, how: str) -> None:
        """A worker has ended that was not to: what it was grading is tried once more."""
        if not worker.is_ready:
            raise ConfigError(self._loading(how))
        if worker.batch:  # else it died of nothing that we asked of it
            self._try_again(worker, how)
        self._remove(worker)

    def _try_again(self, worker: Worker, how: str) -> None:
        task = worker.batch[0]
        task.num_deaths += 1
        if task.num_deaths == MAX_TRIES:
            worker.batch.popleft()
            score = self._unscored(
                ScoreStatus.FAILED, worker.elapsed_s(), f"{how}, {MAX_TRIES} times", self._asked(worker)
            )
            self._finished.append(Outcome(ticket=task.ticket, score=score))

    def _lose(self, template: Template) -> None:
        """The template was killed, and all workers with it; by what one of them was grading, or from outside.

        Raises:
            RewardError: again and again.
        """
        self._num_templates_in_vain += 1
        for worker in list(self._workers):
            if worker.batch:
                self._try_again(worker, "the process that starts workers ended")
            self._remove(worker)
        how = template.close()
        self._template = None
        if self._num_templates_in_vain == MAX_TEMPLATES_IN_VAIN:
            raise RewardError(
                f"the process that starts the workers of the rewards {', '.join(self._uses)} ended {how}, "
                f"{MAX_TEMPLATES_IN_VAIN} times without a score in between; see whether the machine is out of memory"
            )

    def _loading(self, what: str) -> str:
        return f"rewards {', '.join(self._uses)}: {what} while a worker loaded them; try to import the file by hand"

    def _unscored(self, status: ScoreStatus, seconds: float, what: str, culprit: str | None) -> Score:
        """No part has a value; the culprit, if it is known, is said to have taken the time."""
        unknown = dict.fromkeys(self._names, math.nan)
        return Score(
            parts=unknown,
            part_status=dict.fromkeys(self._names, status),
            part_seconds=unknown | ({} if culprit is None else {culprit: seconds}),
            total=math.nan,
            status=status,
            seconds=seconds,
            detail=what if culprit is None else f"{culprit}: {what}",
        )

    def _asked(self, worker: Worker) -> str | None:
        """The part that the worker was asked last, as it noted itself."""
        assert self._template is not None
        return self._part(self._template.part_at_work(worker))

    def _part(self, place: int) -> str | None:
        return self._names[place - 1] if 0 < place <= len(self._names) else None

    def _remember(self, task: Task, score: Score) -> None:
        if score.status == ScoreStatus.OK:
            self._cache[task.key] = score
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)


def _key(item: Item, code_hash: str) -> bytes:
    """A digest in place of the texts, so that the cache of a long run stays small."""
    digest = hashlib.blake2b(digest_size=16, key=code_hash.encode())
    for text in item:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(LENGTH.pack(len(encoded)))
        digest.update(encoded)
    return digest.digest()
