"""Configuration of the teacher stage."""

from collections.abc import Collection
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lachesis.pipeline.teacher.prompt import PromptTemplate
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import check_name

__all__ = ["NAMED_TEACHER", "TeacherConfig"]

NAMED_TEACHER = "teacher-"
"""How the roles of further teachers begin."""

PositiveInt = Annotated[int, Meta(ge=1)]


class TeacherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The teacher stage: logprobs of a second model for every rollout."""

    enabled: bool = False
    """Whether the run has a teacher. Default false."""
    concurrency: PositiveInt = 4
    """Groups that one replica scores at once. Default 4."""
    environments: dict[str, str] = {}
    """Teacher of each environment: the role of an inference server, teacher, teacher-NAME, or policy: the policy
    itself, with its newest weights. Default empty: the server of [inference.teacher] is the teacher of all, as of those
    not named here."""
    prompt: str | None = None
    """What the teacher reads in place of the user's message, for self-distillation: text with {question}, that message,
    and fields of the rollout's task, {answer} say. The sampled tokens after it are the recorded ones. A group whose
    task lacks a field has no teacher. Default None: the teacher reads what the policy read."""
    top_k: Annotated[int, Meta(ge=0, le=100)] = 0
    """Likeliest tokens of the teacher stored at each position, with the probability of all others, for
    training.learner.loss.teacher_kl. vLLM gives 20 unless --max-logprobs says more. Default 0."""
    tokenizers: Literal["same", "align"] = "same"
    """What becomes of a teacher with another tokenizer than the policy's. same: its groups are refused, by the hash of
    vocabulary and chat template. align: it reads the same text under its own chat template, and tokens of both that end
    at the same bytes are compared by their summed logprobs. Default same."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of what is stored of one token."""
        return 4 + (6 * self.top_k + 4 if self.top_k else 0) + (8 if self.tokenizers == "align" else 0)

    def role_of(self, env: str) -> str:
        """Return the role of the server that is the teacher of an environment."""
        return self.environments.get(env, "teacher")

    def roles(self, environments: Collection[str]) -> list[str]:
        """Return the roles of the teachers of `environments`, which are those of the run."""
        return list(dict.fromkeys(map(self.role_of, environments))) or ["teacher"]

    def check(self, environments: Collection[str], roles: Collection[str], *, kl: str, reserved: int) -> None:
        """Raise `ConfigError` where this does not fit the rest of the configuration.

        `roles`: of the inference servers that have settings. `kl`: the loss's teacher_kl. `reserved`: bytes of TEACHER
        that a lease reserves for each token.
        """
        self._check_roles(environments, roles)
        if self.prompt is not None:
            PromptTemplate(self.prompt)
            if self.tokenizers == "align":
                raise ConfigError(
                    'teacher.prompt is set, and teacher.tokenizers is "align": a teacher with a prompt of its own must '
                    "have the policy's tokenizer. Leave one of them out"
                )
        if kl != "sampled" and self.tokenizers == "align":
            raise ConfigError(
                f'training.learner.loss.teacher_kl is "{kl}", which compares tokens of one vocabulary, and '
                'teacher.tokenizers is "align": set one of them to its default'
            )
        if kl != "sampled" and not self.top_k:
            raise ConfigError(
                f'training.learner.loss.teacher_kl is "{kl}", but teacher.top_k is 0: no likeliest tokens would come'
            )
        if self.enabled and reserved < self.bytes_per_token and (self.top_k or self.tokenizers == "align"):
            raise ConfigError(
                f"flow.teacher_bytes_per_token is {reserved}, but what [teacher] asks for takes {self.bytes_per_token} "
                "bytes a token: set it to that"
            )

    def _check_roles(self, environments: Collection[str], roles: Collection[str]) -> None:
        for env, role in self.environments.items():
            check_name(f"teacher.environments.{env}", role)
            if env not in environments:
                known = ", ".join(environments) or "none"
                raise ConfigError(f"teacher.environments.{env}: there is no such environment; there are: {known}")
            if role not in {"teacher", "policy"} and not role.startswith(NAMED_TEACHER):
                raise ConfigError(f"teacher.environments.{env} is {role!r}; use teacher, teacher-NAME or policy")
            if role not in {"teacher", "policy"} and role not in roles:
                raise ConfigError(f"teacher.environments.{env} is {role}, but there is no [inference.{role}]")
        for role in roles:
            if role.startswith(NAMED_TEACHER) and role not in self.environments.values():
                raise ConfigError(f"inference.{role}: no environment has this teacher; see teacher.environments")
