"""A run's history as tables, for notebooks and scripts: `lachesis.open_run(NAME)`.

It works beside a run that goes on and on one that has ended. The tables are those of pyarrow, which pandas, polars and
DuckDB take as they are. What reads the streams is the commands `export` and `rollouts`, in a process of their own: a
notebook has an event loop already, and the server of a run that has ended needs a main thread to be started from.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.options import Options
from lachesis.services.observe.groups import GroupRow, GroupView
from lachesis.services.observe.progress import all_figures

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset

__all__ = ["RunTables", "open_run"]


def open_run(name: str | None = None, *, config: str | Path | None = None, nats: str | None = None) -> "RunTables":
    """Open a run by its name, from any folder, as the commands do.

    `config` is its TOML file, `nats` the URL of a server. Raises `ConfigError` where there is no such run, and
    `StartupError` where pyarrow is not installed.
    """
    try:
        import pyarrow as pa  # noqa: F401
    except ModuleNotFoundError as error:
        raise StartupError(f"tables need pyarrow: {install_command('export')}") from error
    return RunTables(Options(file=None if config is None else Path(config), sets=(), nats=nats, run=name))


class RunTables:
    """The tables of one run. What was read lies in a temporary folder until `close`, or the end of a `with` block.

    Every method raises `ConfigError` with what the command said that could not do it.
    """

    def __init__(self, options: Options) -> None:
        self.config = options.config_with_environments()
        self._arguments = options.arguments()
        self._folder = tempfile.TemporaryDirectory(prefix="lachesis-")
        self._files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delete what was read."""
        self._folder.cleanup()

    def rollouts(self, *, revision: str = "live", **selection: Any) -> "pyarrow.dataset.Dataset":
        """Return a row for each sequence, with texts, tokens, scores, ratings, advantage and outcome.

        The columns are those of `lachesis export`, and so is `selection`: env, since, until, from_seq, to_seq,
        min_step, max_step. The dataset is lazy: `to_table(columns=[...], filter=...)`, `head`, or
        `polars.scan_pyarrow_dataset`.
        """
        import pyarrow.dataset

        self._files += 1
        path = Path(self._folder.name) / f"{self._files}.parquet"
        self._call("export", str(path), "--revision", revision, *_flags(selection))
        return pyarrow.dataset.dataset(path, format="parquet")

    def groups(self, *, limit: int = 1_000_000, **wanted: Any) -> "pa.Table":
        """Return a row for each group, the newest first; the columns are the fields of `GroupRow`.

        `wanted` is what `lachesis rollouts` takes: env, state, item, text, score, disagreement, advantage, step,
        policy_step, rating, highest, lowest, before.
        """
        import pyarrow as pa

        lines = self._call("rollouts", "--json", "--limit", str(limit), *_flags(wanted)).splitlines()
        rows = [msgspec.json.decode(line, type=GroupRow) for line in lines]
        return pa.table({name: [getattr(row, name) for row in rows] for name in GroupRow.__struct_fields__})

    def group(self, name: str) -> GroupView:
        """Return one group with its samples, by its id or any part of it that no other has."""
        return msgspec.json.decode(self._call("rollouts", name, "--json"), type=GroupView)

    def metrics(self) -> "pa.Table":
        """Return a row for each optimizer step, with the trainer's figures; none before the first."""
        import pyarrow as pa

        folder = self.config.path
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not on this machine, and the figures of steps lie there")
        rows = list(all_figures(folder))
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    def _call(self, *arguments: str) -> bytes:
        command = [sys.executable, "-P", "-m", "lachesis", *arguments, *self._arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode != 0:
            raise ConfigError(done.stderr.decode(errors="replace").strip().removeprefix("lachesis: "))
        return done.stdout


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as a command line has them; a list is an option that is given several times."""
    found = []
    for name, value in options.items():
        several = isinstance(value, Sequence) and not isinstance(value, str)
        found += [f"--{name.replace('_', '-')}={one}" for one in (value if several else [value])]
    return found
