"""Makes from a run's configuration what the inference servers of a role, and their clients, need.

Services and extensions share it.
"""

from pathlib import Path

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.inference.directory import RoleAccess
from lachesis.pipeline.inference.settings import ServerSettings

__all__ = ["key_path", "role_access", "sampling_key", "server_settings"]


def role_access(config: RunConfig, role: str) -> RoleAccess:
    """Return how clients reach the servers of a role."""
    settings = config.role(role)
    if settings.key_file is not None:
        return RoleAccess(role, settings.url, Path(settings.key_file), key_is_given=True)
    return RoleAccess(role, settings.url, config.path / "inference" / f"{role}.key" if settings.needs_key else None)


def key_path(config: RunConfig, role: str) -> Path | None:
    """Return the file of the key for sampling from the servers of `role`; None if they need none."""
    return role_access(config, role).key_file


def sampling_key(config: RunConfig, role: str) -> str | None:
    """Return the key for sampling from the servers of `role`; None if they need none.

    It is made if there is none yet. Raises `StartupError` when its file cannot be read or written, or holds no key.
    """
    return role_access(config, role).key()


def server_settings(config: RunConfig, role: str) -> ServerSettings:
    """Return the settings of the server of a role."""
    settings = config.role(role)
    is_policy, is_shared = role == "policy", config.weights.transport == "shared_memory"
    foreign = is_policy and any(env.is_foreign for env in config.environments.values())
    return ServerSettings(
        role=role,
        config=settings,
        access=role_access(config, role),
        folder=config.path,
        trainer=config.training.name,
        model=settings.model or config.model,
        own_tokenizer=settings.tokenizer if settings.tokenizer or settings.model else config.tokenizer,
        tokenizer=config.tokenizer_of(role),
        chat_template=config.chat_template_of(role),
        model_exceptions=tuple(config.model_exceptions),
        shares_weights=is_shared,
        max_staleness=config.batching.max_staleness,
        expected_temperature=config.trained_temperature if foreign else None,
        routed_experts=is_policy and "routed_experts" in config.training.reads.columns,
    )
