"""The demo's gate on several seeds, beside its two controls.

    python tests/benchmarks/demo_gate.py --out runs/gate

For each seed: the demo, then the in-process loop from the same warm-started model with the same hyper-parameters and
staleness. For the first seed also the demo with advantages shuffled within groups, which must not learn. Prints a table
and exits with 1 unless every demo passed its gate, each is within 10 points of its control, and the shuffled one gained
less than half of what the gate asks for.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONTROL = Path(__file__).with_name("in_process_grpo.py")
CLOSE_POINTS = 10.0
SHUFFLED_POINTS = 10.0


def demo(folder: Path, seed: int, *arguments: str) -> dict[str, Any]:
    """Run one demo and return its summary."""
    command = [sys.executable, "-m", "lachesis", "demo", "--seed", str(seed), "--run", folder.name]
    with folder.with_suffix(".log").open("wb") as log:
        subprocess.run([*command, "--folder", str(folder), *arguments], stdout=log, stderr=log, check=False)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    return summary


def control(seed: int, steps: int, staleness: int, model: Path) -> float:
    """Run the in-process loop and return its gain in points."""
    arguments = ["--seed", seed, "--steps", steps, "--staleness", staleness, "--model", model]
    command = [sys.executable, str(CONTROL), *map(str, arguments)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures = json.loads(output.splitlines()[-1])
    return 100.0 * float(figures["after"] - figures["before"])


def main() -> None:
    arguments = parse()
    arguments.out.mkdir(parents=True)
    steps = ["--steps", str(arguments.steps)]
    wrong = []
    print("seed  before  after   gain  control  greedy         wall s  start  train  groups/s  e2e p99")
    for seed in arguments.seeds:
        summary = demo(arguments.out / f"seed-{seed}", seed, *steps)
        gate, walls = summary["gate"], summary["walls"]
        if gate["gain"] is None:
            wrong.append(f"seed {seed}: {summary['state']}, {summary['reason']}")
            continue
        gain = control(seed, arguments.steps, arguments.staleness, arguments.out / f"seed-{seed}" / "model")
        print(
            f"{seed:4}  {gate['before']:6.1%}  {gate['after']:5.1%}  {gate['gain']:+5.1f}  {gain:+7.1f}  "
            f"{gate['greedy_before']:5.1%} -> {gate['greedy_after']:5.1%}  {walls['total']:6.1f}  "
            f"{walls['start']:5.1f}  {walls['train']:5.1f}  {summary['groups_per_s']:8.1f}  "
            f"{summary['end_to_end']['p99']:7.2f}",
            flush=True,
        )
        wrong += [f"seed {seed}: the gate was not passed"] * (not gate["passed"])
        wrong += [f"seed {seed}: {CLOSE_POINTS} points from its control"] * (abs(gate["gain"] - gain) > CLOSE_POINTS)
    seed = arguments.seeds[0]
    gain = demo(arguments.out / "shuffled", seed, *steps, "--shuffle-advantages", "--no-gate")["gate"]["gain"]
    print(f"shuffled advantages, seed {seed}: {'not measured' if gain is None else f'{gain:+.1f}'} points")
    wrong += ["shuffled advantages learned"] * (gain is None or gain >= SHUFFLED_POINTS)
    print("\n".join(wrong) or "all as it should be")
    sys.exit(bool(wrong))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to make and to put the runs into")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of demos and controls")
    parser.add_argument("--staleness", type=int, default=2, help="of the control; the demos' bound")
    return parser.parse_args()


if __name__ == "__main__":
    main()
