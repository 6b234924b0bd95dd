"""The commands: what each is called, takes and says in its help. What they do is in the module each one imports."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lachesis import __version__
from lachesis.services.cli.options import Options, with_options
from lachesis.services.cli.selection import Wanted, with_selection

__all__ = ["app"]

_HELP = """Event-driven rollout pipeline for reinforcement learning of language models.

`lachesis up` runs everything; `lachesis run NAME` runs one service; `top`, `trace`, `status`, `tail` and
`doctor` look at it."""

app = typer.Typer(
    name="lachesis", help=_HELP, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
env_app = typer.Typer(help="Environments.", no_args_is_help=True)
dead_app = typer.Typer(help="Messages that could not be handled.", no_args_is_help=True)
config_app = typer.Typer(help="The configuration.", no_args_is_help=True)
app.add_typer(env_app, name="env")
app.add_typer(dead_app, name="dead")
app.add_typer(config_app, name="config")
auth_app = typer.Typer(help="Keys and permissions for a server of one's own.", no_args_is_help=True)
app.add_typer(auth_app, name="auth")
shadow_app = typer.Typer(help="Revisions that follow the live run beside it.", no_args_is_help=True)
app.add_typer(shadow_app, name="shadow")


class Format(StrEnum):
    """What rollouts are written as."""

    parquet = "parquet"
    jsonl = "jsonl"


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


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


@app.command()
@with_options
def up(options: Options) -> None:
    """Run everything: the server, unless one is named, and every service, in order, until Ctrl-C or the last step."""
    from lachesis.services.cli.up import run_up

    run_up(options)


def _services(incomplete: str) -> list[str]:
    from lachesis.services.registry import SERVICES

    return [name for name in SERVICES if name.startswith(incomplete)]


@app.command()
@with_options
def run(
    options: Options,
    service: Annotated[str | None, typer.Argument(help="Service; none: list them.", autocompletion=_services)] = None,
    part: Annotated[str, typer.Argument(help="Its part: an environment, or the role of an inference server.")] = "",
    replica: Annotated[int, typer.Option(min=1, help="Number of this replica, from 1.")] = 1,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Run one service until it is told to stop, or list the services."""
    from lachesis.services.cli.run import list_services, run_service

    if service is None:
        list_services()
    else:
        run_service(options, service, part, replica=replica, supervised=supervised)


@app.command(hidden=True)
@with_options
def spare(options: Options, kind: Annotated[str, typer.Argument()]) -> None:
    """Wait to be told by the supervisor which service to run."""
    from lachesis.services.cli.run import run_service
    from lachesis.services.spare import wait_to_be_told

    told = wait_to_be_told(kind)
    if told is not None:
        run_service(options, told.service, told.part, replica=told.replica, supervised=True)


@app.command()
def demo(
    *,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model, its warm start and the run.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    run_name: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Name of the run.")] = None,
    folder: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder; default runs/NAME.")] = None,
    nats: Annotated[str | None, typer.Option(metavar="URL", help="Use this NATS server.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set one value; may be given again.")
    ] = None,
    shuffle_advantages: Annotated[
        bool, typer.Option("--shuffle-advantages", help="A control, which must not learn.")
    ] = False,
    gate: Annotated[bool, typer.Option(help="Fail unless the held-out pass rate rises by 20 points.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make the model anew, whatever is cached.")] = False,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds after which the demo has failed.")] = 600.0,
) -> None:
    """Train a small model on real tasks with everything running, and judge by held-out tasks whether it learned."""
    from lachesis.services.cli.demo import run_demo_command
    from lachesis.services.demo.settings import DemoOptions

    run_demo_command(
        DemoOptions(
            seed=seed,
            steps=steps,
            run=run_name,
            folder=folder,
            nats=nats,
            sets=tuple(sets or ()),
            shuffle_advantages=shuffle_advantages,
            gate=gate,
            fresh=fresh,
            deadline_s=deadline,
        )
    )


@app.command()
@with_options
def dev(
    options: Options,
    env: Annotated[str, typer.Argument(help="Environment of the configuration.")],
    task: Annotated[int, typer.Option(min=0, help="Index of the task in the environment's pool.")] = 0,
) -> None:
    """Take one trip from a task to an optimizer step in this process, without a server; for breakpoints."""
    import anyio
    from rich.console import Console

    from lachesis.services.dev import run_dev

    anyio.run(run_dev, options.config(), env, task, Console())


@app.command()
@with_options
def init(options: Options) -> None:
    """Create the streams and buckets on the server, or change them to fit the configuration. Safe to repeat."""
    from lachesis.services.cli.init import run_init

    run_init(options)


@app.command()
@with_options
def status(options: Options, as_json: Json = False) -> None:
    """Show how the run stands: streams, services, ledger, policy, trainer."""
    from lachesis.services.cli.status import run_status

    run_status(options, as_json=as_json)


@app.command()
@with_options
def top(
    options: Options,
    *,
    once: Annotated[bool, typer.Option("--once", help="Look once, print what was seen, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Look once and print JSON.")] = False,
    window: Annotated[float, typer.Option(min=2, help="Seconds that rates and percentiles are over.")] = 15.0,
) -> None:
    """Watch the run: each stage's lag, rate and times, and which of them is the bottleneck. Ends with Ctrl-C."""
    from lachesis.services.cli.top import run_top

    run_top(options, once=once, as_json=as_json, window_s=window)


@app.command()
@with_options
def trace(
    options: Options,
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP_ID", help="A rollout: its id or its first digits.")
    ] = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show slow, failed and redelivered rollouts as they end.")
    ] = False,
    slow: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Seconds from which one is slow; default: the p99 so far.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --follow one object a line.")] = False,
) -> None:
    """Show where a rollout's time went, as a waterfall, or follow those that are worth a look as they end."""
    from lachesis.services.cli.trace import run_follow, run_trace

    if (group is None) is not follow:
        raise typer.BadParameter("name a rollout, or give --follow")
    if group is None:
        run_follow(options, slow_s=slow, as_json=as_json)
    else:
        run_trace(options, group, as_json=as_json)


@app.command()
@with_options
def health(
    options: Options,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print alerts as they come, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show what the health checks found. Exits with 1 if an environment is quarantined, halted, or not judged yet."""
    from lachesis.services.cli.health import run_health

    run_health(options, follow=follow, as_json=as_json)


@app.command()
@with_options
def resume(
    options: Options,
    env: Annotated[str | None, typer.Argument(help="Environment; none: all that are quarantined or halted.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the health service.")] = 15.0,
) -> None:
    """Let an environment go on that a health check has quarantined or halted. The checks begin anew."""
    from lachesis.services.cli.health import run_resume

    run_resume(options, env, wait_s=wait)


@app.command()
@with_options
@with_selection
def replay(
    options: Options,
    wanted: Wanted,
    *,
    revision: Annotated[str, typer.Option(metavar="NAME", help="What the new scores are called.")],
    max_rate: Annotated[float | None, typer.Option(min=0.001, help="Groups a second at most.")] = None,
    max_inflight: Annotated[int, typer.Option(min=1, help="Groups that are read and not yet written.")] = 32,
    as_json: Json = False,
) -> None:
    """Score history again, with the raters, normalization and advantages of --config and --set, as a new revision.

    The live run is not touched. After Ctrl-C or a crash the same command goes on where it was. Compare the result
    with `lachesis compare live NAME`.
    """
    from lachesis.pipeline.replay.config import Pace
    from lachesis.services.cli.replay import replay_history

    replay_history(options, revision, wanted, Pace(max_rate=max_rate, max_inflight=max_inflight), as_json=as_json)


@shadow_app.command("start")
@with_options
def shadow_start(
    options: Options,
    revision: Annotated[str, typer.Argument(metavar="NAME", help="What the scores are called.")],
    *,
    env: Annotated[list[str] | None, typer.Option(help="Environment; may be given again. Default: all.")] = None,
    from_seq: Annotated[
        int | None, typer.Option(min=1, help="First sequence of ROLLOUTS. Default: what is stored from now on.")
    ] = None,
    max_rate: Annotated[float | None, typer.Option(min=0.001, help="Groups a second at most.")] = None,
    max_inflight: Annotated[int, typer.Option(min=1, help="Groups that are read and not yet written.")] = 32,
    as_json: Json = False,
) -> None:
    """Score the live run a second time as it goes on, with the raters, normalization and advantages of --config.

    It runs until Ctrl-C or `lachesis shadow stop`, and gives way to the run: what it is too slow for, it does not hold
    up. After a crash the same command goes on where it was, with the same bits as `lachesis replay` would give.
    """
    from lachesis.pipeline.replay.config import Pace
    from lachesis.services.cli.shadow import start_shadow

    pace = Pace(max_rate=max_rate, max_inflight=max_inflight)
    start_shadow(options, revision, envs=env or [], from_seq=from_seq, pace=pace, as_json=as_json)


@shadow_app.command("list")
@with_options
def shadow_list(options: Options, as_json: Json = False) -> None:
    """Show each shadow: whether it runs, where it is, and how it differs from the live revision of late."""
    from lachesis.services.cli.shadow import list_shadows

    list_shadows(options, as_json=as_json)


@shadow_app.command("stop")
@with_options
def shadow_stop(
    options: Options, revision: Annotated[str, typer.Argument(metavar="NAME", help="A revision that follows the run.")]
) -> None:
    """Tell a shadow to end. What it has written stays; the command that started it goes on from there."""
    from lachesis.services.cli.shadow import stop_shadow

    stop_shadow(options, revision)


@app.command()
@with_options
def promote(
    options: Options,
    revision: Annotated[str, typer.Argument(metavar="NAME", help="A revision that a shadow or a replay made.")],
    *,
    wait_s: Annotated[float, typer.Option("--wait", min=0, metavar="S", help="Wait so long for the decision.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Let the live run go on with a revision: --config is what it was made with.

    The ledger says from which rollout on, and who asked for it; nothing is restarted. What was stored before is judged
    as before. It stays in force whatever configuration the run is started with again; another promotion ends it.
    """
    from lachesis.services.cli.promote import promote_revision

    promote_revision(options, revision, wait_s=wait_s, as_json=as_json)


@app.command()
@with_options
def train(
    options: Options,
    *,
    revision: Annotated[str, typer.Option(metavar="NAME", help="What a replay wrote, and finished.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the trainer and its ledger. Default: the revision's.")
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help="Model, or step of a kept checkpoint. Default: the run's model."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps at most. Default: every batch.")] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(min=0, help="Most steps between the policy that made a rollout and the weights. Default: any."),
    ] = None,
    min_step: Annotated[int | None, typer.Option(min=0, help="Made by this policy step or a later one.")] = None,
    max_step: Annotated[int | None, typer.Option(min=0, help="Made by this policy step or an earlier one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and form the batches, and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train on past rollouts as a revision judged them: a second trainer, with a ledger and checkpoints of its own.

    The importance ratio is against the logprobs that the rollouts were sampled with. The live run is not touched, and
    nobody is sent the weights; they are in trainers/NAME of the run's folder. After Ctrl-C or a crash the same command
    goes on where it was.
    """
    from lachesis.pipeline.replay.past import PastRequest
    from lachesis.services.cli.train import train_on_past

    request = PastRequest(
        trainer=name or revision,
        revision=revision,
        max_staleness=max_staleness,
        min_step=min_step,
        max_step=max_step,
        store=not dry_run,
    )
    train_on_past(options, request, begin=begin, steps=steps, as_json=as_json)


@app.command()
@with_options
def compare(
    options: Options,
    a: Annotated[str, typer.Argument(metavar="REV_A", help="A revision: `live`, or what a replay wrote.")],
    b: Annotated[str, typer.Argument(metavar="REV_B", help="Another one.")],
    *,
    fail_if: Annotated[
        list[str] | None, typer.Option(metavar="CONDITION", help='Exit with 1 if it holds: "sign_flips>0.05".')
    ] = None,
    disputed: Annotated[int, typer.Option(min=0, help="Samples shown that the revisions differ on most.")] = 5,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as Markdown.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as one page with plots.")] = None,
    as_json: Json = False,
) -> None:
    """Show what two revisions of the same history differ in: rewards, ranks, signs of advantages, raters, texts."""
    from lachesis.services.cli.compare import compare_revisions

    compare_revisions(
        options, (a, b), fail_if=fail_if or [], disputed=disputed, files=(markdown, html), as_json=as_json
    )


@app.command()
@with_options
@with_selection
def export(
    options: Options,
    wanted: Wanted,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="*.parquet or *.jsonl; its folder has to exist.")],
    *,
    revision: Annotated[
        str, typer.Option(metavar="NAME", help="Whose scores: `live`, or what a replay wrote.")
    ] = "live",
    kind: Annotated[Format | None, typer.Option("--format", help="Default: as the name of the file says.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write rollouts with their scores, rewards, advantages and outcomes to a file, one row a sequence.

    `datasets.load_dataset("parquet", data_files=FILE)` loads it, and `lachesis import` takes it back.
    """
    from lachesis.services.cli.export import export_history

    export_history(options, path, wanted, revision=revision, kind=kind, overwrite=overwrite, as_json=as_json)


@app.command()
@with_options
def gc(
    options: Options,
    *,
    older_than: Annotated[str | None, typer.Option(metavar="AGE", help="What is older goes: 12h, 7d.")] = None,
    keep_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The oldest goes until a stream has no more: 2GiB.")
    ] = None,
    revision: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="This re-scored revision goes; may be given again.")
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="The ledger's beginning too; what it says is lost then.")
    ] = False,
    whole_run: Annotated[bool, typer.Option("--whole-run", help="All of a run that is over.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete it; else it is only shown.")] = False,
    as_json: Json = False,
) -> None:
    """Show, or delete, what of the run's history nobody needs: no reader, no hold, no checkpoint to resume from.

    The governor of a run makes room by itself; this is for what should not be kept, and for what it never trims:
    evaluations, revisions, the ledger, runs that are over. Safe beside it, and to repeat.
    """
    from lachesis.services.cli.gc import collect_garbage, erase_run, limits

    if whole_run and (older_than or keep_bytes or revision or ledger):
        raise typer.BadParameter("--whole-run leaves nothing that another option could keep")
    if whole_run:
        erase_run(options, yes=yes, as_json=as_json)
    else:
        wanted = limits(older_than, keep_bytes, revision or [], ledger=ledger)
        collect_garbage(options, wanted, yes=yes, as_json=as_json)


@app.command("import")
@with_options
def import_(
    options: Options,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="What `export` or Atropos wrote.")],
    *,
    atropos: Annotated[bool, typer.Option("--atropos", help="The files are JSON lines of Atropos.")] = False,
    env: Annotated[str | None, typer.Option(help="Atropos: the environment that its groups are of.")] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Atropos: what made them, STEP-LINEAGE-DIGEST, if known.")
    ] = None,
    tokenizer_hash: Annotated[str | None, typer.Option(metavar="HASH", help="Atropos: of their tokenizer.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out, and tell, what cannot be stored.")] = False,
    unleased: Annotated[
        bool, typer.Option("--unleased", help="The run has no governor to ask; keep within the byte budgets.")
    ] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for each group's admission.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Store rollouts from files in the run, under their own ids. Safe to repeat: what is stored already is passed over.

    Only rollouts come back; the run, or `lachesis replay`, scores them anew. A run that does not exist is made.
    """
    from lachesis.services.cli.imports import Foreign, import_files

    if not atropos and (env or policy or tokenizer_hash):
        raise typer.BadParameter("--env, --policy and --tokenizer-hash are for files of Atropos: give --atropos")
    foreign = Foreign(env, policy, tokenizer_hash) if atropos else None
    import_files(options, files, foreign, skip_bad=skip_bad, unleased=unleased, wait_s=wait, as_json=as_json)


@app.command()
@with_options
def tail(
    options: Options,
    subject: Annotated[
        str, typer.Argument(help="A subject (`rl.score.>`) or a kind (score, reward, ledger, dead...).")
    ],
    *,
    since_start: Annotated[bool, typer.Option("--since-start", help="Begin with the oldest message.")] = False,
    last: Annotated[int | None, typer.Option(min=1, metavar="N", help="Begin N messages back.")] = None,
    follow: Annotated[bool, typer.Option(help="Wait for further messages.")] = True,
    where: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help="Only such events, e.g. groups.item=7.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Columns with their values, stamps, digests.")] = False,
) -> None:
    """Follow events as they are stored, decoded."""
    from lachesis.services.cli.tail import Span, run_tail

    span = Span(since_start=since_start, last=last, follow=follow)
    run_tail(options, subject, span, where=where or [], as_json=as_json, full=full)


@env_app.command("list")
def env_list(as_json: Json = False) -> None:
    """List the built-in environments and the tasks they offer."""
    from lachesis.services.cli.environments import list_environments

    list_environments(as_json=as_json)


@dead_app.command("list")
@with_options
def dead_list(options: Options, as_json: Json = False) -> None:
    """List the run's dead letters."""
    from lachesis.services.cli.dead import list_dead

    list_dead(options, as_json=as_json)


@dead_app.command("show")
@with_options
def dead_show(
    options: Options, seq: Annotated[int, typer.Argument(min=1, help="Sequence, as `dead list` prints it.")]
) -> None:
    """Show one dead letter and the message it is about, as JSON."""
    from lachesis.services.cli.dead import show_dead

    show_dead(options, seq)


@dead_app.command("requeue")
@with_options
def dead_requeue(
    options: Options,
    letters: Annotated[
        list[int] | None, typer.Argument(metavar="LETTER", help="Sequences, as `dead list` prints them.")
    ] = None,
    *,
    env: Annotated[str | None, typer.Option(help="Only of this environment.")] = None,
    stage: Annotated[str | None, typer.Option(help="Only what this stage could not handle.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only data, poison or deadline.")] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Only where the reason holds this.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for each rollout's admission.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Put dead-lettered messages back after a fix: rollouts as new ones, annotations as they were. Safe to repeat."""
    from lachesis.services.cli.dead import Selection, requeue_dead

    chosen = Selection(frozenset(letters or ()), env, stage, kind, reason, everything)
    requeue_dead(options, chosen, dry_run=dry_run, yes=yes, wait_s=wait, as_json=as_json)


@app.command()
def schema(
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write every file there (for --check: read).")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if DIR (deploy/schema) differs.")] = False,
) -> None:
    """Print the AsyncAPI document, or write it and the JSON Schemas to a folder."""
    from lachesis.services.cli.schema import run_schema

    run_schema(out, check=check)


@config_app.command("show")
@with_options
def config_show(options: Options, as_json: Json = False) -> None:
    """Show every setting: its value, where the value comes from, and what it means."""
    from lachesis.services.cli.settings import show_settings

    show_settings(options, as_json=as_json)


@app.command()
@with_options
def verify(
    options: Options,
    groups: Annotated[int, typer.Option(min=1, help="Newest recorded groups to verify with.")] = 32,
    runs: Annotated[int, typer.Option(min=2, help="Times that each sample is rated.")] = 3,
    atol: Annotated[float, typer.Option(min=0.0, help="Difference between two ratings that is none.")] = 1e-6,
    as_json: Json = False,
) -> None:
    """Check on recorded rollouts that raters, advantages and the loss are numerically sound; exit with 1 if not."""
    from lachesis.services.cli.verify import verify_run

    verify_run(options, groups=groups, runs=runs, atol=atol, as_json=as_json)


@app.command()
@with_options
def reproduce(
    options: Options,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="The run, as --run.")] = None,
    *,
    trainer: Annotated[
        str | None, typer.Option(metavar="NAME", help="A trainer on past rollouts. Default: the live one.")
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="STEP", help="Kept checkpoint to begin with. Default: the model, at step 0."),
    ] = None,
    end: Annotated[
        int | None, typer.Option("--to", min=1, metavar="STEP", help="Last step. Default: the last one reported.")
    ] = None,
    batches_only: Annotated[bool, typer.Option("--batches-only", help="Verify batches, and train nothing.")] = False,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="On another machine: distance of weights, as a share of how far they moved.")
    ] = 0.05,
    as_json: Json = False,
) -> None:
    """Rebuild a run from its streams: the same batches in the same order, and from a checkpoint the same weights.

    Reads only, while the run goes on or after it has ended. Exits with 1 if anything is not what was recorded.
    """
    from dataclasses import replace

    from lachesis.services.cli.reproduce import Wish, reproduce_run

    chosen = options if run is None else replace(options, run=run)
    wish = Wish(trainer=trainer, begin=begin, end=end, batches_only=batches_only, tolerance=tolerance)
    reproduce_run(chosen, wish, as_json=as_json)


@app.command()
@with_options
def doctor(options: Options, as_json: Json = False) -> None:
    """Check this machine and the server, and say how to mend what is wrong. Exits with 1 if something is."""
    from lachesis.services.cli.doctor import run_doctor

    run_doctor(options, as_json=as_json)


@auth_app.command("init")
@with_options
def auth_init(
    options: Options,
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the server's configuration.")] = Path(
        "deploy/nats"
    ),
    force: Annotated[bool, typer.Option("--force", help="Make new keys in place of those that exist.")] = False,
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's certificate, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask clients for certificates of this authority, PEM.")
    ] = None,
) -> None:
    """Write an nkey for each service and permissions that allow it its work and nothing else. Safe to repeat."""
    from lachesis.services.cli.auth import run_auth_init, server_tls

    run_auth_init(options, out, force=force, tls=server_tls(cert, key, client_ca))


@auth_app.command("show")
@with_options
def auth_show(options: Options, as_json: Json = False) -> None:
    """Show who may do what; with --json, the subjects that the server allows and denies."""
    from lachesis.services.cli.auth import show_auth

    show_auth(options, as_json=as_json)
