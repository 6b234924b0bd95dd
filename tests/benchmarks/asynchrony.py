"""Ablation of asynchrony: what stale rollouts cost, with and without each correction of the loss.

    python tests/benchmarks/asynchrony.py --out runs/asynchrony.jsonl
    python tests/benchmarks/asynchrony.py --out runs/asynchrony.jsonl --show           # only the table of what is there

Trains the demo's warm-started model on the demo's words by the trainer's own learner and loss. Staleness is exact: the
batch of step t was sampled by the weights of step t - s, the first s batches by the weights at the start. For each
seed, all cells begin with the same weights and draw the same words. Without staleness no correction changes anything
beyond rounding, so one cell stands for all of them. Each finished cell is a line of JSON in `--out`; a cell that is
there is not run again, so the command may be killed and started again.

Columns: the held-out rate before and after (200 words, 4 answers each, temperature 1) with its standard error over
seeds, or of one seed over words, which says nothing of other seeds; the tokens that were sampled; the mean entropy of
the last ten steps; and over all steps the mean of |w - 1| and the KL (k3) with w = pi_train / pi_rollout, and the share
of tokens that the loss cut off or left out.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from in_process_grpo import Player, passed, with_advantages
from msgspec.structs import replace

from lachesis.pipeline.environment.spelling_tasks import SpellBackward
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.model.logprobs import PassInputs, SampledLogprobs
from lachesis.pipeline.model.policy import build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.tokenizer import common_beginning
from lachesis.pipeline.tasks.splits import Split
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig, WarmStartConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import PackedBatch, pack
from lachesis.pipeline.trainer.step_metrics import StepMetrics
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.pipeline.trainer.warmstart import warm_start
from lachesis.services.demo.prepare import ERROR_RATE, WARM_START_PAIRS

ON_POLICY = "any"
"""The correction of the cells without staleness, in which there is nothing to correct."""
_NO_RATIO = LossConfig(anchor="proximal", tis_cap=None)
CORRECTIONS: dict[str, LossConfig] = {
    ON_POLICY: LossConfig(),
    "none": _NO_RATIO,
    "tis": replace(_NO_RATIO, tis_cap=2.0),
    "icepop": replace(_NO_RATIO, outside="mask", tis_floor=0.5, tis_cap=5.0),
    "mask": replace(_NO_RATIO, off_policy_threshold=0.05),
    "default": LossConfig(),
    "default, mask": LossConfig(off_policy_threshold=0.05),
    "tis, mask": replace(_NO_RATIO, tis_cap=2.0, off_policy_threshold=0.5),
    "gspo": LossConfig(objective="gspo"),
    "cispo": LossConfig(objective="cispo"),
    "sapo": LossConfig(objective="sapo"),
}
"""none: stale rollouts are trained on as if they were fresh. default: the ratio to the rollout's probabilities, clipped
(PPO). mask: off-policy sequence masking, at nats a token; "tis, mask" is the loss of the recipe `off_policy`."""
MEASURED_EVERY = 4
"""Steps of which one has its |w - 1| measured, which takes a forward pass."""
LAST_STEPS = 10


class Cell(msgspec.Struct, frozen=True):
    """What identifies a cell of the grid: with the same values it is the same run."""

    staleness: int
    correction: str
    seed: int
    learning_rate: float
    steps: int
    prompts: int
    samples: int


class Finished(msgspec.Struct, frozen=True):
    """A cell that was run: the rate of every held-out word, what was sampled, and means over the steps."""

    cell: Cell
    before: list[float]
    after: list[float]
    curve: list[float]
    tokens: int
    entropy: float
    off_by: float
    kl: float
    cut: float
    seconds: float

    @property
    def rates(self) -> tuple[float, float]:
        return statistics.fmean(self.before), statistics.fmean(self.after)


def words(split: Split, size: int) -> list[dict[str, str]]:
    pool = SpellBackward(split=split, size=size, min_length=3, max_length=5)
    return [{"question": question, "answer": answer} for question, answer in pool.pairs()]


def starting_model(folder: Path, seed: int) -> str:
    """Make the demo's model, or find it in `folder`."""
    made = folder / f"model-{seed}"
    if not made.is_dir():
        pairs = [(item["question"], item["answer"]) for item in words("warm_start", WARM_START_PAIRS)]
        policy = build_tiny_policy(seed, phrases=[common_beginning(question for question, _ in pairs)])
        warm_start(policy, pairs, WarmStartConfig(seed=seed, slips=ERROR_RATE))
        partial = made.with_suffix(".partial")
        save_policy(policy, partial)
        partial.rename(made)
    return str(made)


def held_out_rates(player: Player, items: list[dict[str, str]], samples: int) -> list[float]:
    """Return the share of right answers to each word."""
    results = player.generate(items, samples, 1.0, seed=7)
    return [
        statistics.fmean(passed(item, player.text(sample.token_ids)) for sample in result.samples)
        for item, result in zip(items, results, strict=True)
    ]


def off_by(sampled: SampledLogprobs, batch: PackedBatch) -> float:
    """Return the mean of |w - 1| over the batch's trained tokens."""
    with torch.no_grad():
        logprobs_BT = sampled(batch.tokens_BT, 1.0, batch.mask_BT, PassInputs())[0]
    w_BT = (logprobs_BT - batch.logprobs_BT).exp()
    return float((w_BT - 1).abs()[batch.mask_BT].mean())


def run(cell: Cell, model: str, training: list[dict[str, str]], held_out: list[dict[str, str]]) -> Finished:
    """Train one cell and evaluate it."""
    started = time.process_time()
    torch.manual_seed(cell.seed)
    policy = load_model(model)
    learner = Learner(
        policy.model,
        LearnerConfig(learning_rate=cell.learning_rate, loss=CORRECTIONS[cell.correction]),
    )
    sampled = SampledLogprobs(policy.model)
    draw = random.Random(cell.seed)
    waiting: deque[list[TrainingSequence]] = deque()
    metrics: list[StepMetrics] = []
    offsets: list[float] = []
    curve: list[float] = []
    tokens = 0
    with Engine(policy.model, eos_token_id=policy.tokenizer.eos_token_id, weight_version="in-process") as engine:
        player = Player(policy, engine)
        before = held_out_rates(player, held_out, 4)
        for number in range(cell.steps + cell.staleness):
            if number < cell.steps:
                items = draw.sample(training, cell.prompts)
                groups = player.rollouts(items, cell.samples, 1000 * cell.seed + number, learner.steps)
                tokens += sum(int(one.loss_mask.sum()) for group in groups for _, one in group)
                waiting.append(with_advantages(groups, divide=False, shuffle=None))
            if number < cell.staleness or not (sequences := waiting.popleft()):
                continue  # no batch is old enough yet, or the batch had no group with variance
            batch = pack(sequences)
            if learner.steps % MEASURED_EVERY == 0:
                offsets.append(off_by(sampled, batch))
            metrics.append(learner.step(batch))
            if learner.steps % 20 == 0:
                curve.append(statistics.fmean(held_out_rates(player, held_out, 1)))
        after = held_out_rates(player, held_out, 4)
    return Finished(
        cell=cell,
        before=before,
        after=after,
        curve=curve,
        tokens=tokens,
        entropy=statistics.fmean(one.entropy for one in metrics[-LAST_STEPS:]),
        off_by=statistics.fmean(offsets),
        kl=statistics.fmean(one.kl for one in metrics),
        cut=statistics.fmean(one.clip_fraction + one.masked_fraction for one in metrics),
        seconds=time.process_time() - started,
    )


def read(file: Path) -> list[Finished]:
    """Return the cells of a file, up to a line that a kill cut off."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
    return [msgspec.json.decode(line, type=Finished) for line in lines]


def mean_error(rates: Sequence[Sequence[float]]) -> str:
    """Return the mean of the words' rates of each seed, and its error: over seeds, or over words if there is one."""
    values = rates[0] if len(rates) == 1 else [statistics.fmean(one) for one in rates]
    return f"{statistics.fmean(values):6.1%} +- {statistics.stdev(values) / math.sqrt(len(values)):5.1%}"


def table(cells: Iterable[Finished]) -> str:
    """Return a row for each staleness and correction, over seeds."""
    rows: dict[tuple[float, int, int], list[Finished]] = {}
    for one in cells:
        place = list(CORRECTIONS).index(one.cell.correction)
        rows.setdefault((one.cell.learning_rate, one.cell.staleness, place), []).append(one)
    lines = [
        f"rate  stale  correction     seeds  {'before':15}  {'after':15}  {'gain':15}   tokens  entropy  |w-1|      KL"
    ]
    lines[0] += "    cut"
    for (rate, staleness, _), found in sorted(rows.items()):
        before, after = [one.before for one in found], [one.after for one in found]
        gains = [[end - begin for begin, end in zip(one.before, one.after, strict=True)] for one in found]
        tokens, entropy, off, kl, cut = (
            statistics.fmean(getattr(one, name) for one in found)
            for name in ("tokens", "entropy", "off_by", "kl", "cut")
        )
        lines.append(
            f"{rate:.0e} {staleness:5}  {found[0].cell.correction:13} {len(found):5}  {mean_error(before)}  "
            f"{mean_error(after)}  {mean_error(gains)}  {tokens:7.0f}  {entropy:7.3f}  {off:.3f}  {kl:.4f}  {cut:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = parse()
    if not arguments.show:
        fill(arguments)
    print(table(read(arguments.out)))


def fill(arguments: argparse.Namespace) -> None:
    """Run the cells that the file lacks, one seed after the other."""
    torch.set_num_threads(1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    found = read(arguments.out)
    arguments.out.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in found))
    training, held_out = words("train", 8000), words("held_out", 200)
    done = {one.cell for one in found}
    for seed in arguments.seeds:
        model = starting_model(arguments.out.parent, seed)
        for staleness in arguments.staleness:
            for correction in arguments.corrections if staleness else [ON_POLICY]:
                cell = Cell(
                    staleness, correction, seed, arguments.lr, arguments.steps, arguments.prompts, arguments.samples
                )
                if cell in done:
                    continue
                one = run(cell, model, training, held_out)
                with arguments.out.open("ab") as file:
                    file.write(msgspec.json.encode(one) + b"\n")
                before, after = one.rates
                print(
                    f"seed {seed} staleness {staleness} {correction}: {before:.1%} -> {after:.1%}, entropy "
                    f"{one.entropy:.3f}, |w-1| {one.off_by:.3f}, {one.seconds:.0f} s of processor time",
                    flush=True,
                )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of the finished cells, a line of JSON each")
    parser.add_argument("--show", action="store_true", help="run nothing, print the table of what is there")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument(
        "--corrections",
        nargs="+",
        choices=[name for name in CORRECTIONS if name != ON_POLICY],
        default=[name for name in CORRECTIONS if name != ON_POLICY],
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=6e-4, help="learning rate; the demo's is 3e-4")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--prompts", type=int, default=16, help="groups a step")
    parser.add_argument("--samples", type=int, default=8, help="samples a group")
    return parser.parse_args()


if __name__ == "__main__":
    main()
