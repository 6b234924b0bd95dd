"""`lachesis rollouts`: lists groups by what they are and what became of them, or shows one."""

import sys
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

import anyio
import msgspec
import typer
from rich.text import Text

from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message
from lachesis.services.cli.columns import TableColumn, print_columns
from lachesis.services.cli.ending import follow_run
from lachesis.services.cli.options import Options, with_options
from lachesis.services.cli.progress import bar
from lachesis.services.observe.group_reader import (
    GroupPage,
    follow_groups,
    newest_groups,
    read_group,
    read_group_page,
)
from lachesis.services.observe.groups import GroupFilter, GroupOrder, GroupRow, GroupView, SampleView
from lachesis.services.output import SafeConsole, human_number, json_text, print_json, printable
from lachesis.services.run.connect import RunHistory, open_history

__all__ = ["rollouts"]

_ITEM_CHARS = 32
_MAX_TURNS = 64
_REWARD_IS = (
    "a reward is the score as normalization and reward_config make it comparable with other tasks; advantages are "
    "made of rewards"
)
_STATES = {"trained": "green", "batched": "green", "under way": "yellow", "dead": "red"}


def _range(option: str, help_: str) -> typer.models.OptionInfo:
    option_info: typer.models.OptionInfo = typer.Option(option, metavar="LOW:HIGH", help=help_)
    return option_info


@with_options
def rollouts(
    options: Options,
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP_ID", help="Show this one: its id, or any unique part of it.")
    ] = None,
    *,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Environment. Repeatable.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="trained, batched, 'under way', 'left over', stale, dead... Repeatable."),
    ] = None,
    item: Annotated[str | None, typer.Option(metavar="TEXT", help="Part of the item's name.")] = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="In a prompt or an answer, in any case.")] = None,
    score: Annotated[str | None, _range("--score", "Mean score: 0.9: is 0.9 or more.")] = None,
    disagreement: Annotated[str | None, _range("--disagreement", "Deviation between raters, mean of samples.")] = None,
    advantage: Annotated[str | None, _range("--advantage", "Largest absolute advantage.")] = None,
    step: Annotated[str | None, _range("--step", "Optimizer step that it was trained in.")] = None,
    policy_step: Annotated[str | None, _range("--policy-step", "Step of the policy that generated it.")] = None,
    rating: Annotated[
        list[str] | None,
        typer.Option(metavar="RATER=LOW:HIGH", help="One rater's mean over samples. Repeatable."),
    ] = None,
    highest: Annotated[
        str | None, typer.Option(metavar="RATER", help="Its highest first, or of score, disagreement, advantage.")
    ] = None,
    lowest: Annotated[str | None, typer.Option(metavar="RATER", help="The lowest of it first.")] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Groups that are listed.")] = 20,
    before: Annotated[int | None, typer.Option(min=1, metavar="SEQ", help="Only older ones: the next page.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show groups as it is decided what becomes of them.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table, of a list one object a line.")
    ] = False,
) -> None:
    """List groups of rollouts, the newest first or by a rater, or show one with its samples."""
    config = options.config()
    if group is not None:
        view = anyio.run(_show, config, group)
        if as_json:
            print_json(view)
        else:
            _print_group(view)
        return
    ranges = {"score": score, "disagreement": disagreement, "advantage": advantage, "step": step,
              "policy_step": policy_step}  # fmt: skip
    wanted = GroupFilter.parse(
        envs=env or (), states=state or (), item=item, text=text, ranges=ranges, ratings=rating or (), prefix="--"
    )
    order = GroupOrder.parse(highest, lowest, "--")
    if follow:
        if order is not None:
            raise ConfigError("--follow shows groups as they are decided: leave out --highest or --lowest")
        anyio.run(_follow, config, wanted, as_json)
        return
    rows, older = anyio.run(_list, config, wanted, limit, before, order)
    if as_json:
        sys.stdout.write("".join(f"{json_text(row)}\n" for row in rows))
    elif rows:
        _print_rows(rows, older, dict.fromkeys([*wanted.ratings, *([order.by] if order is not None else [])]))
    else:
        fits = "is stored" if wanted == GroupFilter() and before is None else "that is stored fits"
        named = [*wanted.ratings, *([order.by] if order is not None else [])]
        of = f" and has a rating {' or '.join(map(repr, named))}" if named else ""
        other = "; if some failed, `lachesis status` says why" if fits == "is stored" else ""
        print(f"no group {fits}{of}{other}", file=sys.stderr)


async def _show(config: RunConfig, name: str) -> GroupView:
    async with open_history(config, f"{config.run}.rollouts") as bus:
        return await read_group(bus, config, name)


async def _list(
    config: RunConfig, wanted: GroupFilter, limit: int, before: int | None, order: GroupOrder | None
) -> GroupPage:
    async with open_history(config, f"{config.run}.rollouts") as bus:
        with bar("looking back") as show:
            return await read_group_page(bus, config, wanted, limit=limit, before=before, order=order, progress=show)


async def _follow(config: RunConfig, wanted: GroupFilter, as_json: bool) -> None:
    await follow_run(config, f"{config.run}.rollouts", partial(_follow_rows, config, wanted, as_json))


async def _follow_rows(config: RunConfig, wanted: GroupFilter, as_json: bool, history: RunHistory) -> None:
    rows: AsyncGenerator[GroupRow] = (
        newest_groups(history.bus, config, wanted) if history.ended else follow_groups(history.bus, config, wanted)
    )
    async with aclosing(rows) as found:
        async for row in found:
            sys.stdout.write((json_text(row) if as_json else _line(row)) + "\n")
            sys.stdout.flush()


def _when(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%m-%d %H:%M:%S")


def _number(value: float | None) -> str:
    return "-" if value is None else human_number(value) or "-"


def _state(row: GroupRow) -> str:
    if row.step is None:
        return row.state
    if row.state == "left over":
        return "left over: its batch came after the last step"
    return f"{row.state} {'for' if row.state == 'batched' else 'in'} step {row.step}"


def _task(row: GroupRow) -> str:
    return (row.prompt or row.item or "-")[:_ITEM_CHARS]


def _line(row: GroupRow) -> str:
    figures = [f"score {_number(row.score)}", f"disagreement {_number(row.disagreement)}"]
    parts = [_when(row.stored_ns), row.group, row.env, _task(row), *figures, _state(row), row.reason or ""]
    return "  ".join(printable(part) for part in parts if part)


def _print_rows(rows: Sequence[GroupRow], older: int | None, raters: Iterable[str]) -> None:
    cells: list[tuple[str, list[str], bool, int]] = [
        ("stored", [_when(row.stored_ns) for row in rows], False, 1),
        ("group", [row.group for row in rows], False, 0),
        ("env", [row.env for row in rows], False, 1),
        ("item", [(row.item or "-")[:_ITEM_CHARS] for row in rows], False, 3),
        ("prompt", [_task(row) for row in rows], False, 2),
        ("policy", [str(row.policy_step) for row in rows], True, 3),
        ("score", [_number(row.score) for row in rows], True, 0),
        ("low", [_number(row.low) for row in rows], True, 2),
        ("high", [_number(row.high) for row in rows], True, 2),
        *(
            (printable(rater), [_number(row.ratings.get(rater)) for row in rows], True, 0)
            for rater in raters
            if any(rater in row.ratings for row in rows)
        ),
        ("disagree", [_number(row.disagreement) for row in rows], True, 1),
        ("advantage", [_number(row.advantage) for row in rows], True, 2),
        ("tokens", [str(row.tokens) for row in rows], True, 3),
    ]
    if any(row.turns not in (None, 1) for row in rows):
        cells.append(("turns", [_number(row.turns) for row in rows], True, 2))
    columns = [
        TableColumn(name, [Text(printable(text)) for text in texts], right, least)
        for name, texts, right, least in cells
    ]
    states = [Text(printable(_state(row)), style=_STATES.get(row.state, "")) for row in rows]
    print_columns([*columns, TableColumn("state", states)])
    if older is not None:
        print(f"older ones: --before {older}; one with its samples: lachesis rollouts GROUP_ID", file=sys.stderr)


def _print_group(view: GroupView) -> None:
    """Print a group: its prompt, and each sample with everything derived from it."""
    console = SafeConsole(soft_wrap=True)
    for text in (*_head(view), *_said("prompt", view.prompt)):
        console.print(text)
    for number, sample in enumerate(view.samples):
        for text in _sample(number, sample):
            console.print(text)


def _head(view: GroupView) -> Iterator[Text]:
    row = view.row
    yield Text.assemble((f"group {row.group}", "bold"), printable(f"   {row.env}, item {view.item}"))
    yield Text(
        printable(
            f"stored {_when(row.stored_ns)} UTC as ROLLOUTS:{row.seq}, policy {', '.join(view.policy_versions)}, "
            f"{row.samples} samples, {row.tokens} tokens"
        )
    )
    yield Text(printable(_state(row)), style=_STATES.get(row.state, "bold"))
    if row.reason:
        yield Text(printable(row.reason), style="yellow")
    yield Text(
        f"score {_number(row.score)} ({_number(row.low)} to {_number(row.high)}), "
        f"disagreement {_number(row.disagreement)}, largest advantage {_number(row.advantage)}"
    )
    for rater, why in view.failures.items():
        yield Text(printable(f"{rater} gave no rating: {why}"), style="red")
    for number, why in view.left_out.items():
        yield Text(printable(f"sample {number} of the request failed and is left out: {why}"), style="red")
    if any(sample.reward is not None and sample.reward != sample.score for sample in view.samples):
        yield Text(_REWARD_IS, style="dim")
    known = {"skill": view.skill, "difficulty": view.difficulty, "task": view.task or None}
    if known := {name: value for name, value in known.items() if value is not None}:
        yield Text(printable(msgspec.json.encode(known).decode()), style="dim")
    yield Text()


def _sample(number: int, sample: SampleView) -> Iterator[Text]:
    parts = [f"score {_number(sample.score)}", f"advantage {_number(sample.advantage)}"]
    where = f" in {sample.sequences} sequences" if sample.sequences > 1 else ""
    where += f", {sample.branches} branches" if sample.branches > 1 else ""
    parts += [f"reward {_number(sample.reward)}", f"{sample.tokens} tokens{where}, {sample.finish_reason}"]
    parts += [] if sample.logprob is None else [f"mean logprob {_number(sample.logprob)}"]
    parts += ["not trained on"] if sample.excluded else []
    yield Text.assemble((f"sample {number}", "bold"), "   ", ", ".join(parts))
    ratings = [
        f"{rater} {_number(value)}" + (f" ({sample.statuses[rater]})" if value is None else "")
        for rater, value in sample.ratings.items()
    ]
    ratings += [f"{name} {_number(value)}" for name, value in sample.figures.items()]
    own = [f"{name} {_number(value)} (by the environment)" for name, value in sample.rewards.items()]
    if ratings or own:
        yield Text(printable(f"  {', '.join([*ratings, *own])}"), style="dim")
    for place, turn in enumerate(sample.turns[:_MAX_TURNS]):
        after = f" continues turn {turn.continues}" if sample.branches > 1 and turn.continues >= 0 else ""
        values = f"reward {_number(turn.reward)}, advantage {_number(turn.advantage)}"
        yield Text(f"  turn {place}{after}: {values}", style="dim")
    if len(sample.turns) > _MAX_TURNS:
        yield Text(f"  and {len(sample.turns) - _MAX_TURNS} further turns", style="dim")
    yield from _said("", sample.messages)


def _said(title: str, messages: Sequence[Message]) -> Iterator[Text]:
    if title and messages:
        yield Text(title, style="bold")
    for message in messages:
        lines = message.content.split("\n") if message.content else []
        lines += [f"calls {call.name}({call.arguments})" for call in message.tool_calls]
        lines += [f"[{len(message.attachments)} attachments]"] if message.attachments else []
        for i, line in enumerate(lines or [""]):
            who = f"{message.role}: " if i == 0 else " " * (len(message.role) + 2)
            yield Text.assemble((printable(f"  {who}"), "cyan"), printable(line))
    if messages:
        yield Text()
