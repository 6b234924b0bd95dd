"""Configuration of the learning side.

Values are validated on construction; the defaults fit pretrained models.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lachesis.pipeline.common.field_types import check_field_types
from lachesis.pipeline.common.paths import CodeParams, CodePath
from lachesis.pipeline.common.trainability import TrainerReads
from lachesis.pipeline.model.config import LoraConfig
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.values import convert_plain, from_json

__all__ = [
    "INPUTS_FOR_ONE_ROW",
    "MODEL_INPUTS",
    "THIS_MACHINE",
    "TORCH_BACKEND",
    "LearnerConfig",
    "LossConfig",
    "ModelInputConfig",
    "TrainingConfig",
    "WarmStartConfig",
    "learner_on_record",
]

THIS_MACHINE = "torch"
"""The back end that trains on this machine."""
TORCH_BACKEND = "lachesis.pipeline.trainer.torch_backend:open_torch"
"""The function that opens it."""
Positive = Annotated[float, Meta(gt=0)]
PositiveInt = Annotated[int, Meta(gt=0)]

_RATE_TIMES_ROOT = 0.2
"""Learning rate times the root of the trainable parameters. Measured: 3e-4 suits the demo's 0.45 million, and 2e-5 the
135 million of SmolLM2, while 3e-4 destroys it; at 1.6 to 40 billion it gives the 1e-6 to 5e-6 that the field uses."""
_CLIPS = {"ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "sapo": (0.0, 0.0), "dppo": (0.0, 0.0)}
"""Clip distances below and above by objective."""
MODEL_INPUTS: dict[str, tuple[frozenset[str], bool]] = {
    "routed_experts": (frozenset({"routed_experts"}), False),
    "sampling_mask": (frozenset({"sampling_mask"}), False),
    "images": (frozenset(), True),
}
"""The built-in inputs of a model: which columns each reads, and whether attachments."""
INPUTS_FOR_ONE_ROW = frozenset({"routed_experts", "sampling_mask"})
"""Those that go with rows in one: see `LearnerConfig.packing`."""
_DEFAULTS_BEFORE_VERSIONING: dict[str, Any] = {
    "warmup_steps": 0,
    "max_step_kl": None,
    "step_kl_every": 1,
    "precision": "float32",
    "device_kernels": False,
    "packing": False,
    "recompute_layers": False,
}
"""Values of settings that early trainers had not."""


class LossConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy-gradient loss; `trainer/loss.py` has the formulas."""

    objective: Literal["ppo", "gspo", "cispo", "sapo", "dppo"] = "ppo"
    """ppo: clipped ratios of tokens (GRPO, DAPO). gspo: clipped ratios of sequences. cispo: the clipped ratio only
    weights the gradient, so no token loses its own. sapo: a smooth gate instead of a clip. dppo: a bound on how far
    probabilities move instead of a clip. Default ppo."""
    clip_low: Positive | None = None
    """Lower clip distance of the importance ratio: it is clipped at 1 - clip_low. Default None: 0.2 for ppo, 3e-4 for
    gspo, 1 (no lower clip) for cispo. sapo and dppo clip nothing."""
    clip_high: Positive | None = None
    """Upper clip distance: the ratio is clipped at 1 + clip_high. Default None: 0.28 for ppo (clip-higher, DAPO), 4e-4
    for gspo, 4 for cispo (arXiv:2510.13786)."""
    dual_clip: Positive | None = 3.0
    """With ppo, for negative advantages, the surrogate is at least dual_clip * advantage. Above 1; None: off.
    Default 3."""
    tau_positive: Positive = 1.0
    """With sapo, how fast the gate closes where the advantage is positive, as the ratio leaves 1. Default 1."""
    tau_negative: Positive = 1.05
    """With sapo, the same for other advantages; above tau_positive, since a token that is made rarer lifts all others.
    Default 1.05 (arXiv:2511.20347)."""
    divergence: Literal["tv", "kl"] = "tv"
    """With dppo, what max_divergence bounds: total variation or KL, of the sampled token against all others. Default
    tv."""
    max_divergence: Positive = 0.2
    """With dppo, tokens beyond it are moved no further. Default 0.2; for KL take 0.05."""
    anchor: Literal["rollout", "proximal"] = "rollout"
    """What the ratio is taken against. rollout: the logprobs the rollout was sampled with. proximal: the trainer's own
    policy at the start of the step; the rollout's distance w = pi_train / pi_rollout weights the loss (decoupled
    loss)."""
    tis_cap: Positive | None = 2.0
    """Upper bound on w; see outside. None: no bound, and under "truncate" no weight. Default 2."""
    tis_floor: Positive | None = None
    """Lower bound on w, with outside "mask". IcePop takes 0.5 to 5. Default None."""
    outside: Literal["truncate", "mask"] = "truncate"
    """What becomes of tokens with w beyond the bounds. truncate: with anchor "proximal" their weight is tis_cap. mask:
    they are left out, with either anchor. Default truncate."""
    sequence_cap: Positive | None = None
    """A sequence whose product of w exceeds it is left out. Default None; 3 is usual."""
    geometric_floor: Positive | None = None
    """A sequence whose geometric mean of w is below it is left out: however long a sequence is, the bound is the same
    (geometric sequence masking). Default None; 0.99 is usual."""
    geometric_cap: Positive | None = None
    """A sequence whose geometric mean of w exceeds it is left out. Default None; 1.01 is usual."""
    off_policy_threshold: Positive | None = None
    """Off-policy sequence masking (DeepSeek-V3.2): tokens with a negative advantage are left out where the mean over
    their sequence of logprob_rollout - logprob_train exceeds it, nats a token. Default None; 0.05 to 0.5 is usual."""
    mask_truncated: bool = False
    """Leave out samples that were cut off at their length limit; their rewards still count in their group's (DAPO's
    overlong filtering). Default false: a policy that runs into the limit learns that it is not paid for it."""
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] | None = None
    """token_mean: sum over trainable tokens / their number (DAPO). sequence_mean: the mean over samples of their
    means (GRPO, GSPO). constant_length: / (samples * constant_length) (Dr.GRPO, no length bias). A sample of several
    sequences counts once. Default None: sequence_mean for gspo, as its paper has it, else token_mean."""
    constant_length: PositiveInt = 16
    """Tokens each sample counts as under aggregation "constant_length". Default 16."""
    sharing: Literal["tokens", "sequences"] = "tokens"
    """How the weight of a sample is shared among its sequences, if it has several, as an agent's with sub-agents. The
    weight itself does not depend on their number, nor does the baseline of its group. tokens: each token of the sample
    weighs the same, as if it were one sequence. sequences: each sequence weighs the same. Default tokens."""
    teacher_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the teacher term: the advantage loses teacher_coef * (logprob_train - logprob_teacher) at each token,
    in advantage per nat. Default 0 (off)."""
    teacher_kl: Literal["sampled", "reverse", "forward"] = "sampled"
    """What the teacher term is made of. sampled: the sampled tokens' logprobs, as said. reverse, forward: instead the
    loss gains teacher_coef * KL(policy || teacher) or KL(teacher || policy) at each token, over the teacher's
    teacher.top_k likeliest tokens and all others as one; much less noise for more bytes. Default sampled."""
    kl_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the KL divergence to the model that the run began with, which the trainer then holds as well. Default 0
    (off)."""
    kl_estimator: Literal["k1", "k3"] = "k3"
    """k3: the loss gains kl_coef * (r - 1 - log r), r = pi_reference / pi. k1: the advantage gains kl_coef * log r.
    Default k3."""
    entropy_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of an entropy bonus, advantage per nat. Default 0 (off)."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip is {self.dual_clip}; it must be greater than 1, or None to turn it off.")
        if self.low >= 1 and self.objective != "cispo":
            raise ConfigError(f"clip_low is {self.clip_low}; it must be below 1, the ratio cannot fall below 0.")
        if self.tis_floor is not None and self.outside != "mask":
            raise ConfigError(f'tis_floor is {self.tis_floor}, which needs outside = "mask".')
        if self.tis_floor is not None and self.tis_cap is not None and self.tis_floor >= self.tis_cap:
            raise ConfigError(f"tis_floor is {self.tis_floor}; it must be below tis_cap, {self.tis_cap}.")
        floor, cap = self.geometric_floor, self.geometric_cap
        if floor is not None and cap is not None and floor >= cap:
            raise ConfigError(f"geometric_floor is {floor}; it must be below geometric_cap, {cap}.")

    @property
    def averaging(self) -> Literal["token_mean", "sequence_mean", "constant_length"]:
        """The aggregation in force."""
        return self.aggregation or ("sequence_mean" if self.objective == "gspo" else "token_mean")

    @property
    def masks_sequences(self) -> bool:
        """Whether tokens are left out by what their whole sequence is like."""
        bounds = (self.sequence_cap, self.geometric_floor, self.geometric_cap, self.off_policy_threshold)
        return any(bound is not None for bound in bounds)

    @property
    def low(self) -> float:
        """The lower clip distance in force."""
        return _CLIPS[self.objective][0] if self.clip_low is None else self.clip_low

    @property
    def high(self) -> float:
        """The upper clip distance in force."""
        return _CLIPS[self.objective][1] if self.clip_high is None else self.clip_high


class LearnerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer step."""

    learning_rate: Positive | None = None
    """AdamW's peak step size. Default None: 0.2 / sqrt(trainable parameters), which is 1.7e-5 for 135 million, 9e-6 for
    half a billion, 5e-6 for 1.6 billion and 2.4e-6 for 7 billion. Adapters (LoRA) have fewer, and so get more: 3e-5
    where 40 million parameters are trained. A value ten times too large destroys a pretrained model in a few steps."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 5
    """Steps over which the rate rises linearly to its peak. The first steps of AdamW move every weight by the full
    rate, however small its gradient. Default 5; 0: none."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up: it stays, or falls to final_fraction of its peak at step schedule_steps.
    Default constant: a run may go on without an end, or beyond the one it had at first."""
    schedule_steps: PositiveInt | None = None
    """Step of the run at which schedule "linear" or "cosine" ends, as a rule training.steps. Default None, for
    "constant"."""
    final_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of the peak that the rate falls to under schedule "linear" or "cosine". Default 0.1."""
    max_step_kl: Positive | None = 0.1
    """Bound on KL(before || after) of one optimizer step, nats a token, measured on some of its own tokens by one more
    forward pass: `trainer/step_size.py` says on which. A step beyond it is too large for the model: see
    on_large_step. Default 0.1; None: not measured."""
    step_kl_every: PositiveInt = 3
    """Where the bound only warns, every so many steps are measured; so are the first ten of a run, and steps after one
    that was too large. Default 3; 1: all steps."""
    on_large_step: Literal["warn", "shorten", "refuse"] = "warn"
    """What becomes of a step beyond max_step_kl. warn: it is taken, and the trainer says which setting to lower.
    shorten: the weights go only so far along the step (half, a quarter, ...) that it stays within the bound. refuse:
    weights and optimizer stay as they were, and the batch is void. The latter two hold a second copy of the weights
    during a step, refuse of AdamW's moments too. Default warn."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment. Default 0.9."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment. Default 0.95."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Decoupled weight decay. Default 0."""
    grad_clip: Positive = 1.0
    """Largest L2 norm of the gradient of the whole batch. Default 1."""
    max_tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Tokens of one forward and backward pass; where rows are padded (see packing), rows * longest row. Bounds memory,
    changes no result beyond rounding. A single longer sequence makes a micro-batch of its own. Where so many do not fit
    into a GPU's memory, half as many are taken from then on, and the trainer says so. auto: 16384 on a GPU, 1024 on a
    CPU, which is as fast with few and where the kernel ends a process that takes too much. Default auto."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """What matrix products are computed in; weights, moments and softmax stay in float32. auto: bfloat16 on a GPU,
    float32 on a CPU. Default auto."""
    float32_head: bool = False
    """Where matrix products are bfloat16, compute those of the output head in float32, so that logits are not rounded
    (ScaleRL, arXiv:2510.13786): logprobs come nearer to the exact ones, for more time and memory on a GPU, where that
    was not measured. Not for a model whose head does more than multiply. Default false."""
    device_kernels: bool = True
    """Compute as suits the device: AdamW in one fused kernel, and slices of logits by its memory, which stay there for
    the backward pass where they fit. false: AdamW as torch chooses, and slices of the size that a CPU takes. Both are
    the same within rounding. Default true."""
    compile: bool = False
    """Compile the model's layers by torch.compile, each by itself. The first steps take minutes, later ones less time;
    the result is the same within rounding, and a run repeats its own bits. Not with training.inputs. Default false."""
    packing: bool | Literal["auto"] = "auto"
    """Compute the rows of a micro-batch as one row of all their tokens, without padding; no token sees another row.
    auto: where the model's form allows it and a comparison at the start finds the same logprobs and gradients, else
    rows are padded, and the log says why. true: the trainer ends where it cannot. The same within rounding. Default
    auto."""
    pack_trees: bool = False
    """With rows in one (see packing): rows of a group compute the tokens with which they begin alike once, such as the
    prompt of its samples, or what the branches of a conversation share. Layers then cost the distinct tokens; attention
    still sees whole rows. Not for models with windows or chunks of attention, nor with training.inputs. The same within
    rounding; never run on a GPU so far. Default false."""
    recompute_layers: bool | Literal["auto"] = "auto"
    """Activation checkpointing: keep only the inputs of the model's layers, and compute each layer again in the
    backward pass. Memory for activations falls to about one layer's, for a third more work. auto: once a sequence alone
    does not fit into memory otherwise. Default auto."""
    temperature: Positive = 1.0
    """Sampling temperature of the rollouts: logits are divided by it, so that the ratio compares like with like.
    Default 1."""
    loss: LossConfig = LossConfig()
    """The policy-gradient loss."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.schedule != "constant" and self.schedule_steps is None:
            raise ConfigError(
                f'schedule is "{self.schedule}", which has to end somewhere: set schedule_steps, as a rule to '
                "training.steps."
            )
        if self.schedule_steps is not None and self.schedule_steps <= self.warmup_steps:
            raise ConfigError(
                f"schedule_steps is {self.schedule_steps}; it must be more than warmup_steps, {self.warmup_steps}."
            )
        if self.on_large_step != "warn" and self.max_step_kl is None:
            raise ConfigError(f'on_large_step is "{self.on_large_step}", but no max_step_kl says what large is.')

    def uses_bfloat16(self, device: str) -> bool:
        """Return whether matrix products are computed in bfloat16 on a device of this type ("cpu", "cuda")."""
        return self.precision == "bfloat16" or (self.precision == "auto" and device == "cuda")

    def microbatch_tokens(self, device: str) -> int:
        """Return the most tokens of one pass on a device of this type: cpu, cuda."""
        if self.max_tokens_per_microbatch == "auto":
            return 1024 if device == "cpu" else 16384
        return self.max_tokens_per_microbatch

    def peak_rate(self, parameters: int) -> float:
        """Return the rate after the warm-up for a model of so many trainable parameters."""
        return _RATE_TIMES_ROOT / math.sqrt(parameters) if self.learning_rate is None else self.learning_rate

    def rate_factor(self, steps: int) -> float:
        """Return the share of the peak rate that the step after `steps` steps is taken with."""
        if steps < self.warmup_steps:
            return (steps + 1) / self.warmup_steps
        if self.schedule == "constant" or self.schedule_steps is None:
            return 1.0
        done = min(1.0, (steps - self.warmup_steps) / (self.schedule_steps - self.warmup_steps))
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final_fraction + (1 - self.final_fraction) * left


def learner_on_record(recorded: bytes) -> LearnerConfig:
    """Return the settings that a trainer recorded as JSON with its steps.

    A field that the record lacks did not exist then, and gets the value that means the earlier behaviour. Raises
    `SchemaError`.
    """
    known = from_json("numerics.learner", dict[str, Any], recorded)
    return convert_plain("numerics.learner", LearnerConfig, _DEFAULTS_BEFORE_VERSIONING | known)


class ModelInputConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What gives the model, or its loss, more of a rollout than text tokens; `trainer/inputs/` has how."""

    input: CodePath
    """A built-in one, or `module:Class` or `path/to/file.py:Class` of your own, a `lachesis.ModelInput`.

    - routed_experts: experts of a mixture-of-experts model are those that the rollout was sampled with, from the column
      `routed_experts` (rollout routing replay).
    - sampling_mask: logprobs are over the tokens that the sampler left, from the column `sampling_mask`: ids that top-p
      or top-k kept.
    - images: attachments go through the model's own image processor."""
    columns: list[str] | None = None
    """Further columns of rollouts that your own class reads; the other services leave out columns that no input reads,
    without importing your class. Default None: none; the built-in ones read those that they are called after."""
    attachments: bool | None = None
    """Whether your own reads attachments. Default None: it does not; of the built-in ones only images does."""
    params: CodeParams = {}
    """Arguments of your own class, in addition to the model."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.input in MODEL_INPUTS:
            if self.columns is not None or self.attachments is not None or self.params:
                raise ConfigError(
                    f"training.inputs {self.input!r} is built in: leave columns, attachments and params out"
                )
        elif ":" not in self.input:
            raise ConfigError(
                f"training.inputs: unknown input {self.input!r}; built in are {', '.join(MODEL_INPUTS)}; your own is "
                "module:Class or path/to/file.py:Class"
            )
        elif not self.columns and not self.attachments:
            raise ConfigError(
                f"training.inputs {self.input!r}: say what it reads of rollouts, with columns = [...] or attachments = "
                "true"
            )

    @property
    def reads_columns(self) -> frozenset[str]:
        """The further columns that it reads."""
        return MODEL_INPUTS[self.input][0] if self.input in MODEL_INPUTS else frozenset(self.columns or ())

    @property
    def reads_attachments(self) -> bool:
        """Whether it reads attachments."""
        return MODEL_INPUTS[self.input][1] if self.input in MODEL_INPUTS else bool(self.attachments)


class WarmStartConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The supervised warm start of a fresh model."""

    steps: PositiveInt = 220
    """Optimizer steps. Default 220."""
    batch_size: PositiveInt = 64
    """Pairs drawn with replacement for each step. Default 64."""
    learning_rate: Positive = 3e-3
    """Peak AdamW step size. Default 3e-3."""
    slips: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of the answers in which two neighbouring characters are exchanged. Demonstrations with slips leave the
    policy unsure between the right answer and a near miss, as a base model is: format and task are known, and what the
    reward adds can be seen. 0 keeps all answers as they are. Default 0.5."""
    seed: int = 0
    """Seed of the slips and of the order of the pairs. Default 0."""


class TrainingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer."""

    name: str = "main"
    """Name of the trainer and of its ledger."""
    steps: PositiveInt | None = None
    """Optimizer steps after which the trainer stops. Default None: it goes on."""
    backend: str = THIS_MACHINE
    """What trains. torch: this machine. Extensions add others. Default torch."""
    learner: LearnerConfig = LearnerConfig()
    """The optimizer step."""
    device: Annotated[str, Meta(pattern="^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """What the trainer computes on: auto, cpu, cuda or cuda:N. auto: the first GPU that torch sees, else the CPU.
    Default auto."""
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    """Implementation of attention. auto: the model's default, which is sdpa (fused kernels) where it has it. Default
    auto."""
    deterministic: Literal["auto", "always", "never"] = "auto"
    """Whether the same weights and batches give the same bits every time on a GPU. auto: yes, unless an operation of
    the model has no such form, which the log names. always: such an operation is an error; with several ranks it is one
    in any case. never: faster with some models. Without, `lachesis reproduce` compares within a tolerance. Default
    auto."""
    lora: LoraConfig | None = None
    """Train low-rank adapters (the extra `lora`) instead of all weights. Inference servers get whole weights, the
    adapters merged in, and a checkpoint holds both. Default None: all weights are trained."""
    inputs: list[ModelInputConfig] = []
    """What the model is given of rollouts in addition to text tokens, each as { input = "routed_experts" }. A rollout
    that holds more than is named here is refused on arrival. Default: nothing more."""
    ranks: PositiveInt = 1
    """Processes of the trainer on this machine, each with a share of every batch and a GPU of its own, where there are
    GPUs. Under torchrun its number of processes counts. Default 1."""
    sharding: Literal["none", "full"] = "none"
    """With several ranks. none: each rank holds all weights (data parallel). full: weights, gradients and optimizer
    state are spread over the ranks (FSDP2). Default none."""
    collectives: Literal["auto", "gloo"] = "auto"
    """What several ranks exchange gradients over. auto: NCCL between GPUs, gloo between CPUs. gloo: over main memory,
    from GPUs as well; slower, but ranks may share a GPU. Not with sharding on GPUs. Default auto."""
    rank_timeout_s: Positive = 600.0
    """Seconds a rank may wait for another within a step, or at the start, until the trainer starts again. Default
    600."""
    threads: PositiveInt = 1
    """CPU threads of each rank; one thread gives the same bits every time. Default 1."""
    checkpoint_every: PositiveInt = 10
    """Optimizer steps between checkpoints. Default 10."""
    checkpoint_after_s: Positive = 60.0
    """Seconds after which there is one more checkpoint between two of these, since a kill repeats the steps after the
    newest one, and groups that are generated meanwhile may be too old to train on. If a checkpoint takes long to write,
    twenty times as long must have passed. Default 60."""
    checkpoints_kept: PositiveInt = 3
    """Newest checkpoints kept, of those at multiples of `checkpoint_every`; beside them the newest of all, and the one
    of the best held-out rate. Default 3."""
    drain_s: Positive = 60.0
    """Seconds the trainer has after SIGTERM to finish its step and write a checkpoint. A step that takes longer is
    given up with those since the last checkpoint, and all of them are done again at the next start: nothing but their
    time is lost. Set it to more than a step and a checkpoint take. Default 60."""
    weights_kept: PositiveInt = 8
    """Newest versions of the weights kept for inference servers. Default 8."""
    shuffle_advantages: bool = False
    """A control: advantages are shuffled within each group, so nothing can be learned. Default false."""
    sample_rows: Annotated[int, Meta(ge=0)] = 16
    """Samples that trackers get at each checkpoint, with their prompts and advantages. Default 16."""

    def __post_init__(self) -> None:
        if self.learner.compile and self.inputs:
            raise ConfigError(
                "training.learner.compile does not go with training.inputs, which change what layers compute: leave "
                "one of them out"
            )

    def without_extensions(self) -> TrainingConfig:
        """Return the pipeline's own of these settings, for a rank whose installation may lack an extension."""
        return TrainingConfig(**{name: getattr(self, name) for name in TrainingConfig.__struct_fields__})

    @property
    def reads(self) -> TrainerReads:
        """Name what the trainer reads in addition to text tokens."""
        columns = frozenset[str]().union(*(one.reads_columns for one in self.inputs))
        return TrainerReads(columns, any(one.reads_attachments for one in self.inputs))
