"""Commands that judge the past or the live run anew: `replay`, `shadow`, `promote`, `compare`, `train`."""

from pathlib import Path
from typing import Annotated

import typer

from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.selection import Wanted, with_selection

__all__ = ["compare", "promote", "replay", "shadow_app", "train"]

shadow_app = typer.Typer(help="Revisions that follow the live run beside it.", no_args_is_help=True)


@with_options
@with_selection
def replay(
    options: Options,
    wanted: Wanted,
    *,
    revision: Annotated[str, typer.Option(metavar="NAME", help="What the new scores are called.")],
    max_rate: Annotated[float | None, typer.Option(min=0.001, help="Groups a second at most.")] = None,
    max_inflight: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Groups that are read and not yet written. Default: 32 a worker where raters have to be waited for, "
            "512 where none has to be.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that read and judge.")] = 1,
    as_json: Json = False,
) -> None:
    """Score history again, with the raters, normalization and advantages of --config and --set, as a new revision.

    The live run is not touched. After Ctrl-C or a crash the same command goes on where it was. Compare the result
    with `lachesis compare live NAME`.
    """
    from lachesis.pipeline.replay.config import Pace
    from lachesis.services.cli.replay import replay_history

    pace = Pace(max_rate=max_rate, max_inflight=max_inflight, workers=workers)
    replay_history(options, revision, wanted, pace, as_json=as_json)


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


@with_options
def promote(
    options: Options,
    revision: Annotated[str, typer.Argument(metavar="NAME", help="A revision that a shadow or a replay made.")],
    *,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Of what was stored before, bury what waits for raters that are away.")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=0, metavar="S", help="Wait so long for the decision.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Let the live run go on with a revision: --config is what it was made with.

    The ledger says from which rollout on, and who asked for it; nothing is restarted. What was stored before is judged
    as before; with --give-up it becomes a dead letter where that cannot be done, and `lachesis dead requeue` has the
    revision judge it. The promotion stays in force whatever configuration the run is started with again; another one
    ends it.
    """
    from lachesis.services.cli.promote import promote_revision

    promote_revision(options, revision, give_up=give_up, wait_s=wait_s, as_json=as_json)


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
