"""Runs an Atropos environment as a source of rollouts, without HTTP between it and the run.

From the place of a `BaseEnv` class and an interpreter that has atroposlib, it makes an environment. Its tasks are the
items that the class draws, in their order. Tokens, logprobs and policy versions of its groups are those of the engine
(`engine_log`); the other fields of groups are read as the gateway reads them (`logic.scored_groups`).
"""

import importlib.util
import logging
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from lachesis.pipeline.common.paths import expand_home
from lachesis.pipeline.environment.group_environment import GeneratedGroup, GroupEnvironment, SequenceExtras
from lachesis.pipeline.environment.inference_requests import InferenceRequests, ModelTurn
from lachesis.pipeline.environment.plain_hooks import HOOKS
from lachesis.pipeline.environment.rollout import deciding_error
from lachesis.pipeline.environment.session import Reply, Session
from lachesis.pipeline.errors import EnvironmentCodeError, GroupDeclinedError, InfrastructureError
from lachesis.pipeline.extensions.atropos.logic.scored_data import ScoredData, read_scored_data
from lachesis.pipeline.extensions.atropos.logic.scored_groups import REWARD, GroupOrigin, to_group
from lachesis.pipeline.extensions.atropos.native.engine_log import EngineLog
from lachesis.pipeline.extensions.atropos.native.frames import Generate, Groups
from lachesis.pipeline.extensions.atropos.native.process import AtroposProcess
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.library.reward_normalizer import RewardNormalizer
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.errors import ConfigError, DataError, SchemaError
from lachesis.schemas.rollout import Message, RolloutGroup

__all__ = ["AtroposSource"]

log = logging.getLogger("lachesis")

PROBE = [Message(role="user", content="Which tokens are these?")]
"""As in `child`."""
_ANY = 1 << 31
"""No bound: the lease has its own."""
_DEFAULT_CLIP = 5.0
_DEFAULT_WARMUP = 10


class AtroposSource(GroupEnvironment):
    """Groups of the `BaseEnv` class at `place`, `module:NAME` or `path/to/file.py:NAME`, in a process of its own.

    `python`: an interpreter that has atroposlib; by default this one. `settings`: fields of the class' configuration,
    in place of what its `config_init` says. `items`: the number of tasks; task `i` is the item of call `i` of
    `get_next_item`, whose random numbers (`random`, numpy, torch) are seeded with `seed`. `fresh_items`: each group has
    a newly drawn item instead, which the curriculum cannot weigh. `timeout_s`: seconds that a group may take. `hang_s`:
    seconds after which a process that does not answer is replaced.

    Raises ConfigError when the interpreter is missing, or a number is out of range.
    """

    def __init__(
        self,
        place: str,
        *,
        python: str | None = None,
        settings: dict[str, Any] | None = None,
        items: int = 1000,
        seed: int = 0,
        fresh_items: bool = False,
        success_threshold: float = 1.0,
        timeout_s: float = 600.0,
        hang_s: float = 60.0,
    ) -> None:
        module, _, name = place.rpartition(":")
        if not module or not name:
            raise ConfigError(f"atropos: place is {place!r}; write module:CLASS or path/to/file.py:CLASS")
        if module.endswith(".py") and not Path(module).is_file():
            raise ConfigError(f"atropos: there is no file {module!r}")
        if items < 1 or timeout_s <= 0 or hang_s <= 0:
            raise ConfigError(f"atropos: {place}: items must be at least 1, timeout_s and hang_s above 0")
        self.place = place
        self.success_threshold = success_threshold
        self.rollout_timeout_s = timeout_s
        self._python = _interpreter(python)
        self._items = 1 if fresh_items else items
        self._fresh = fresh_items
        self._hang_s = hang_s
        self._start = {"op": "start", "place": place, "settings": settings or {}, "seed": seed, "fresh": fresh_items}
        self._process: AtroposProcess | None = None
        self._spare: deque[GeneratedGroup] = deque()
        """Groups beyond the first of a call: they are handed out before any other is made."""
        self._digests: dict[int, str] = {}
        self._normalizer: RewardNormalizer | None = None
        self._checked = 0
        """Lives of the process in which its tokenizer was compared with the server's."""

    def __len__(self) -> int:
        return self._items

    def task(self, index: int) -> Task:
        """Return the task of `index`. Its prompt is empty, because only the class knows it."""
        return Task(item=f"item-{index}", prompt=[], task={"index": index})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the class' process running. See `GroupEnvironment`."""
        if self._process is not None:
            yield
            return
        try:
            async with anyio.create_task_group() as tasks:
                process = AtroposProcess(f"atropos {self.place}", self._python, self._start, hang_s=self._hang_s)
                self._checked = 0
                self._process = process
                tasks.start_soon(process.run)
                try:
                    yield
                finally:
                    self._process = None
                    tasks.cancel_scope.cancel()
        except ExceptionGroup as errors:
            raise deciding_error(errors) from errors

    async def check_setup(self) -> None:
        """Make the environment in its process, and end it. See `GroupEnvironment`."""
        async with self.running():
            assert self._process is not None  # noqa: S101 - it runs
            await self._process.up()

    async def generate_group(
        self, task: Task, requests: InferenceRequests, n: int, sampling: SamplingParams
    ) -> GeneratedGroup:
        """Let the class make groups of an item, and return the first. See `GroupEnvironment`."""
        if self._spare:
            return self._spare.popleft()
        async with self.running():
            process = self._process
            assert process is not None  # noqa: S101 - it runs
            engine = EngineLog(sampling)

            async def answer(request: Generate) -> Sequence[ModelTurn]:
                asked = _sampling(request, sampling)
                generations = await requests.generate(request.prompt_ids, request.n, asked)
                turns = [await requests.finish(request.prompt_ids, one, asked) for one in generations]
                for turn in turns:
                    engine.record(request.prompt_ids, turn, asked)
                return turns

            try:
                with HOOKS.fail_after(self.rollout_timeout_s):
                    await self._check_tokenizer(process, requests)
                    made = await process.collect(task.task["index"], n, answer)
            except TimeoutError as error:
                raise InfrastructureError(
                    f"{self.place}, {task.item}: no group within {self.rollout_timeout_s:g} s (timeout_s)"
                ) from error
            except ExceptionGroup as errors:
                raise deciding_error(errors) from errors
        self._check_item(made)
        name = f"drawn-{made.digest or made.index}" if self._fresh else made.name or f"item-{made.index}"
        about = Task(item=name, prompt=[], task={"index": made.index})
        groups = [self._converted(about, read_scored_data(raw), engine, requests, sampling) for raw in made.groups]
        if not groups:
            raise GroupDeclinedError(f"{self.place} made no group of {name}")
        self._spare.extend(groups[1:])
        return groups[0]

    def discard_spare_groups(self) -> None:
        """Drop the groups that the class made in one call beyond the first."""
        self._spare.clear()

    async def score(self, task: Task, session: Session) -> float | None:
        """Return the score that the class gave, before it was normalized."""
        found: float = session.state["score"]
        return found

    async def _check_tokenizer(self, process: AtroposProcess, requests: InferenceRequests) -> None:
        """Compare the class' tokenizer with that of the policy's server, once in the life of each process."""
        await process.up()
        ready, life = process.ready, process.lives
        if ready is None or self._checked == life:
            return
        if ready.named is not None and not self._fresh and self._items > ready.named:
            raise ConfigError(f"{self.place} has {ready.named} curriculum_items: set params.items to {ready.named}")
        if ready.probe is not None and ready.probe != await requests.tokenize(PROBE):
            raise ConfigError(
                f"{self.place}: its tokenizer does not write a conversation in the tokens of the policy's server; set "
                "params.settings.tokenizer_name to the run's model"
            )
        self._normalizer = self._normalizer or _normalizer(self.place, ready.normalization)
        self._checked = life

    def _check_item(self, made: Groups) -> None:
        """Raise `ConfigError` if an item is not the one that the same index named in an earlier process."""
        if self._fresh or made.digest is None:
            return
        if self._digests.setdefault(made.index, made.digest) != made.digest:
            raise ConfigError(
                f"{self.place}: item {made.index} is another one in this process than in the last; get_next_item must "
                "draw the same items in the same order after the same seed, else set params.fresh_items"
            )

    def _converted(
        self, task: Task, data: ScoredData, engine: EngineLog, requests: InferenceRequests, sampling: SamplingParams
    ) -> GeneratedGroup:
        """Return a group with the engine's logprobs. Raises EnvironmentCodeError, which says what is wrong."""
        origin = GroupOrigin(
            id="0" * 32, run="run", env="atropos", producer="atropos", epoch=0, counter=0, policy_version="0-a-b",
            tokenizer_hash="any", started_ns=0, name=self.place, longest=_ANY, most=_ANY, by="atropos",
            needs_logprobs=False,
        )  # fmt: skip
        try:
            group = to_group(msgspec.structs.replace(data, inference_logprobs=None), origin)
        except SchemaError as error:
            raise EnvironmentCodeError(f"{self.place}, {task.item}: {error}") from error
        scores = list(data.scores)
        rewards = scores if self._normalizer is None else self._normalized(scores)
        sessions = []
        for number, sequence in enumerate(group.sequences):
            try:
                sampled = engine.match(number, sequence.tokens, sequence.loss_mask)
            except EnvironmentCodeError as error:
                raise EnvironmentCodeError(f"{self.place}, {task.item}: {error}") from error
            session = Session.of_group(task, number, requests, sampling)
            session.tokens = sequence.tokens.tolist()
            session.loss_mask = sequence.loss_mask.tolist()
            session.logprobs = sampled.logprobs.tolist()
            session.versions = sampled.versions
            session.sampling_masks = sampled.masks
            session.finish_reason = sampled.finish_reason
            session.messages = group.messages[number] if group.messages else []
            session.replies = _replies(session.messages, sampled.finish_reason)
            session.state["score"] = scores[number]
            sessions.append(session)
        if not all(session.versions for session in sessions):
            raise EnvironmentCodeError(f"{self.place}, {task.item}: a sequence has no token that the policy sampled")
        return GeneratedGroup(
            task=task,
            sessions=sessions,
            rewards=[{REWARD: reward} for reward in rewards],
            extras=_extras(group),
            metadata=_metadata(group, self.place, scores if self._normalizer is not None else None),
        )

    def _normalized(self, scores: list[float]) -> list[float]:
        assert self._normalizer is not None  # noqa: S101
        try:
            return self._normalizer.normalize(scores)
        except DataError as error:
            raise EnvironmentCodeError(f"{self.place}: {error}") from error


def _interpreter(python: str | None) -> str:
    if python is None:
        if importlib.util.find_spec("atroposlib") is None:
            raise ConfigError(
                "atropos: params.python is not set, and atroposlib is not installed beside Lachesis: name an "
                'interpreter that has it, "atropos/bin/python" say (python -m venv atropos; atropos/bin/pip install '
                "atroposlib==0.4.0)"
            )
        return sys.executable
    found = shutil.which(expand_home(Path(python)))
    if found is None:
        raise ConfigError(f"atropos: params.python is {python!r}, which is no program; name an interpreter")
    return str(Path(found).absolute())  # not resolved: a venv is known by the name of its link


def _sampling(request: Generate, run: SamplingParams) -> SamplingParams:
    """Return the environment's sampling parameters, with the run's for those it leaves out; greedy is the run's."""
    own = {name: getattr(run, name) for name in ("temperature", "top_p", "max_tokens", "sampling_mask")}
    asked = own | request.sampling
    if run.temperature == 0:
        asked["temperature"] = 0.0
    try:
        return msgspec.convert(asked, SamplingParams)
    except msgspec.ValidationError as error:
        raise EnvironmentCodeError(f"the environment asks for tokens in a way that cannot be: {error}") from error


def _normalizer(place: str, settings: dict[str, Any]) -> RewardNormalizer | None:
    """Return the normalizer of `reward_normalization`, `reward_clip` and `reward_normalization_warmup`, if any."""
    mode = settings.get("reward_normalization") or "none"
    clip = settings.get("reward_clip", _DEFAULT_CLIP)
    warmup = settings.get("reward_normalization_warmup", _DEFAULT_WARMUP)
    try:
        made = RewardNormalizer(mode, clip, warmup)
    except ConfigError as error:
        raise ConfigError(f"{place}: settings.reward_normalization and those beside it: {error}") from error
    return None if mode == "none" else made


def _replies(messages: Sequence[Message], reason: str) -> list[Reply]:
    said = [message.content for message in messages if message.role == "assistant"] or [""]
    return [Reply(text=text, finish_reason=reason if i == len(said) - 1 else "stop") for i, text in enumerate(said)]


def _extras(group: RolloutGroup) -> SequenceExtras:
    sequences = group.sequences
    return SequenceExtras(
        token_advantages=sequences.token_advantages,
        columns=sequences.columns,
        excluded_samples=sequences.excluded_samples,
        metadata=_metadata_by_sample(group),
    )


def _metadata_by_sample(group: RolloutGroup) -> dict[str, list[Any]]:
    """Return the entries of a group's metadata that have an item for each sample, as the environment gave them."""
    given = {name: group.metadata.get(name) for name in ("overrides", "images")}
    return {
        name: found for name, found in given.items() if isinstance(found, list) and len(found) == len(group.sequences)
    }


def _metadata(group: RolloutGroup, place: str, raw_scores: list[float] | None) -> dict[str, Any]:
    about: dict[str, Any] = {"name": place}
    if raw_scores is not None:
        about["raw_scores"] = raw_scores
    by_sample = _metadata_by_sample(group)
    of_group = {name: value for name, value in group.metadata.items() if name not in by_sample}
    return {**of_group, "atropos": {**group.metadata["atropos"], **about, "assumed": []}}
