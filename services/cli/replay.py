"""`lachesis replay`: what to score again, how fast, and how it goes."""

import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.replay.config import Pace
from lachesis.pipeline.replay.logic.selection import group_list, groups_digest
from lachesis.pipeline.replay.stage import Replayed, Request, run_replay
from lachesis.schemas.access import OPERATOR
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.replay import Selection
from lachesis.services.cli.options import Options
from lachesis.services.cli.output import print_json
from lachesis.services.connect import open_history

__all__ = ["Wanted", "replay_history"]

_PAUSED = 130
"""Exit code of a replay that was interrupted: as a shell gives it, and another than that of a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line selects; None: all."""

    envs: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    groups: Path | None = None

    def selection(self, config: RunConfig) -> tuple[Selection, Collection[str] | None]:
        """Return the selection, and the groups if they are listed. Raises `ConfigError`."""
        listed = None if self.groups is None else _read_groups(self.groups)
        for low, high, what in (
            (self.since, self.until, "since"), (self.first_seq, self.last_seq, "from-seq"),
            (self.min_step, self.max_step, "min-step"),
        ):  # fmt: skip
            if low is not None and high is not None and low > high:  # type: ignore[operator]
                raise ConfigError(f"--{what} {low} lies behind the end, {high}: nothing can be selected")
        return Selection(
            envs=sorted(set(self.envs or config.environments)),
            first_seq=self.first_seq,
            last_seq=self.last_seq,
            since_ns=_unix_ns(self.since),
            until_ns=_unix_ns(self.until),
            min_step=self.min_step,
            max_step=self.max_step,
            groups=groups_digest(listed) if listed is not None else None,
        ), listed


def _read_groups(path: Path) -> frozenset[str]:
    try:
        return group_list(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--groups {path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"--groups {path}: {error}") from error


def _unix_ns(time: datetime | None) -> int | None:
    """A time without a zone is UTC."""
    if time is None:
        return None
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1e6) * 1000


def replay_history(options: Options, revision: str, wanted: Wanted, pace: Pace, *, as_json: bool) -> None:
    """Score the selection under `revision`. Exits with 130 when it was interrupted; the same command goes on."""
    config = options.config()
    if not config.environments:
        raise ConfigError("the configuration has no environments; give the run's with --config")
    selection, groups = wanted.selection(config)
    request = Request(revision=revision, selection=selection, groups=groups, pace=pace)
    result = anyio.run(_run, config, request)
    if as_json:
        print_json(result)
    else:
        _tell(result)
    if not result.finished:
        raise typer.Exit(_PAUSED)


async def _run(config: RunConfig, request: Request) -> Replayed:
    draining = anyio.Event()

    async def drain_when_told() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if draining.is_set():
                    raise KeyboardInterrupt  # told twice: at once, which loses nothing but time
                draining.set()

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("groups"), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    async with (
        open_history(config, f"{config.run}.replay", OPERATOR) as bus,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(drain_when_told)
        with bar:
            task = bar.add_task(f"replay {request.revision}", total=None)
            result = await run_replay(
                bus,
                config,
                request,
                draining=draining,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        tasks.cancel_scope.cancel()
    return result


def _tell(result: Replayed) -> None:
    rate = f"{result.seconds:.1f} s"
    print(f"revision {result.revision}: {result.groups} of {result.total} groups, {rate}, digest {result.digest}")
    if result.unscored:
        print(f"{result.unscored} groups could not be scored; `lachesis tail rl.replay.rescore.>` shows why")
    if not result.finished:
        print("paused: the same command goes on from here. Its history may be trimmed meanwhile", file=sys.stderr)
