"""A small file system of its own, to fill up."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """Mount one of `size`, such as "256k", at `folder`. False where only root may, or a container refuses it.

    It goes away afterwards only if nothing on it is still open.
    """
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    can_mount = os.geteuid() == 0 and shutil.which("mount") is not None
    is_mounted = can_mount and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True)
