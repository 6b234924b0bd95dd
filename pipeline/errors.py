"""The exception tree. Three kinds of failure are kept apart everywhere:

infrastructure (retry, never a reward), data (dead letter, never a retry) and programming or configuration errors
(stop the process with a message that says how to fix it). "Valid, but do not train on it" is an outcome, not an error.
"""

from lachesis.schemas.errors import ConfigError, DataError, LachesisError, SchemaError

__all__ = [
    "AccessError",
    "ApiKeyError",
    "BusClosedError",
    "CheckpointError",
    "DamagedError",
    "EnvironmentCodeError",
    "FencedError",
    "GroupDeclinedError",
    "HistoryLostError",
    "InfrastructureError",
    "LanguageModelError",
    "LedgerError",
    "NotFoundError",
    "NotResumableError",
    "OutOfMemoryError",
    "PermissionDeniedError",
    "PolicyMovedError",
    "PromptTooLongError",
    "RankLostError",
    "RaterUnavailable",
    "ServerAwayError",
    "SettingsChangedError",
    "StartupError",
    "StoredValueError",
    "StreamFullError",
    "StreamMissingError",
    "ToolError",
    "UnreadableAnswerError",
    "UnservedError",
    "UnsupportedError",
    "WrongServerError",
    "leaves",
]


class StartupError(LachesisError, RuntimeError):
    """Raised when a service cannot start (no server, wrong version, port taken, missing package) and what to do."""


class AccessError(LachesisError, RuntimeError):
    """Raised when the server refuses this process a subject or its credentials; the text names what was refused."""


class PermissionDeniedError(AccessError):
    """Raised when the server refuses one subject to a process whose credentials it takes: a person has to mend that."""


class ApiKeyError(AccessError):
    """Raised when a server over HTTP refuses the key or token of a request (401, 403)."""


class InfrastructureError(LachesisError, RuntimeError):
    """Raised when a dependency failed (timeout, connection, 5xx). It says nothing about the rollout: retry."""


class RaterUnavailable(InfrastructureError):  # noqa: N818 - the public name: a state of affairs more than an error
    """Raised by a rater when what it depends on is away: the group waits and is rated again, for as long as it takes.

    Connection errors, time limits and the statuses 408, 429 and 5xx of the usual clients are taken for it anyway.
    """


class ServerAwayError(InfrastructureError):
    """Raised when a server could not be reached, or broke off, for a reason that no answer of a model can have caused:
    no process listens, the connection was lost, or it said that it is busy (429, 502, 503, 504)."""


class GroupTakenError(InfrastructureError):
    """Raised where a process may work on a group no more: its lease has ended, and another one may go on with it."""


class NotResumableError(InfrastructureError):
    """Raised when a conversation cannot go on from its record; nothing that the model said is the cause."""


class UnreadableAnswerError(InfrastructureError):
    """Raised when a server answers what its protocol has no place for: HTML, half of an answer, numbers that cannot be.

    As while it is away, work waits until it answers properly again; the text says which server answered what.
    """


class WrongServerError(InfrastructureError):
    """Raised when another server than the run's answers: of another tokenizer, model, engine or policy."""


class UnservedError(InfrastructureError):
    """Raised when no process serves the subject of a request, which is known at once, without waiting."""


class BusClosedError(InfrastructureError):
    """Raised when the bus was closed, or the connection lost for good, while a call was waiting."""


class StreamFullError(InfrastructureError):
    """Raised when a stream is at its byte budget and refuses messages; retry after history was trimmed."""


class NotFoundError(LachesisError, LookupError):
    """Raised when a requested message, key, stream or consumer does not exist."""


class StreamMissingError(NotFoundError):
    """Raised when a stream of the run that is read or written does not exist: never made, or deleted under the run."""


class FencedError(LachesisError, RuntimeError):
    """Raised when another writer has taken over this single-writer subject; the process must stop writing and exit."""


class PromptTooLongError(DataError):
    """Raised when a prompt leaves no room for an answer in the model's context: no other try will help."""


class StoredValueError(SchemaError):
    """Raised when a service cannot go on from what a key of the run's bucket, or its copy in a file, holds; the text
    says how to go on."""


class UnsupportedError(DataError):
    """Raised when an event is valid but holds something this consumer cannot use (branches, images, ...)."""


class LedgerError(LachesisError, RuntimeError):
    """Raised when the ledger's chain does not hold: a gap, a broken hash, a position behind a checkpoint."""


class HistoryLostError(LedgerError):
    """Raised when the broker's stream ends before, or holds something else than, what was read or stored there."""


class CheckpointError(LachesisError, RuntimeError):
    """Raised when a checkpoint is missing, incomplete or belongs to another run."""


class RankLostError(LachesisError, RuntimeError):
    """Raised when another rank of a trainer was killed, stands still or cannot be reached: all of them start again."""


class DamagedError(LedgerError):
    """Raised when the broker counts a message that it cannot read: its store is damaged. It is not "there is none"."""


class OutOfMemoryError(LachesisError, MemoryError):
    """Raised when a step does not fit into memory, however it is divided; the text says what is missing and helps."""


class SettingsChangedError(ConfigError):
    """Raised when a setting was changed that what is stored of the run was made with; the text says how to go on."""


class EnvironmentCodeError(LachesisError, RuntimeError):
    """Raised when an environment's own code failed or broke a rule of the SDK; the text names environment and place."""


class GroupDeclinedError(EnvironmentCodeError):
    """Raised when an environment decides to make no group of a task: no fault, and nothing to train on."""


class ToolError(LachesisError, ValueError):
    """Raised by a tool to show the model what was wrong with its call; the model reads the text and goes on."""


class LanguageModelError(LachesisError, RuntimeError):
    """Raised when the model that names languages cannot be loaded; the text says why, and how to mend it."""


class PolicyMovedError(InfrastructureError):
    """Raised when an evaluation pinned to one policy version got samples from another; evaluate again."""


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors that a task group wrapped, however deep, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]
