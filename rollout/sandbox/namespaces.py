"""A view of the file system, the network and shared memory of one's own (user_namespaces(7)), where landlock is not to
be had: an empty read-only root with only the folders that are named. Needs no root, where the administrators let users
have namespaces."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from towline.rollout.sandbox import capabilities

_NEW_USER, _NEW_FILES, _NEW_NETWORK, _NEW_SHARED_MEMORY = 0x10000000, 0x00020000, 0x40000000, 0x08000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_NO_SET_UID, _NO_DEVICES, _NO_PROGRAMS = 2, 4, 8
_LOCKED = 2 | 4 | 8 | 1024 | 2048
"""Flags that a mount of the outer namespace keeps when it is mounted again."""
_DETACH = 2
_MOUNT_POINT = Path("/proc")
"""There everywhere, and nothing below it is wanted inside."""

_libc = ctypes.CDLL(None, use_errno=True)


def confine(readable: Sequence[Path], writable: Sequence[Path]) -> None:
    """Arguments are those of `landlock.confine`; folders above what is readable can be listed.

    Raises:
        OSError: the kernel, or its administrator, does not let us. The process is then in between, and must end.
    """
    user, group = os.geteuid(), os.getegid()
    _checked(_libc.unshare(_NEW_USER | _NEW_FILES | _NEW_NETWORK | _NEW_SHARED_MEMORY), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount(None, Path("/"), _RECURSIVE | _PRIVATE)
    _mount(Path("tmpfs"), _MOUNT_POINT, _NO_SET_UID | _NO_DEVICES, kind=b"tmpfs")
    for path in (path for path in readable if path.exists()):
        _bind(path, read_only=True)
    for path in writable:
        _bind(path, read_only=False)
    _mount(None, _MOUNT_POINT, _REMOUNT | _READ_ONLY | _NO_SET_UID | _NO_DEVICES)
    os.chdir(_MOUNT_POINT)
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")
    capabilities.drop()


def _bind(path: Path, *, read_only: bool) -> None:
    target = _MOUNT_POINT / path.relative_to("/")
    if target.exists():  # with a folder above it
        return
    if path.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount(path, target, _BIND | _RECURSIVE)
    if read_only:
        _mount(None, target, _BIND | _REMOUNT | _READ_ONLY | _NO_SET_UID | (os.statvfs(path).f_flag & _LOCKED))


def _mount(source: Path | None, target: Path, flags: int, kind: bytes | None = None) -> None:
    found = _libc.mount(None if source is None else bytes(source), bytes(target), kind, ctypes.c_ulong(flags), None)
    _checked(found, f"mount on {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
