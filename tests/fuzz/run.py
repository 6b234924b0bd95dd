"""`make fuzz`: seeded hostile inputs against every edge that takes bytes; failing ones are kept, minimised, as files.

make fuzz ARGS="--cases 100000 --seed 1"            every target, by weight
make fuzz ARGS="--target wire.rollout --cases 5000" some of them
make fuzz ARGS="--replay build/fuzz/wire.rollout-1a2b3c4d.bin"
"""

import argparse
import hashlib
import logging
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.oracle import Finding, Target, judge, minimise
from fuzz.targets.all import all_targets

__all__ = ["Result", "main", "run_target"]

_LARGE = 64 << 10


@dataclass
class Result:
    """What came of one target's cases. `times` is the most memory an input over 64 KiB took, in multiples of it."""

    cases: int = 0
    seconds: float = 0.0
    times: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, tuple[Finding, bytes]] = field(default_factory=dict)


def run_target(target: Target, cases: int, seed: int) -> Result:
    """Judge the target's seeds as they are, then `cases` inputs; equal seeds give equal inputs."""
    rng = random.Random(f"{seed}/{target.name}")
    result = Result()
    began = time.perf_counter()
    for number in range(-len(target.seeds), cases):
        data = target.seeds[number] if number < 0 else target.case(rng)
        outcome, finding, peak = judge(target, data)
        result.cases += 1
        result.outcomes[outcome] += 1
        if len(data) > _LARGE:
            result.times = max(result.times, peak / len(data))
        if finding is not None and finding.signature not in result.findings:
            result.findings[finding.signature] = (finding, data)
    result.seconds = time.perf_counter() - began
    return result


def _keep(folder: Path, target: Target, finding: Finding, data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    smallest = minimise(target, data, finding)
    path = folder / f"{target.name}-{hashlib.sha256(finding.signature.encode()).hexdigest()[:8]}.bin"
    path.write_bytes(smallest)
    path.with_suffix(".txt").write_text(f"{finding.kind}, {len(data)} bytes, {len(smallest)} kept\n\n{finding.text}")
    return path


def _replay(targets: Sequence[Target], path: Path) -> int:
    target = next(target for target in targets if path.name.startswith(f"{target.name}-"))
    outcome, finding, peak = judge(target, path.read_bytes())
    print(f"{target.name}: {outcome}, {peak} bytes of memory")
    print(finding.text if finding else "no finding")
    return int(finding is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a table, and return 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--cases", type=int, default=10_000, help="in all, shared by weight (10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", default=[], help="only targets whose name begins so; repeatable")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="where failing inputs are kept")
    parser.add_argument("--replay", type=Path, help="judge one kept input again")
    options = parser.parse_args(arguments)
    logging.disable()
    tracemalloc.start(1)
    with all_targets() as targets:
        if options.replay:
            return _replay(targets, options.replay)
        chosen = [t for t in targets if not options.target or t.name.startswith(tuple(options.target))]
        total = sum(target.weight for target in chosen)
        found, cases, began = 0, 0, time.perf_counter()
        print(f"{'target':24} {'cases':>7} {'a second':>8} {'memory':>7}  outcomes")
        for target in chosen:
            result = run_target(target, max(1, round(options.cases * target.weight / total)), options.seed)
            outcomes = ", ".join(f"{name} {count}" for name, count in result.outcomes.most_common())
            rate = result.cases / result.seconds
            print(f"{target.name:24} {result.cases:7} {rate:8.0f} {result.times:6.1f}x  {outcomes}", flush=True)
            for finding, data in result.findings.values():
                path = _keep(options.out, target, finding, data)
                print(f"  {finding.signature}\n  kept as {path}")
            found += len(result.findings)
            cases += result.cases
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n{cases} cases in {time.perf_counter() - began:.0f} s, {found} findings, {peak:.0f} MiB resident at most")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
