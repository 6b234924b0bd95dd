"""The curriculum on real models: tokens until a fixed held-out rate, with `irt` and with uniform draws.

    python tests/benchmarks/curriculum_models.py --out runs/curriculum
    python tests/benchmarks/curriculum_models.py --out runs/curriculum --model smollm2

Runs the demo with each strategy on each seed, one after the other, and prints what every run took and the means with
their standard errors over seeds. The target was chosen before the runs. Tokens are those the policy sampled, prompts
left out: `trained` are those of the batches up to a step, `sampled` those of every group that was stored by its end.
Between two evaluations the held-out rate is taken to be linear. A run that has its `curve.json` is not run again.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

TARGETS = {"tiny": 0.55, "smollm2": 0.30}
"""Held-out rates to reach, about midway between what the demo of each model starts from and ends with."""
STEPS = {"tiny": 100, "smollm2": 6}
SETTINGS = {
    "tiny": ["evaluate.every_steps=10", "evaluate.items_between=200"],
    "smollm2": [
        "batching.batch_size=32",
        "evaluate.every_steps=3",
        "evaluate.items=20",
        "evaluate.items_between=20",
        "evaluate.samples=2",
        "environments.sums.max_new_tokens=12",
        "evaluation.sums.max_new_tokens=12",
    ],
}
"""The same tasks in every evaluation of a seed. SmolLM2 in small: a step of the demo's takes half a minute."""
STRATEGIES = ("uniform", "irt")
CURVE = "curve.json"


class Point(msgspec.Struct, frozen=True):
    """An evaluation: the optimizer step, the held-out rate, and the tokens trained and sampled by then."""

    step: int
    rate: float
    trained: int
    sampled: int


class Row(msgspec.Struct):
    """What is read of a row of the export, a sequence."""

    loss_mask: list[int]
    stored_ns: int
    batch: int | None = None


def crossing(points: Sequence[Point], target: float, tokens: str) -> float | None:
    """Return how many `tokens` ("trained" or "sampled") it took to reach `target`; None: it was not reached."""
    if points and points[0].rate >= target:
        return float(getattr(points[0], tokens))
    for before, after in pairwise(points):
        if after.rate >= target:
            share = (target - before.rate) / (after.rate - before.rate)
            first, last = getattr(before, tokens), getattr(after, tokens)
            return float(first + share * (last - first))
    return None


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, NaN where there are too few values."""
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def run(folder: Path, arguments: argparse.Namespace, strategy: str, seed: int) -> list[Point]:
    """Run one demo, or find it in `folder`; return its evaluations."""
    file = folder / CURVE
    if not file.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        sets = [f"curriculum.strategy={strategy}", *SETTINGS[arguments.model], *arguments.set]
        command = ["demo", "--model", arguments.model, "--seed", seed, "--run", folder.name, "--folder", folder]
        command += ["--steps", arguments.steps, "--deadline", arguments.deadline, "--no-gate"]
        command += [word for one in sets for word in ("--set", one)]
        lachesis(command, folder.with_suffix(".log"))
        summary = json.loads((folder / "summary.json").read_bytes())
        points = curve(summary, folder)
        partial = file.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(points))
        partial.rename(file)
    return msgspec.json.decode(file.read_bytes(), type=list[Point])


def lachesis(command: Sequence[object], log: Path) -> None:
    with log.open("ab") as output:
        words = [sys.executable, "-m", "lachesis", *map(str, command)]
        subprocess.run(words, stdout=output, stderr=output, check=True)


def curve(summary: dict[str, Any], folder: Path) -> list[Point]:
    """Return the evaluations of a finished run with the tokens that were spent before each."""
    export = folder / "export.jsonl"
    lachesis(["export", "--config", folder / "run.toml", "--overwrite", export], folder.with_suffix(".log"))
    with export.open("rb") as lines:
        rows = [msgspec.json.decode(line, type=Row) for line in lines]
    export.unlink()
    figures = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    ended_ns = {int(one["train/step"]): one["train/time"] * 1e9 for one in figures if "train/time" in one}
    points = []
    for event in summary["held_out"]:
        step = event["step"]
        trained = sum(sum(row.loss_mask) for row in rows if row.batch is not None and row.batch < step)
        sampled = sum(sum(row.loss_mask) for row in rows if step and row.stored_ns <= ended_ns[step])
        points.append(Point(step, event["avg"], trained, sampled))
    return points


def main() -> None:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = TARGETS[arguments.model] if arguments.target is None else arguments.target
    found: dict[str, dict[int, list[Point]]] = {strategy: {} for strategy in arguments.strategies}
    print(f"{arguments.model}, {arguments.steps} steps, held-out rate to reach {target:.0%}")
    print("seed  strategy  start    end   trained  sampled  (tokens to the target)")
    for seed in arguments.seeds:
        for strategy in arguments.strategies:
            folder = arguments.out / f"{arguments.model}-{strategy}-{seed}"
            points = found[strategy][seed] = run(folder.absolute(), arguments, strategy, seed)
            costs = "  ".join(
                f"{'-' if cost is None else f'{cost:.0f}':>7}"
                for cost in (crossing(points, target, tokens) for tokens in ("trained", "sampled"))
            )
            print(f"{seed:4}  {strategy:8}  {points[0].rate:5.1%}  {points[-1].rate:5.1%}  {costs}", flush=True)
    print("\nmeans and standard errors over seeds")
    for strategy, runs in found.items():
        ends = mean_error([100 * points[-1].rate for points in runs.values()])
        print(f"{strategy:8}  end {ends[0]:.1f} +- {ends[1]:.1f} %", end="")
        for tokens in ("trained", "sampled"):
            costs_ = [crossing(points, target, tokens) for points in runs.values()]
            reached = [cost for cost in costs_ if cost is not None]
            mean, error = mean_error(reached)
            print(f"; {tokens} {mean:.0f} +- {error:.0f} tokens ({len(reached)} of {len(costs_)} runs)", end="")
        print()
    first, second = (found[strategy] for strategy in arguments.strategies[:2])
    print(f"{' / '.join(arguments.strategies[:2])}, geometric mean over the seeds in which both reach it")
    for tokens in ("trained", "sampled"):
        pairs = [(crossing(first[seed], target, tokens), crossing(second[seed], target, tokens)) for seed in first]
        logs = [math.log(one / other) for one, other in pairs if one and other]
        mean, error = mean_error(logs)
        print(f"{tokens} tokens: {math.exp(mean):.2f} (x/ {math.exp(error):.2f}), {len(logs)} seeds")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; what is there is taken from it")
    parser.add_argument("--model", choices=list(TARGETS), default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), help="the first two are compared")
    parser.add_argument("--steps", type=int, help="optimizer steps; 100 for tiny, 6 for smollm2")
    parser.add_argument("--target", type=float, help="held-out rate to reach; 0.55 for tiny, 0.30 for smollm2")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds a run may take")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="one setting more of every run")
    arguments = parser.parse_args()
    if arguments.steps is None:
        arguments.steps = STEPS[arguments.model]
    if len(arguments.strategies) < 2:
        parser.error("--strategies: two are compared")
    return arguments


if __name__ == "__main__":
    main()
