"""Carry out a command as on a kernel that has neither landlock nor namespaces for users, and with --bare no seccomp
either: `python without_walls.py [--bare] COMMAND...`. The calls fail as they do there; nothing else is changed.
"""

import ctypes
import os
import struct
import sys

from towline.rollout.sandbox.system_calls import AUDIT_ARCHITECTURE, machine

LANDLOCK_CREATE_RULESET = 444
UNSHARE, SECCOMP = {"x86_64": (272, 317), "aarch64": (97, 277)}[machine()]
ALLOW, NO_SUCH_CALL = 0x7FFF0000, 0x00050000 | 38
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22


def instruction(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, constant)


def take_away(calls: list[int]) -> None:
    program = [instruction(0x20, 4), instruction(0x15, AUDIT_ARCHITECTURE[machine()], 1, 0), instruction(6, ALLOW)]
    program.append(instruction(0x20, 0))
    for call in calls:
        program += [instruction(0x15, call, 0, 1), instruction(6, NO_SUCH_CALL)]
    program.append(instruction(6, ALLOW))
    content = ctypes.create_string_buffer(b"".join(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    description = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(content))
    assert libc.prctl(PR_SET_SECCOMP, 2, description, 0, 0) == 0, ctypes.get_errno()


def main() -> None:
    arguments = sys.argv[1:]
    is_bare = arguments[0] == "--bare"
    take_away([LANDLOCK_CREATE_RULESET, UNSHARE, *([SECCOMP] if is_bare else [])])
    command = arguments[is_bare:]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
