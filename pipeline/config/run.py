"""The configuration of a run: one struct, made of the structs that the stages' own folders define."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.config import ConnectionConfig, ServerConfig, StreamsConfig
from lachesis.pipeline.common.paths import FilePath, ModelPath, OpenSwitch, TemplatePath
from lachesis.pipeline.common.sampling_agreement import MASK_COLUMN, sampling_difference
from lachesis.pipeline.common.trainability import TrainerReads
from lachesis.pipeline.config.shared_processes import check_together
from lachesis.pipeline.config.variables import MODEL_VARIABLES
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.environment.config import EnvironmentConfig
from lachesis.pipeline.evaluator.config import EvaluationConfig
from lachesis.pipeline.extension import TrainerSpec, added
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.inference.engine_table import engines_that
from lachesis.pipeline.normalizer.config.advantage import SHAPEABLE, AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.teacher.config import NAMED_TEACHER, TeacherConfig
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.trainer.config import THIS_MACHINE, TrainingConfig
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.keys import INFERENCE_ROLES
from lachesis.schemas.subjects import LIVE, check_name

__all__ = [
    "NATS_FOLDER",
    "THIS_MACHINE",
    "EnvironmentConfig",
    "EvaluationConfig",
    "InferenceConfig",
    "RunConfig",
    "ServicesConfig",
    "TrainingConfig",
    "WeightsConfig",
]

NATS_FOLDER = "nats"
"""Where in a run's folder the embedded server keeps its store."""

D = TypeVar("D")
PositiveInt = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class ServicesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processes that `lachesis up` starts."""

    scorers: PositiveInt = 1
    """Replicas of the scorer. Default 1."""
    teachers: PositiveInt = 1
    """Replicas of the teacher stage. Default 1."""
    environments: PositiveInt = 1
    """Processes for each environment. Default 1."""
    together: list[list[str]] = []
    """Services that share a process, a list for each such process: of governor, normalizer, curriculum, batcher, health
    and teacher, those that the run has. One that fails ends its process, and all of them start again. Default empty:
    each has a process of its own."""
    forkserver: bool = True
    """Whether services are forked from processes that have imported everything and do nothing else: one with torch
    (some 350 MB), for trainer, inference servers and environments beside them, and one without (70 MB), for all others.
    Default true."""
    drain_s: Seconds = 10.0
    """Seconds a service has to finish what it holds after SIGTERM; the trainer has `training.drain_s`. Default 10."""
    alive_file: FilePath | None = None
    """File that a service touches with each heartbeat, every second, for a container's liveness probe. Default None."""
    ready_s: Seconds = 120.0
    """Seconds a service has to become ready, once none of a supervisor that was killed still drains. Default 120."""
    silent_s: Seconds = 60.0
    """Seconds without a heartbeat (a service sends one each second) after which `lachesis up` takes a process for hung,
    kills it and starts it again; one that starts has `ready_s`. Default 60."""
    log_bytes: PositiveInt = 64 << 20
    """Largest log of a process, its children included, bytes. A larger one is cut; its newest quarter stays beside it
    as `NAME.log.old`. Default 64 MiB."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run. Times are seconds, sizes bytes, unless a field says otherwise. Paths are relative to the file they are in;
    those of variables and `--set`, to the current folder."""

    VARIABLES: ClassVar[dict[str, str]] = MODEL_VARIABLES
    """Variables beside `LACHESIS_*`, by which people know these settings; `LACHESIS_*` goes before them."""

    run: str = "run"
    """Name of the run: letters, digits, '_' and '-'."""
    revision: str = LIVE
    """Revision that the run's annotations are written under. Default live."""
    folder: FilePath | None = None
    """Folder of the run: logs, weights, checkpoints, the embedded server's store. Default None: where the run was
    started before, else runs/<run> in the current folder."""
    shared_files: OpenSwitch = False
    """Let other users of the machine read the run's folder, logs and exports, as far as the umask allows. Default:
    false, only the run's own user can (umask 077)."""
    recipe: str | None = None
    """Named settings of advantage and loss, such as "dapo"; what is set elsewhere goes before them. `lachesis config
    recipes` shows them. Default None."""
    model: ModelPath | None = None
    """The model to train: a local folder or a Hugging Face id."""
    tokenizer: ModelPath | None = None
    """Folder or Hugging Face id of the tokenizer of `model`. Default None: the one that lies beside its weights."""
    model_exceptions: list[str] = []
    """What may be wrong with a model that the run loads: names of tensors that may be missing, unexpected, of another
    shape, quantized, not finite or tied against the files' word, where * stands for any characters; tokenizer, for one
    with more tokens than the model; quantization_config. What is missing is drawn at random, in every process the same.
    Each service that loads such a model names it in its log. Default empty: it is refused."""
    chat_template: TemplatePath | None = None
    """Chat template of `model`: a file, or the text of a template in Jinja's syntax. A base model that has none needs
    one. Default None: the one that lies beside its tokenizer."""
    seed: int = 0
    """Seed of everything drawn at random."""
    mode: Literal["train", "observe"] = "train"
    """observe: no trainer is started; somebody else reads the batches. Default train."""
    nats: ConnectionConfig | None = None
    """An existing server. Default None: `lachesis up` starts an embedded one in the run's folder."""
    server: ServerConfig = ServerConfig()
    """The embedded server."""
    streams: StreamsConfig = StreamsConfig()
    """Byte budgets and replication of the streams."""
    environments: dict[str, EnvironmentConfig] = {}
    """The environments by name: [environments.NAME] with kind, params, samples, max_new_tokens, temperature, top_p,
    chat_template_kwargs, concurrency, longest_tokens, success_rater, success_threshold, scoring, normalization,
    reward_config, advantage, timeout_s, lost_samples and fewest_samples. Only kind is required."""
    evaluation: dict[str, EnvironmentConfig] = {}
    """Held-out environments by name, with the settings of an environment; evaluated on the schedule of `evaluate`.
    Default empty: a share of each environment's own tasks is (evaluate.held_out)."""
    evaluate: EvaluationConfig = EvaluationConfig()
    """The evaluation schedule."""
    scoring: ScoringConfig = ScoringConfig()
    """Raters and their aggregation."""
    normalization: NormalizationConfig = NormalizationConfig()
    """Reward normalization."""
    reward_config: RewardConfig = RewardConfig()
    """Reward shaping: bonuses for form and length while hardly anything succeeds. Default none."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantage estimator."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """What the environments draw."""
    teacher: TeacherConfig = TeacherConfig()
    """The teacher stage."""
    batching: BatchingConfig = BatchingConfig()
    """Batch formation and the ledger."""
    flow: FlowConfig = FlowConfig()
    """Leases."""
    health: HealthConfig = HealthConfig()
    """Health checks."""
    inference: dict[str, InferenceConfig] = {}
    """Inference servers by role: [inference.policy], [inference.teacher] (further ones teacher-NAME) and
    [inference.eval], each with url, kind, model, tokenizer, host, port, advertise, threads and engine, or python, gpus
    and args for vLLM. Default empty: `lachesis up` starts the reference server for each role it needs."""
    training: TrainingConfig = TrainingConfig()
    """The trainer."""
    weights: WeightsConfig = WeightsConfig()
    """How weights travel from the trainer to the inference servers."""
    services: ServicesConfig = ServicesConfig()
    """Processes."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Traces and metrics over OTLP."""

    def __post_init__(self) -> None:
        check_name("run", self.run)
        check_name("revision", self.revision)
        check_name("training.name", self.training.name)
        for name in (*self.environments, *self.evaluation):
            check_name("environment", name)
        if self.batching.teacher != "off" and not self.teacher.enabled:
            raise ConfigError(
                f'batching.teacher is "{self.batching.teacher}", but teacher.enabled is false: no logprobs would come'
            )
        coef = self.training.learner.loss.teacher_coef
        if coef and self.batching.teacher == "off":
            raise ConfigError(
                f'training.learner.loss.teacher_coef is {coef}, but batching.teacher is "off": nothing would be '
                'learned from a teacher. Set that to "required" or "optional", or this to 0'
            )
        check_together(self.services.together, teachers=self.services.teachers)
        self._check_weights()
        self._check_inputs()
        self._check_sampling()
        for name, env in self.evaluation.items():
            if env.is_foreign:
                raise ConfigError(f"evaluation.{name}.kind is {env.kind}: the run itself must pose held-out tasks")
        for name, env in self.environments.items():
            self._check_shaping(name, env)
            kind = added("environments").get(env.kind)
            if env.chat_template_kwargs and kind is not None and kind.renders_prompts:
                raise ConfigError(
                    f"environments.{name}.chat_template_kwargs is set, but its kind is {env.kind}, whose own code "
                    "renders prompts: leave it out, and give them there"
                )
            if not env.is_foreign:  # else its client says how many samples, and of what length
                self._check_size(name, env)
        for role in self.inference:
            if role not in INFERENCE_ROLES and not role.startswith(NAMED_TEACHER):
                raise ConfigError(f"inference.{role}: unknown role; use policy, teacher, teacher-NAME or eval")
        kl, reserved = self.training.learner.loss.teacher_kl, self.flow.teacher_bytes_per_token
        self.teacher.check(self.environments, self.inference, kl=kl, reserved=reserved)

    def _check_weights(self) -> None:
        if self.weights.transport != "shared_memory":
            return
        if self.role("policy").url is not None:
            raise ConfigError(
                'weights.transport is "shared_memory": the run itself must start the policy\'s server; leave '
                "inference.policy.url out"
            )
        if not self.role("policy").spec.shares_memory:
            raise ConfigError(
                f'weights.transport is "shared_memory", which {self.role("policy").kind} does not compute with: set '
                f'{engines_that(lambda spec: spec.shares_memory)}, or take "files" or "nats"'
            )
        if self.weights.dtype != "float32":
            raise ConfigError(
                f'weights.transport is "shared_memory", which is float32, but weights.dtype is "{self.weights.dtype}": '
                "leave weights.dtype out"
            )
        if self.training.ranks > 1:
            raise ConfigError(
                'weights.transport is "shared_memory", which one process shares, but training.ranks is '
                f'{self.training.ranks}: set it to 1, or take "files" or "nats"'
            )
        if self.training.lora is not None:
            raise ConfigError(
                'weights.transport is "shared_memory", but adapters are merged into copies of the weights: leave '
                'training.lora out, or take "files"'
            )

    def _check_inputs(self) -> None:
        inputs = [one.input for one in self.training.inputs]
        if repeated := [name for name in inputs if inputs.count(name) > 1]:
            raise ConfigError(f"training.inputs names {repeated[0]!r} twice")
        teacher_kl = self.training.learner.loss.teacher_kl
        if MASK_COLUMN in inputs and teacher_kl != "sampled":
            raise ConfigError(
                f'training.learner.loss.teacher_kl is "{teacher_kl}", which needs logprobs of '
                f'tokens that training.inputs {MASK_COLUMN} may exclude: set it to "sampled", or leave the input out'
            )

    def _check_sampling(self) -> None:
        """Refuse environments that sample from another distribution than the trainer computes."""
        temperature = self.trained_temperature
        if temperature is None:
            return
        self._check_nucleus()
        for name, env in self.environments.items():
            if not env.is_foreign:
                difference = sampling_difference({"temperature": env.temperature}, temperature, masked=True)
                if difference is not None:
                    raise ConfigError(f"environments.{name}: {difference}")

    def _check_nucleus(self) -> None:
        """Refuse a `top_p` that the trainer would not know of, with all that has to be set for it."""
        cut = {name: env for name, env in self.environments.items() if env.top_p < 1 and not env.is_foreign}
        if not cut:
            return
        asked = ", ".join(f"environments.{name}.top_p is {env.top_p:g}" for name, env in cut.items())
        if self.training.backend != THIS_MACHINE:
            raise ConfigError(f"{asked}, and {self.training.backend} trains on all tokens: set it to 1")
        policy = self.role("policy")
        if not policy.spec.records_kept_tokens:
            raise ConfigError(
                f"{asked}, and {policy.kind} does not say which tokens that left, so the trainer cannot leave out the "
                f"others: set it to 1, or set {engines_that(lambda spec: spec.records_kept_tokens)}"
            )
        missing = []
        if MASK_COLUMN not in self.training.reads.columns:
            missing.append(f'training.inputs = [{{ input = "{MASK_COLUMN}" }}]')
        if self.training.learner.loss.teacher_kl != "sampled":
            missing.append('training.learner.loss.teacher_kl = "sampled"')
        missing += [f"environments.{name}.column_bytes = 4096" for name, env in cut.items() if not env.column_bytes]
        if missing:
            raise ConfigError(
                f"{asked}, which leaves out tokens that the trainer counts, unless each token comes with the ids among "
                f"which it was sampled: set top_p to 1, or set {' and '.join(missing)} (column_bytes: 4 for each id)"
            )

    @property
    def trained_temperature(self) -> float | None:
        """The temperature that the run's own trainer divides logits by; None where another trains."""
        if self.mode != "train":
            return None
        return self.training.learner.temperature if self.training.backend == THIS_MACHINE else 1.0

    def _check_size(self, name: str, env: EnvironmentConfig) -> None:
        if env.samples < 2:
            raise ConfigError(
                f"environments.{name}.samples is {env.samples}: advantages compare the samples of a group, so a group "
                "of one would never be trained on; give 2 or more"
            )
        if env.samples > self.batching.batch_size:
            raise ConfigError(
                f"environments.{name}.samples is {env.samples}, but a batch has {self.batching.batch_size} "
                "sequences and groups are never split: no group could be admitted"
            )
        if env.lost_samples == "drop" and env.fewest_samples < 2:
            raise ConfigError(f"environments.{name}.fewest_samples is {env.fewest_samples}; a group needs 2 or more")
        if env.max_new_tokens > env.longest_tokens:
            raise ConfigError(
                f"environments.{name}.max_new_tokens is {env.max_new_tokens}, but room is kept for sequences of "
                f"longest_tokens = {env.longest_tokens}: lower the first, or raise the second and "
                "count the prompt in"
            )

    def _check_shaping(self, name: str, env: EnvironmentConfig) -> None:
        shaping, estimator = self.reward_config_of(name), self.advantage_of(name).estimator
        if not shaping.on:
            return
        if estimator not in SHAPEABLE:
            raise ConfigError(
                f"environment {name}: reward_config gives bonuses, and estimator {estimator} would divide by them or "
                f"whiten them to full strength; use {', '.join(SHAPEABLE)}"
            )
        if env.success_rater is None and self.scoring_of(name).aggregation == "reliability":
            raise ConfigError(
                f"environment {name}: success is decided before raters are weighted by reliability, so reward_config "
                "needs a success_rater"
            )
        if env.success_rater is not None and shaping.min_success is None:
            raise ConfigError(
                f"environment {name}: {env.success_rater} tells who succeeds, so reward_config.min_success must say "
                "what the lowest score of a success is: no bonus may reach it"
            )

    @property
    def path(self) -> Path:
        """The run's folder as an absolute path."""
        return Path(self.folder or f"runs/{self.run}").absolute()

    @property
    def store(self) -> Path | None:
        """Where the run's own server keeps the streams; None: it has another server."""
        return self.path / NATS_FOLDER if self.nats is None else None

    @property
    def trainer_reads(self) -> TrainerReads | None:
        """Name what the run's own trainer reads in addition to text tokens; None if another trains."""
        return self.training.reads if self.mode == "train" else None

    def advantage_of(self, env: str) -> AdvantageConfig:
        """Return how the rewards of an environment become advantages."""
        settings = self.environments.get(env)
        return (settings and settings.advantage) or self.advantage

    def scoring_of(self, env: str) -> ScoringConfig:
        """Return the raters of an environment and how their ratings become scores."""
        settings = self.environments.get(env)
        return (settings and settings.scoring) or self.scoring

    def normalization_of(self, env: str) -> NormalizationConfig:
        """Return how the scores of an environment are normalized."""
        settings = self.environments.get(env)
        return (settings and settings.normalization) or self.normalization

    def reward_config_of(self, env: str) -> RewardConfig:
        """Return how the rewards of an environment are shaped."""
        settings = self.environments.get(env)
        return (settings and settings.reward_config) or self.reward_config

    def drain_s(self, service: str) -> float:
        """Return how long a service may take to drain, seconds."""
        return self.training.drain_s if service == "trainer" else self.services.drain_s

    def role(self, role: str) -> InferenceConfig:
        """Return the settings of an inference server."""
        return self.inference.get(role, InferenceConfig())

    @property
    def tokenizer_name(self) -> str | None:
        """Folder or id that the tokenizer of the trained model is loaded from."""
        return self.tokenizer or self.model

    def trains_elsewhere(self, service: str, part: str) -> TrainerSpec | None:
        """Return the back end that stands behind a service; None: it computes on this machine.

        A back end that trains elsewhere has the weights, and so stands behind the servers of policy and eval, too.
        """
        served = service == "inference" and part in {"", "policy", "eval"}
        if self.training.backend == THIS_MACHINE or not (served or service == "trainer"):
            return None
        found: TrainerSpec | None = added("trainers").get(self.training.backend)
        return found

    def at(self, path: str, default: D) -> D:
        """Return the setting at a dotted path that an extension adds; `default` where it has not been added."""
        value: Any = self
        for name in path.split("."):
            value = getattr(value, name, default)
        found: D = value
        return found

    def tokenizer_of(self, role: str) -> str | None:
        """Return the folder or id that the tokenizer of an inference server is loaded from."""
        settings = self.role(role)
        return settings.tokenizer or settings.model or self.tokenizer_name

    def chat_template_of(self, role: str) -> str | None:
        """Return the chat template that an inference server is to have; None: the one beside its tokenizer."""
        settings = self.role(role)
        if settings.chat_template or settings.tokenizer or settings.model:
            return settings.chat_template
        return self.chat_template
