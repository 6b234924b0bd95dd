"""The options that select history, declared once for `replay` and `export`.

`with_selection` gives a command `--env`, `--subject`, `--since` and so on in place of its second parameter, a
`SelectionOptions`.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lachesis.pipeline.config.run import RunConfig
    from lachesis.schemas.replay import Selection

__all__ = ["SelectionOptions", "with_selection"]

_PANEL = "Selection"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOptions:
    """The selection of the command line; None or nothing selects all."""

    envs: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    groups: Path | None = None

    def selection(self, config: "RunConfig") -> "tuple[Selection, Collection[str] | None]":
        """Return the selection that `config` and the options describe, and the groups if they are listed.

        Raises `ConfigError`.
        """
        from lachesis.pipeline.offline.replay.logic.rollout_filter import groups_digest
        from lachesis.schemas.errors import ConfigError
        from lachesis.schemas.replay import Selection

        listed = None if self.groups is None else _read_groups(self.groups)
        for low, high, what in (
            (self.since, self.until, "since"), (self.first_seq, self.last_seq, "from-seq"),
            (self.min_step, self.max_step, "min-step"),
        ):  # fmt: skip
            if low is not None and high is not None and low > high:  # type: ignore[operator]
                raise ConfigError(f"--{what} {low} lies behind the end, {high}: nothing can be selected")
        return Selection(
            envs=self._environments(config),
            first_seq=self.first_seq,
            last_seq=self.last_seq,
            since_ns=_unix_ns(self.since),
            until_ns=_unix_ns(self.until),
            min_step=self.min_step,
            max_step=self.max_step,
            groups=groups_digest(listed) if listed is not None else None,
        ), listed

    def _environments(self, config: "RunConfig") -> list[str]:
        """Return the environments named, sorted; with subject filters those of them whose rollouts a filter takes."""
        from lachesis.pipeline.bus.routing import matches
        from lachesis.schemas import subjects
        from lachesis.schemas.errors import ConfigError

        unknown = sorted(set(self.envs) - set(config.environments))
        if unknown:
            raise ConfigError(f"there is no environment {unknown[0]!r}; there are {', '.join(config.environments)}")
        named = sorted(set(self.envs or config.environments))
        if not self.subjects:
            return named
        for pattern in self.subjects:
            if not any(matches(pattern, subjects.rollout(config.run, env)) for env in named):
                raise ConfigError(
                    f"--subject {pattern!r} takes none of the rollouts; they are stored on "
                    f"{', '.join(subjects.rollout(config.run, env) for env in named)}"
                )
        return [
            env
            for env in named
            if any(matches(pattern, subjects.rollout(config.run, env)) for pattern in self.subjects)
        ]


def _read_groups(path: Path) -> frozenset[str]:
    from lachesis.pipeline.common.small_files import read_small_text
    from lachesis.pipeline.offline.replay.logic.rollout_filter import group_list
    from lachesis.schemas.errors import ConfigError

    try:
        return group_list(read_small_text(path))
    except OSError as error:
        raise ConfigError(f"--groups {path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"--groups {path}: {error}") from error


def _unix_ns(time: datetime | None) -> int | None:
    """A time without a zone is UTC."""
    if time is None:
        return None
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1e6) * 1000


def _option(kind: Any, *names: str, **settings: Any) -> Any:
    return Annotated[kind, typer.Option(*names, rich_help_panel=_PANEL, **settings)]


_OPTIONS: dict[str, tuple[str, Any]] = {
    "env": ("envs", _option(list[str] | None, help="Environment. Repeatable. Default: all.")),
    "subject": (
        "subjects",
        _option(list[str] | None, metavar="FILTER", help="NATS filter, rl.rollout.RUN.ENV. Repeatable."),
    ),
    "since": (
        "since",
        _option(datetime | None, help="Only rollouts stored then or later, UTC: 2026-01-31 or 2026-01-31T23:59:00."),
    ),
    "until": ("until", _option(datetime | None, help="Only rollouts stored then or earlier, UTC.")),
    "from_seq": ("first_seq", _option(int | None, min=1, help="First sequence of ROLLOUTS.")),
    "to_seq": ("last_seq", _option(int | None, min=1, help="Last sequence of ROLLOUTS.")),
    "min_step": ("min_step", _option(int | None, min=0, help="Only rollouts of this policy step or a later one.")),
    "max_step": ("max_step", _option(int | None, min=0, help="Only rollouts of this policy step or an earlier one.")),
    "groups": ("groups", _option(Path | None, metavar="FILE", help="Only these groups: a file with one id a line.")),
}
"""By parameter: the field of `SelectionOptions`, and the option."""


def with_selection(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command`, whose second parameter is a `SelectionOptions`, its options instead."""

    @wraps(command)
    def wrapper(options: Any, **given: Any) -> None:
        values = {field: given.pop(name) for name, (field, _) in _OPTIONS.items()}
        for several in ("envs", "subjects"):
            values[several] = tuple(values[several] or ())
        command(options, SelectionOptions(**values), **given)

    first, _, *own = inspect.signature(command).parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, (_, option) in _OPTIONS.items()
    ]
    wrapper.__signature__ = inspect.Signature([first, *own, *added])  # type: ignore[attr-defined]
    return wrapper
