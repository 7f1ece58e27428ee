"""What Linux offers to end a process together with everything it started, without being root.

An orphan goes to its nearest living ancestor that adopts orphans, however often it left its group or session. So what
an ended child leaves behind turns up among the children of the process that had started it, and can be ended there.
"""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own. Not inherited by children."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Be killed when the parent ends. It counts as ended when the thread that started us ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        os._exit(0)


def outlive_parent() -> None:
    _prctl(_SET_PARENT_DEATH_SIGNAL, 0)


def children() -> set[int]:
    """Process ids of our children, of zombies too; for a process with one thread."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    if listed.exists():
        return set(map(int, listed.read_text().split()))
    return {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _parent(entry) == os.getpid()}


def _parent(entry: Path) -> int | None:
    with suppress(OSError):
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return None


def kill_with_group(pid: int) -> None:
    """
    Args:
        pid: of a child of ours that was not reaped, so that its number is its own; its group goes too if it leads one.
    """
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def thread_names() -> list[str]:
    """Of every thread of this process, those of C libraries too."""
    names: list[str] = []
    for task in sorted(Path("/proc/self/task").iterdir()):
        with suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return names


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
