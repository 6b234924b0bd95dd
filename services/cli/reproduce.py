"""`lachesis reproduce`: rebuilds a run's batches, repeats its training, and compares the bits."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer
from rich.progress import MofNCompleteColumn, TextColumn

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import CheckpointError, LedgerError, NotFoundError
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, TrainerState, known_checkpoints
from lachesis.pipeline.offline.reproduction.batches import LedgerReplayFacts, Progress, verify_batches
from lachesis.pipeline.offline.trainer.ledger import read_offline_trainer
from lachesis.pipeline.offline.verification.checks import NumericFinding
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.replay import OfflineTrainerRecord
from lachesis.schemas.subjects import check_name
from lachesis.services.cli.findings import exit_with, print_findings
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.progress import bar
from lachesis.services.cli.train import offline_config
from lachesis.services.output import print_json
from lachesis.services.run.connect import open_history
from lachesis.services.run.lost_history import warn_of_losses

__all__ = ["ReproduceOptions", "Reproduction", "reproduce"]


@with_options
def reproduce(
    options: Options,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of the run, same as --run.")] = None,
    *,
    trainer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of an offline trainer. Default: the live trainer.")
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="STEP", help="Checkpoint to start from. Default: the model at step 0."),
    ] = None,
    end: Annotated[
        int | None, typer.Option("--to", min=1, metavar="STEP", help="Last step. Default: the last reported step.")
    ] = None,
    batches_only: Annotated[bool, typer.Option("--batches-only", help="Verify batches only; do not train.")] = False,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0, help="On another machine: accepted distance of the weights, as a share of their movement."
        ),
    ] = 0.05,
    as_json: Json = False,
) -> None:
    """Rebuild a run from its streams: the same batches, and from a checkpoint the same weights.

    Reads only, while the run goes on or after it has ended. Exits with 1 if anything is not what was recorded.
    """
    chosen = options if run is None else replace(options, run=run)
    wish = ReproduceOptions(trainer=trainer, begin=begin, end=end, batches_only=batches_only, tolerance=tolerance)
    found = anyio.run(_run, chosen.config(), wish)
    if as_json:
        print_json(found)
    else:
        of = f" on revision {found.revision}" if found.revision else ""
        print(f"run {found.run}, trainer {found.trainer}{of}: {found.batches} batches, digest {found.manifest}")
        print_findings(found.findings)
    exit_with(found.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceOptions:
    """Options of the command line; None is the default of each."""

    trainer: str | None
    begin: str | None
    end: int | None
    batches_only: bool
    tolerance: float


class Reproduction(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `manifest` names the ledger's batches in order, `chain` its last entry."""

    run: str
    trainer: str
    revision: str | None
    entries: int
    batches: int
    manifest: str
    chain: str
    findings: list[NumericFinding]


async def _run(config: RunConfig, wish: ReproduceOptions) -> Reproduction:
    trainer = check_name("trainer", wish.trainer or config.training.name)
    async with open_history(config, f"{config.run}.reproduce") as bus:
        await warn_of_losses(bus, config)
        past = None if trainer == config.training.name else await read_offline_trainer(bus, config.run, trainer)
        if past is not None:
            config = offline_config(config, past, None)
        elif trainer != config.training.name:  # another live one, of a trainer's own loop say
            config = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, name=trainer))
        kept = known_checkpoints(config.path / CHECKPOINTS)
        saved = {path.name: state.position for path, state in kept}
        with bar("verify", MofNCompleteColumn()) as advance:
            facts, findings = await verify_batches(bus, config, trainer, past, saved=saved, progress=advance)
        if not any(finding.verdict == "fail" and finding.check == "chain" for finding in findings):
            with bar("train", MofNCompleteColumn(), TextColumn("steps")) as advance:
                findings += await _weights(bus, config, wish, facts, kept=kept, past=past, progress=advance)
    return Reproduction(
        run=config.run,
        trainer=trainer,
        revision=past.revision if past else None,
        entries=facts.entries,
        batches=facts.batches,
        manifest=facts.manifest,
        chain=facts.chain,
        findings=findings,
    )


async def _weights(
    bus: Bus,
    config: RunConfig,
    wish: ReproduceOptions,
    facts: LedgerReplayFacts,
    *,
    kept: list[tuple[Path, TrainerState]],
    past: OfflineTrainerRecord | None,
    progress: Progress,
) -> list[NumericFinding]:
    why = None
    if wish.batches_only:
        return []
    if not facts.reports:
        why = "the trainer has reported no step yet"
    elif find_spec("torch") is None:
        why = f"needs torch; {install_command('train')}"
    if why is not None:
        text = f"not compared: {why}"
        return [NumericFinding(check="weights", subject=config.training.name, verdict="warn", text=text)]
    from lachesis.pipeline.offline.reproduction.weights import RetrainStart, retrain

    path, state = _begin(config, wish.begin, kept)
    try:
        return await retrain(
            bus,
            config,
            RetrainStart(path, state),
            facts,
            end=wish.end,
            tolerance=wish.tolerance,
            sampled=past is None,
            progress=progress,
        )
    except (NotFoundError, CheckpointError, LedgerError) as error:
        return [NumericFinding(check="weights", subject=config.training.name, verdict="fail", text=str(error))]


def _begin(
    config: RunConfig, wanted: str | None, kept: list[tuple[Path, TrainerState]]
) -> tuple[str, TrainerState | None]:
    """Return what to begin with: the model, or a checkpoint, the oldest where the run names no model."""
    steps = {state.step: (str(path), state) for path, state in kept}
    there = f"checkpoints are kept of steps {', '.join(map(str, sorted(steps)))}" if steps else "no checkpoint is kept"
    if wanted in {None, "0"} and config.model is not None:
        return config.model, None
    if wanted is None and steps:
        return steps[min(steps)]
    if wanted is None or wanted == "0":
        raise ConfigError(f"model: not set, and {there}; give the run's --config")
    if not wanted.isdecimal() or int(wanted) not in steps:
        raise ConfigError(f"--from {wanted}: {there} in {config.path / CHECKPOINTS}")
    return steps[int(wanted)]
