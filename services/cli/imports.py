"""`lachesis import`: which files, into which run, and what became of what they hold."""

import sys
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer
from rich.progress import DownloadColumn, TransferSpeedColumn

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extension import added, load_place
from lachesis.pipeline.offline.archive.files import format_of
from lachesis.pipeline.offline.archive.importer import Importer, ImportRequest, ImportSummary
from lachesis.pipeline.offline.archive.logic.foreign_lines import PRODUCER, UNKNOWN_POLICY, ImportAssumptions
from lachesis.pipeline.offline.archive.reader import check_kind
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.ids import PolicyVersion
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.progress import bar
from lachesis.services.output import human_bytes, print_json
from lachesis.services.run.connect import open_run

__all__ = ["ForeignOptions", "import_"]


@with_options
def import_(
    options: Options,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of `export` or another project.")],
    *,
    project: Annotated[
        str | None, typer.Option("--from", metavar="PROJECT", help="The files are JSON lines of that project.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="With --from: the environment of the groups.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="With --from: their policy version, STEP-LINEAGE-DIGEST, if known."),
    ] = None,
    tokenizer_hash: Annotated[
        str | None, typer.Option(metavar="HASH", help="With --from: hash of the groups' tokenizer.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip and report groups that cannot be stored.")] = False,
    unleased: Annotated[
        bool,
        typer.Option(
            "--unleased", help="Do not request leases, because the run has no governor; stay within the byte budgets."
        ),
    ] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for each group's admission.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Import rollouts from files into the run, under their own ids. Stored rollouts are skipped.

    Only rollouts are imported; the run, or `lachesis replay`, scores them again. A missing run is created. The command
    is safe to repeat.
    """
    if project is None and (env or policy or tokenizer_hash):
        raise typer.BadParameter("--env, --policy and --tokenizer-hash are for files of another project: give --from")
    if project is not None and project not in added("importers"):
        raise typer.BadParameter(f"--from {project}: unknown{nearest(project, added('importers'))}")
    given = ForeignOptions(env, policy, tokenizer_hash)
    config = options.config_with_environments()
    known = [(path, format_of(path, "jsonl" if project else None)) for path in files]
    for path, kind in known:
        check_kind(path, kind, foreign=project)
    foreign = None if project is None else (load_place(added("importers")[project]), given.assumed(config))
    request = ImportRequest(files=known, foreign=foreign, skip_bad=skip_bad, leased=not unleased, wait_s=wait)
    done = anyio.run(_run, config, request)
    if as_json:
        print_json(done)
    else:
        _print_summary(done)


class ForeignOptions:
    """Options of the command line for files of another project."""

    def __init__(self, env: str | None, policy: str | None, tokenizer_hash: str | None) -> None:
        self.env, self.policy, self.tokenizer_hash = env, policy, tokenizer_hash

    def assumed(self, config: RunConfig) -> ImportAssumptions:
        """Return what is assumed of their groups. Raises `ConfigError`."""
        env = self.env or (next(iter(config.environments)) if len(config.environments) == 1 else None)
        if env is None or env not in config.environments:
            raise ConfigError(
                f"--env {env or ''}: name the environment that the groups are of; there are "
                f"{', '.join(config.environments) or 'none'}"
            )
        version = self.policy or UNKNOWN_POLICY
        try:
            PolicyVersion.parse(version)
        except SchemaError as error:
            raise ConfigError(f"--policy: {error}") from error
        settings = config.environments[env]
        return ImportAssumptions(
            run=config.run,
            env=env,
            longest=settings.longest_tokens,
            most=config.batching.batch_size,
            policy_version=version,
            tokenizer_hash=self.tokenizer_hash or "unknown",
        )


async def _run(config: RunConfig, request: ImportRequest) -> ImportSummary:
    async with open_run(config, f"{config.run}.import", OPERATOR, create=True) as (bus, ended):
        if ended:  # no other client can be there: the server runs only for this import
            request = msgspec.structs.replace(request, leased=False)
        service = Service(bus, PRODUCER, config.run, config.revision)
        with bar("import", DownloadColumn(), TransferSpeedColumn()) as advance:
            return await Importer(service, config, request, progress=advance, complain=_complain).run(
                _index_folder(config)
            )


def _index_folder(config: RunConfig) -> Path:
    """The run's folder if there is one on this machine, and else the one we are in."""
    return config.path if config.path.is_dir() else Path.cwd()


def _complain(place: str, reason: str) -> None:
    print(f"left out: {place}: {reason}", file=sys.stderr)


def _print_summary(done: ImportSummary) -> None:
    rate = f"{done.stored / done.seconds:.0f} groups/s" if done.stored and done.seconds else f"{done.seconds:.1f} s"
    print(f"{done.stored} groups stored ({done.sequences} sequences, {human_bytes(done.bytes)}), {rate}")
    if done.untrainable:
        print(
            f"{done.untrainable} came without logprobs, or with what the trainer cannot use (images, per-token "
            "columns, unknown token ids): they are never trained on, and can be scored again if they have their texts"
        )
    if done.known:
        print(f"{done.known} were stored already")
    if done.bad:
        print(f"{done.bad} were left out: see above", file=sys.stderr)
