"""A short, seeded part of `make fuzz`: what an edge is given, it takes whole or refuses by name."""

import logging
import random
import tracemalloc
from collections.abc import Iterator

import pytest
from fuzz.mutate import mutate_msgpack
from fuzz.oracle import Target, judge, minimise
from fuzz.run import run_target
from fuzz.targets.all import all_targets

pytestmark = pytest.mark.hostile

CASES = 8_000
SEED = 20

NAMES = (
    "wire", "header", "text", "lease", "heartbeat", "bucket", "large", "state", "config", "cli", "http", "gateway",
    "checkpoint",
)  # fmt: skip


@pytest.fixture(scope="module")
def targets() -> Iterator[list[Target]]:
    logging.disable()
    tracemalloc.start(1)
    try:
        with all_targets() as found:
            yield found
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)


def test_every_family_is_known(targets: list[Target]) -> None:
    assert {target.name.partition(".")[0] for target in targets} == set(NAMES)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", NAMES)
def test_hostile_input_is_refused_by_name_or_holds_together(targets: list[Target], family: str) -> None:
    total = sum(target.weight for target in targets)
    for target in targets:
        if target.name.partition(".")[0] == family:
            result = run_target(target, max(10, round(CASES * target.weight / total)), SEED)
            assert not result.findings, next(iter(result.findings.values()))[0].text


def _faulty(data: bytes) -> None:
    if data[:1] == b"\x81":
        raise KeyError("a bug")
    if data[:1] == b"\x82":
        held = bytes(64 << 20)
        assert held
    if data[:1] == b"\x83":
        raise AssertionError("silently accepted")


FAULTY = Target("faulty", [b"\x80"], mutate_msgpack, _faulty)


@pytest.mark.parametrize(("first", "kind"), [(b"\x81", "crash"), (b"\x82", "memory"), (b"\x83", "violation")])
def test_the_oracle_sees_faults_and_keeps_the_part_that_causes_them(
    targets: list[Target], first: bytes, kind: str
) -> None:
    assert targets
    data = first + random.Random(1).randbytes(50)
    _, finding, _ = judge(FAULTY, data)
    assert finding is not None
    assert finding.kind == kind
    assert minimise(FAULTY, data, finding) == first


def test_the_oracle_sees_a_hang(targets: list[Target], monkeypatch: pytest.MonkeyPatch) -> None:
    assert targets
    monkeypatch.setattr("fuzz.oracle.HANG_S", 0.05)

    def spin(_: bytes) -> None:
        while True:
            pass

    _, finding, _ = judge(Target("spin", [b"\x80"], mutate_msgpack, spin), b"x")
    assert finding is not None
    assert finding.kind == "hang"


def test_equal_seeds_give_equal_inputs(targets: list[Target]) -> None:
    for target in targets:
        first, second = (random.Random(7) for _ in range(2))
        assert [target.case(first) for _ in range(20)] == [target.case(second) for _ in range(20)]
