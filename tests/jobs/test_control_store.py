"""The control store, its process, its clients and the heartbeats in it: what is believed, and how its death shows."""

import dataclasses
import itertools
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from towline.jobs.control_store import ControlStore
from towline.jobs.heartbeat import PERIOD_S, Heartbeat
from towline.jobs.launch import LocalLauncher
from towline.jobs.store_handle import StoreHandle
from towline.storage.errors import StoreError

KEY = b"the key of this run"
PROMPTLY_S = 3.0
"""On a machine that does other things too; 0.1 s were measured."""
# Children only talk to the store: they need none of this process's threads, and torch is imported already.
FORK = multiprocessing.get_context("fork")
ATTEMPTS = itertools.count(1)


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreHandle]:
    handle = StoreHandle(KEY, 0, tmp_path_factory.mktemp("store") / "store.log", LocalLauncher().store_command())
    yield handle
    handle.close()
    assert handle.poll() == 0
    handle.close()  # twice is once


@pytest.fixture
def attempt() -> int:
    """Fresh for each test, so that none sees another's names."""
    return next(ATTEMPTS)


@pytest.fixture
def store(handle: StoreHandle, attempt: int) -> ControlStore:
    return ControlStore(handle.address, KEY, attempt)


def seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    with pytest.raises(StoreError):
        call()
    return time.monotonic() - began


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("value", [None, True, 0, "", 1.5, [1, [2]], {"step": 3, "digest": "ab"}, "é \N{MINUS SIGN}"])
def test_a_value_comes_back_as_it_was_set(store: ControlStore, value: object):
    store.set("value", value)
    assert store.get("value") == value
    assert store.wait("value", 1.0) == value


def test_get_does_not_wait_for_a_value_that_is_not_there(store: ControlStore):
    began = time.monotonic()
    assert store.get("missing") is None
    assert time.monotonic() - began < 1.0


def test_wait_returns_soon_after_another_client_wrote(store: ControlStore, handle: StoreHandle, attempt: int):
    written: list[float] = []

    def write() -> None:
        ControlStore(handle.address, KEY, attempt).set("late", 7)
        written.append(time.monotonic())

    timer = threading.Timer(0.3, write)
    timer.start()
    assert store.wait("late", 10.0) == 7
    timer.join()
    assert time.monotonic() - written[0] < 0.5


def test_wait_gives_up_in_time_and_says_what_was_missing(store: ControlStore):
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"nobody wrote ack/3/1 within 0\.3 s"):
        store.wait("ack/3/1", 0.3)
    assert 0.3 <= time.monotonic() - began < 0.45
    store.set("after", 1)
    assert store.get("after") == 1


@pytest.mark.parametrize("timeout_s", [0.0, 0.0004])
def test_a_wait_of_no_time_does_not_last_for_ever(store: ControlStore, timeout_s: float):
    assert seconds(lambda: store.wait("missing", timeout_s)) < 0.5


def test_on_wait_runs_at_least_once_a_second_and_may_end_the_wait(store: ControlStore):
    class GivenUp(Exception):
        pass

    calls: list[float] = []

    def on_wait() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise GivenUp

    began = time.monotonic()
    with pytest.raises(GivenUp):
        store.wait("missing", 30.0, on_wait)
    gaps = [later - earlier for earlier, later in itertools.pairwise([began, *calls])]
    assert max(gaps) < 1.0


def test_a_signal_handler_runs_within_a_second_of_a_wait(store: ControlStore):
    handled: list[float] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: handled.append(time.monotonic()))
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGUSR2)

    timer = threading.Timer(0.1, send)
    timer.start()
    try:
        with pytest.raises(StoreError):
            store.wait("missing", 1.2)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert handled[0] - sent[0] < 1.0


def test_a_wall_clock_that_jumps_ends_no_wait(store: ControlStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.time", itertools.count(1e9, 3600.0).__next__)
    waits = itertools.count()
    assert store.wait("value", 60.0, lambda: store.set("value", 5) if next(waits) == 1 else None) == 5
    with pytest.raises(StoreError, match="nobody wrote missing"):
        store.wait("missing", 0.1)


def test_a_claim_of_a_missing_name_wins_and_leaves_its_value(store: ControlStore):
    assert store.exchange("lease", None, {"engine": 0, "nonce": "a"})
    assert store.get("lease") == {"engine": 0, "nonce": "a"}


def test_a_claim_of_a_taken_name_loses_and_changes_nothing(store: ControlStore):
    store.set("lease", {"engine": 1, "nonce": "b"})
    assert not store.exchange("lease", None, {"engine": 0, "nonce": "a"})
    assert store.get("lease") == {"engine": 1, "nonce": "b"}


def test_an_exchange_wins_only_against_the_value_that_stands(store: ControlStore):
    assert not store.exchange("lease", {"holder": "a"}, {"holder": "b"})
    assert store.get("lease") is None
    assert store.exchange("lease", None, {"holder": "a", "lost": 0})
    assert not store.exchange("lease", {"holder": "a", "lost": 1}, {"holder": "b", "lost": 1})
    assert store.exchange("lease", {"lost": 0, "holder": "a"}, {"holder": None, "lost": 1})
    assert store.get("lease") == {"holder": None, "lost": 1}


def test_a_claim_is_won_by_exactly_one_of_several_processes(store: ControlStore, handle: StoreHandle, attempt: int):
    def race(number: int) -> None:
        client = ControlStore(handle.address, KEY, attempt)
        client.set(f"ready/{number}", True)
        client.wait("go", 30.0)
        nonce = secrets.token_hex(8)
        client.set(f"won/{number}", [name for name in names if client.exchange(name, None, [number, nonce])])

    names = [f"lease/{number}" for number in range(50)]
    racers = [FORK.Process(target=race, args=(number,)) for number in range(4)]
    for racer in racers:
        racer.start()
    try:
        for number in range(4):
            store.wait(f"ready/{number}", 30.0)
        store.set("go", True)
        won = [store.wait(f"won/{number}", 30.0) for number in range(4)]
    finally:
        for racer in racers:
            racer.join(10)
            racer.kill()
    assert sorted(itertools.chain(*won)) == sorted(names)
    for number, names_won in enumerate(won):
        for name in names_won:
            lease = store.get(name)
            assert lease is not None
            assert lease[0] == number


def test_names_are_private_to_an_attempt(store: ControlStore, handle: StoreHandle, attempt: int):
    later = ControlStore(handle.address, KEY, attempt + 1000)
    store.set("stop", True)
    assert later.get("stop") is None
    assert later.exchange("stop", None, "mine")
    assert store.get("stop") is True


def test_a_value_of_another_run_is_refused(store: ControlStore, handle: StoreHandle, attempt: int):
    ControlStore(handle.address, b"the key of another run", attempt).set("publish", {"version": 3})
    for read in (lambda: store.get("publish"), lambda: store.wait("publish", 1.0)):
        with pytest.raises(StoreError, match="not written by this run"):
            read()
    assert not store.exchange("publish", None, "mine")


@pytest.mark.parametrize("garbage", [b"", b"short", b"x" * 100])
def test_a_value_without_a_seal_is_refused(store: ControlStore, handle: StoreHandle, attempt: int, garbage: bytes):
    raw_client(handle).set(f"attempt-{attempt}/publish", garbage)  # pyright: ignore[reportArgumentType]
    with pytest.raises(StoreError, match="not written by this run"):
        store.get("publish")


def test_a_value_moved_to_another_name_is_refused(store: ControlStore, handle: StoreHandle, attempt: int):
    store.set("probe/1/0", [0.1])
    raw = raw_client(handle)
    value: Any = raw.get(f"attempt-{attempt}/probe/1/0")
    raw.set(f"attempt-{attempt}/probe/2/0", value)
    with pytest.raises(StoreError, match="not written by this run"):
        store.get("probe/2/0")


def raw_client(handle: StoreHandle) -> TCPStore:
    host, port = handle.address.rsplit(":", 1)
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False)


def test_supervisor_and_roles_read_what_the_other_wrote(handle: StoreHandle):
    store = ControlStore(handle.address, KEY, 0)
    assert handle.get("stop") is None
    handle.set("stop", {"reason": "ctrl-c"})
    assert store.get("stop") == {"reason": "ctrl-c"}
    store.set("finished", {"status": "done", "step": 3})
    assert handle.get("finished") == {"status": "done", "step": 3}
    ControlStore(handle.address, b"another key", 0).set("finished", 1)
    with pytest.raises(StoreError, match="not written by this run"):
        handle.get("finished")


def test_the_supervisor_exchanges_over_the_pipe_what_roles_hold(handle: StoreHandle):
    store = ControlStore(handle.address, KEY, 0)
    assert handle.exchange("lease/a", None, {"holder": "é", "lost": 0})
    assert store.get("lease/a") == {"holder": "é", "lost": 0}
    assert not handle.exchange("lease/a", None, {"holder": "other", "lost": 0})
    assert store.exchange("lease/a", {"holder": "é", "lost": 0}, {"holder": "engine", "lost": 0})
    assert not handle.exchange("lease/a", {"holder": "é", "lost": 0}, {"holder": None, "lost": 1})
    assert handle.exchange("lease/a", {"holder": "engine", "lost": 0}, {"holder": None, "lost": 1})
    assert store.get("lease/a") == handle.get("lease/a") == {"holder": None, "lost": 1}
    assert not handle.exchange("lease/missing", {"holder": "a"}, {"holder": "b"})
    assert handle.get("lease/missing") is None


def test_nobody_at_the_address_is_an_error(tmp_path: Path):
    with pytest.raises(StoreError, match=r"no control store at 127\.0\.0\.1:1\b"):
        ControlStore("127.0.0.1:1", KEY, 0, timeout_s=0.5)


def test_a_killed_store_is_an_error_promptly_for_every_caller(tmp_path: Path):
    handle = StoreHandle(KEY, 0, tmp_path / "store.log", LocalLauncher().store_command())
    setting, getting, claiming, waiting = (ControlStore(handle.address, KEY, 0) for _ in range(4))
    setting.set("before", 1)
    failed: list[float] = []

    def wait() -> None:
        with pytest.raises(StoreError, match="is gone"):
            waiting.wait("never", 60.0)
        failed.append(time.monotonic())

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.2)
    killed = time.monotonic()
    os.kill(handle.pid, signal.SIGKILL)
    took = {
        "handle.get": seconds(lambda: handle.get("before")),
        "handle.set": seconds(lambda: handle.set("before", 2)),
        "handle.exchange": seconds(lambda: handle.exchange("lease", None, 2)),
        "set": seconds(lambda: setting.set("before", 2)),
        "get": seconds(lambda: getting.get("before")),
        "claim": seconds(lambda: claiming.exchange("lease", None, 1)),
    }
    waiter.join(10)
    took["wait"] = failed[0] - killed
    assert handle.poll() is not None
    handle.close()
    assert max(took.values()) < PROMPTLY_S, took


def test_the_signals_of_a_preemption_leave_the_store_alive(tmp_path: Path):
    """The processes of the run need it to agree on a checkpoint."""
    handle = StoreHandle(KEY, 0, tmp_path / "store.log", LocalLauncher().store_command())
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        os.kill(handle.pid, number)
    handle.set("after", 1)
    assert handle.get("after") == 1
    handle.close()
    assert handle.poll() == 0


def test_no_two_jobs_of_a_node_have_the_same_port(tmp_path: Path):
    """Whatever their ids: the kernel gives each store a port that nobody has, and it listens there from then on. There
    is no moment at which another process, or an outgoing connection, could take it."""
    # case G4-21: by id % 16384 + 49152 the first two would be the same, by the last four digits the others
    usual = LocalLauncher().store_command()

    def start(job: str) -> StoreHandle:
        command = dataclasses.replace(usual, environment={**usual.environment, "SLURM_JOB_ID": job})
        return StoreHandle(KEY, 0, tmp_path / f"{job}.log", command)

    with ThreadPoolExecutor() as threads:
        handles = list(threads.map(start, ("1000", "17384", "120001", "130001")))
    try:
        ports = {int(handle.address.rpartition(":")[2]) for handle in handles}
        assert len(ports) == 4
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    finally:
        for handle in handles:
            handle.close()


def test_a_store_that_cannot_start_is_an_error_at_once_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "torch.py").write_text('raise ImportError("torch is broken here")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    children = set(psutil.Process().children())
    with pytest.raises(StoreError, match="ended with code 1"):
        StoreHandle(KEY, 0, tmp_path / "store.log", LocalLauncher().store_command())
    assert set(psutil.Process().children()) <= children
    assert "torch is broken here" in (tmp_path / "store.log").read_text()


def test_the_store_ends_when_its_parent_is_killed(tmp_path: Path):
    code = f"""
import pathlib, time
from towline.jobs.launch import LocalLauncher
from towline.jobs.store_handle import StoreHandle
handle = StoreHandle(b"key", 0, pathlib.Path({str(tmp_path / "store.log")!r}), LocalLauncher().store_command())
print(handle.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            assert is_alive(pid)
            parent.kill()
            until(lambda: not is_alive(pid), timeout_s=10)
        finally:
            parent.kill()
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def present(store: ControlStore, process: str) -> dict[str, Any]:
    heartbeat = store.get(f"heartbeat/{process}")
    assert heartbeat is not None
    return heartbeat


def test_a_heartbeat_counts_beats_only_and_carries_the_phase(store: ControlStore, handle: StoreHandle, attempt: int):
    heartbeat = Heartbeat(handle.address, KEY, attempt, "rollout.1", life=2)
    try:
        first = store.wait("heartbeat/rollout.1", 10.0)
        assert (first["phase"], first["beats"], first["pid"], first["life"]) == ("start", 0, os.getpid(), 2)
        time.sleep(1.5 * PERIOD_S)
        idle = present(store, "rollout.1")
        assert idle["beats"] == 0
        assert idle["rounds"] > first["rounds"], "the process itself is not stopped"
        assert idle["phase_s"] > first["phase_s"]
        heartbeat.beat("generate")
        heartbeat.beat()
        heartbeat.beat("generate")
        until(lambda: present(store, "rollout.1")["beats"] == 3)
        working = present(store, "rollout.1")
        assert working["phase"] == "generate"
        assert working["phase_s"] <= 1.5 * PERIOD_S
    finally:
        heartbeat.close()


def test_the_heartbeat_of_a_stopped_process_stands_still(store: ControlStore, handle: StoreHandle, attempt: int):
    def work() -> None:
        heartbeat = Heartbeat(handle.address, KEY, attempt, "trainer.0")
        while True:
            heartbeat.beat("train")
            time.sleep(0.01)

    def beats() -> int:
        return present(store, "trainer.0")["beats"]

    def rounds() -> int:
        return present(store, "trainer.0")["rounds"]

    worker = FORK.Process(target=work)
    worker.start()
    try:
        first = store.wait("heartbeat/trainer.0", 10.0)["beats"]
        until(lambda: beats() > first)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
        stood = beats(), rounds()
        time.sleep(1.5 * PERIOD_S)
        assert (beats(), rounds()) == stood
        os.kill(worker.pid, signal.SIGCONT)
        until(lambda: beats() > stood[0] and rounds() > stood[1])
    finally:
        worker.kill()
        worker.join()
