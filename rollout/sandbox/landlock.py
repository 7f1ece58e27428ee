"""Which files this process and its children may open from now on (landlock(7)), for good. Needs no root and no
binary, but Linux 5.13 with landlock switched on. Later versions of its interface close more; all that is there is used.
"""

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_SET_NO_NEW_PRIVILEGES = 38
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version → how many rights on files it knows; version 2 adds links across folders, 3 truncation, 5 devices' ioctl."""
_ALL_TCP, _ALL_SCOPES = 0b11, 0b11
"""Version 4 closes bind and connect, version 6 abstract sockets and signals to processes outside."""

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """0 where the kernel has none, or it is switched off."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG))


def confine(readable: Sequence[Path], writable: Sequence[Path], listable: Sequence[Path] = ()) -> int:
    """
    Args:
        readable: files and folders with all below them. What is not there is passed over.
        writable: files that may be read and written.
        listable: folders of which the names below may be seen, and no more.

    Returns:
        The version of the interface.

    Raises:
        OSError: the kernel does not do it.
    """
    found = version()
    if found == 0:
        raise OSError(ctypes.get_errno(), "this kernel has no landlock, or it is switched off")
    rights = (1 << _NUM_RIGHTS[min(found, max(_NUM_RIGHTS))]) - 1
    attributes = struct.pack("QQQ", rights, _ALL_TCP if found >= 4 else 0, _ALL_SCOPES)
    size = 8 if found < 4 else 16 if found < 6 else 24
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0))
    try:
        for path in readable:
            _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_FOLDER)
        for path in listable:
            _allow(ruleset, path, _READ_FOLDER)
        for path in writable:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
        _checked(_libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return found


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights &= ~0 if path.is_dir() else ~_READ_FOLDER
        _checked(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, beneath), 0))
    finally:
        os.close(beneath)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    return result
