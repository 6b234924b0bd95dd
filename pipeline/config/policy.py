"""An operator's policy: which settings others may change, and within which bounds.

A policy is a TOML file, or the name of a preset:

    preset = "rl"                     # optional: what is below adds to it
    others = "free"                   # settings that no rule names: free (the default) or locked

    [fields."training.steps"]
    locked = true                     # nobody may change it
    value = 500                       # what it is; left out: what the configuration says

    [fields."batching.batch_size"]
    min = 16
    max = 512
    value = 128                       # where nobody changed it

A `*` in a setting's path stands for any one part of it, such as an environment's name. Rules are held against the
values that come out, so that no other way of writing a setting gets round them.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from lachesis.pipeline.small_files import read_small_text
from lachesis.schemas.errors import ConfigError

__all__ = ["PRESETS", "ConfigPolicy", "FieldRule", "load_policy"]


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
    """A policy. `fields`: rules by path of the setting; `names`: other names of settings, by which people know them."""

    preset: str | None = None
    others: Literal["free", "locked"] = "free"
    fields: dict[str, FieldRule] = {}
    names: dict[str, str] = {}

    def rule(self, path: str) -> FieldRule:
        """Return the rule of a setting: that of its own path, else the longest with a `*` that fits."""
        found = self.fields.get(path)
        if found is None:
            fitting = [one for one in self.fields if "*" in one and _fits(one, path)]
            found = self.fields[max(fitting, key=len)] if fitting else None
        return found if found is not None else FieldRule(locked=self.others == "locked")

    def values(self, environment: str) -> dict[str, Any]:
        """Return the values that the policy gives to settings; a `*` stands for the environment."""
        given = {path.replace("*", environment): rule.value for path, rule in self.fields.items()}
        return {path: value for path, value in given.items() if value is not msgspec.UNSET}

    def check(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Raise `ConfigError` where a setting was changed that is locked, or is out of its bounds.

        `before` and `after`: the values by path, without and with the changes.
        """
        for path in sorted(before.keys() | after.keys()):
            rule, value = self.rule(path), after.get(path)
            if value == before.get(path):
                continue
            if rule.locked:
                raise ConfigError(
                    f"{path}: locked by the operator's policy; it stays {before.get(path)!r} and cannot be {value!r}"
                )
            if value is not None and not rule.allows(value):
                raise ConfigError(f"{path}: {value!r} is not allowed by the operator's policy: {rule.describe()}")


def _fits(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), path) is not None


def _locked(value: Any = msgspec.UNSET) -> FieldRule:
    return FieldRule(locked=True, value=value)


PRESETS: dict[str, ConfigPolicy] = {
    "rl": ConfigPolicy(
        preset="rl",
        fields={
            "model": _locked(),
            "gateway.host": _locked(),
            "gateway.port": _locked(),
            "environments.*.longest_tokens": _locked(8192),
            "environments.*.concurrency": _locked(2048),
            "training.steps": _locked(2500),
            "training.lora.rank": _locked(32),
            "training.learner.learning_rate": _locked(4e-5),
            "training.learner.max_tokens_per_microbatch": _locked(9000),
            "environments.*.samples": FieldRule(value=16),
            "batching.batch_size": FieldRule(value=128),
        },
        names={
            "tokenizer_name": "model",
            "rollout_server_url": "gateway.port",
            "max_token_length": "environments.*.longest_tokens",
            "max_num_workers": "environments.*.concurrency",
            "total_steps": "training.steps",
            "lora_rank": "training.lora.rank",
            "learning_rate": "training.learner.learning_rate",
            "max_token_trainer_length": "training.learner.max_tokens_per_microbatch",
            "group_size": "environments.*.samples",
            "batch_size": "batching.batch_size",
            "steps_per_eval": "evaluate.every_steps",
            "wandb_project": "training.wandb.project",
            "wandb_name": "run",
        },
    )
}
"""`rl`: the settings that users of Atropos' agent tools know, with those tools' values."""


def load_policy(given: str) -> ConfigPolicy:
    """Return the policy in a file, or the preset of that name. Raises `ConfigError`."""
    if given in PRESETS:
        return PRESETS[given]
    try:
        text = read_small_text(Path(given))
    except OSError as error:
        known = ", ".join(PRESETS)
        raise ConfigError(f"cannot read the policy {given}: {error.strerror}; presets: {known}") from error
    try:
        policy = msgspec.convert(tomllib.loads(text), ConfigPolicy)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"the policy {given}: {error}") from error
    if policy.preset is None:
        return policy
    if policy.preset not in PRESETS:
        raise ConfigError(f"the policy {given}: no preset {policy.preset!r}; known: {', '.join(PRESETS)}")
    base = PRESETS[policy.preset]
    return msgspec.structs.replace(
        policy, fields={**base.fields, **policy.fields}, names={**base.names, **policy.names}
    )
