"""Merges the demo's TOML file, `LACHESIS_*` and the command line into one `RunConfig`.

The file is `demo.toml` or, for the pretrained model, `smollm2.toml`.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import msgspec

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.toml import toml_value
from lachesis.schemas.errors import ConfigError
from lachesis.services.run.file_permissions import share_files
from lachesis.services.run.trusted import check_trusted

__all__ = ["DEADLINES_S", "TEACHER_FOLDER", "DemoModel", "DemoOptions", "demo_config"]

DemoModel = Literal["tiny", "smollm2"]
"""tiny: made on the spot, learns to spell words backward. smollm2: a pretrained one, learns to do sums."""
_FILES: dict[DemoModel, str] = {"tiny": "demo.toml", "smollm2": "smollm2.toml"}
TEACHER_FOLDER = "teacher"
"""Folder of the teacher that is distilled, in the run's."""
DISTILLATION = {
    "batching.teacher": "required",
    "teacher.top_k": 8,
    "flow.teacher_bytes_per_token": 56,
    "training.learner.loss.teacher_coef": 1.0,
    "training.learner.loss.teacher_kl": "reverse",
    "curriculum.strategy": "uniform",
}
"""The demo's settings for on-policy distillation: the policy learns from the teacher at each token beside the reward.

Words are drawn evenly. The distance to the teacher is measured on what is trained, and is 2.7 times as large on wrong
answers as on right ones: a curriculum that goes on to harder words raises that figure while the policy comes nearer on
every word.
"""
_SMOLLM2_RATE, _SMOLLM2_LORA_RATE = 3e-5, 1.2e-4
"""Learning rates of ten steps on the pretrained model, unless one is set: of all weights and of adapters. Ten steps are
few, so they are about twice those that so many trained parameters have by default."""
DEADLINES_S: dict[DemoModel, float] = {"tiny": 600.0, "smollm2": 1200.0}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `lachesis demo`. `deadline_s`: the demo fails if it is not done by then."""

    model: DemoModel = "tiny"
    seed: int = 0
    steps: int | None = None
    run: str | None = None
    folder: Path | None = None
    nats: str | None = None
    sets: Sequence[str] = ()
    shuffle_advantages: bool = False
    distill: bool = False
    gate: bool = True
    fresh: bool = False
    deadline_s: float = 600.0


def demo_config(options: DemoOptions) -> RunConfig:
    """Return the configuration.

    Raises `ConfigError`, also where it would be no demo: no trainer, no held-out set.
    """
    run = options.run or time.strftime("demo-%Y%m%d-%H%M%S")
    folder = options.folder or Path("runs") / run
    if options.folder is None and folder.is_dir():
        check_trusted(folder.absolute())
    given: dict[str, Any] = {"run": run, "folder": str(folder), "seed": options.seed}
    if options.model == "smollm2":
        tasks = folder.absolute() / "tasks"
        given["environments.sums.params.path"] = str(tasks / "train.jsonl")
        given["evaluation.sums.params.path"] = str(tasks / "held_out.jsonl")
    given |= {"training.steps": options.steps} if options.steps is not None else {}
    given |= {"training.shuffle_advantages": True} if options.shuffle_advantages else {}
    if options.distill:
        if options.model != "tiny":
            raise ConfigError("the demo has a better teacher for its tiny model alone: leave out --distill or --model")
        given |= DISTILLATION | {"inference.teacher.model": str(folder.absolute() / TEACHER_FOLDER)}
    given |= {"nats.url": options.nats} if options.nats else {}
    sets = [f"{path}={toml_value(value)}" for path, value in given.items()]
    source = Path(str(files(__package__) / _FILES[options.model]))
    config = load(run_config_type(), file=source, environ=os.environ, sets=[*sets, *options.sets]).config
    if config.shared_files:
        share_files()
    if config.mode != "train" or config.training.steps is None:
        raise ConfigError("the demo trains for a number of steps: leave mode and training.steps as they are")
    if len(config.environments) != 1 or len(config.evaluation) != 1:
        raise ConfigError("the demo has one environment and one evaluation; use `lachesis up` for runs of your own")
    config = msgspec.structs.replace(config, folder=str(config.path))
    return config if options.model == "tiny" else _with_smollm2_rate(config)


def _with_smollm2_rate(config: RunConfig) -> RunConfig:
    training = config.training
    if training.learner.learning_rate is not None:
        return config
    rate = _SMOLLM2_RATE if training.lora is None else _SMOLLM2_LORA_RATE
    learner = msgspec.structs.replace(training.learner, learning_rate=rate)
    return msgspec.structs.replace(config, training=msgspec.structs.replace(training, learner=learner))
