"""The filter's verdicts on every architecture it knows, by running its program as the kernel would."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from leasehold.worker.sandbox.seccomp import _FORBIDDEN, MACHINES, Machine, build_filter

ALLOW, KILL = 0x7FFF0000, 0x80000000
DENY, ABSENT = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
PID = 4321


def verdict(machine: Machine, number: int, *arguments: int, arch: int | None = None) -> int:
    """Interpret the program over one system call."""
    filled = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("<IIQ6Q", number, machine.audit_arch if arch is None else arch, 0, *filled)
    program = list(struct.iter_unpack("=HBBI", build_filter(machine, PID)))
    at, value = 0, 0
    while True:
        code, if_true, if_false, k = program[at]
        at += 1
        if code == 0x06:
            return int(k)
        if code == 0x20:
            value = struct.unpack_from("<I", data, k)[0]
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += if_true if holds else if_false


@pytest.fixture(params=sorted(MACHINES))
def machine(request: pytest.FixtureRequest) -> Machine:
    return MACHINES[request.param]


def test_every_listed_call_is_denied(machine: Machine) -> None:
    numbers = [numbers[machine.column] for numbers in _FORBIDDEN.values()]
    assert {verdict(machine, number) for number in numbers if number is not None} == {DENY}


def test_no_call_is_listed_twice(machine: Machine) -> None:
    numbers = [numbers[machine.column] for numbers in _FORBIDDEN.values() if numbers[machine.column] is not None]
    assert len(numbers) == len(set(numbers))


def test_threads_may_be_made_and_processes_not(machine: Machine) -> None:
    clone = (56, 220)[machine.column]
    assert verdict(machine, clone, 0x003D0F00) == ALLOW  # what pthread_create asks for
    assert verdict(machine, clone, 0x01200011) == DENY  # what fork asks for
    assert verdict(machine, 435) == ABSENT


def test_signals_reach_only_the_process_itself(machine: Machine) -> None:
    for number in ((62, 129)[machine.column], (234, 131)[machine.column]):
        assert verdict(machine, number, PID, 6) == ALLOW
        assert verdict(machine, number, 1, 9) == DENY
        assert verdict(machine, number, 0xFFFFFFFFFFFFFFFF, 9) == DENY


def test_limits_may_be_read_and_not_set(machine: Machine) -> None:
    prlimit64 = (302, 261)[machine.column]
    assert verdict(machine, prlimit64, 0, 7, 0, 0x7FFF00000000) == ALLOW
    assert verdict(machine, prlimit64, 0, 7, 0x7FFF00000000, 0) == DENY
    assert verdict(machine, prlimit64, 0, 7, 0x1000, 0) == DENY


def test_io_uring_is_as_if_the_kernel_were_older(machine: Machine) -> None:
    assert {verdict(machine, number) for number in (425, 426, 427)} == {ABSENT}


def test_reading_and_writing_stay_allowed(machine: Machine) -> None:
    assert verdict(machine, (0, 63)[machine.column]) == ALLOW
    assert verdict(machine, (1, 64)[machine.column]) == ALLOW


def test_another_architectures_calls_end_the_process(machine: Machine) -> None:
    assert verdict(machine, 1, arch=0x40000003) == KILL  # 32-bit x86: other numbers, same kernel


def test_the_x32_numbers_are_denied(machine: Machine) -> None:
    assert verdict(machine, 0x40000000 + 41) == DENY


def test_this_machine_is_known_or_said_to_be_unknown() -> None:
    assert (os.uname().machine in MACHINES) == (os.uname().machine in {"x86_64", "aarch64"})
