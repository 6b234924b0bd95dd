"""False alarms and detection of the health checks: simulated healthy runs and scripted hacks, one line a kind.

    python tests/benchmarks/health_false_alarms.py --seeds 10 --groups 10000 --jobs 2

The real monitor judges scores, rewards, batches and reports as they would come from the streams; there is no broker.
Prints for healthy runs how many were warned of, quarantined and halted, and by which checks; for hacks the share that
was quarantined or halted, the median delay in groups from the onset, and the checks that did it. Other simulators can
be checked alike: `judge_run` takes arrays (see `health_simulator` and `health_skills`), of any number of raters.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from health_simulator import HACKS, HEALTHY, ONSET, SimulatedRun
from health_skills import SKILL_HACKS, SKILL_HEALTHY

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.schemas.alerts import Alert
from lachesis.schemas.annotations import GroupReward, GroupScore, GroupSignals
from lachesis.schemas.ledger import GroupRef, Mismatch

KINDS = {"healthy": HEALTHY | SKILL_HEALTHY, "hack": HACKS | SKILL_HACKS}


@dataclass
class RunVerdict:
    """What a monitor made of a run: by check the group at which it first warned, and where the environment stood."""

    warned: dict[str, int] = field(default_factory=dict)
    quarantined_at: int | None = None
    halted_at: int | None = None
    cause: str | None = None


def judge_run(run: SimulatedRun, config: HealthConfig, rule: str = "lcb") -> RunVerdict:
    """Feed a run to a monitor, in the order of the streams: scores and rewards, each step's batch, its report."""
    monitor, verdict = EnvMonitor(config), RunVerdict()
    scores = _scores(run.ratings, rule)
    refs: list[GroupRef] = []
    for i, (score, reward) in enumerate(_events(run, scores)):
        monitor.score(score)
        monitor.reward(reward, "grpo")
        if monitor.window_full:
            _record(verdict, monitor, monitor.evaluate(), i)
        refs.append(
            GroupRef(
                group=score.group, seq=score.seq, env="e", sequences=len(score.scores), tokens=1,
                policy_step=score.policy_step, advantages=[],
            )
        )  # fmt: skip
        if len(refs) == run.per_step:
            step = i // run.per_step
            monitor.trained([_mismatch(run, step)])
            monitor.batch(step, refs)
            refs = []
            if monitor.batches_full:
                _record(verdict, monitor, monitor.judge_batches(), i)
    return verdict


def _mismatch(run: SimulatedRun, step: int) -> Mismatch:
    k3 = float(run.k3[step])
    entropy = -float(np.nanmean(run.logprobs[step * run.per_step : (step + 1) * run.per_step]))
    return Mismatch(k3 / 2, k3, 1.0, 1 / (1 + 2 * k3), float(run.step_kl[step]), entropy)


def _record(verdict: RunVerdict, monitor: EnvMonitor, results: Sequence[Alert], at: int) -> None:
    for result in results:
        if result.severity in {"warn", "quarantine", "halt"}:
            verdict.warned.setdefault(result.check, at)
    standing = monitor.standing
    if standing.quarantined_from is not None and verdict.quarantined_at is None:
        verdict.quarantined_at, verdict.cause = at, standing.cause
    if standing.halted and verdict.halted_at is None:
        verdict.halted_at = at


def _scores(ratings: np.ndarray, rule: str) -> np.ndarray:
    """The ensemble's verdict [N, G]; None (NaN) below a quorum of half the raters."""
    present = np.isfinite(ratings)
    m = present.sum(axis=2)
    known = np.where(present, ratings, 0.0)
    mean = known.sum(axis=2) / np.maximum(1, m)
    if rule == "lcb":
        variance = np.where(present, (ratings - mean[:, :, None]) ** 2, 0.0).sum(axis=2) / np.maximum(1, m)
        mean = mean - np.sqrt(variance / np.maximum(1, m - 1))
    return np.where(2 * m >= ratings.shape[2], mean, np.nan)


def _events(run: SimulatedRun, scores: np.ndarray) -> Iterator[tuple[GroupScore, GroupReward]]:
    centred = scores - np.nanmean(scores, axis=1, keepdims=True)
    deviation = np.nanstd(scores, axis=1, ddof=1)
    advantages = centred / np.maximum(deviation, 1e-3)[:, None]
    rater_names = [f"rater-{k}" for k in range(run.ratings.shape[2])]
    for i in range(run.groups):
        columns = run.ratings[i].T.tolist()
        statuses = {}
        ratings = {}
        for name, column in zip(rater_names, columns, strict=True):
            ratings[name] = [None if value != value else value for value in column]  # noqa: PLR0124 - NaN
            if None in ratings[name]:
                statuses[name] = ["timeout" if value is None else "ok" for value in ratings[name]]
        values = [None if value != value else value for value in scores[i].tolist()]  # noqa: PLR0124
        same = {
            "group": f"{i + 1:032x}",
            "seq": i + 1,
            "item": f"item-{i % 4000}",
            "policy_step": max(0, i // run.per_step - 1),
        }
        score = GroupScore(
            **same,
            scores=values,
            ratings=ratings,
            statuses=statuses,
            lengths=[int(n) for n in run.lengths[i]],
            signals=GroupSignals(
                logprobs=run.logprobs[i].tolist(),
                texts=run.texts[i].tolist(),
                truncated=int(run.truncated[i]),
                distinct=float(run.distinct[i]),
            ),
        )
        valid = [value for value in values if value is not None]
        flat = max(valid, default=0.0) - min(valid, default=0.0) <= 1e-6
        reward = GroupReward(
            **same,
            verdict="zero_variance" if flat else "trainable",
            scores=values,
            rewards=values,
            advantages=[None if v is None else a for v, a in zip(values, advantages[i].tolist(), strict=True)],
            snapshot="s",
            mean=statistics.fmean(valid) if valid else None,
            std=float(deviation[i]) if len(valid) > 1 else None,
            range=max(valid) - min(valid) if valid else None,
            n_valid=len(valid),
        )
        yield score, reward


def _simulate(task: tuple[str, str, int, int, HealthConfig]) -> tuple[str, str, RunVerdict]:
    table, kind, seed, groups, config = task
    rng = np.random.default_rng([seed, zlib.crc32(kind.encode())])
    run = KINDS[table][kind](rng, groups)
    return table, kind, judge_run(run, config, "lcb" if table == "healthy" and seed % 2 else "mean")


def _healthy_line(kind: str, found: Sequence[RunVerdict]) -> str:
    causes = Counter(verdict.cause for verdict in found if verdict.cause)
    warned = Counter(name for verdict in found for name in verdict.warned)
    stopped = sum(verdict.quarantined_at is not None for verdict in found)
    halted = sum(verdict.halted_at is not None for verdict in found)
    return (
        f"{kind:<30} quarantined {stopped:2} halted {halted:2} of {len(found)} {_counted(causes):<28} "
        f"warned: {_counted(warned)}"
    )


def _hack_line(kind: str, found: Sequence[RunVerdict]) -> str:
    onset = 0 if "at the start" in kind else ONSET
    early = sum(verdict.quarantined_at is not None and verdict.quarantined_at < onset for verdict in found)
    caught = [verdict for verdict in found if verdict.quarantined_at is not None and verdict.quarantined_at >= onset]
    delays = [verdict.quarantined_at - onset for verdict in caught if verdict.quarantined_at is not None]
    first = [
        min((at - onset, name) for name, at in verdict.warned.items() if at >= onset)
        for verdict in found
        if any(at >= onset for at in verdict.warned.values())
    ]
    told = Counter(name for _, name in first)
    return (
        f"{kind:<30} quarantined {len(caught):2} of {len(found)} after {_median(delays):>5} groups "
        f"{_counted(Counter(verdict.cause for verdict in caught)):<34} warned {len(first):2} after "
        f"{_median([at for at, _ in first]):>5}: {_counted(told)}"
        + (f"  (false alarms before: {early})" if early else "")
    )


def _median(values: Sequence[int]) -> str:
    return f"{statistics.median(values):.0f}" if values else "-"


def _counted(counts: Counter[str | None] | Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.most_common(6)) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--kinds", nargs="*", default=[], help="only kinds whose name contains one of these")
    parser.add_argument("--off", nargs="*", default=[], help="checks that do not judge")
    given = parser.parse_args()
    config = HealthConfig(window=given.window, off=given.off)
    chosen = [
        (table, kind)
        for table, kinds in KINDS.items()
        for kind in kinds
        if not given.kinds or any(part in kind or part == table for part in given.kinds)
    ]
    started, quiet, runs = time.monotonic(), 0, 0
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    tasks = [(table, kind, seed, given.groups, config) for table, kind in chosen for seed in seeds]
    with ProcessPoolExecutor(given.jobs) as pool:
        results = iter(pool.map(_simulate, tasks))
        for table, kind in chosen:
            found = [next(results)[2] for _ in seeds]
            print(_healthy_line(kind, found) if table == "healthy" else _hack_line(kind, found), flush=True)
            if table == "healthy":
                runs += len(found)
                quiet += sum(verdict.quarantined_at is None for verdict in found)
    if runs:
        print(f"healthy runs of {given.groups} groups left alone: {quiet} of {runs}")
    print(f"{len(tasks)} runs in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
