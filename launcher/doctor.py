"""`towline doctor`: what this machine has of what runs need, each tried by using it."""

from collections.abc import Iterator

from towline.rollout.sandbox.isolation import IsolationError
from towline.rollout.sandbox.sandbox import Sandbox, try_sandbox
from towline.rollout.sandbox.zygote import FILES

_MEANING = {
    "landlock": "files cannot be read or written",
    "namespaces": "files, network and shared memory are not there",
}


def print_doctor() -> int:
    """Return 1 where something failed."""
    lines = list(_sandbox_lines())
    for kind, what in lines:
        print(f"sandbox  {kind:<8} {what}")
    num_failed = sum(kind == "FAILED" for kind, _ in lines)
    print(f"{num_failed} failed" if num_failed else "nothing failed")
    return 1 if num_failed else 0


def _sandbox_lines() -> Iterator[tuple[str, str]]:
    """Each wall, and what programs of a code reward would run behind."""
    for files in FILES:
        try:
            found = Sandbox(files=files, seccomp=True)
        except IsolationError as error:
            yield "missing", f"seccomp + {error}"
            continue
        found.close()
        if found.isolation.is_whole:
            yield "ok", f"{found.isolation}: no processes, sockets or signals; {_MEANING[files]}"
        else:
            yield "FAILED", f"{found.isolation}: a program {', '.join(found.isolation.failures)}"
    try:
        yield "ok", f"code rewards run programs behind {try_sandbox()}"
    except IsolationError as error:
        yield "FAILED", f"code rewards: {error}"
