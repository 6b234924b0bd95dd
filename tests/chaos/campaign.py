"""A campaign: rounds of random strikes on whole runs, each audited at its end, and what they add up to.

    python tests/chaos/campaign.py --seed 1 --kills 1000

Rounds of `--round` kills alternate between the supervisor's own server and one beside the run, behind a proxy whose
connections are cut and silenced; of four, the third has so little room that history is trimmed all the time, and in the
fourth every rollout is a large message, in chunks. With `--cluster` every round is on three nodes, of which the leader
of some stream is struck, the next once all copies are whole again. The seed decides the whole schedule; `--only N`
plays round N again. Prints a line for each round as it ends, then the report; the result so far is in `--out` after
each round. Exits with 1 on a violation.

With `--operations` nothing of that happens: a cluster is operated under one run, see `operations`; `--only-operation`
names one of them, and may be given again.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.operations import OPERATIONS, operate
from chaos.rounds import TIGHT, Round, play
from chaos.strikes import Tally, percentile


class Report:
    """The rounds so far, added up."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.started = time.monotonic()
        self.rounds = 0
        self.tally = Tally()
        self.audited: Counter[str] = Counter()
        self.most_outstanding = 0
        self.standstills: list[float] = []
        self.violations: list[str] = []

    def add(self, number: int, played: Round, folder: Path) -> None:
        """Add a round that was played in `folder`."""
        self.rounds += 1
        self.tally.add(played.tally)
        verdict = played.verdict
        for what in ("rollouts", "outcomes", "batches", "steps", "acknowledged", "late"):
            self.audited[what] += getattr(verdict, what)
        self.most_outstanding = max(self.most_outstanding, verdict.most_outstanding)
        self.standstills.append(verdict.longest_standstill_s)
        for check, found in verdict.violations.items():
            self.violations += [f"round {number} ({folder}), {check}: {text}" for text in found]

    def as_json(self) -> dict[str, object]:
        recovery = {
            kind: {"n": len(values), "p50_s": percentile(values, 0.5), "p99_s": percentile(values, 0.99)}
            for kind, values in self._by_kind("kill").items()
        }
        every = [seconds for values in self._by_kind("kill").values() for seconds in values]
        return {
            "seed": self.seed,
            "rounds": self.rounds,
            "seconds": time.monotonic() - self.started,
            "kills": self.tally.kills,
            "struck": {f"{action} {kind}": count for (action, kind), count in sorted(self.tally.struck.items())},
            "audited": dict(self.audited),
            "most_outstanding_sequences": self.most_outstanding,
            "longest_standstill_s": max(self.standstills, default=None),
            "recovery": recovery,
            "recovery_from_all": {"n": len(every), "p50_s": percentile(every, 0.5), "p99_s": percentile(every, 0.99)},
            "recovery_of_others": {
                action: {"n": len(values), "p50_s": percentile(values, 0.5), "p99_s": percentile(values, 0.99)}
                for action in ("freeze", "restart", "cut", "silence")
                if (values := [s for found in self._by_kind(action).values() for s in found])
            },
            "violations": self.violations,
        }  # fmt: skip

    def _by_kind(self, action: str) -> dict[str, list[float]]:
        return {kind: values for (did, kind), values in sorted(self.tally.recovery.items()) if did == action}

    def as_text(self) -> str:
        found = self.as_json()
        struck = self.tally.struck
        actions = sorted({action for action, _ in struck}, key=lambda action: (action != "kill", action))
        lines = [
            f"seed {self.seed}: {self.tally.kills} kills in {self.rounds} rounds, {found['seconds']:.0f} s",
            "",
            f"{'':14}" + "".join(f"{action:>10}" for action in actions) + f"{'p50':>10}{'p99':>8}",
        ]
        for kind in sorted({kind for _, kind in struck}):
            values = self.tally.recovery["kill", kind]
            times = "".join(
                f"{seconds:>{width}.2f}" for share, width in ((0.5, 10), (0.99, 8))
                if (seconds := percentile(values, share)) is not None
            )  # fmt: skip
            lines.append(f"{kind:14}" + "".join(f"{struck[action, kind]:>10}" for action in actions) + times)
        every = found["recovery_from_all"]
        assert isinstance(every, dict)
        if every["n"]:
            lines.append(
                f"recovery from {every['n']} kills: p50 {every['p50_s']:.2f} s, p99 {every['p99_s']:.2f} s "
                "(the columns: seconds from a kill)"
            )
        lines += [
            ", ".join(f"{count} {what}" for what, count in self.audited.items()),
            f"at most {self.most_outstanding} sequences were stored and not trained",
            f"the ledger stood still for {max(self.standstills, default=0):.1f} s at most",
            f"violations: {len(self.violations)}",
            *self.violations[:50],
        ]
        return "\n".join(lines)


async def play_all(arguments: argparse.Namespace, report: Report) -> None:
    """Play the rounds that the arguments ask for, one after the other."""
    rounds = -(-arguments.kills // arguments.round)
    for number in range(rounds) if arguments.only is None else [arguments.only]:
        kills = min(arguments.round, arguments.kills - number * arguments.round)
        seed = arguments.seed * 1000 + number
        this = Round(
            seed,
            kills,
            pause_s=arguments.pause,
            servers="cluster" if arguments.cluster else "standalone" if number % 2 else "supervised",
            sets=TIGHT if number % 4 == 2 else {},
            patches=["small_chunks"] if number % 4 == 3 else [],
        )
        folder = Path(tempfile.mkdtemp(prefix="lachesis chaos "))
        start = time.monotonic()
        try:
            await play(this, folder)
        finally:
            report.add(number, this, folder)
            arguments.out.write_text(json.dumps(report.as_json(), indent=1))
        wrong = sum(map(len, this.verdict.violations.values()))
        print(
            f"round {number + 1} of {rounds}: {this.tally.kills} kills, {this.verdict.rollouts} rollouts, "
            f"{this.verdict.steps} steps, {wrong} violations, {time.monotonic() - start:.0f} s",
            flush=True,
        )
        if not wrong:
            shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--round", type=int, default=100, help="kills in one round")
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between two moments of striking")
    parser.add_argument("--only", type=int, default=None, help="play this round alone, counted from 0")
    parser.add_argument("--cluster", action="store_true", help="play every round on three nodes, three copies of all")
    parser.add_argument("--out", type=Path, default=None, help="JSON file of the result; default runs/chaos-SEED.json")
    parser.add_argument("--operations", action="store_true", help="operate a cluster under a run instead")
    parser.add_argument("--only-operation", action="append", choices=list(OPERATIONS), help="play only this operation")
    parser.add_argument("--secured", action="store_true", help="operate it with TLS and a key for each service")
    arguments = parser.parse_args()
    if arguments.operations or arguments.only_operation:
        return _operate(arguments.seed, arguments.only_operation or list(OPERATIONS), secured=arguments.secured)
    logging.disable(logging.WARNING)  # what the audit reads warns in its own words; the checks say what is wrong
    if arguments.out is None:
        arguments.out = Path("runs") / f"chaos-{arguments.seed}.json"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.seed)
    try:
        anyio.run(play_all, arguments, report)
    except KeyboardInterrupt:
        print("interrupted; the result so far:")
    print(report.as_text())
    return 1 if report.violations else 0


def _operate(seed: int, names: list[str], *, secured: bool) -> int:
    folder = Path(tempfile.mkdtemp(prefix="lachesis operations "))
    violations = anyio.run(partial(operate, seed, names, folder, secured=secured))
    print(f"seed {seed}, violations: {len(violations)}", *violations, sep="\n")
    if violations:
        print(f"everything is kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
