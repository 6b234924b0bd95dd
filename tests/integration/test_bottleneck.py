"""`lachesis top` names the slowest stage of a real run, whichever it is: one after the other is slowed on purpose."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.harness import Run
from integration.servers import Supervised

SLOWED = Path(__file__).parent / "slowed"
LONGER_THAN_ANY_TEST = 100_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "slowed").write_text("")
    environ = {"PYTHONPATH": str(SLOWED), "SLOWED": str(folder / "slowed")}
    sets = {"health.enabled": "false"}  # which would halt an environment whose model was never trained
    it = Run(folder, LONGER_THAN_ANY_TEST, Supervised(folder), sets=sets, environ=environ)
    with it:
        yield it


def lachesis(run: Run, *arguments: str) -> Any:
    command = [sys.executable, "-m", "lachesis", *arguments, "--json", *run.arguments]
    return json.loads(subprocess.run(command, env=run.environ, check=True, capture_output=True, timeout=60).stdout)


def look(run: Run, window_s: float) -> Any:
    return lachesis(run, "top", "--once", f"--window={window_s}")


async def test_top_names_the_stage_that_was_slowed(run: Run) -> None:
    run.start()
    await run.wait_for_step(5)
    found = {}
    for stage in ("scorer", "trainer", "teacher", "environment", "normalizer"):
        (run.folder / "slowed").write_text(stage)
        look(run, 12)  # until what was under way before has passed
        found[stage] = look(run, 15)
    named = {stage: seen["bottleneck"]["service"] for stage, seen in found.items()}
    why = {stage: (seen["bottleneck"], [(row["service"], row["load"], row["held"]) for row in seen["stages"]])
            for stage, seen in found.items()}  # fmt: skip
    assert named == {
        "scorer": "scorer",
        "trainer": "trainer",
        "teacher": "teacher",
        "environment": "environment-sums",
        "normalizer": "normalizer",
    }, why

    seen = found["trainer"]
    assert seen["s_per_step"] > 3
    assert seen["step"] > 5
    assert seen["staleness_bound"] == 2
    assert 0 < seen["outstanding"] <= seen["capacity"] == 48
    assert seen["e2e_p99_s"] > 3
    assert seen["slow"]
    rows = {row["service"]: row for row in seen["stages"]}
    assert rows["trainer"]["process"]["p50"] > 2.95  # 3 s, and the histogram is within 1.1 %
    assert rows["environment-sums"]["load"] < 0.5
    assert rows["scorer"]["process"]["p50"] < 3

    slowest = seen["slow"][0]
    told = lachesis(run, "trace", slowest["group"][:20])
    assert (told["group"], told["state"], told["waits_for"]) == (slowest["group"], "trained", None)
    assert told["seconds"] == pytest.approx(slowest["seconds"], abs=0.01)
    services = {"environment-sums", "scorer", "teacher", "normalizer", "batcher", "trainer"}
    assert {span["service"] for span in told["spans"]} == services
    assert max(told["spans"][1:], key=lambda span: span["end_ns"] - span["start_ns"])["service"] == "trainer"
