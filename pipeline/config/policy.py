"""An operator's policy: which settings others may change, and within which bounds.

A policy is a TOML file, or the name of a preset, which an extension adds:

    preset = "rl"                     # optional: what is below adds to it
    others = "free"                   # settings that no rule names: free (the default) or locked

    [fields."training.steps"]
    locked = true                     # no session may change it
    value = 500                       # its value; default: that of the configuration

    [fields."batching.batch_size"]
    min = 16
    max = 512
    value = 128                       # unless it is changed

A `*` in a setting's path stands for any one part of it, such as an environment's name. Rules are checked against the
resulting values, so that no other way of writing a setting gets round them.

Under any policy, the settings that name code, programs and their arguments, files, models, addresses or parameters of
code are locked, whatever `others` says: they decide what this user's machine runs, reads or connects to. Numbers and
switches among such parameters, and built-in names where code may be named, are exempt. A rule with the setting's own
name in its path frees it:

    [fields."environments.*.params.level"]
    choices = ["easy", "hard"]

Their types say which settings these are (`common.paths`). So are the switches that let other users and processes of the
machine in, for example `shared_files`.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from lachesis.pipeline.common.paths import opens_run, reach_of
from lachesis.pipeline.common.secrets import masked
from lachesis.pipeline.common.small_files import read_small_text
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.toml_lines import NO_TOML
from lachesis.pipeline.extension import added, load_place
from lachesis.schemas.errors import ConfigError

__all__ = ["ConfigPolicy", "FieldRule", "load_policy", "presets"]

_BUILTIN = re.compile(r"[A-Za-z0-9_+@-]+")
"""What is no module, file or attribute: code of one's own is named with a colon."""


_CODE_PARAMS = frozenset({"place", "python"})
"""Parameters of kinds of environments that name what is run; a rule for all parameters does not free them."""


class FieldRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may become of one setting. `value`: what it is unless it is changed; UNSET: what the configuration says."""

    locked: bool = False
    value: Any = msgspec.UNSET
    min: float | None = None
    max: float | None = None
    choices: list[Any] | None = None

    def describe(self) -> str:
        """Return the values that are allowed, in words; empty where all are."""
        if self.choices is not None:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.min is not None and self.max is not None:
            return f"{self.min:g} to {self.max:g}"
        if self.min is not None:
            return f"{self.min:g} or more"
        return "" if self.max is None else f"{self.max:g} or less"

    def allows(self, value: Any) -> bool:
        """Whether a value is within the bounds."""
        if self.choices is not None:
            return value in self.choices
        if self.min is None and self.max is None:
            return True
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


class ConfigPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy. `fields`: rules by path of the setting; `names`: other names of settings, by which people know them.

    `ConfigPolicy()` is none at all: everything is free. A policy that was loaded has `others`.
    """

    preset: str | None = None
    others: Literal["free", "locked"] | None = None
    fields: dict[str, FieldRule] = {}
    names: dict[str, str] = {}

    def rule(self, path: str) -> FieldRule:
        """Return the rule of a setting: that of its own path, else the longest with a `*` that fits."""
        found = self._named_rule(path)
        return FieldRule(locked=self.others == "locked") if found is None else self.fields[found]

    def locks(self, path: str, old: Any, new: Any, *, table: str | None = None) -> str | None:
        """Return why a setting may not be changed from `old` to `new`, None if it may be changed.

        `table` is the setting of free form that it lies in: a rule of that counts where it has none of its own.
        """
        named = self._named_rule(path) or (self._named_rule(table) if table is not None else None)
        if named is not None and self.fields[named].locked:
            return "locked by the operator's policy"
        reached = reach_of(run_config_type(), path) if self.is_policy else None
        if reached is None or (_is_tame(old, reached[0]) and _is_tame(new, reached[0])):
            reached = None
        if reached is not None and (named is None or named.split(".")[reached[1] - 1] == "*"):
            return f"locked by the operator's policy, which has no rule by its name: it is for {reached[0]}"
        last = path.rpartition(".")[2]
        if self.is_policy and last in _CODE_PARAMS and ".params." in path and (named or "").rpartition(".")[2] != last:
            return "locked by the operator's policy, which has no rule by its name: it names code or a program"
        if self.is_policy and named != path and opens_run(run_config_type(), path):
            return "locked by the operator's policy, which has no rule by its name: it lets others in"
        return "locked by the operator's policy" if named is None and self.others == "locked" else None

    def _named_rule(self, path: str) -> str | None:
        if path in self.fields:
            return path
        return max((one for one in self.fields if "*" in one and _fits(one, path)), key=len, default=None)

    @property
    def is_policy(self) -> bool:
        """Whether there is a policy at all."""
        return self.others is not None or bool(self.fields)

    def values(self, environment: str) -> dict[str, Any]:
        """Return the values that the policy gives to settings; a `*` stands for the environment."""
        given = {path.replace("*", environment): rule.value for path, rule in self.fields.items()}
        return {path: value for path, value in given.items() if value is not msgspec.UNSET}

    def check(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Raise `ConfigError` where a setting was changed that is locked, or is out of its bounds.

        `before` and `after`: the values by path, without and with the changes.
        """
        for path in sorted(before.keys() | after.keys()):
            for place, old, new in _changes(path, before.get(path), after.get(path)):
                self._check_change(place, old, new, path)

    def _check_change(self, path: str, old: Any, new: Any, table: str) -> None:
        why = self.locks(path, old, new, table=table)
        if why is not None:
            raise ConfigError(f"{path}: {why}; it stays {masked(path, old)!r} and cannot be {masked(path, new)!r}")
        rule = self.rule(path if self._named_rule(path) is not None else table)
        if new is not None and not rule.allows(new):
            raise ConfigError(
                f"{path}: {masked(path, new)!r} is not allowed by the operator's policy: {rule.describe()}"
            )


def _is_tame(value: Any, reached: str) -> bool:
    """Whether a value leads nowhere: a number, a switch, none, or a built-in name where code may be named."""
    if isinstance(value, str):
        return reached == "code" and _BUILTIN.fullmatch(value) is not None
    return value is None or isinstance(value, bool | int | float)


def _changes(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs with its path, in the tables of free form each value by itself."""
    if old == new:
        return
    if isinstance(old or {}, dict) and isinstance(new or {}, dict) and (old or new):
        for key in sorted((old or {}).keys() | (new or {}).keys()):
            yield from _changes(f"{path}.{key}", (old or {}).get(key), (new or {}).get(key))
    else:
        yield path, old, new


def _fits(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), path) is not None


def presets() -> dict[str, ConfigPolicy]:
    """Return by name the policies that extensions add."""
    return {name: load_place(place) for name, place in added("policies").items()}


def load_policy(given: str) -> ConfigPolicy:
    """Return the policy in a file, or the preset of that name. Raises `ConfigError`."""
    known = presets()
    if given in known:
        return known[given]
    try:
        text = read_small_text(Path(given))
    except OSError as error:
        names = ", ".join(known) or "none"
        raise ConfigError(f"cannot read the policy {given}: {error.strerror}; presets: {names}") from error
    try:
        policy = msgspec.convert(tomllib.loads(text), ConfigPolicy)
    except (*NO_TOML, msgspec.ValidationError) as error:
        raise ConfigError(f"the policy {given}: {error}") from error
    policy = msgspec.structs.replace(policy, others=policy.others or "free")
    if policy.preset is None:
        return policy
    if policy.preset not in known:
        names = ", ".join(known) or "none"
        raise ConfigError(f"the policy {given}: no preset {policy.preset!r}; known: {names}")
    base = known[policy.preset]
    return msgspec.structs.replace(
        policy, fields={**base.fields, **policy.fields}, names={**base.names, **policy.names}
    )
