"""What root may do beyond others (capabilities(7)): given up, so that a program run by root cannot raise its limits."""

import ctypes
import struct

_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def drop() -> None:
    """For good, where programs cannot be started.

    Raises:
        OSError: the kernel does not do it.
    """
    if _libc.capset(struct.pack("Ii", _VERSION, 0), bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
