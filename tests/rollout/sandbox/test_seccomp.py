"""The filter of system calls, gone through as the kernel does: what it says of each call, by number and arguments."""

import struct

import pytest

from towline.rollout.sandbox.seccomp import _program
from towline.rollout.sandbox.system_calls import AUDIT_ARCHITECTURE, MACHINES, always_allowed, number_of

ALLOWED, KILLED, REFUSED, MISSING = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
X32 = 0x40000000


class Machine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.program = [struct.unpack("HBBI", one) for one in _program(name)]

    def says(self, call: str | int, *arguments: int, architecture: int | None = None) -> int:
        number = number_of(call, self.name) if isinstance(call, str) else call
        found = AUDIT_ARCHITECTURE[self.name] if architecture is None else architecture
        data = struct.pack("IIQ6Q", number, found, 0, *arguments, *[0] * (6 - len(arguments)))
        place = value = 0
        while True:
            code, if_true, if_false, constant = self.program[place]
            place += 1
            match code:
                case 0x20:
                    (value,) = struct.unpack_from("I", data, constant)
                case 0x54:
                    value &= constant
                case 0x06:
                    return constant
                case 0x15 | 0x35 | 0x45:
                    holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
                    place += if_true if holds else if_false


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(request.param)


LIMITED = ("kill", "tgkill", "prlimit64", "clone", "socketpair", "ioctl", "fcntl", "clone3", "openat2")


def test_calls_that_are_not_listed_are_refused(machine: Machine) -> None:
    allowed = set(always_allowed(machine.name))
    limited = {number_of(call, machine.name) for call in LIMITED}
    numbers = {*range(1024), X32, X32 + 1, X32 + 512, 2**31 - 1, 2**31, 2**32 - 1} - limited
    assert len(allowed & numbers) == len(allowed) > 80
    for number in numbers:
        for argument in (0, 1, 2**32 - 1):
            assert machine.says(number, *[argument] * 6) == (ALLOWED if number in allowed else REFUSED), number


def test_calls_of_another_architecture_end_the_process(machine: Machine) -> None:
    for architecture in {*AUDIT_ARCHITECTURE.values(), 0x40000003, 0} - {AUDIT_ARCHITECTURE[machine.name]}:
        assert {machine.says(number, architecture=architecture) for number in range(512)} == {KILLED}


def test_the_c_library_is_told_that_newer_calls_are_missing(machine: Machine) -> None:
    assert [machine.says(call) for call in ("clone3", "openat2")] == [MISSING] * 2


def test_signals_and_limits_are_for_nobody_else(machine: Machine) -> None:
    # A copy puts in its own number; before that it is 0.
    for call in ("kill", "tgkill", "prlimit64"):
        assert machine.says(call, 0, 9) == ALLOWED
        for process in (1, 4242, 2**32 - 1, 2**31):
            assert machine.says(call, process, 9) == REFUSED


def test_there_are_threads_and_no_processes(machine: Machine) -> None:
    assert machine.says("clone", 0x003D0F00) == ALLOWED  # what pthread_create asks for
    for flags in (0, 17, 0x4111, 0x01200011, 0x10000000, 0x7E020000):
        assert machine.says("clone", flags) == REFUSED


def test_sockets_are_pairs_of_local_streams(machine: Machine) -> None:
    assert machine.says("socketpair", 1, 1) == machine.says("socketpair", 1, 0x80801) == ALLOWED
    for family, kind in ((1, 2), (1, 5), (2, 1), (10, 1), (16, 3), (17, 3), (0, 1)):
        assert machine.says("socketpair", family, kind) == REFUSED


def test_of_descriptors_harmless_things_are_asked(machine: Machine) -> None:
    for command in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451):
        assert machine.says("ioctl", 1, command) == ALLOWED
    for command in (0x5412, 0x540E, 0x8901, 0x8904, 0x8912, 0x8B01, 0):  # TIOCSTI, TIOCSCTTY, FIOSETOWN and others
        assert machine.says("ioctl", 1, command) == REFUSED
    for command in (0, 1, 2, 3, 4, 1030, 1032):
        assert machine.says("fcntl", 1, command) == ALLOWED
    for command in (6, 8, 10, 15, 1024, 1026, 1031, 1033):  # locks, F_SETOWN, F_SETSIG, leases, F_SETPIPE_SZ, seals
        assert machine.says("fcntl", 1, command) == REFUSED


def test_no_call_is_far_to_seek(machine: Machine) -> None:
    """The kernel goes through all of the filter for each call as it is put up, in every copy."""

    def depth(place: int) -> int:
        code, if_true, if_false, _ = machine.program[place]
        if code == 0x06:
            return 1
        if code in (0x20, 0x54):
            return 1 + depth(place + 1)
        return 1 + max(depth(place + 1 + if_true), depth(place + 1 + if_false))

    assert depth(0) < 32
