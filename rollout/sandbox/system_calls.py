"""System calls that a Python program needs to compute, by machine: number on x86_64, number on aarch64.

From the kernel's tables arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h. What is not here
is refused: above all processes, sockets, signals to others, and whatever changes files.
"""

import platform

_BOTH = {
    "read": (0, 63), "write": (1, 64), "futex": (202, 98), "mmap": (9, 222), "munmap": (11, 215), "brk": (12, 214),
    "close": (3, 57), "lseek": (8, 62), "fstat": (5, 80), "newfstatat": (262, 79), "openat": (257, 56),
    "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "sched_yield": (24, 124), "dup": (32, 23), "dup3": (292, 24),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "times": (100, 153), "getitimer": (36, 102), "setitimer": (38, 103),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getpgid": (121, 155), "getsid": (124, 156),
    "uname": (63, 160), "sysinfo": (99, 179), "getcwd": (79, 17), "umask": (95, 166),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "getrusage": (98, 165), "wait4": (61, 260), "waitid": (247, 95),
    "sched_getaffinity": (204, 123), "getcpu": (309, 168), "getdents64": (217, 61), "readlinkat": (267, 78),
    "faccessat": (269, 48), "faccessat2": (439, 439), "statx": (332, 291), "fadvise64": (221, 223),
    "set_tid_address": (218, 96), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "rseq": (334, 293),
    "restart_syscall": (219, 128), "membarrier": (324, 283), "getrandom": (318, 278), "pipe2": (293, 59),
    "eventfd2": (290, 19), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "ppoll": (271, 73), "pselect6": (270, 72), "close_range": (436, 436),
    "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210), "getsockopt": (55, 209),
    "setsockopt": (54, 208), "getsockname": (51, 204), "getpeername": (52, 205), "exit": (60, 93),
    "exit_group": (231, 94),
}  # fmt: skip
_X86_64_ONLY = {
    "open": 2, "stat": 4, "lstat": 6, "poll": 7, "access": 21, "pipe": 22, "select": 23, "dup2": 33, "pause": 34,
    "alarm": 37, "getdents": 78, "readlink": 89, "getpgrp": 111, "arch_prctl": 158, "time": 201, "epoll_create": 213,
    "epoll_wait": 232, "eventfd": 284,
}  # fmt: skip
_LIMITED = {
    "ioctl": (16, 29), "kill": (62, 129), "tgkill": (234, 131), "clone": (56, 220), "prlimit64": (302, 261),
    "socketpair": (53, 199), "seccomp": (317, 277), "fcntl": (72, 25),
}  # fmt: skip
"""Refused, or allowed with some arguments only."""
_NEWER = {"clone3": (435, 435), "openat2": (437, 437)}
"""The C library does without them where the kernel has none."""

MACHINES = {"x86_64": 0, "aarch64": 1}
AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def machine() -> str:
    """
    Raises:
        OSError: the numbers of this machine are not here.
    """
    name = platform.machine()
    if name not in MACHINES:
        raise OSError(f"no table of system calls for {name}; there are {', '.join(MACHINES)}")
    return name


def always_allowed(name: str) -> list[int]:
    numbers = [numbers[MACHINES[name]] for numbers in _BOTH.values()]
    return numbers + (list(_X86_64_ONLY.values()) if name == "x86_64" else [])


def number_of(call: str, name: str) -> int:
    return (_LIMITED | _NEWER)[call][MACHINES[name]]
