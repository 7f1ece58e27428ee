"""What one program may use."""

import ctypes
import math
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    seconds: float = 4.0
    """Wall time of all tests or cases of a program together."""
    memory_mib: int = 1024
    """Address space of the program, beyond that of a bare interpreter."""
    output_bytes: int = 2**20
    """Of what one run of the program prints; as much as is expected of it may be printed in any case."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf or self.memory_mib < 16 or self.output_bytes < 1:
            raise ValueError(f"limits are positive, and memory is 16 MiB or more; found {self}")


MAX_OPEN_FILES = 64
MAX_STACK_BYTES = 64 * 2**20
_MAX_HEAPS = -8
"""M_ARENA_MAX. Else each thread reserves 64 MiB of address space, and a program has room for a dozen."""


def used_bytes() -> int:
    """Address space of this process; where its own files cannot be seen any more, ask before."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def confine_template() -> None:
    """What is the same for every program, and inherited by it."""
    with suppress(AttributeError):  # not the GNU C library
        ctypes.CDLL(None).mallopt(_MAX_HEAPS, 1)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, MAX_STACK_BYTES)


def confine(seconds: float, max_bytes: int) -> None:
    """
    Args:
        max_bytes: of address space, in all.
    """
    _limit(resource.RLIMIT_AS, max_bytes)
    _limit(resource.RLIMIT_CPU, math.ceil(seconds) + 1)
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)


def _limit(kind: int, wanted: int) -> None:
    """Never above the hard limit that is there: it cannot be raised, and a lower one is no reason to fail."""
    _, hard = resource.getrlimit(kind)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))
