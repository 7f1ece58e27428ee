"""What a program is shut in by, shown by trying: a kernel may offer what it does not do."""

import json
from dataclasses import dataclass

from towline.storage.errors import ConfigError


class IsolationError(ConfigError):
    """Programs cannot be shut in here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    files: str
    """What hides them: landlock or namespaces; empty: nothing does."""
    version: int
    """Of landlock's interface; 0 without it."""
    has_seccomp: bool
    failures: tuple[str, ...]
    """What a program could do that it is not to."""

    @property
    def is_whole(self) -> bool:
        return bool(self.files) and self.has_seccomp and not self.failures

    def __str__(self) -> str:
        files = f"{self.files} {self.version}" if self.version else self.files
        walls = [wall for wall in ("seccomp" if self.has_seccomp else "", files) if wall]
        return " + ".join([*walls, "rlimits"])


PROBE = r"""
import fcntl, json, os, sys
asked = json.load(sys.stdin)
can = []
def attempt(what, action):
    try:
        action()
    except (OSError, ImportError):
        return
    can.append(what)
def fork():
    if os.fork() == 0:
        os._exit(0)
def connect():
    import socket
    socket.socket(socket.AF_INET, socket.SOCK_STREAM)
def local_socket():
    import socket
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
attempt("reads your files", lambda: open(asked["secret"]).close())
attempt("lists your folders", lambda: os.listdir(asked["folder"]))
attempt("writes files", lambda: open(os.path.join(asked["folder"], "written"), "w").close())
attempt("writes shared memory", lambda: os.close(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)))
attempt("changes files", lambda: os.chmod(asked["secret"], 0o600))
attempt("deletes files", lambda: os.unlink(asked["secret"]))
attempt("starts processes", fork)
attempt("starts programs", lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt("opens network sockets", connect)
attempt("opens local sockets", local_socket)
attempt("signals other processes", lambda: os.kill(asked["process"], 0))
attempt("signals other processes by way of a descriptor", lambda: fcntl.fcntl(0, fcntl.F_SETOWN, asked["process"]))
attempt("looks into other processes", lambda: open(f"/proc/{asked['process']}/environ", "rb").close())
print(json.dumps(can))
"""
"""A program that says what it could do."""


def judge_probe(output: bytes, error: str) -> tuple[str, ...]:
    """
    Raises:
        IsolationError: it did not run, so that nothing is known and nothing could be done here.
    """
    try:
        return tuple(str(what) for what in json.loads(output))
    except ValueError:
        raise IsolationError(f"no program runs: {error[-300:].strip() or 'it ended without a word'}") from None
