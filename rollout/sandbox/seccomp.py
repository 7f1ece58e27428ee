"""A list of system calls that this process may use from now on (seccomp(2), mode filter), for good.

The filter is a program for the kernel's classic BPF machine over `struct seccomp_data`: the number of the call at byte
0, the architecture at 4, the arguments at 16, eight bytes each.
"""

import ctypes
import os
import struct
from itertools import pairwise

from towline.rollout.sandbox.system_calls import AUDIT_ARCHITECTURE, always_allowed, machine, number_of

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_BITS, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NOT_PERMITTED, _NO_SUCH_CALL = 1, 38
_CLONE_THREAD = 0x00010000
_AF_UNIX, _SOCK_STREAM, _SOCKET_TYPE_MASK = 1, 1, 0xF
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_HARMLESS_FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not F_SETOWN and F_SETSIG: with them a
descriptor sends any process of this user any signal."""
_SET_NO_NEW_PRIVILEGES, _SET_MODE_FILTER = 38, 1

_INSTRUCTION = struct.Struct("HBBI")

_libc = ctypes.CDLL(None, use_errno=True)


class Filter:
    """Made once, before processes are copied; a copy only puts its own number in."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: the calls of this machine are not known here.
        """
        name = machine()
        instructions = _program(name)
        self._number = number_of("seccomp", name)
        self._own_process = [
            place * _INSTRUCTION.size + 4 for place, one in enumerate(instructions) if one is _IS_THIS_PROCESS
        ]
        self._content = ctypes.create_string_buffer(b"".join(instructions))
        self._program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(self._content))

    def confine(self) -> None:
        """
        Raises:
            OSError: the kernel does not do it.
        """
        for offset in self._own_process:
            struct.pack_into("I", self._content, offset, os.getpid())
        if _libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "no_new_privs")
        if _libc.syscall(self._number, _SET_MODE_FILTER, 0, self._program) != 0:
            raise OSError(ctypes.get_errno(), "seccomp")


def _program(name: str) -> list[bytes]:
    """Anything but what is allowed fails with EPERM; a call of another architecture ends the process."""
    rules = _limited(name)
    rules |= {number: _ALWAYS for number in always_allowed(name)}
    firsts = sorted({0} | rules.keys() | {number + 1 for number in rules})
    pieces = [(first, rules.get(first, _NEVER)) for first in firsts]
    joined = [piece for before, piece in pairwise([(0, []), *pieces]) if piece[1] is not before[1]]
    program = [_do(_LOAD, 4), _do(_JUMP_IF_EQUAL, AUDIT_ARCHITECTURE[name], 1, 0), _do(_RETURN, _KILL), _do(_LOAD, 0)]
    return [*program, *_search(joined)]


def _search(rules: list[tuple[int, list[bytes]]]) -> list[bytes]:
    """By halves: as a filter is put up, the kernel goes through it for every call that there is.

    Args:
        rules: in order: number of a call, and what holds from there to the next.
    """
    if len(rules) == 1:
        return rules[0][1]
    middle = len(rules) // 2
    below, above = _search(rules[:middle]), _search(rules[middle:])
    return [_do(_JUMP_IF_AT_LEAST, rules[middle][0], len(below), 0), *below, *above]


def _limited(name: str) -> dict[int, list[bytes]]:
    """Number → rule of calls whose arguments count, and of those that are to be missed by the C library."""
    own_process = [_argument(0), _IS_THIS_PROCESS, _REFUSED, _ALLOWED]
    rules = {
        "clone3": [_MISSING],
        "openat2": [_MISSING],
        "kill": own_process,
        "tgkill": own_process,
        "prlimit64": [_argument(0), _do(_JUMP_IF_EQUAL, 0, 1, 0), _REFUSED, _ALLOWED],
        "clone": [_argument(0), _do(_JUMP_IF_BITS, _CLONE_THREAD, 1, 0), _REFUSED, _ALLOWED],
        "socketpair": [  # unnamed, between threads of this process: event loops wake themselves with one
            *(_argument(0), _do(_JUMP_IF_EQUAL, _AF_UNIX, 1, 0), _REFUSED),
            *(_argument(1), _do(_AND, _SOCKET_TYPE_MASK), _do(_JUMP_IF_EQUAL, _SOCK_STREAM, 1, 0), _REFUSED, _ALLOWED),
        ],
    }
    for call, harmless in (("ioctl", _HARMLESS_IOCTLS), ("fcntl", _HARMLESS_FCNTLS)):
        commands = [part for code in harmless for part in (_do(_JUMP_IF_EQUAL, code, 0, 1), _ALLOWED)]
        rules[call] = [_argument(1), *commands, _REFUSED]
    return {number_of(call, name): rule for call, rule in rules.items()}


def _do(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return _INSTRUCTION.pack(code, if_true, if_false, constant)


def _argument(place: int) -> bytes:
    """The lower half, on machines of little endian; the calls here take 32 bits or look at low bits only."""
    return _do(_LOAD, 16 + 8 * place)


_IS_THIS_PROCESS = _do(_JUMP_IF_EQUAL, 0, 1, 0)
"""Its constant is put in by `Filter.confine`."""
_ALLOWED, _REFUSED = _do(_RETURN, _ALLOW), _do(_RETURN, _ERROR | _NOT_PERMITTED)
_MISSING = _do(_RETURN, _ERROR | _NO_SUCH_CALL)
_ALWAYS, _NEVER = [_ALLOWED], [_REFUSED]
