"""The keys of a run's key-value bucket, in one place. Only an extension spells its own ones out.

A key's first part says what it holds; permissions are granted by it.
"""

from typing import Final

__all__ = [
    "INFERENCE_ROLES",
    "MARKS",
    "POLICY",
    "RETENTION",
    "STORE",
    "SUPERVISOR",
    "attempts",
    "curriculum",
    "epoch",
    "fixed_samples",
    "held_out",
    "inference",
    "prompts",
    "resume",
    "webhook",
]

INFERENCE_ROLES: Final = ("policy", "teacher", "eval")
"""What inference servers are for: sampling rollouts, a teacher's logprobs, held-out tasks. Further teachers, if a run
has several, are teacher-NAME."""
POLICY: Final = "policy"
"""The newest policy, and where its weights are."""
RETENTION: Final = "retention"
"""Which history is held back from trimming, and how far it may have been trimmed."""
MARKS: Final = "marks"
"""How far each stream goes, so that one which lost its end is noticed."""
STORE: Final = "store"
"""Which streams the run has had on this server, so that one that is gone is missed."""
SUPERVISOR: Final = "supervisor"
"""Who runs the run's services."""


def curriculum(revision: str, env: str = "*") -> str:
    """The newest weights of an environment's tasks."""
    return f"curriculum.{revision}.{env}"


def epoch(env: str = "*") -> str:
    """How far an environment that shows every item once an epoch has come."""
    return f"epoch.{env}"


def fixed_samples(revision: str, env: str = "*") -> str:
    """Samples of an environment that raters rate again and again, so that a rater that changes is noticed."""
    return f"fixed_samples.{revision}.{env}"


def held_out(env: str = "*") -> str:
    """Which of an environment's tasks may be held out: none that was ever drawn."""
    return f"held_out.{env}"


def prompts(env: str = "*") -> str:
    """How an environment's prompts were made at its last start."""
    return f"prompts.{env}"


def attempts(durable: str, seq: int | str = "*") -> str:
    """How often handling the rollout at `seq` has ended a process of the stage with this durable consumer."""
    return f"attempts.{durable}.{seq}"


def inference(role: str) -> str:
    """Where the inference server of a role listens."""
    return f"inference.{role}"


def resume(env: str = "*") -> str:
    """A request that an environment go on after a health check stopped it."""
    return f"resume.{env}"


def webhook(revision: str = "*") -> str:
    """How far the alerts of a revision were sent to the webhook."""
    return f"webhook.{revision}"
