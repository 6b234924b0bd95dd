"""`lachesis runs recover`: makes a run go on whose server lost history; shown, confirmed and done."""

import sys
from dataclasses import replace
from functools import partial
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.retention.recovery_record import RecoveryPlan
from lachesis.schemas.subjects import ROLLOUTS
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import print_json, printable
from lachesis.services.run.recovery import recover_run

__all__ = ["recover"]

_MAX_NAMED = 12


@with_options
def recover(
    options: Options,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of the run, same as --run.")] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    from_first_model: Annotated[
        bool,
        typer.Option(
            "--from-first-model",
            help="No checkpoint is left anywhere: train again, from the run's first model.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a run go on whose server lost history, or a part of whose store is older than the rest.

    Lists what is lost first, and asks. What is left is kept; what is replaced is written into a file. Safe to repeat: a
    recovery that was cut off is completed. Afterwards `lachesis up` goes on.
    """
    options = options if run is None else replace(options, run=run)
    config = options.config_to_change("recover", asks=not yes, json=as_json)

    def confirm(plan: RecoveryPlan, begun: bool) -> bool:
        if not as_json:
            for line in describe_plan(plan, begun=begun):
                print(printable(line))
        return yes or typer.confirm(f"recover run {config.run}?", err=True)

    plan, done = anyio.run(partial(recover_run, config, confirm, from_first_model=from_first_model))
    if as_json:
        print_json(plan)
    elif plan is None:
        print(f"run {config.run} needs no recovery: its streams and checkpoints fit each other")
    elif done is not None:
        print(printable(f"run {config.run} was recovered; {done} keeps what was replaced. Go on: lachesis up"))
    if plan is not None and done is None:
        print("nothing was changed", file=sys.stderr)
        raise typer.Abort


def describe_plan(plan: RecoveryPlan, *, begun: bool) -> list[str]:
    """Return in lines what is wrong, and what the recovery costs."""
    lines = ["this recovery was begun before, and is completed"] if begun else []
    lines += ["what is wrong:", *(f"  {problem}" for problem in plan.problems), "what that costs:"]
    if plan.makes:
        made = (
            f"  empty streams are made in place of {', '.join(plan.makes)}; then it is listed what was lost with them"
        )
        return [*lines, f"{made}, and requested again"]
    costs = [_loss(one.stream, one.first, one.last) for one in plan.losses]
    if (lost := sum(one.last + 1 - one.first for one in plan.losses if one.stream == ROLLOUTS)) > 0:
        costs.append(f"of these {lost} rollouts the ledger gives {plan.settled} their outcome, which stays; "
                     f"{lost - plan.settled} never get one")  # fmt: skip
        costs.append(_names(plan.groups, lost))
    if plan.copies:
        costs.append(f"{len(plan.copies)} rollouts that took lost sequences are stored once more, none is lost")
    if plan.rescore_from is not None:
        costs.append(f"rollouts from sequence {plan.rescore_from} on are scored again where no score is left")
    if plan.left_out:
        costs.append("what a service cannot use of its own state is passed over: it goes on with what it had before, "
                     "and reads again what came since; if somebody forged it, make a new key for it")  # fmt: skip
    if plan.keys:
        costs.append(f"what the keys {', '.join(sorted(plan.keys))} hold is put aside into the file of this recovery: "
                     "their services begin again there, held-out tasks and what was trimmed or lost before from the "
                     "copies in the run's folder")  # fmt: skip
    change = plan.checkpoint
    if change is not None:
        where = f"checkpoint {change.name}" if change.name is not None else "the model that the run began with"
        costs.append(f"training goes back from step {change.from_step} to step {change.step}, {where}; steps after it "
                     "are taken again, and untrained rollouts by their policies count as dead")  # fmt: skip
    if plan.ends and not plan.has_new_copies:
        costs.append("in the cluster every stream's copies are made again from the one that leads now; what only "
                     "another server still has is saved before, beside the file of this recovery, and the rollouts "
                     "among it are stored once more")  # fmt: skip
    if plan.elsewhere is not None:
        costs.append(f"training is left as it is: its checkpoints are not in this folder (the newest is reported to be "
                     f"{plan.elsewhere}), and the trainer goes on from them where they are; if none is left, use "
                     "--from-first-model")  # fmt: skip
    if plan.bucket_went_back:
        costs.append("the bucket's keys are older or gone: tasks of an epoch may be drawn again, alerts be sent again, "
                     "groups that waited in a service of an extension be published again, which count once, or be "
                     "lost")  # fmt: skip
    return [*lines, *(f"  {cost}" for cost in costs or ["nothing"])]


def _names(groups: dict[int, str], lost: int) -> str:
    """Name the lost rollouts that are known, and count the others."""
    named = [f"{group} at {seq}" for seq, group in groups.items()]
    more = f" and {len(named) - _MAX_NAMED} more, all in the file of this recovery" if len(named) > _MAX_NAMED else ""
    unknown = f"; the names of {lost - len(named)} are not known" if lost > len(named) else ""
    return f"lost rollouts that are known by name: {', '.join(named[:_MAX_NAMED]) or 'none'}{more}{unknown}"


def _loss(stream: str, first: int, last: int) -> str:
    what = {
        "ROLLOUTS": "rollouts, which can never be trained on; batches go on without them",
        "EVENTS": "scores, rewards, evaluations and alerts",
        "TEACHER": "a teacher's logprobs; their groups are trained without them, or not at all where they are required",
        "LEDGER": "entries of the ledger or states; batches are formed again",
        "REPLAY": "scores of re-scored history",
        "WEIGHTS": "published weights; the trainer publishes again",
        "CALLS": "calls of conversations under way; those conversations begin again",
        "KEYS": "the newest values of the bucket's keys; those before them hold until their writers store others",
    }[stream]
    return f"{stream}, sequences {first} to {last} ({last + 1 - first}): {what}"
