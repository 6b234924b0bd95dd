"""Configuration of an environment, and of how its rollouts are collected."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from lachesis.pipeline.common.paths import CodeParams, CodePath
from lachesis.pipeline.extension import added
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.scorer.config import ScoringConfig

__all__ = ["CollectConfig", "EnvironmentConfig"]

PositiveInt = Annotated[int, Meta(gt=0)]
Positive = Annotated[float, Meta(gt=0)]

_BYTES_PER_TOKEN = 16
"""int32 token, float32 logprob, one bit of mask, and its text before it is packed, rounded up."""
_BYTES_PER_SAMPLE = 4096
"""The rest of a sample."""

_BYTES_OF_RECORDS = 32 << 10
"""The rest of a sample's recorded calls."""


class CollectConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a group is collected, for any environment."""

    request_timeout_s: Positive = 120.0
    """Seconds one request to the inference server may take before it counts as failed. Each time-out doubles them for
    that request, up to four times as many. Default 120."""
    attempts: PositiveInt = 4
    """Tries of a request, and continuations of an aborted sample, before the group is abandoned. Default 4."""
    backoff_s: Positive = 0.5
    """Seconds before the second try, doubled before each further one, up to 30; each pause is shortened at random by up
    to half. Default 0.5."""
    lost_samples: Literal["refill", "drop", "abandon"] = "refill"
    """What to do with a group that lost samples because their inference server went away: see
    environments.NAME.lost_samples. Default refill."""
    fewest_samples: PositiveInt = 2
    """Samples that a group needs to go on without lost ones. Default 2."""
    max_context: PositiveInt | None = None
    """Tokens prompt and completion of a sequence may have together. Default None: what the server accepts."""
    chat_template_kwargs: dict[str, Any] = {}
    """Parameters of the model's chat template. Default none."""
    model: str = "policy"
    """Name of the model in traces. Default policy."""


class EnvironmentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One environment: which tasks, and how rollouts of them are generated."""

    PARAM_PATHS: ClassVar[dict[str, Mapping[str, str]]] = {"dataset": {"path": "file"}}

    kind: CodePath
    """A built-in environment ("dataset"), one that an extension adds ("reasoning_gym"), `module:Class` or
    `path/to/file.py:Class`."""
    params: CodeParams = {}
    """Keyword arguments of the environment. Paths in those of built-in kinds are relative to the configuration file."""
    samples: PositiveInt = 8
    """Samples in a group. Default 8."""
    max_new_tokens: PositiveInt = 256
    """Most tokens generated in one turn. Default 256."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Sampling temperature. It must equal training.learner.temperature where the run's own trainer trains on what is
    sampled; of held-out tasks ([evaluation.NAME]) it may be any. Default 1."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus of the sampling distribution. Below 1 the trainer must know which tokens it left: name sampling_mask in
    training.inputs, and room for it in column_bytes; the reference server records it. Default 1: all of it."""
    chat_template_kwargs: dict[str, Any] = {}
    """Parameters of the model's chat template, { enable_thinking = false } say: in training, evaluation and tests.
    Default none: the template's own defaults."""
    concurrency: PositiveInt = 8
    """Groups that one process generates at once. Default 8."""
    longest_tokens: PositiveInt = 1024
    """Most tokens of one sample, prompt included, in all its sequences together if it has several; what these begin
    with alike counts once. A lease reserves bytes for them. A group that outgrows what was reserved goes on without its
    heaviest samples, which are named as failed ones are; it is not stored if fewer than two would be left. Default
    1024."""
    column_bytes: Annotated[int, Meta(ge=0)] = 0
    """Most bytes that a token's further columns take; routed_experts of int16 take 2 for each layer and expert. Default
    0."""
    attachment_bytes: Annotated[int, Meta(ge=0)] = 0
    """Most bytes that the attachments of a group take. Default 0."""
    success_rater: str | None = None
    """Rater that decides, by its calibrated rating, whether a sample succeeded. Default None: the score itself."""
    success_threshold: float = 1.0
    """A sample succeeds when that value reaches this. Default 1."""
    scoring: ScoringConfig | None = None
    """Raters of this environment alone. Default None: those of the run."""
    normalization: NormalizationConfig | None = None
    """Reward normalization of this environment alone. Default None: the run's."""
    reward_config: RewardConfig | None = None
    """Reward shaping of this environment alone. Default None: the run's."""
    advantage: AdvantageConfig | None = None
    """Advantage estimator of this environment alone. Default None: the run's."""
    timeout_s: Positive = 120.0
    """Seconds until one turn must be generated; a late one is an infrastructure failure, and is requested again with
    twice the time, at most four times as much. Default 120."""
    lost_samples: Literal["refill", "drop", "abandon"] = "refill"
    """What to do with a group that lost samples because its inference server became unavailable: no process listens,
    the connection breaks, or it answers 429, 502, 503 or 504 to every attempt. refill: the lost samples are generated
    again, twice at most. drop: the group goes on with the others, if there are at least `fewest_samples`; a smaller
    group fits into fewer batches, so it waits longer. abandon: the whole group is given up; so is a group that refill
    or drop cannot save. A failure that the model's answer may have caused (a time limit, a tool's error, a broken
    answer) always gives up the whole group, because dropping such samples would favour other answers. Default
    refill."""
    fewest_samples: PositiveInt = 2
    """Samples that a group needs to go on without lost ones, with lost_samples "drop". Default 2."""

    record: Literal["auto", "always", "never"] = "auto"
    """Whether each answer of the model, and each result of a tool, is stored before the conversation goes on, so that
    it goes on where it was after its process, its inference server or the broker was killed. auto: where a conversation
    may have several turns; one of a single turn has nothing to go on from. Default auto."""
    diverged: Literal["sample", "give_up"] = "sample"
    """What to do where a recorded conversation asks something else when it runs again, as one that looks at the clock
    may. sample: the request is sampled, and the group's metadata name it. give_up: the sample is lost, as one whose
    server went away (`lost_samples`). Default sample."""

    def collect_config(self, *, max_context: int | None = None) -> CollectConfig:
        """Return how evaluations and tests collect answers.

        `max_context`: tokens of the model's context; None: not known.
        """
        return CollectConfig(
            request_timeout_s=self.timeout_s, chat_template_kwargs=self.chat_template_kwargs, max_context=max_context
        )

    @property
    def largest_bytes(self) -> int:
        """Most that a group may weigh, bytes: what its lease reserves."""
        per_token = _BYTES_PER_TOKEN + self.column_bytes
        return self.samples * (self.longest_tokens * per_token + _BYTES_PER_SAMPLE) + self.attachment_bytes

    @property
    def calls_bytes(self) -> int:
        """Most that the recorded calls of a group may take, bytes.

        That is its tokens, and its texts once as answers and once more in its conversations.
        """
        return 2 * self.largest_bytes + self.samples * _BYTES_OF_RECORDS

    @property
    def is_foreign(self) -> bool:
        """Whether a service publishes for it what was generated elsewhere.

        The run has no process that generates, and draws none of its tasks.
        """
        kind = added("environments").get(self.kind)
        return kind is not None and kind.place is None
