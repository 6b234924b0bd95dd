"""Checks that the byte budgets suffice for the history that a run must keep at once.

Pure, except that it looks at the model's files. A stream with only history that is still needed admits nothing more, so
a run that needs more than a budget stops for ever. The least it needs, with sequences as long as they may be and with
as few bytes as possible:

    ROLLOUTS  a window of normalization for each environment (its groups go once all of it is folded), the groups of a
              batch that waits to be complete, and room for one more group; trained batches are deleted, since a trainer
              that has to wait makes a checkpoint
    EVENTS    the annotations of those groups
    CALLS     the recorded calls of one group
    TEACHER   the logprobs of a batch that waits to be complete, and of one more group
"""

import math

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.retention.budget import MIN_BYTES_PER_TOKEN, ByteReservation
from lachesis.pipeline.weights.room import check_weights_room
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import CALLS, EVENTS, ROLLOUTS, TEACHER

__all__ = ["check_budgets", "least_bytes"]


def least_bytes(config: RunConfig) -> dict[str, tuple[int, str]]:
    """Return, by stream, the smallest budget in bytes with which the run cannot stall, and its parts.

    Only environments that generate here count: clients elsewhere say themselves how long their sequences are.
    """
    found = {ROLLOUTS: (0, ""), EVENTS: (0, ""), TEACHER: (0, ""), CALLS: (0, "")}
    batch = config.batching.batch_size
    own = {name: env for name, env in config.environments.items() if not env.is_foreign}
    # an environment may fall silent within a window, and the window then stays
    windows = sum(config.normalization_of(name).window * _group_bytes(env) for name, env in own.items())
    for name, env in own.items():
        groups = math.ceil(batch / env.samples)
        tokens = env.samples * env.longest_tokens
        lease = ByteReservation.of(config.flow, sequences=env.samples, bytes_=env.largest_bytes, tokens=tokens)
        sizes = f"of environments.{name}: {env.samples} samples of {env.longest_tokens} tokens"
        kept = (
            f"normalization.window = {config.normalization_of(name).window} groups of each environment, a batch of "
            f"{batch} sequences, and one more group {sizes}"
        )
        needs = {
            ROLLOUTS: (windows + groups * _group_bytes(env) + lease.rollouts, kept),
            EVENTS: (lease.events, f"the annotations of one group {sizes}"),
        }
        if env.record != "never":
            needs[CALLS] = env.calls_bytes, f"the recorded calls of one group {sizes}"
        if config.teacher.enabled:
            needs[TEACHER] = (
                (groups + 1) * lease.teacher,
                f"logprobs for a batch of {batch}, and one more group {sizes}",
            )
        for stream, (size, what) in needs.items():
            least = math.ceil(size / config.flow.close_at)
            if least > found[stream][0]:
                found[stream] = least, what
    return found


def _group_bytes(env: EnvironmentConfig) -> int:
    return MIN_BYTES_PER_TOKEN * env.samples * env.longest_tokens


def check_budgets(config: RunConfig) -> None:
    """Raise `ConfigError` if a budget is too small for the run, or too large for the run's own server.

    With a budget that is too small the run would stall for ever.
    """
    if config.nats is None:
        _check_own_server(config)
    check_weights_room(config.model, config.weights, config.streams.weights_bytes)
    for stream, (least, what) in least_bytes(config).items():
        budget = config.streams.budgets()[stream]
        if budget < least:
            raise ConfigError(
                f"streams.{stream.lower()}_bytes is {budget}, which cannot hold what must be kept at once ({what}), so "
                f"the run could stop for good: raise it to {least} at least, or make those figures smaller"
            )


def _check_own_server(config: RunConfig) -> None:
    most, total = config.server.max_file_bytes, config.streams.total_bytes()
    if config.streams.replicas > 1:
        raise ConfigError(
            f"streams.replicas is {config.streams.replicas}, but the run's own server is one: set it to 1, or name a "
            "cluster with nats.url"
        )
    if most is not None and most < total:
        raise ConfigError(
            f"server.max_file_bytes is {most}, but streams.*_bytes add up to {total}: raise it to that at least, leave "
            "it out, or lower the budgets"
        )
