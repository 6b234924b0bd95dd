"""The table of commands: the help line of each, and the module that it is imported from when called.

Further ones are entry points of the group `lachesis.commands` of installed packages: functions as typer runs them. The
entry point `env.NAME` adds a command to the group `env`.

A command's options, help and work are in one module, which imports whatever the work needs. `lachesis --help` imports
none of them, so it answers at once, and a process that only runs raters never imports what only training needs.
"""

import importlib
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from lachesis import __version__
from lachesis.pipeline.common.uncollected_imports import uncollected_imports
from lachesis.pipeline.errors import StartupError

__all__ = ["COMMANDS", "GROUP", "Command", "app", "load_command"]

GROUP = "lachesis.commands"
"""The group of entry points by which packages add commands."""


class Command(NamedTuple):
    """A command, or a group of commands: its name, `module:function`, and its line in the help.

    The module is one of `services.cli`, unless an installed `package` adds the command. `GROUP.NAME`: one in a group.
    """

    name: str
    target: str
    help: str
    hidden: bool = False
    is_group: bool = False
    package: EntryPoint | None = None


COMMANDS = {
    command.name: command
    for command in (
        Command("up", "up:up", "Run everything until Ctrl-C or the last step: the server, unless "
                "one is named, and every service."),
        Command("run", "run:run", "Run one service until it is stopped, or list the services."),
        Command("forkserver", "run:forkserver", "Fork services on the supervisor's request.", hidden=True),
        Command("load-check", "load_check:load_check", "Load all that the configuration names, "
                "and print the results as JSON.", hidden=True),
        Command("demo", "demo:demo", "Train a model on real tasks with the whole pipeline, "
                "and check that it learned."),
        Command("dev", "dev:dev", "Run one task through all stages to an optimizer step in this "
                "process, without a server."),
        Command("init", "init:init", "Create the run's streams and bucket on the server, or change them to fit the "
                "configuration."),
        Command("status", "status:status", "Show the state of a run: streams, services, ledger, policy, trainer."),
        Command("top", "top:top", "Watch the run: lag, rate and latency of each stage, and "
                "the bottleneck. Ends with Ctrl-C."),
        Command("trace", "trace:trace", "Show the spans of a rollout as a waterfall, or follow slow "
                "and failed rollouts as they end."),
        Command("rollouts", "rollouts:rollouts", "List groups of rollouts, the newest first or by a rater, or show "
                "one with its samples."),
        Command("web", "web:web", "Serve a page that shows the run and its rollouts, and print its address. "
                "Ends with Ctrl-C."),
        Command("health", "health:health", "Show the health checks. Exits with 1 if an environment "
                "is quarantined, halted, or not checked yet."),
        Command("resume", "health:resume", "Resume a quarantined or halted environment. Its "
                "health checks start over."),
        Command("replay", "replay:replay", "Score history again as a new revision, with the "
                "raters and settings of --config and --set."),
        Command("promote", "promote:promote", "Switch the live run to a revision; --config is the configuration "
                "that made it."),
        Command("train", "train:train", "Train a second model offline on a revision's rewards, "
                "with its own ledger and checkpoints."),
        Command("compare", "compare:compare", "Compare two revisions of the same history: rewards, "
                "ranks, advantage signs, raters, texts."),
        Command("eval", "eval:eval_", "Evaluate checkpoints, or models of a server, on the held-out tasks of a run."),
        Command("serve", "serve:serve", "Serve a checkpoint of a run, or a model's folder, to OpenAI clients. Ends "
                "with Ctrl-C."),
        Command("export", "export:export", "Write rollouts with their scores, rewards, advantages and outcomes to a "
                "file, one row a sequence."),
        Command("gc", "gc:gc", "List unused history (by age, size, revision or offline "
                "trainer); `--yes` deletes it."),
        Command("import", "imports:import_", "Import rollouts from files into the run, under "
                "their own ids. Stored rollouts are skipped."),
        Command("tail", "tail:tail", "Follow events as they are stored, decoded."),
        Command("schema", "schema:schema", "Print the AsyncAPI document, or write it and the JSON Schemas to a "
                "folder."),
        Command("verify", "verify:verify", "Check raters, advantages and the loss numerically on "
                "recorded rollouts; exit with 1 on failure."),
        Command("reproduce", "reproduce:reproduce", "Rebuild a run from its streams: the same "
                "batches, and from a checkpoint the same weights."),
        Command("doctor", "doctor:doctor", "Check this machine and the server, and say how to fix each "
                "problem. Exits with 1 if there is one."),
        Command("plan", "plan:plan", "Say how many bytes an optimizer step takes. Exits with 1 where the "
                "device has fewer."),
        Command("runs", "runs:runs_app", "Runs of this machine.", is_group=True),
        Command("mcp", "mcp:mcp", "Serve tools for agents by the Model Context Protocol: find, configure, start, watch "
                "and stop runs."),
        Command("env", "environments:env_app", "Environments.", is_group=True),
        Command("dead", "dead:dead_app", "Messages that could not be handled.", is_group=True),
        Command("config", "config_command:config_app", "The configuration.", is_group=True),
        Command("auth", "auth:auth_app", "Keys and permissions for your own server.", is_group=True),
        Command("shadow", "shadow:shadow_app", "Revisions that score the live run in parallel.", is_group=True),
    )
}  # fmt: skip
"""Every command by name, in the order in which the help lists them."""


def _of_packages(group: str = "") -> list[Command]:
    """Return the commands that installed packages add to a group, or beside the groups."""
    found = {point.name: point for point in entry_points(group=GROUP) if point.name.rpartition(".")[0] == group}
    return [
        Command(name, point.value, f"A command of the package {_package_of(point)}.", package=point)
        for name, point in sorted(found.items())
    ]


def _package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "?"


_HELP = """Event-driven rollout pipeline for reinforcement learning of language models.

`lachesis up` runs everything; `lachesis run NAME` runs one service; `top`, `trace`, `status`, `tail` and
`doctor` look at it."""


def load_command(command: Command) -> Any:
    """Import a command's module and return the command as typer runs it.

    Raises `StartupError` that names the package where that of a package cannot be loaded.
    """
    if command.package is None:
        module, _, name = command.target.partition(":")
        return _as_typer_runs(command, getattr(importlib.import_module(f"lachesis.services.cli.{module}"), name))
    packages = [_package_of(point) for point in entry_points(group=GROUP, name=command.name)]
    if len(packages) > 1:
        raise StartupError(
            f"the packages {' and '.join(packages)} both add the command {command.name!r}: uninstall one"
        )
    try:
        return _as_typer_runs(command, command.package.load())
    except Exception as error:  # foreign code: whatever it raises, the package is named
        package = _package_of(command.package)
        raise StartupError(
            f"the command {command.name!r} of {package} cannot be loaded ({type(error).__name__}: {error}); install "
            f"another version of {package}, or uninstall it"
        ) from error


def _as_typer_runs(command: Command, target: Any) -> Any:
    loaded = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    name = command.name.rpartition(".")[2]
    if not command.is_group:
        loaded.command(name, hidden=command.hidden)(target)
        return get_group(loaded).commands[name]
    loaded.add_typer(target, name=name)
    group: Any = get_group(loaded).commands[name]
    for one in _of_packages(name):
        own_name = one.name.rpartition(".")[2]
        if own_name not in group.commands:
            group.add_command(_load_or_defer(one), own_name)
    return group


def _load_or_defer(command: Command) -> Any:
    """Return a command of a group, which is loaded with it; one that fails says so when it is called."""
    try:
        return load_command(command)
    except StartupError as error:
        return TyperCommand(
            command.name, callback=partial(_fail, error), help=command.help, add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )  # fmt: skip


def _fail(error: StartupError) -> NoReturn:
    raise error


class _Commands(TyperGroup):
    """Lists the commands from the table, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        with uncollected_imports():
            return name, None if command is None else load_command(_ALL[str(command.name)]), rest


app = typer.Typer(
    name="lachesis", cls=_Commands, help=_HELP, no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lachesis {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _list_command(command: Command) -> None:
    if command.is_group:
        app.add_typer(typer.Typer(), name=command.name, help=command.help)
    else:
        app.command(command.name, help=command.help, hidden=command.hidden)(lambda: None)


_ALL = {**COMMANDS, **{command.name: command for command in _of_packages() if command.name not in COMMANDS}}
for _command in _ALL.values():
    _list_command(_command)
