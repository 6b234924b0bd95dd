"""`lachesis top` names the slowest stage of a real run, whichever it is: they are slowed in turn, drawn by a seed.

SLOWED_SEED draws another order and other delays than the default ones.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.harness import Run
from integration.servers import Supervised

SLOWED = Path(__file__).parent / "slowed"
LONGER_THAN_ANY_TEST = 100_000
STAGES = {
    "environment": "environment-sums",
    "normalizer": "normalizer",
    "scorer": "scorer",
    "teacher": "teacher",
    "trainer": "trainer",
}
"""What can be slowed, and the service that is to be named then."""
NAMED_WITHIN_S = 300.0
"""Some forty windows: much more than a machine with time to spare needs."""
WINDOW_S = 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "slowed").write_text("none 0")
    environ = {"PYTHONPATH": str(SLOWED), "SLOWED": str(folder / "slowed")}
    sets = {
        "health.enabled": "false",  # which would halt an environment whose model was never trained
        "services.forkserver": "false",  # each process is slowed as it starts
    }
    it = Run(folder, LONGER_THAN_ANY_TEST, Supervised(folder), sets=sets, environ=environ)
    with it:
        yield it


def lachesis(run: Run, *arguments: str) -> str:
    command = [sys.executable, "-m", "lachesis", *arguments, *run.arguments]
    return subprocess.run(command, env=run.environ, check=True, capture_output=True, timeout=180, text=True).stdout


def top(run: Run, *arguments: str) -> str:
    return lachesis(run, "top", "--once", f"--window={WINDOW_S}", *arguments)


def marked(text: str) -> str | None:
    """Return the stage that a reader of `top` sees marked."""
    rows = [line.split() for line in text.splitlines() if line.startswith(">")]
    return rows[0][1] if rows else None


async def test_top_names_the_stage_that_was_slowed(run: Run) -> None:
    seed = int(os.environ.get("SLOWED_SEED", "0"))
    rng = random.Random(seed)
    run.start()
    await run.wait_for_step(5)
    slowed: set[str] = set()
    for stage in rng.sample(sorted(STAGES), len(STAGES)):
        delay_s = rng.uniform(1.4, 2.2)
        (run.folder / "slowed").write_text(f"{stage} {delay_s}")
        service = STAGES[stage]
        slowed.add(stage)
        began = time.monotonic()
        seen = [text := top(run)]
        while marked(text) != service and time.monotonic() < began + NAMED_WITHIN_S:
            seen.append(text := top(run))
        seen.append(top(run))  # once it is named it stays so: no luck
        assert [marked(text) for text in seen[-2:]] == [service] * 2, f"seed {seed}, {stage} by {delay_s} s:\n" + (
            "\n\n".join(seen)
        )
        if stage == "trainer":
            check_figures(json.loads(top(run, "--json")), delay_s)

    check_slowest(run, json.loads(top(run, "--json")), slowed)


def check_figures(seen: Any, delay_s: float) -> None:
    """What `top` says while every step takes `delay_s` seconds at least."""
    least_s = 0.98 * delay_s  # the histogram is within 1.1 %
    assert seen["s_per_step"] > least_s
    assert seen["e2e_p99_s"] > least_s
    assert seen["step"] > 5
    assert seen["staleness_bound"] == 2
    assert 0 < seen["outstanding"] <= seen["capacity"] == 48
    rows = {row["service"]: row for row in seen["stages"]}
    assert rows["trainer"]["process"]["p50"] > least_s
    assert rows["environment-sums"]["load"] < rows["trainer"]["load"]


def check_slowest(run: Run, seen: Any, slowed: set[str]) -> None:
    """The slowest rollout that `top` names can be looked up, and says where its time went."""
    slowest = seen["slow"][0]
    told = json.loads(lachesis(run, "trace", slowest["group"][:20], "--json"))
    assert (told["group"], told["state"], told["waits_for"]) == (slowest["group"], "trained", None)
    assert told["seconds"] == pytest.approx(slowest["seconds"], abs=0.01)
    assert {span["service"] for span in told["spans"]} == {*STAGES, "batcher"}
    longest = longest_span(told)
    if longest["service"] == "batcher":  # it waited for the rest of its batch, which a slowed stage held up
        step = str(told["step"])
        members = [
            json.loads(line) for line in lachesis(run, "rollouts", f"--step={step}:{step}", "--json").splitlines()
        ]
        traces = [json.loads(lachesis(run, "trace", member["group"], "--json")) for member in members]
        longest = longest_span(max(traces, key=reached_batcher_ns), without="batcher")
    assert longest["service"] in slowed


def longest_span(told: Any, without: str | None = None) -> Any:
    spans = [span for span in told["spans"][1:] if span["service"] != without]
    return max(spans, key=lambda span: span["end_ns"] - span["start_ns"])


def reached_batcher_ns(told: Any) -> int:
    """When the last stage before the batcher was done with a rollout."""
    return max(span["end_ns"] for span in told["spans"][1:] if span["service"] not in {"batcher", "trainer"})
