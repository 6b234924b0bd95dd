"""What the answer in the teacher's prompt is worth: whole runs with it and without, from the same model.

    python tests/benchmarks/self_distillation.py --out runs/self_distillation
    python tests/benchmarks/self_distillation.py --out runs/self_distillation --show   # only the table of finished runs

A tiny character model learns to spell words backward, as in the demo, with one reward: right or wrong. Its warm start
shows it the demo's words, six of ten answers with a slip, and the same words with the answer in the prompt, all of them
right; so it can read an answer there, as a pretrained model can, and would not find it by itself. Each run is
`lachesis up` with the recipe `self_distillation` and all of its processes. `grpo` is without a teacher and else the
same, `frozen` has the model before training as its teacher, `policy` the policy as it is.

Columns: the held-out rate (200 words, 4 answers each, temperature 1) before and after, the tokens that were trained on,
and the gain over `grpo` of the same seed, with the standard error over seeds. A run that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import torch
from asynchrony import held_out_rates, words
from in_process_grpo import Player

from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.ledger.checkpoint_state import POINTER
from lachesis.pipeline.model.policy import build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.tokenizer import common_beginning
from lachesis.pipeline.teacher.prompt import PromptTemplate
from lachesis.pipeline.trainer.config import WarmStartConfig
from lachesis.pipeline.trainer.warmstart import _with_slip, warm_start
from lachesis.services.demo.prepare import ERROR_RATE, WARM_START_PAIRS

TEMPLATE = "{question} Answer: {answer}"
NO_TEACHER = {"teacher.enabled": False, "batching.teacher": "off", "training.learner.loss.teacher_coef": 0.0}
ARMS: dict[str, dict[str, object]] = {
    "grpo": NO_TEACHER,
    "frozen": {},
    "policy": {"teacher.environments.words": "policy"},
}
CONFIG = """
recipe = "self_distillation"
run = "r"
folder = "run"
seed = {seed}
model = "{model}"

[environments.words]
kind = "spell_backward"
samples = 8
max_new_tokens = 12
concurrency = 16
longest_tokens = 48
success_rater = "accuracy"
params = {{ split = "train", size = 8000, min_length = 3, max_length = 5 }}

[[scoring.raters]]
rater = "exact_match"
name = "accuracy"

[batching]
batch_size = 128
max_staleness = 2

[teacher]
prompt = "{template}"

[training]
steps = {steps}
checkpoint_every = {steps}
learner = {{ learning_rate = 3e-4, warmup_steps = 0 }}
"""


class Finished(msgspec.Struct, frozen=True):
    """A run that ended: the held-out rates and the tokens that were trained on."""

    arm: str
    seed: int
    steps: int
    before: float
    after: float
    tokens: int


def starting_model(folder: Path, seed: int) -> Path:
    """Make the model, or find it in `folder`."""
    made = folder / f"model-{seed}"
    if not made.is_dir():
        draw, template = random.Random(seed), PromptTemplate(TEMPLATE)
        items = words("warm_start", WARM_START_PAIRS)
        pairs = [(item["question"], _with_slip(item["answer"], ERROR_RATE, draw)) for item in items]
        pairs += [(template.fill(item["question"], item), item["answer"]) for item in items]
        policy = build_tiny_policy(seed, phrases=[common_beginning(item["question"] for item in items)])
        warm_start(policy, pairs, WarmStartConfig(seed=seed, slips=0.0, steps=440))
        partial = made.with_suffix(".partial")
        save_policy(policy, partial)
        partial.rename(made)
    return made.absolute()


def held_out_rate(model: Path, *, privileged: bool = False) -> float:
    """Return the share of right answers to the held-out words; `privileged`: with the answer in the prompt."""
    policy, items = load_model(str(model)), words("held_out", 200)
    if privileged:
        items = [item | {"question": PromptTemplate(TEMPLATE).fill(item["question"], item)} for item in items]
    with Engine(policy.model, eos_token_id=policy.tokenizer.eos_token_id, weight_version="in-process") as engine:
        return statistics.fmean(held_out_rates(Player(policy, engine), items, 4))


def run(arm: str, seed: int, steps: int, folder: Path, model: Path) -> Finished:
    """Run one arm with all its processes, and measure the model that it ends with."""
    place = folder / f"{arm}-{seed}"
    place.mkdir()
    (place / "run.toml").write_text(CONFIG.format(seed=seed, model=model, steps=steps, template=TEMPLATE))
    sets = [text for path, value in ARMS[arm].items() for text in ("--set", f"{path}={json.dumps(value)}")]
    command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml", *sets]
    with (place / "up.log").open("wb") as log:
        subprocess.run(command, cwd=place, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
    (pointer,) = place.rglob(POINTER)
    rows = [json.loads(line) for line in next(place.rglob("metrics.jsonl")).read_text().splitlines()]
    return Finished(
        arm=arm,
        seed=seed,
        steps=steps,
        before=held_out_rate(model),
        after=held_out_rate(pointer.parent / pointer.read_text().strip()),
        tokens=int(sum(row.get("train/tokens", 0) for row in rows)),
    )


def table(found: list[Finished]) -> str:
    """Return a row for each arm, over seeds, with the gain over `grpo` of the same seeds."""
    base = {one.seed: one.after for one in found if one.arm == "grpo"}
    lines = ["arm     seeds  before  after  tokens  more than grpo"]
    for arm in ARMS:
        rows = [one for one in found if one.arm == arm]
        gains = [one.after - base[one.seed] for one in rows if one.seed in base]
        if not rows:
            continue
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        before, after, tokens = (
            statistics.fmean(getattr(one, name) for one in rows) for name in ("before", "after", "tokens")
        )
        lines.append(
            f"{arm:7} {len(rows):5}  {before:6.1%}  {after:5.1%}  {tokens:6.0f}  "
            f"{statistics.fmean(gains):+.1%} +- {error:.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of models, runs and results.jsonl")
    parser.add_argument("--show", action="store_true", help="run nothing, print the table of what is there")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = arguments.out / "results.jsonl"
    found = (
        [msgspec.json.decode(line, type=Finished) for line in results.read_bytes().splitlines()]
        if results.exists()
        else []
    )
    for seed in [] if arguments.show else arguments.seeds:
        model = starting_model(arguments.out, seed)
        print(
            f"seed {seed}: {held_out_rate(model):.1%}, with the answer {held_out_rate(model, privileged=True):.1%}",
            flush=True,
        )
        for arm in ARMS:
            if any((one.arm, one.seed) == (arm, seed) for one in found):
                continue
            found.append(run(arm, seed, arguments.steps, arguments.out, model))
            with results.open("ab") as file:
                file.write(msgspec.json.encode(found[-1]) + b"\n")
            print(found[-1], flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
