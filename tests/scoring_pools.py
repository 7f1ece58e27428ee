"""Reward functions that do harm, and what pools of workers leave behind."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

from towline.rollout.rewards.config import RewardConfig

NUM_WORKERS, LIMIT_S = 2, 0.5
# One file with every misdeed, chosen by the completion, so that one warm pool serves many tests.
HOSTILE = r"""
import ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path

HERE = Path(__file__).parent
print("printed while loading")

def grade(completion, gold):
    deed, _, argument = completion.partition(" ")
    return globals()[deed](argument)

def value(argument):
    return float(argument)

def pid(argument):
    return os.getpid()

def sleep(argument):
    time.sleep(float(argument))
    return 1

def loop(argument):
    while True:
        pass

def hold_the_interpreter(argument):
    return len(str(pow(7, 10**9)))

def swallow(argument):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

def leave(argument):
    with (HERE / "tries").open("a") as file:
        file.write("x")
    os._exit(int(argument))

def leave_once(argument):
    if not (HERE / f"left{argument}").exists():
        (HERE / f"left{argument}").touch()
        os._exit(0)
    return 1

def segfault(argument):
    ctypes.string_at(0)

def print_much(argument):
    print("x" * 100_000)
    os.write(1, b"\0\0\0\2{}" * 100)
    subprocess.run(["echo", "from a program"], check=True)
    return 1

def read_input(argument):
    return len(sys.stdin.read()) + len(os.read(0, 100))

def fork_and_leave(argument):
    child = os.fork()
    if child == 0:
        time.sleep(600)
    (HERE / "child").write_text(str(child))
    os._exit(0)

def fork_and_loop(argument):
    child = subprocess.Popen(["sleep", "600"])
    (HERE / "child").write_text(str(child.pid))
    while True:
        pass

def fork_and_come_back(argument):
    os.fork()
    return 1

def leave_soon(argument):
    threading.Timer(0.1, os._exit, [0]).start()
    return 1

def hold_soon(argument):
    threading.Timer(0.05, pow, [7, 10**9]).start()
    return 1

def environment(argument):
    return len([name for name in os.environ if name.startswith(("SLURM", "SECRET", "OMPI"))])

def modules(argument):
    return len({"torch", "vllm", "pydantic", "transformers"} & set(sys.modules))

def become_daemon(argument):
    # It leaves group and session, and its parent is gone.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            (HERE / "daemon").write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not (HERE / "daemon").exists() or not (HERE / "daemon").read_text():
        time.sleep(0.001)

def daemon(argument):
    become_daemon(argument)
    return 1

def daemon_and_loop(argument):
    become_daemon(argument)
    while True:
        pass

def multiply(argument):
    # A small fork bomb, each process of it in a session of its own.
    for _ in range(5):
        os.fork()
        os.setsid() if os.getpid() != os.getsid(0) else None
    time.sleep(600)

def close_everything(argument):
    os.closerange(0, 1000)
    return 1

def write_everywhere(argument):
    for descriptor in range(3, 100):
        try:
            os.write(descriptor, b"\0\0\0\2{}" * 10)
        except OSError:
            pass
    return 1

def interrupt(argument):
    raise KeyboardInterrupt("pressed by nobody")

class Unusual(BaseException):
    pass

def unusual(argument):
    raise Unusual("not an Exception")

def block_signals(argument):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    loop(argument)

def leave_a_thread(argument):
    threading.Thread(target=time.sleep, args=[600]).start()
    return 1

def huge_answer(argument):
    return "x" * 50_000_000

def allocate(argument):
    return len(bytearray(int(argument) * 2**20))

HOARD = []

def hoard(argument):
    HOARD.append(bytearray(int(argument) * 2**20))
    return len(HOARD)

def recurse(argument):
    return recurse(argument)

def kill_the_parent(argument):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

def stop_the_parent(argument):
    os.kill(os.getppid(), signal.SIGSTOP)
    os._exit(0)
"""


def rewards(*uses: str) -> list[RewardConfig]:
    return [RewardConfig(use=use, weight=1.0) for use in uses]


def children(of: int | None = None) -> set[int]:
    """Processes below this one, or another, at any depth, zombies too."""
    top = os.getpid() if of is None else of
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    below = {top}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {top}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def open_files() -> list[str]:
    gc.collect()  # what a test before has left to it
    return sorted(os.listdir("/proc/self/fd"))
