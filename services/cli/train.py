"""`lachesis train`: trains a second model offline on a revision's rewards.

The live run is not touched.
"""

import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer
from rich.progress import MofNCompleteColumn, TextColumn

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import THIS_MACHINE, RunConfig
from lachesis.pipeline.config.trainer_settings import trainer_settings
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, latest_checkpoint, state_of
from lachesis.pipeline.ledger.offline_start import OfflineStart
from lachesis.pipeline.offline.trainer.ledger import OfflineRequest, open_offline_ledger
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.replay import OfflineTrainerRecord
from lachesis.schemas.subjects import check_name
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.progress import PAUSED, bar, drain_on_signal
from lachesis.services.output import print_json
from lachesis.services.run.checkpoints import find_checkpoint
from lachesis.services.run.connect import open_history
from lachesis.services.run.lost_history import warn_of_losses

__all__ = ["OFFLINE_FOLDER", "TrainingProgress", "offline_config", "start_model", "train"]

OFFLINE_FOLDER = "trainers"
"""Folder, in a run's, of the folders of offline trainers."""


@with_options
def train(
    options: Options,
    *,
    revision: Annotated[str, typer.Option(metavar="NAME", help="Name of a finished replay.")],
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the trainer and its ledger. Default: the revision's name."),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help="Model, or step of a checkpoint. Default: the run's model."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of optimizer steps. Default: every batch.")
    ] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum staleness of a rollout in optimizer steps. Default: unlimited."),
    ] = None,
    min_step: Annotated[
        int | None, typer.Option(min=0, help="Only rollouts of this policy step or a later one.")
    ] = None,
    max_step: Annotated[
        int | None, typer.Option(min=0, help="Only rollouts of this policy step or an earlier one.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and form the batches, but write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train a second model offline on a revision's rewards, with its own ledger and checkpoints.

    The importance ratio is against the logprobs that the rollouts were sampled with. The live run is not touched, and
    the weights are not published; they are in trainers/NAME of the run's folder. After Ctrl-C or a crash the same
    command goes on where it was.
    """

    request = OfflineRequest(
        trainer=name or revision,
        revision=revision,
        max_staleness=max_staleness,
        min_step=min_step,
        max_step=max_step,
        store=not dry_run,
    )
    config = options.config()
    check_name("trainer", request.trainer)
    model, start = start_model(config, begin)
    request = replace(request, model=model, start=start)
    if request.store and find_spec("torch") is None:
        raise StartupError(f"train needs the package 'torch': {install_command('train')}; or form the "
                           "batches alone, with --dry-run")  # fmt: skip
    if find_spec("torch") is not None:
        request = replace(request, tokenizer_hash=_tokenizer_hash(model, config.chat_template))
    result = anyio.run(_run, config, request, steps)
    if as_json:
        print_json(result)
    else:
        _print_summary(result, stored=request.store)
    if request.store and not result.finished:
        raise typer.Exit(PAUSED)


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where an offline trainer stands. `manifest` names all its batches in order, `chain` its ledger.

    `steps` and `policy_version` are of its newest checkpoint (0 and None: there is none); `finished`: every batch, or
    the requested number, is in it.
    """

    trainer: str
    revision: str
    batches: int
    groups: int
    manifest: str
    chain: str
    steps: int
    finished: bool
    policy_version: str | None
    checkpoint: str | None
    seconds: float


def start_model(config: RunConfig, begin: str | None) -> tuple[str, int]:
    """Return the model that training starts from, and the optimizer step of its weights.

    `begin` is a model, or the step of a checkpoint that the run still has; None: the model that the run began with. A
    model that is no checkpoint counts as step 0. Raises `ConfigError`.
    """
    if begin is not None and begin.isdecimal() and int(begin):
        return str(find_checkpoint(config.path, begin)), int(begin)
    name = config.model if begin in {None, "0"} else begin
    if name is None:
        raise ConfigError("model: not set; give the run's --config, or name the model to begin with (--from)")
    folder = Path(name)
    state = state_of(folder)
    return str(folder.absolute()) if folder.is_dir() else name, state.step if state else 0


def offline_config(config: RunConfig, record: OfflineTrainerRecord, steps: int | None) -> RunConfig:
    """Return the configuration of an offline trainer: its own folder, model, name, and end."""
    training = msgspec.structs.replace(
        config.training,
        name=record.trainer,
        steps=min(steps or record.batches, record.batches),
        backend=THIS_MACHINE,
    )
    folder = config.path / OFFLINE_FOLDER / record.trainer
    return msgspec.structs.replace(config, folder=str(folder), model=record.model, training=training)


def _tokenizer_hash(model: str, chat_template: str | None) -> str:
    from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer
    from lachesis.pipeline.model.tokenizer import tokenizer_hash

    return tokenizer_hash(load_tokenizer(model, chat_template))


async def _run(config: RunConfig, request: OfflineRequest, steps: int | None) -> TrainingProgress:
    started = time.monotonic()
    async with open_history(config, f"{config.run}.train", OPERATOR) as bus, AsyncExitStack() as stack:
        await warn_of_losses(bus, config)
        with bar(f"read {request.revision}") as advance:
            opened = open_offline_ledger(bus, config, request, progress=advance)
            record, trained = await stack.enter_async_context(opened)
        if request.store:
            await _train(bus, offline_config(config, record, steps), record, trained)
    return _standing(config, record, steps, time.monotonic() - started)


async def _train(
    bus: Bus, config: RunConfig, record: OfflineTrainerRecord, durable: Callable[[LedgerEntry], None]
) -> None:
    from lachesis.pipeline.trainer.stage import OfflineRun, run_trainer

    service = Service(bus, "trainer", config.run)
    total = config.training.steps
    with bar(f"train {record.trainer}", MofNCompleteColumn(), TextColumn("steps")) as advance:
        offline = OfflineRun(
            start=OfflineStart(record.start, record.max_staleness),
            on_trained=lambda step: advance(step, total),
            on_durable=durable,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain_on_signal, service.draining, service.drain)
            await run_trainer(service, trainer_settings(config), offline)
            tasks.cancel_scope.cancel()


def _standing(config: RunConfig, record: OfflineTrainerRecord, steps: int | None, seconds: float) -> TrainingProgress:
    own = offline_config(config, record, steps)
    path = latest_checkpoint(own.path / CHECKPOINTS)
    state = state_of(path) if path else None
    step = state.step if state else 0
    return TrainingProgress(
        trainer=record.trainer,
        revision=record.revision,
        batches=record.batches,
        groups=record.groups,
        manifest=record.manifest,
        chain=record.chain,
        steps=step,
        finished=step >= (own.training.steps or 0),
        policy_version=state.policy_version if state else None,
        checkpoint=str(path) if path else None,
        seconds=seconds,
    )


def _print_summary(result: TrainingProgress, *, stored: bool) -> None:
    print(
        f"trainer {result.trainer} on revision {result.revision}: {result.batches} batches of {result.groups} groups, "
        f"digest {result.manifest}"
    )
    if stored:
        print(f"step {result.steps}, {result.seconds:.1f} s, policy {result.policy_version}, {result.checkpoint}")
    if stored and not result.finished:
        print("paused: the same command continues from here. Its history may be trimmed meanwhile", file=sys.stderr)
