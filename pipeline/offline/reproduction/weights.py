"""Repeats a run's optimizer steps from a checkpoint and compares the weights.

Guarantees that nothing is written: neither to the streams nor to the run's folder. Each step is taken with the settings
and number of threads that its report names, whatever they were before and after. On the processor and versions that
trained, every digest that the run recorded must come out again; where a step was taken elsewhere, weights are compared
within a tolerance, with the checkpoints that are still there.
"""

from __future__ import annotations

import math
import time
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec
import torch

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.trainer_settings import trainer_settings
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, TrainerState, known_checkpoints
from lachesis.pipeline.ledger.reader import Payload, fetch_batch, follow_ledger
from lachesis.pipeline.model.device import prepare_device, take_repeatably
from lachesis.pipeline.model.digest import DIGEST_LENGTH
from lachesis.pipeline.model.policy import PolicyModel, load_model
from lachesis.pipeline.model.tensors import policy_tensors, rounded, vocabulary_of, weights_digest
from lachesis.pipeline.offline.reproduction.batches import LedgerReplayFacts, Progress
from lachesis.pipeline.offline.reproduction.logic import numerics_after, numerics_differences
from lachesis.pipeline.offline.verification.checks import CheckVerdict, NumericFinding
from lachesis.pipeline.trainer.adapters import load_trainable_model
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig, learner_on_record
from lachesis.pipeline.trainer.feed import LedgerBatch
from lachesis.pipeline.trainer.inputs.model_inputs import load_inputs
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.model_setup import model_setup
from lachesis.pipeline.trainer.numerics import microbatch_at, numerics_of
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.resume import load_reference
from lachesis.pipeline.trainer.sequences import trainer_limits
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import Batch, Numerics

__all__ = ["RetrainStart", "retrain"]

_MAX_REPORTED = 3


@dataclass(frozen=True, slots=True)
class RetrainStart:
    """What to begin with: a checkpoint of the trainer, or, where `state` is None, a model that has taken no step."""

    path: str
    state: TrainerState | None


async def retrain(
    bus: Bus,
    config: RunConfig,
    begin: RetrainStart,
    facts: LedgerReplayFacts,
    *,
    end: int | None,
    tolerance: float,
    sampled: bool,
    progress: Progress,
) -> list[NumericFinding]:
    """Take the steps from `begin` to `end` (None: the last one reported) again, and compare.

    `sampled`: rollouts name the weights of this trainer that they were sampled with, which are compared as well.
    `tolerance` is the largest distance of weights that counts as none where the machine is another: relative to how far
    they have moved since the beginning. Raises `ConfigError` where there is nothing to do, `CheckpointError` and
    `LedgerError` where the beginning is not what the ledger says, `NotFoundError` where rollouts are gone.
    """
    trainer = config.training.name
    first = begin.state.step if begin.state else 0
    last = max((report.step for report in facts.reports), default=0) if end is None else end
    if last <= first:
        raise ConfigError(
            f"there is nothing to train again between step {first} and step {last}: begin earlier (--from), or wait "
            "for the next checkpoint"
        )
    device = prepare_device(
        config.training.device, config.training.threads, deterministic=config.training.deterministic
    )
    drops = facts.drops
    compares = _ComparedStep(facts, config, sampled=sampled)
    again, position = await anyio.to_thread.run_sync(partial(_load, begin, config, device, facts, compares))
    await anyio.to_thread.run_sync(again.compare)
    started = time.monotonic()
    async with aclosing(follow_ledger(bus, config.run, trainer, position, follow=False)) as entries:
        async for entry in entries:
            if entry.batch is None:
                continue
            if entry.batch.number >= last:
                break
            groups = await _fetch(bus, entry.batch, trainer)
            compares.versions(groups, again.learner.steps)
            if entry.batch.number in facts.voids:
                again.learner.steps = entry.batch.number + 1
            else:
                dropped = drops.get(entry.batch.number, set())
                trained = [payload for payload in groups if payload[0].seq not in dropped]
                await anyio.to_thread.run_sync(again.step, LedgerBatch(entry, entry.batch, trained))
            await anyio.to_thread.run_sync(again.compare)
            progress(again.learner.steps - first, last - first)
    if again.learner.steps < last:
        raise NotFoundError(f"the ledger of trainer {trainer} ends at batch {again.learner.steps}, before step {last}")
    took = time.monotonic() - started
    return compares.findings(trainer, (first, last), again.settings.other, tolerance, took)


class _RecordedSettings:
    """How the run took its steps: as it recorded, else as the configuration says."""

    def __init__(self, config: RunConfig, facts: LedgerReplayFacts, device: torch.device) -> None:
        self._device = device
        self.other: list[str] = []
        """In what this process is not the one that took the steps so far."""
        self._config = config
        self.reads = config.training.reads
        self._reports = facts.reports
        self._known: dict[Numerics | None, tuple[LearnerConfig, int | None]] = {}

    def apply(self, learner: Learner) -> int | None:
        """Put those of the learner's next step into force, and return the seed that advantages are shuffled with.

        To be called by the thread that takes the step: torch counts threads for each that computes.
        """
        recorded = numerics_after(self._reports, learner.steps)
        torch.set_num_threads(recorded.threads if recorded else self._config.training.threads)
        if recorded not in self._known:
            self._known[recorded] = self._read(recorded)
        learner_config, shuffle_seed = self._known[recorded]
        if recorded is not None:
            tokens = microbatch_at(recorded, learner.steps)
            learner_config = msgspec.structs.replace(
                learner_config, max_tokens_per_microbatch=tokens, packing=recorded.packed
            )
        learner.spares_memory = False
        learner.configure(learner_config)
        return shuffle_seed

    def record_difference(self, text: str) -> None:
        """Say in what else this process is not the one that took the steps."""
        if text not in self.other:
            self.other.append(text)

    def _read(self, recorded: Numerics | None) -> tuple[LearnerConfig, int | None]:
        ours = numerics_of(trainer_settings(self._config), self._device)
        found = numerics_differences(recorded, ours) if recorded else ["what it was trained with is not recorded"]
        if self._device.type != "cpu" and self._config.training.deterministic == "never":
            found.append('training.deterministic is "never", so no step gives the same bits twice')
        for text in found:
            self.record_difference(text)
        if recorded is None:
            return self._config.training.learner, ours.shuffle_seed
        return learner_on_record(recorded.learner.encode()), recorded.shuffle_seed


def _load(
    begin: RetrainStart, config: RunConfig, device: torch.device, facts: LedgerReplayFacts, compares: _ComparedStep
) -> tuple[_Retraining, LedgerPosition]:
    settings = trainer_settings(config)
    setup = model_setup(settings, device)
    reference = load_reference(settings, setup)
    if begin.state is not None:
        checkpoint = load_checkpoint(begin.path, config.training.learner, setup, reference=reference)
        policy, learner, position = checkpoint.policy, checkpoint.learner, checkpoint.state.position
    else:
        policy = load_trainable_model(begin.path, setup)
        learner, position = Learner(policy.model, config.training.learner, reference=reference), LedgerPosition()
    learner.inputs = load_inputs(config.training.inputs, policy, learner.trained)
    return _Retraining(policy, learner, _copy(policy), _RecordedSettings(config, facts, device), compares), position


async def _fetch(bus: Bus, batch: Batch, trainer: str) -> list[Payload]:
    try:
        return await fetch_batch(bus, batch)
    except DataError as error:
        raise NotFoundError(
            f"step {batch.number + 1} of trainer {trainer} cannot be taken again: {error}. Begin behind it, at a "
            "checkpoint that is still there (--from STEP); the batches alone are verified with --batches-only"
        ) from error


def _kept_tensors(path: Path) -> dict[str, torch.Tensor] | None:
    """Return the weights of a checkpoint; None if a trainer that goes on has deleted it meanwhile.

    Raises ConfigError where it cannot be loaded.
    """
    try:
        return policy_tensors(load_model(path).model)
    except ConfigError:
        if path not in (there for there, _ in known_checkpoints(path.parent)):
            return None
        raise


def _copy(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """Return the weights on the CPU, where checkpoints are read: a GPU may have no room for them a second time."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in policy_tensors(policy.model).items()}


@dataclass(slots=True)
class _Retraining:
    """The policy as it is trained again."""

    policy: PolicyModel
    learner: Learner
    begin: dict[str, torch.Tensor]
    settings: _RecordedSettings
    compares: _ComparedStep

    def step(self, fed: LedgerBatch) -> None:
        policy, number = self.policy, fed.batch.number
        seed = self.settings.apply(self.learner)
        try:
            limits = trainer_limits(
                policy.tokenizer_hash, vocabulary_of(policy.model), self.settings.reads, self.learner.config
            )
            selected = fed.select(limits, inputs=self.learner.inputs, shuffle_seed=seed)
            packed = pack(selected.sequences, pad_id=policy.tokenizer.pad_token_id or 0)
            take_repeatably(lambda: self.learner.step(packed), "auto", self.settings.record_difference)
        except DataError as error:
            self.compares.fail(number + 1, f"batch {number} cannot be trained: {error}")
            self.learner.steps = number + 1

    def compare(self) -> None:
        """Digests all weights and loads what checkpoint there is: no work for the event loop."""
        self.compares.weights(self.learner.steps, policy_tensors(self.policy.model), self.begin)


class _ComparedStep:
    """What the run recorded of its weights, compared with ours as they come."""

    def __init__(self, facts: LedgerReplayFacts, config: RunConfig, *, sampled: bool) -> None:
        self._reported: dict[int, set[str]] = {}
        for report in facts.reports:
            version = PolicyVersion.parse(report.policy_version)
            self._reported.setdefault(report.step, set()).add(version.digest)
        # by life of the trainer the last step it made durable: what it took beyond, the next life took in its own way
        self._lineages = {report.lineage: report.step for report in facts.reports} if sampled else {}
        self._kept = {state.step: path for path, state in known_checkpoints(config.path / CHECKPOINTS)}
        self._ours: dict[int, str] = {}
        self._published: dict[int, str] = {}
        self._dtype = config.weights.dtype
        self._sampled: set[tuple[int, str]] = set()
        self._equal: set[int] = set()
        self._failed: dict[int, str] = {}
        self._distances: dict[int, float] = {}

    def fail(self, step: int, text: str) -> None:
        self._failed.setdefault(step, text)

    def weights(self, step: int, tensors: dict[str, torch.Tensor], begin: dict[str, torch.Tensor]) -> None:
        """Compare the weights after `step` with reports and checkpoints."""
        ours = self._ours[step] = weights_digest(tensors)
        is_rounded = self._dtype != "float32"
        self._published[step] = weights_digest(rounded(tensors, self._dtype)) if is_rounded else ours
        for reported in self._reported.get(step, ()):
            self._compare(step, ours.startswith(reported), f"{ours[: len(reported)]}, reported as {reported}")
        path = self._kept.get(step)
        kept = None if path is None else _kept_tensors(path)
        if kept is not None:
            digest, other = ours[:DIGEST_LENGTH], weights_digest(kept)[:DIGEST_LENGTH]
            self._compare(step, other == digest, f"{digest}, {other} in {path}")
            moved = _distance(kept, begin)
            self._distances[step] = _distance(kept, tensors) / moved if moved else 0.0

    def versions(self, groups: list[Payload], steps: int) -> None:
        """Compare the weights that rollouts name with ours, as far as we have come."""
        for _, group, _ in groups:
            for version in group.versions:
                ours = self._published.get(version.step)
                if ours is None or version.step > min(steps, self._lineages.get(version.lineage, -1)):
                    continue
                self._sampled.add((version.step, version.digest))
                text = f"{ours[: len(version.digest)]}, sampled from as {version.digest}"
                self._compare(version.step, ours.startswith(version.digest), text)

    def _compare(self, step: int, equal: bool, text: str) -> None:
        if equal:
            self._equal.add(step)
        else:
            self.fail(step, text)

    def findings(
        self, trainer: str, span: tuple[int, int], other: list[str], tolerance: float, seconds: float
    ) -> list[NumericFinding]:
        """Return what the comparison comes to. `other`: in what this machine is not the one that trained."""
        first, last = span
        apart = sorted(self._failed.items())
        text = (
            f"steps {first + 1} to {last} repeated in {seconds:.1f} s; after step {last} they are "
            f"{self._ours[last][:DIGEST_LENGTH]}"
        )
        equal = len(self._equal - self._failed.keys() - {first})
        steps = f"bit for bit what was recorded after {equal} of {equal + len(apart)} steps with a record"
        if not other:
            if apart:
                shown = "; ".join(f"step {step}: {why}" for step, why in apart[:_MAX_REPORTED])
                return [_finding("weights", trainer, "fail", f"{text}; {steps}: {shown}{self._far()}")]
            return [_finding("weights", trainer, "ok" if equal else "warn", f"{text}; {steps}")]
        machine = _finding("machine", trainer, "warn", f"not the one that trained: {'; '.join(other)}")
        if not apart and equal:
            return [machine, _finding("weights", trainer, "ok", f"{text}; {steps}")]
        far = {step: value for step, value in self._distances.items() if step > first}
        if not far:
            return [machine, _finding("weights", trainer, "warn", f"{text}; no checkpoint is left to compare with")]
        worst = max(far.values())
        verdict: CheckVerdict = "ok" if worst <= tolerance else "fail"
        compared = f"{text}; {worst:.2g} of the way that they moved away from the checkpoints, {tolerance:g} is allowed"
        return [machine, _finding("weights", trainer, verdict, compared)]

    def _far(self) -> str:
        worst = max(self._distances.values(), default=None)
        return "" if worst is None else f"; {worst:.2g} of the way that they moved away from the checkpoints kept"


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the L2 distance of two sets of weights with the same names and shapes, on whatever devices."""
    squares = [float((_double(one[name]) - _double(other[name])).square().sum()) for name in one]
    return math.sqrt(sum(squares))


def _double(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64 on the CPU: its distances are the same wherever the weights were trained."""
    return tensor.detach().cpu().double()


def _finding(check: str, trainer: str, verdict: CheckVerdict, text: str) -> NumericFinding:
    return NumericFinding(check=check, subject=trainer, verdict=verdict, text=text)
