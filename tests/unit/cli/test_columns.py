"""What fits a terminal: columns are left out, and no figure is cut short."""

import io

import msgspec
import pytest
from rich.console import Console, RenderableType

from lachesis.pipeline.telemetry.messages import consume_spans, rebuild_trace
from lachesis.pipeline.telemetry.spans import RolloutEnd
from lachesis.schemas.annotations import Stamp
from lachesis.services.cli import top, trace
from lachesis.services.cli.columns import fitting, table
from lachesis.services.cli.status import _columns
from lachesis.services.observe.bottleneck import Bottleneck
from lachesis.services.observe.overview import look_back
from lachesis.services.observe.rollout import Timeline
from lachesis.services.observe.services import Quantiles, ServiceStatus
from lachesis.services.observe.window import StageRow

MS = 1_000_000
WIDTHS = (80, 100, 110, 120, 150, 200)
TIMES = Quantiles(0.352, 0.641, 0.685)


def shown(picture: RenderableType, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(picture)
    return captured.get()


def stage(service: str, state: str = "ok", load: float | None = 0.05) -> StageRow:
    return StageRow(
        service=service, state=state, instances=1, load=load, lag=12, lag_per_s=-0.3, in_flight=5, unacked=8,
        in_per_s=2.27, out_per_s=1.64, wait=TIMES, process=TIMES, redelivered=0, retried=0, dead=0, held=5.0,
    )  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_top_cuts_no_figure_short_whatever_the_terminal(width: int) -> None:
    rows = [stage("environment-sums", "backpressure"), stage("teacher", load=1.0), stage("inference-teacher")]
    overview = msgspec.structs.replace(
        look_back("r", [], [], {}), ended=False, window_s=15.0, stages=rows,
        bottleneck=Bottleneck(service="teacher", reason="is at work 100 % of the time"),
    )  # fmt: skip
    text = shown(top.render(overview, width), width)
    assert "…" not in text
    (row,) = [line for line in text.splitlines() if line.startswith(">")]
    assert row.split()[1:6] == ["teacher", "ok", "100", "%", "12"]
    assert "685 ms" in row
    assert ("352 ms/641 ms/685 ms" in row) == (width >= 150)
    meanings = " ".join(text.split())
    assert "lag: still to pass the stage" in meanings
    assert ("unacked: " in meanings) == ("unacked" in text.split("lag:")[0])  # no word on what is not shown


@pytest.mark.parametrize("width", WIDTHS)
def test_status_cuts_no_figure_short_whatever_the_terminal(width: int) -> None:
    rows = [
        ServiceStatus(service=name, state="backpressure", instances=["1-a"], handled=12345, lag=12, in_flight=5,
                      redelivered=0, dead=0, wait=TIMES, process=TIMES)
        for name in ("environment-sums", "inference-teacher")
    ]  # fmt: skip
    text = shown(table(fitting(_columns(rows), width)), width)
    assert "…" not in text
    assert len(text.splitlines()) == 1 + len(rows)
    assert all("12345" in line and "685 ms" in line for line in text.splitlines()[1:])


def timeline() -> Timeline:
    group = "01a20074ab3f7063b56b0cecaa941f96"
    end = RolloutEnd(
        group=group, run="a-long-name", env="spell_backward", seq=7, sequences=4, policy_step=3, started_ns=0,
        ended_ns=9000 * MS, outcome="trained",
    )  # fmt: skip
    stamps = [Stamp("scorer", 480 * MS, 490 * MS, 560 * MS), Stamp("teacher", 480 * MS, 6150 * MS, 8000 * MS)]
    *spans, root = rebuild_trace(end, stamps)
    times = (8000 * MS, 8500 * MS, 9000 * MS)
    spans += consume_spans("trainer", group, "ab" * 16, 5, times, subject="rl.ledger.a-long-name.main")
    return Timeline(
        group=group, run="a-long-name", env="spell_backward", seq=7, samples=2, sequences=4, tokens=92, policy_step=3,
        producer="p", started_ns=0, stored_ns=480 * MS, ended_ns=9000 * MS, now_ns=9000 * MS, state="trained",
        waits_for=None, reason=None, step=5, seconds=9.0, spans=[root, *spans],
    )  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_a_waterfall_shows_every_time_whatever_the_terminal(width: int) -> None:
    text = shown(trace.render(timeline(), width), width)
    assert "…" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("teacher") and "queue.wait" in line]
    assert "480 ms" in row
    assert "5.67 s" in row
    assert row.count("░") > 5
    assert ("rl.rollout.a-long-name.spell_backward" in row) == (width >= 110)


def test_a_waterfall_says_what_took_longest() -> None:
    assert "2 samples in 4 sequences, 92 tokens" in shown(trace.render(timeline()), 120)
    assert "longest: teacher queue.wait, 5.67 s (63 %)" in shown(trace.render(timeline()), 120)
