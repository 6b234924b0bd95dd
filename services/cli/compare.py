"""`lachesis compare`: what two revisions of the same history differ in."""

import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import typer

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.replay.logic.compare import METRICS, Comparison, compare
from lachesis.pipeline.replay.logic.condition import Condition, parse_condition
from lachesis.pipeline.replay.revisions import conversation, read_revision
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message
from lachesis.services.cli.options import Options
from lachesis.services.cli.report.render import markdown, page
from lachesis.services.cli.report.tables import Report, report
from lachesis.services.output import print_json, print_table, printable
from lachesis.services.run.connect import open_history

__all__ = ["compare_revisions"]


def compare_revisions(
    options: Options,
    names: tuple[str, str],
    *,
    fail_if: Sequence[str],
    disputed: int,
    files: tuple[Path | None, Path | None],
    as_json: bool,
) -> None:
    """Print the report of two revisions and write it to `files` (Markdown, HTML). Exits with 1 if a condition holds."""
    conditions = [parse_condition(text, METRICS) for text in fail_if]
    found, said = anyio.run(_read, options.config(), names, disputed)
    shown = report(found, said)
    as_markdown, as_html = files
    if as_markdown is not None:
        _write(as_markdown, markdown(shown))
    if as_html is not None:
        _write(as_html, page(shown, found))
    if as_json:
        print_json(found)
    else:
        _print(shown)
    _judge(conditions, found)


async def _read(
    config: RunConfig, names: tuple[str, str], disputed: int
) -> tuple[Comparison, list[list[Message] | None]]:
    async with open_history(config, f"{config.run}.compare") as bus:
        a, b = [await read_revision(bus, config, name) for name in names]
        found = compare(config.run, a, b, disputed=disputed)
        return found, [await conversation(bus, one.seq, one.sample) for one in found.disputed]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot write the report: {error}") from error


def _print(shown: Report) -> None:
    print(shown.title)
    for finding in shown.findings:
        print(f"! {printable(finding)}")
    for table in shown.tables:
        print(f"\n{printable(table.title)}")
        print_table(table.header, table.rows)
    for text in shown.texts:
        print(f"\n{printable(text.title)}")
        for role, content in text.lines:
            for line in content.split("\n"):
                print(f"  {printable(role)}: {printable(line)}" if role else f"  {line}")


def _judge(conditions: Sequence[Condition], found: Comparison) -> None:
    failures = [failure for condition in conditions if (failure := condition.failure(found.metrics)) is not None]
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)
