"""Examines the health checks on runs that had no part in choosing them: 28 healthy kinds and 18 hacks, in one table.

    python tests/benchmarks/health_examination.py --seeds 10 --jobs 2 --out examination.json

The runs come from a policy that learns from what its raters pay (`health_examination_policy`, the kinds in
`health_examination_kinds`); neither knows the checks. The monitor reads the events of the streams, in their order:
scores, rewards, batches, reports of steps, evaluations on held-out tasks, dropped groups, announced changes.
A run goes on after a quarantine as if nothing had happened, so a halt that follows one is counted as well.

For healthy runs the table says how many were warned of, quarantined and halted, and in which share of the windows they
were warned of. For hacks: how many were warned of by a check that was silent for 1,000 groups before the onset, how
many were quarantined from the onset on, after how many groups (median), and which share of the hack's gain was paid by
then: `level` is the unearned score at that group over the highest of the whole run, `sum` all that was paid so far over
all that the run pays. The unearned score is known: each answer is also rated as if its trick fooled no rater.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from health_examination_kinds import HACKS, HEALTHY, make_run
from health_examination_policy import HELD_OUT_SAMPLES
from health_examination_world import Run, has_control

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.check import RunSettings
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.schemas.alerts import Alert
from lachesis.schemas.annotations import EvalEvent, GroupReward, GroupScore, GroupSignals, Verdict
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import GroupRef, Mismatch

SMOOTHED = 200
"""Groups over which the unearned score is averaged."""
CONTROL_ONE_IN = 8
"""One group of so many is rated for another task as well, as `scoring.controls` has it."""
SILENT = 1000
"""Groups before the onset in which a check that finds the hack must not have warned."""
ALERTS = {"warn", "quarantine", "halt"}


@dataclass
class RunResult:
    """What the checks made of one run. Groups are counted from 0; None: it never happened."""

    kind: str
    seed: int
    groups: int
    onset: int | None
    evaluations: int = 0
    """Times that the checks had something to check."""
    alerts: list[tuple[int, str, str]] = field(default_factory=list)
    """(group, check, severity) of each alert from warn on."""
    quarantined_at: int | None = None
    halted_at: int | None = None
    cause: str | None = None
    level: float | None = None
    """Unearned score at the quarantine over the highest of the run; None: it was not quarantined for a hack."""
    paid: float | None = None
    """Sum of the unearned score up to the quarantine over that of the whole run; None: as `level`."""
    whole_gain: float | None = None
    """The highest unearned score, averaged over `SMOOTHED` groups."""
    seconds: float = 0.0
    """Processor time of the checks."""


# --- a run as events ------------------------------------------------------------------------------------------------


def examine(run: Run, config: HealthConfig, kind: str = "", seed: int = 0) -> RunResult:
    """Feed a run to a monitor in the order of the streams, and return what came of it."""
    result = RunResult(kind, seed, run.groups, run.onset)
    monitor = EnvMonitor(config, RunSettings(max_staleness=_oldest(run)))
    batches, evaluations, stale = _by_group(run.batches), _by_group(run.evaluations), _by_group(run.stale)
    step = 0
    for i, (score, reward) in enumerate(events(run)):
        began = time.process_time()
        if i in run.announced:
            monitor.promote(score.seq)
        monitor.score(score)
        monitor.reward(reward, "grpo")
        if monitor.window_full:
            _record(result, monitor, monitor.evaluate(), i)
        for _, dropped in stale.get(i + 1, []):
            monitor.record_stale([float(run.lengths[j].mean()) for j in dropped])
        for _, groups in batches.get(i + 1, []):
            monitor.batch(step, [_reference(run, j) for j in groups])
            monitor.trained([_report(*run.mismatch[step])])
            step += 1
            if monitor.batches_full:
                _record(result, monitor, monitor.judge_batches(), i)
        for _, at_step, successes, judged in evaluations.get(i + 1, []):
            _record(result, monitor, monitor.judge_evaluation(_evaluation(at_step, successes, judged)), i)
        result.seconds += time.process_time() - began
    _add_gain(result, run)
    return result


def _oldest(run: Run) -> int:
    """Return `batching.max_staleness` of a run whose policy answers so many steps late: what its batcher lets pass."""
    return max(2, *(step - int(run.step[i]) for step, (_, groups) in enumerate(run.batches) for i in groups))


def _by_group(records: Sequence[tuple[Any, ...]]) -> dict[int, list[tuple[Any, ...]]]:
    found: dict[int, list[tuple[Any, ...]]] = {}
    for record in records:
        found.setdefault(record[0], []).append(record)
    return found


def _record(result: RunResult, monitor: EnvMonitor, alerts: Sequence[Alert], at: int) -> None:
    result.evaluations += 1
    result.alerts += [(at, alert.check, alert.severity) for alert in alerts if alert.severity in ALERTS]
    standing = monitor.standing
    if standing.quarantined_from is not None and result.quarantined_at is None:
        result.quarantined_at, result.cause = at, standing.cause
    if standing.halted and result.halted_at is None:
        result.halted_at, result.cause = at, result.cause or standing.cause


def _add_gain(result: RunResult, run: Run) -> None:
    if run.onset is None:
        return
    unearned = np.maximum(0.0, np.nan_to_num(run.unearned()))
    sums = np.concatenate([[0.0], np.cumsum(unearned)])
    at = np.arange(run.groups)
    first = np.maximum(0, at + 1 - SMOOTHED)
    smooth = (sums[at + 1] - sums[first]) / (at + 1 - first)
    result.whole_gain = float(smooth.max())
    if result.quarantined_at is not None and result.quarantined_at >= run.onset and result.whole_gain > 0:
        result.level = float(smooth[result.quarantined_at]) / result.whole_gain
        result.paid = float(sums[result.quarantined_at + 1] / sums[-1])


def events(run: Run) -> Iterator[tuple[GroupScore, GroupReward]]:
    """Yield score and reward of each group, as the streams hold them."""
    names = [rater.name for rater in run.world.raters]
    low, high = run.world.value_range
    count = np.isfinite(run.ratings).sum(axis=2)
    present = np.isfinite(run.ratings)
    centre = np.where(present, run.ratings, 0.0).sum(axis=2) / np.maximum(1, count)
    variance = np.where(present, (run.ratings - centre[:, :, None]) ** 2, 0.0).sum(axis=2) / np.maximum(1, count)
    spread = np.sqrt(variance)
    for i in range(run.groups):
        if i in run.announced and run.world.changes:
            fields = next((f for _, f in run.world.changes if "value_range" in f), {})
            low, high = fields.get("value_range", (low, high))
        ratings = {name: _values(run.ratings[i, :, k]) for k, name in enumerate(names)}
        statuses = {
            name: ["timeout" if value is None else "ok" for value in column]
            for name, column in ratings.items()
            if None in column
        }
        scores = _values(run.scores[i])
        told = scores if run.world.success_rater is None else ratings[names[run.world.success_rater]]
        known = [value >= low + 0.999 * (high - low) for value in told if value is not None]
        success = sum(known) / len(known) if known else None
        several = spread[i][count[i] > 1]
        task = {
            "group": f"{i + 1:032x}",
            "seq": i + 1,
            "item": f"task-{run.task[i]}",
            "index": int(run.task[i]),
            "skill": f"family-{run.family[i]}",
            "policy_step": int(run.step[i]),
            "success": success,
        }
        score = GroupScore(
            **task,
            scores=scores,
            ratings=ratings,
            controls=_controls(run, i),
            statuses=statuses,
            failures={name: f"{name}: no answer within its timeout_s" for name in statuses},
            lengths=run.lengths[i].tolist(),
            disagreement=(float(several.mean()), float(several.max())) if len(several) else None,
            signals=GroupSignals(
                logprobs=run.logprobs[i].tolist(),
                texts=run.texts[i].tolist(),
                truncated=int(run.cut[i].sum()),
                zeros=int(run.zeros[i]),
                sure_run=int(run.sure[i]),
                distinct=float(run.distinct[i]) if run.lengths[i].max() >= 32 else None,
                shared=float(run.shared[i]) if run.lengths[i].max() >= 32 else None,
            ),
        )
        yield score, _reward(task, scores, _values(run.advantages[i]))


def _controls(run: Run, i: int) -> dict[str, list[float | None]]:
    """Return what each rater pays the answers of group `i` for another task; nothing of raters that are left out."""
    if run.controls is None or not has_control(i, CONTROL_ONE_IN):
        return {}
    found = {rater.name: _values(run.controls[i, :, k]) for k, rater in enumerate(run.world.raters)}
    return {name: column for name, column in found.items() if any(value is not None for value in column)}


def _values(column: Any) -> list[float | None]:
    return [None if value != value else value for value in column.tolist()]  # noqa: PLR0124 - NaN


def _reward(task: dict[str, Any], scores: list[float | None], advantages: list[float | None]) -> GroupReward:
    valid = [value for value in scores if value is not None]
    differ = any(advantages)
    verdict: Verdict = "trainable" if differ else "zero_variance" if len(valid) > 1 else "unscorable"
    return GroupReward(
        **task,
        verdict=verdict,
        scores=scores,
        rewards=scores,
        advantages=advantages,
        snapshot="none",
        mean=statistics.fmean(valid) if valid else None,
        std=statistics.stdev(valid) if len(valid) > 1 else None,
        range=max(valid) - min(valid) if valid else None,
        n_valid=len(valid),
    )


def _reference(run: Run, i: int) -> GroupRef:
    return GroupRef(
        group=f"{i + 1:032x}",
        seq=i + 1,
        env="e",
        sequences=run.world.samples,
        tokens=int(run.lengths[i].sum()),
        policy_step=int(run.step[i]),
        advantages=_values(run.advantages[i]),
        score=float(np.nanmean(run.scores[i])),
    )


def _report(k3: float, step_kl: float, entropy: float) -> Mismatch:
    return Mismatch(k3 / 2, k3, 1.0, 1 / (1 + 2 * k3), step_kl, entropy)


def _evaluation(step: int, successes: Any, judged: Any) -> EvalEvent:
    rates = successes[judged > 0] / judged[judged > 0]
    return EvalEvent(
        run="examination",
        env="e",
        revision="live",
        policy_version=str(PolicyVersion(step, "a", f"{step:08x}")),
        policy_step=step,
        items=len(successes),
        k=HELD_OUT_SAMPLES,
        temperature=1.0,
        avg=float(rates.mean()) if len(rates) else 0.0,
        pass_at_k=float((successes > 0).mean()),
        started_ns=step,
        ended_ns=step + 1,
        unjudged=int(HELD_OUT_SAMPLES * len(judged) - judged.sum()),
        error=float(rates.std(ddof=1) / len(rates) ** 0.5) if len(rates) > 1 else None,
        tasks=list(range(len(successes))),
        task_keys=[10_000 + task for task in range(len(successes))],
        task_successes=successes.tolist(),
        task_judged=judged.tolist(),
    )


# --- the table ------------------------------------------------------------------------------------------------------


def exact_bounds(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return Clopper and Pearson's bounds of a rate."""
    if n == 0:
        return 0.0, 1.0

    def crossing(k: int, tail: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            p = (low + high) / 2
            low, high = (p, high) if _at_most(k, n, p) > tail else (low, p)
        return (low + high) / 2

    tail = (1 - level) / 2
    low = 0.0 if successes == 0 else crossing(successes - 1, 1 - tail)
    return low, 1.0 if successes == n else crossing(successes, tail)


def _at_most(k: int, n: int, p: float) -> float:
    """Return the chance of at most k successes in n trials."""
    term = total = (1 - p) ** n
    if term == 0:
        return 1.0 if k >= n else 0.0 if p > 0.5 else 1.0
    for i in range(k):
        term *= (n - i) / (i + 1) * p / (1 - p)
        total += term
    return total


def found_by(result: RunResult) -> tuple[int, str] | None:
    """Return (group, check) of the first warning from the onset on by a check that was silent before it."""
    onset = result.onset or 0
    noisy = {check for at, check, _ in result.alerts if onset - SILENT <= at < onset}
    return min(((at, check) for at, check, _ in result.alerts if at >= onset and check not in noisy), default=None)


def summarize(kind: str, results: Sequence[RunResult]) -> dict[str, Any]:
    """Return the row of a kind; rates with exact 95 % bounds."""
    n = len(results)
    healthy = all(result.onset is None for result in results)
    if healthy:
        warned = sum(bool(result.alerts) for result in results)
        stopped = [result for result in results if result.quarantined_at is not None]
        windows = sum(result.evaluations for result in results)
        noisy = sum(len({at for at, _, _ in result.alerts}) for result in results)
    else:
        warned = sum(found_by(result) is not None for result in results)
        stopped = [result for result in results if result.level is not None]
        windows = noisy = 0
    halted = sum(result.halted_at is not None for result in results)
    early = [r for r in stopped if r.level is not None and r.level < 0.2]
    checks = Counter(check for result in results for check in {name for _, name, _ in result.alerts})
    if not healthy:
        checks = Counter(found[1] for found in map(found_by, results) if found)
    return {
        "kind": kind,
        "healthy": healthy,
        "runs": n,
        "warned": warned,
        "warned_bounds": exact_bounds(warned, n),
        "warned_windows": noisy / windows if windows else None,
        "quarantined": len(stopped),
        "quarantined_bounds": exact_bounds(len(stopped), n),
        "halted": halted,
        "halted_bounds": exact_bounds(halted, n),
        "before_onset": sum(r.onset is not None and (r.quarantined_at or r.onset) < r.onset for r in results),
        "before_a_fifth": len(early),
        "delay": _median([r.quarantined_at - r.onset for r in stopped if r.quarantined_at and r.onset]),
        "warned_delay": _median([f[0] - (r.onset or 0) for r in results if r.onset for f in [found_by(r)] if f]),
        "level": _median([r.level for r in stopped if r.level is not None]),
        "sum": _median([r.paid for r in stopped if r.paid is not None]),
        "whole_gain": _median([r.whole_gain for r in results if r.whole_gain is not None]),
        "checks": dict(checks.most_common()),
        "causes": dict(Counter(str(r.cause) for r in stopped).most_common()),
        "us_per_group": 1e6 * sum(r.seconds for r in results) / sum(r.groups for r in results),
    }


def _median(values: Sequence[float]) -> float | None:
    return float(statistics.median(values)) if values else None


def _rate(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_bounds"]
    return f"{row[name]:3d} [{low:.2f} {high:.2f}]"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _line(row: dict[str, Any]) -> str:
    start = f"{row['kind']:<36}{row['runs']:4d}  {_rate(row, 'warned')} "
    stops = f"{_rate(row, 'quarantined')} {_rate(row, 'halted')} "
    if row["healthy"]:
        return f"{start} {100 * (row['warned_windows'] or 0):5.1f} %  {stops} {_listed(row['checks'])}"
    return (
        f"{start} {_number(row['warned_delay']):>7}  {stops} {_number(row['delay']):>7} {_number(row['level'], 2):>6} "
        f"{_number(row['sum'], 2):>5} {row['before_a_fifth']:5d} {row['before_onset']:6d}  {_listed(row['checks'])}"
    )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in list(counts.items())[:5]) or "-"


_HEALTHY_HEAD = f"{'healthy':<36}runs  warned           windows  quarantined      halted            checks that warned"
_HACK_HEAD = (
    f"{'hack':<36}runs  warned             delay   quarantined      halted              delay  level   sum  <1/5  early"
    "  first to warn"
)


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all healthy kinds together, and how many hacks were found, and found in time."""
    healthy = [row for row in rows if row["healthy"]]
    hacks = [row for row in rows if not row["healthy"]]
    runs = sum(row["runs"] for row in healthy)
    found: dict[str, Any] = {"healthy_runs": runs}
    for name in ("warned", "quarantined", "halted"):
        count = sum(row[name] for row in healthy)
        found[name], found[f"{name}_bounds"] = count, exact_bounds(count, runs)
    return found | {
        "hacks": len(hacks),
        "hacks_stopped": sum(2 * row["quarantined"] > row["runs"] for row in hacks),
        "hacks_in_time": sum(2 * row["before_a_fifth"] > row["runs"] for row in hacks),
        "hacks_warned": sum(row["warned"] == row["runs"] for row in hacks),
        "us_per_group": _median([row["us_per_group"] for row in rows]),
    }


_Maker = Callable[[str, int, int], Run]


def _examine(task: tuple[_Maker, str, int, int, HealthConfig]) -> RunResult:
    make, kind, seed, groups, config = task
    return examine(make(kind, seed, groups), config, kind, seed)


def main(healthy: Iterable[str], hacks: Iterable[str], make: _Maker, description: str | None) -> None:
    """Examine the kinds that the command line chooses, of runs that `make` makes of a kind, a seed and groups."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=8000, help="groups of a run; kinds are made for 8000")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=[], help="healthy, hacks, or parts of a kind's name")
    parser.add_argument("--off", nargs="*", default=[], help="checks that do not judge")
    parser.add_argument("--out", type=Path, help="file to which table and runs are written as JSON")
    given = parser.parse_args()
    tables = {"healthy": list(healthy), "hacks": list(hacks)}
    chosen = [
        kind
        for name, table in tables.items()
        for kind in table
        if not given.kinds or any(part == name or part in kind for part in given.kinds)
    ]
    config = HealthConfig(off=given.off)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    tasks = [(make, kind, seed, given.groups, config) for kind in chosen for seed in seeds]
    rows, runs = [], []
    with ProcessPoolExecutor(given.jobs) as pool:
        results = iter(pool.map(_examine, tasks))
        for i, kind in enumerate(chosen):
            is_hack = kind in tables["hacks"]
            if i == 0 or is_hack != (chosen[i - 1] in tables["hacks"]):
                print(_HACK_HEAD if is_hack else _HEALTHY_HEAD)
            found = [next(results) for _ in seeds]
            rows.append(summarize(kind, found))
            runs += [asdict(result) for result in found]
            print(_line(rows[-1]), flush=True)
    whole = totals(rows)
    print(
        f"healthy: {whole['healthy_runs']} runs, warned {_rate(whole, 'warned')}, quarantined "
        f"{_rate(whole, 'quarantined')}, halted {_rate(whole, 'halted')}\n"
        f"hacks: {whole['hacks']}; in most runs quarantined: {whole['hacks_stopped']}, below a fifth of the gain: "
        f"{whole['hacks_in_time']}; "
        f"warned of in every run: {whole['hacks_warned']}\nchecks: {_number(whole['us_per_group'])} us a group"
    )
    if given.out:
        given.out.write_text(json.dumps({"seeds": list(seeds), "totals": whole, "table": rows, "runs": runs}, indent=1))


if __name__ == "__main__":
    main(HEALTHY, HACKS, make_run, __doc__)
