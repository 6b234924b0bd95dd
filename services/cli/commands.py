"""The table of commands: what the help lists, and the module that each is imported from once it is called.

A command's options, help and work are in one module, which imports whatever the work needs. `lachesis --help` imports
none of them, so it answers at once, and a process that only runs raters never imports what only training needs.
"""

import importlib
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_group

from lachesis import __version__

__all__ = ["COMMANDS", "Command", "app", "load_command"]


class Command(NamedTuple):
    """A command, or a group of commands: its name, `module:function` in `services.cli`, and its line in the help."""

    name: str
    target: str
    help: str
    hidden: bool = False
    is_group: bool = False


COMMANDS = {
    command.name: command
    for command in (
        Command("up", "up:up", "Run everything: the server, unless one is named, and every service, in order, until "
                "Ctrl-C or the last step."),
        Command("run", "run:run", "Run one service until it is told to stop, or list the services."),
        Command("forkserver", "run:forkserver", "Fork services that the supervisor asks for.", hidden=True),
        Command("load-check", "load_check:load_check", "Load what the configuration names, and write what became of it "
                "to standard output, as JSON.", hidden=True),
        Command("demo", "demo:demo", "Train a small model on real tasks with everything running, and judge by held-out "
                "tasks whether it learned."),
        Command("dev", "dev:dev", "Take one trip from a task to an optimizer step in this process, without a server; "
                "for breakpoints."),
        Command("init", "init:init", "Create the run's streams and bucket on the server, or change them to fit the "
                "configuration. Safe to repeat."),
        Command("status", "status:status", "Show how the run stands: streams, services, ledger, policy, trainer."),
        Command("top", "top:top", "Watch the run: each stage's lag, rate and times, and which of them is the "
                "bottleneck. Ends with Ctrl-C."),
        Command("trace", "trace:trace", "Show where a rollout's time went, as a waterfall, or follow those that are "
                "worth a look as they end."),
        Command("health", "health:health", "Show what the health checks found. Exits with 1 if an environment is "
                "quarantined, halted, or not judged yet."),
        Command("resume", "health:resume", "Let an environment go on that a health check has quarantined or halted. "
                "The checks begin anew."),
        Command("replay", "replay:replay", "Score history again, with the raters, normalization and advantages of "
                "--config and --set, as a new revision."),
        Command("promote", "promote:promote", "Let the live run go on with a revision: --config is what it was made "
                "with."),
        Command("train", "train:train", "Train on past rollouts as a revision judged them: a second trainer, with a "
                "ledger and checkpoints of its own."),
        Command("compare", "compare:compare", "Show what two revisions of the same history differ in: rewards, ranks, "
                "signs of advantages, raters, texts."),
        Command("export", "export:export", "Write rollouts with their scores, rewards, advantages and outcomes to a "
                "file, one row a sequence."),
        Command("gc", "gc:gc", "Show, or delete, what of the run's history nobody needs: no reader, no hold, no "
                "checkpoint to resume from."),
        Command("delete", "delete:delete", "Delete a run that is over: its history, checkpoints, logs and folder. "
                "Shows what goes, and asks."),
        Command("import", "imports:import_", "Store rollouts from files in the run, under their own ids. Safe to "
                "repeat: what is stored already is passed over."),
        Command("tail", "tail:tail", "Follow events as they are stored, decoded."),
        Command("schema", "schema:schema", "Print the AsyncAPI document, or write it and the JSON Schemas to a "
                "folder."),
        Command("verify", "verify:verify", "Check on recorded rollouts that raters, advantages and the loss are "
                "numerically sound; exit with 1 if not."),
        Command("reproduce", "reproduce:reproduce", "Rebuild a run from its streams: the same batches in the same "
                "order, and from a checkpoint the same weights."),
        Command("doctor", "doctor:doctor", "Check this machine and the server, and say how to mend what is wrong. "
                "Exits with 1 if something is."),
        Command("env", "environments:env_app", "Environments.", is_group=True),
        Command("dead", "dead:dead_app", "Messages that could not be handled.", is_group=True),
        Command("config", "settings:config_app", "The configuration.", is_group=True),
        Command("auth", "auth:auth_app", "Keys and permissions for a server of one's own.", is_group=True),
        Command("shadow", "shadow:shadow_app", "Revisions that follow the live run beside it.", is_group=True),
    )
}  # fmt: skip
"""Every command by name, in the order in which the help lists them."""

_HELP = """Event-driven rollout pipeline for reinforcement learning of language models.

`lachesis up` runs everything; `lachesis run NAME` runs one service; `top`, `trace`, `status`, `tail` and
`doctor` look at it."""


def load_command(command: Command) -> Any:
    """Import a command's module and return the command as typer runs it."""
    module, _, name = command.target.partition(":")
    target = getattr(importlib.import_module(f"lachesis.services.cli.{module}"), name)
    loaded = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    if command.is_group:
        loaded.add_typer(target, name=command.name)
    else:
        loaded.command(command.name, hidden=command.hidden)(target)
    return get_group(loaded).commands[command.name]


class _Commands(TyperGroup):
    """Lists the commands from the table, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else load_command(COMMANDS[str(command.name)]), rest


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


for _command in COMMANDS.values():
    _list_command(_command)
