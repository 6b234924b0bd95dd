"""The audit of a run that has ended: every check, over the streams and what was acknowledged, and what they found."""

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from chaos import ledger_checks, leftovers, refold
from chaos.history import read_history
from chaos.witness import read_witness
from integration.harness import RUN, Run, trained_in_one_go

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.ledger.checkpoint_state import latest_checkpoint
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.schemas.errors import LachesisError
from lachesis.services.process.service_process import EXIT_DRAIN_TIMEOUT, EXIT_DRAINED, EXIT_FENCED

__all__ = ["Verdict", "judge"]

_ENDED = re.compile(r"WARNING (\S+) ended with code (-?\d+)")
_EXPECTED_ENDS = {0, EXIT_FENCED, EXIT_DRAINED, EXIT_DRAIN_TIMEOUT, -9, -15}


@dataclass
class Verdict:
    """What was looked at and what is wrong with it: `violations` by check, empty when everything holds."""

    rollouts: int = 0
    outcomes: int = 0
    batches: int = 0
    steps: int = 0
    acknowledged: int = 0
    most_outstanding: int = 0
    late: int = 0
    is_whole: bool = True
    """Whether nothing was trimmed, so that everything could be checked."""
    longest_standstill_s: float = 0.0
    """Longest time between two entries of the ledger."""
    violations: dict[str, list[str]] = field(default_factory=dict)

    def blame(self, check: str, found: list[str]) -> None:
        if found:
            self.violations[check] = self.violations.get(check, []) + found


async def judge(bus: NatsBus, run: Run, witness: Path, *, settled: int | None, late: int) -> Verdict:
    """Audit what `run` left on the servers and in its folder. What takes one pass over everything needs all of it.

    `settled`: the last rollout that was to have an outcome, None where the run never came to rest. `late`: groups that
    the governors counted as late.
    """
    config = run.load_config()
    history = await read_history(bus, RUN)
    acknowledged = list(read_witness(witness))
    verdict = Verdict(
        rollouts=len(history.rollouts),
        batches=sum(stored.entry.batch is not None for stored in history.entries),
        outcomes=sum(
            len(stored.entry.outcomes) + (len(stored.entry.batch.groups) if stored.entry.batch else 0)
            for stored in history.entries
        ),
        acknowledged=len(acknowledged),
        late=late,
        steps=history.report.step if history.report else 0,
        is_whole=history.is_whole,
    )
    times = [stored.time_ns for stored in history.entries]
    verdict.longest_standstill_s = max((b - a for a, b in pairwise(times)), default=0) / 1e9
    verdict.blame("chain", ledger_checks.chain(history))
    verdict.blame("outcomes", ledger_checks.outcomes(history, config.batching, settled))
    verdict.blame("manifests", ledger_checks.manifests(history))
    verdict.blame("promotions", ledger_checks.promotions(history))
    verdict.blame("stored once", ledger_checks.stored_once(history))
    verdict.blame("kept", ledger_checks.kept(history, acknowledged))
    if history.is_whole:
        verdict.blame("reasons", ledger_checks.reasons(history, config.batching, config.advantage.std_floor))
        verdict.blame("writer state", ledger_checks.writer_state(history))
        verdict.most_outstanding, found = ledger_checks.bound(history, acknowledged, config.batching, late)
        verdict.blame("bound", found)
        for env in config.environments:
            verdict.blame("normalizer", await refold.normalizer(bus, history, config, env))
            verdict.blame("curriculum", await refold.curriculum(bus, history, config, env))
        verdict.blame("weights", await _weights(bus, run))
    verdict.blame("chunks", leftovers.chunks(history))
    verdict.blame("consumers", await leftovers.consumers(bus, RUN))
    verdict.blame("ends", _ends(run))
    return verdict


async def _weights(bus: NatsBus, run: Run) -> list[str]:
    """The newest checkpoint against one uninterrupted training on the ledger."""
    path = latest_checkpoint(run.folder / "checkpoints")
    if path is None:
        return ["there is no checkpoint"]
    checkpoint = load_checkpoint(path, LearnerConfig())
    try:
        calm = await trained_in_one_go(bus, run.folder / "model", checkpoint.state.step)
    except (LachesisError, AssertionError) as error:
        return [f"the ledger cannot be trained on: {error}"]
    found = []
    if weights_digest(policy_tensors(checkpoint.policy.model)) != calm:
        found.append(f"{path.name} holds other weights than one uninterrupted training on the ledger gives")
    return found


def _ends(run: Run) -> list[str]:
    """Services that ended by a bug, or because they could not start."""
    found = []
    for name, code in _ENDED.findall((run.folder / "up.log").read_text()):
        if name != "nats-server" and int(code) not in _EXPECTED_ENDS:
            found.append(f"{name} ended with code {code}; see {run.folder / 'logs' / name}.log")
    return found
