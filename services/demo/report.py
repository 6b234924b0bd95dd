"""The summary as text for the terminal. Pure."""

from collections import Counter
from collections.abc import Iterator
from textwrap import shorten

from lachesis.pipeline.common.safe_text import printable
from lachesis.services.demo.summary import DemoGate, DemoSummary
from lachesis.services.observe.services import Quantiles
from lachesis.services.output import human_bytes, human_number, human_seconds

__all__ = ["render"]

_NAMES = {"made": "made now", "cached": "from the cache", "given": "given with model="}
_EXAMPLE_CHARS = 100


def render(summary: DemoSummary) -> str:
    """Return the text, one fact a line, the verdict last."""
    parts = [_facts(summary), _stages(summary), _examples(summary), _places(summary), [_verdict(summary)]]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def _facts(summary: DemoSummary) -> Iterator[str]:
    run, gate, walls = summary.run, summary.gate, summary.walls
    totals = run.totals
    yield f"run {run.run}, seed {summary.seed}: {run.state}" + (f", {run.problem}" if run.problem else "")
    yield (
        f"wall time    {walls.total:.1f} s: model {walls.prepare:.1f} ({_NAMES[summary.warm_start]}), "
        f"start {_seconds(walls.start)}, training {_seconds(walls.train)}, finish {_seconds(walls.finish)}"
    )
    yield (
        f"held out     {_percent(gate.before)} -> {_percent(gate.after)} sampled, {_percent(gate.greedy_before)} -> "
        f"{_percent(gate.greedy_after)} greedy ({gate.prompts or 0} prompts, {gate.samples or 0} samples each)"
    )
    yield (
        f"training     {run.step or 0} steps, {run.outcomes.get('batched', 0)} groups, {totals.sequences} sequences, "
        f"{totals.tokens} tokens; {_number(run.groups_per_s)} groups/s, {_number(run.tokens_per_s)} tokens/s"
    )
    kinds = ", ".join(f"{count} {kind}" for kind, count in run.outcomes.items()) or "none"
    yield f"outcomes     {kinds}; {_number(summary.oversampling)} groups generated for one trained"
    yield f"staleness    {_number(totals.staleness_mean)} steps on average, {_number(totals.staleness_max)} at most"
    if (teacher := summary.teacher) is not None:
        yield (
            f"teacher      KL to it {teacher.before:.2f} -> {teacher.after:.2f} nats a token, "
            f"means of the first and the last {teacher.steps} steps"
        )
    yield f"end to end   {_quantiles(run.end_to_end)} from task to optimizer step (p50 / p95 / p99)"
    restarts = ", ".join(f"{name} {count}" for name, count in run.restarts.items()) or "none"
    yield f"restarts     {restarts}; dead letters {summary.dead_letters}"
    yield f"memory       {human_bytes(summary.peak_rss_bytes)} at most (resident; shared pages count for each process)"


def _stages(summary: DemoSummary) -> Iterator[str]:
    titles = f"{'wait p50 / p95 / p99':30}process p50 / p95 / p99"
    yield f"{'stage':20}{'handled':>8}{'again':>7}{'dead':>6}{'cpu s':>7}  {titles}"
    rows = summary.run.services
    for row in rows:
        counts = f"{_count(row.handled):>8}{_count(row.redelivered):>7}{_count(row.dead):>6}"
        cpu_s = summary.run.cpu_s.get(row.service, 0.0)
        yield f"{row.service:20}{counts}{cpu_s:>7.1f}  {_quantiles(row.wait):30}{_quantiles(row.process)}"
    lives = Counter(pid for row in rows for pid in set(row.pids))
    if shared := [row.service for row in rows if any(lives[pid] > 1 for pid in row.pids)]:
        yield f"cpu s of {', '.join(shared)}: of the process that they share"


def _examples(summary: DemoSummary) -> Iterator[str]:
    """Yield questions with the answers before and after: + right, - wrong, ? not scored."""
    if summary.examples:
        yield "held-out answers at temperature 0, of the first policy and of the last (+ right, - wrong)"
    for example in summary.examples:
        yield f"  {_line(example.prompt)}"
        yield f"    before {_mark(example.before_score)} {_line(example.before)}"
        yield f"    after  {_mark(example.after_score)} {_line(example.after)}"


def _line(text: str) -> str:
    """Return the text as one line of the terminal."""
    return printable(shorten(text, _EXAMPLE_CHARS, placeholder=" ...")) or "(nothing)"


def _mark(score: float | None) -> str:
    return "?" if score is None else "+" if score >= 1 else "-"


def _places(summary: DemoSummary) -> Iterator[str]:
    for name, place in summary.run.places.items():
        yield f"{name:12} {place}"
    yield "try next"
    for command in summary.next:
        yield f"  {command}"


def _verdict(summary: DemoSummary) -> str:
    gate = summary.gate
    if gate.passed is None:
        return "no gate was required" if summary.ok else f"FAILED: {summary.run.problem or summary.run.state}"
    needed = f"{gate.required:.0f} points are required"
    if gate.gain is None:
        return f"FAILED: the held-out pass rate was not measured before and after ({_why(summary, gate)}); {needed}"
    rise = f"the held-out pass rate rose by {gate.gain:.1f} points"
    if not summary.ok:
        return f"FAILED: {summary.run.problem or rise}; {needed}"
    return f"PASSED: {rise}; {needed}"


def _why(summary: DemoSummary, gate: DemoGate) -> str:
    missing = "no evaluation of the first policy" if gate.before is None else "none of the last one"
    return summary.run.problem or missing


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return human_number(value) or "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _quantiles(times: Quantiles) -> str:
    return " / ".join(human_seconds(value) or "-" for value in (times.p50, times.p95, times.p99))
