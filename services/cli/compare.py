"""`lachesis compare`: what two revisions of the same history differ in."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.offline.compare.condition import Condition, parse_condition
from lachesis.pipeline.offline.compare.logic import METRICS, Comparison
from lachesis.pipeline.offline.compare.logic import compare as compare_scores
from lachesis.pipeline.offline.replay.revisions import conversation, read_revision
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.observe.comparison import Report, report
from lachesis.services.observe.comparison_page import markdown as as_markdown
from lachesis.services.observe.comparison_page import page as as_page
from lachesis.services.output import print_json, print_table, printable
from lachesis.services.run.connect import open_history
from lachesis.services.run.lost_history import warn_of_losses

__all__ = ["compare"]


@with_options
def compare(
    options: Options,
    a: Annotated[str, typer.Argument(metavar="REV_A", help="A revision: `live`, or the name of a replay.")],
    b: Annotated[str, typer.Argument(metavar="REV_B", help="The revision to compare it with.")],
    *,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION", help='Exit with 1 if this is true, for example "sign_flips>0.05". Repeatable.'
        ),
    ] = None,
    disputed: Annotated[int, typer.Option(min=0, help="Number of most disputed samples to show.")] = 5,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as Markdown.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page with plots.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two revisions of the same history: rewards, ranks, advantage signs, raters, texts."""
    conditions = [parse_condition(text, METRICS) for text in fail_if or []]
    found, said = anyio.run(_read, options.config(), (a, b), disputed)
    shown = report(found, said)
    if markdown is not None:
        _write(markdown, as_markdown(shown))
    if html is not None:
        _write(html, as_page(shown, found))
    if as_json:
        print_json(found)
    else:
        _print(shown)
    _check_condition(conditions, found)


async def _read(
    config: RunConfig, names: tuple[str, str], disputed: int
) -> tuple[Comparison, list[list[Message] | None]]:
    async with open_history(config, f"{config.run}.compare") as bus:
        await warn_of_losses(bus, config)
        a, b = [await read_revision(bus, config, name) for name in names]
        found = compare_scores(config.run, a, b, disputed=disputed)
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


def _check_condition(conditions: Sequence[Condition], found: Comparison) -> None:
    failures = [failure for condition in conditions if (failure := condition.failure(found.metrics)) is not None]
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)
