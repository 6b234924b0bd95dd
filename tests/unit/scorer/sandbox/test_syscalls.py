"""The seccomp filter, run by a small interpreter of its instructions: so for machines that are not at hand, too."""

import errno
import struct

import pytest

from lachesis.pipeline.scorer.sandbox.syscalls import build_filter

ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSED, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None, alone: bool = False) -> int:
    """Return what the kernel would answer."""
    program = build_filter(machine, alone=alone)
    assert program is not None
    instructions = list(struct.iter_unpack("<HBBI", program))
    given = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number, ARCHITECTURES[machine] if architecture is None else architecture, 0, *given)
    at = value = 0
    while True:
        code, when, otherwise, constant = instructions[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
        elif code == 0x06:
            return int(constant)
        else:
            true = value == constant if code == 0x15 else value & constant
            at += when if true else otherwise


@pytest.mark.parametrize(
    ("machine", "numbers"),
    [
        (
            "x86_64",
            {
                "read": 0,
                "futex": 202,
                "execve": 59,
                "clone": 56,
                "prctl": 157,
                "fcntl": 72,
                "prlimit64": 302,
                "sigaction": 13,
            },
        ),
        (
            "aarch64",
            {
                "read": 63,
                "futex": 98,
                "execve": 221,
                "clone": 220,
                "prctl": 167,
                "fcntl": 25,
                "prlimit64": 261,
                "sigaction": 134,
            },
        ),
    ],
)
def test_what_is_allowed_and_what_is_not(machine: str, numbers: dict[str, int]) -> None:
    assert {decide(machine, numbers[name]) for name in ("read", "futex", "execve")} == {ALLOW}
    assert decide(machine, numbers["clone"], 0x3D0F00) == ALLOW  # a thread of glibc's
    assert decide(machine, numbers["clone"], 0x10000011) == REFUSED  # a user namespace
    assert decide(machine, numbers["prctl"], 15) == ALLOW
    assert decide(machine, numbers["prctl"], 1) == REFUSED
    assert [decide(machine, numbers["fcntl"], 0, command) for command in (2, 6, 7, 1024, 1033)] == [ALLOW] + [
        REFUSED
    ] * 4
    assert [decide(machine, numbers["prlimit64"], pid) for pid in (0, 1)] == [ALLOW, REFUSED]
    assert [decide(machine, numbers["sigaction"], signal) for signal in (2, 17)] == [ALLOW, REFUSED]
    assert decide(machine, 435) == UNKNOWN  # clone3
    assert decide(machine, numbers["read"] | 0x40000000) == UNKNOWN
    assert decide(machine, -1) == UNKNOWN
    assert decide(machine, numbers["read"], architecture=0x40000003) == KILL


def test_alone_it_starts_threads_but_no_process_and_sends_no_signal() -> None:
    assert decide("x86_64", 56, 0x3D0F00, alone=True) == ALLOW
    assert decide("x86_64", 56, 17, alone=True) == REFUSED
    assert {decide("x86_64", number, alone=True) for number in (57, 58, 62, 200, 234, 90, 280)} == {UNKNOWN}


def test_a_machine_without_a_list_has_no_filter() -> None:
    assert build_filter("riscv64") is None
