"""An operator's policy: rules by path and pattern, held against the values that come out."""

from pathlib import Path

import pytest

from lachesis.pipeline.config.policy import PRESETS, ConfigPolicy, FieldRule, load_policy
from lachesis.schemas.errors import ConfigError


def test_the_nearest_rule_counts() -> None:
    policy = ConfigPolicy(
        fields={
            "environments.*.samples": FieldRule(max=8),
            "environments.sums.samples": FieldRule(locked=True),
            "training.steps": FieldRule(min=1, max=4),
        }
    )
    assert policy.rule("environments.sums.samples").locked
    assert policy.rule("environments.words.samples").max == 8
    assert policy.rule("environments.words.inner.samples") == FieldRule()
    assert policy.rule("anything") == FieldRule()
    assert ConfigPolicy(others="locked").rule("anything").locked


@pytest.mark.parametrize(
    ("rule", "value", "says"),
    [
        (FieldRule(min=1, max=4), 5, "a.b: 5 is not allowed by the operator's policy: 1 to 4"),
        (FieldRule(min=1), 0, "1 or more"),
        (FieldRule(max=1), 2, "1 or less"),
        (FieldRule(max=2), True, "2 or less"),
        (FieldRule(max=1), "2", "1 or less"),
        (FieldRule(choices=["x", "y"]), "z", "one of x, y"),
        (FieldRule(locked=True), 2, "a.b: locked by the operator's policy; it stays 1.5 and cannot be 2"),
    ],
)
def test_a_change_that_is_not_allowed_is_refused(rule: FieldRule, value: object, says: str) -> None:
    policy = ConfigPolicy(fields={"a.b": rule})
    policy.check({"a.b": 1, "c": 1}, {"a.b": 1, "c": 2})
    with pytest.raises(ConfigError, match=says):
        policy.check({"a.b": 1.5}, {"a.b": value})


def test_what_was_removed_counts_as_changed() -> None:
    with pytest.raises(ConfigError, match=r"a\.b: locked"):
        ConfigPolicy(fields={"a.b": FieldRule(locked=True)}).check({"a.b": 1}, {})


def test_a_file_adds_to_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('preset = "rl"\n[fields."training.steps"]\nmin = 1\nmax = 9\n')
    policy = load_policy(str(file))
    assert policy.rule("training.steps") == FieldRule(min=1, max=9)
    assert policy.values("sums")["environments.sums.longest_tokens"] == 8192
    assert policy.names["group_size"] == "environments.*.samples"
    assert load_policy("rl") is PRESETS["rl"]


def test_the_preset_has_the_defaults_that_users_of_such_tools_know() -> None:
    policy, names = PRESETS["rl"], PRESETS["rl"].names
    given = policy.values("sums")
    locked = {name for name, path in names.items() if policy.rule(path).locked}
    assert locked == {
        "tokenizer_name", "rollout_server_url", "max_token_length", "max_num_workers", "total_steps", "lora_rank",
        "learning_rate", "max_token_trainer_length",
    }  # fmt: skip
    values = {name: given.get(path.replace("*", "sums")) for name, path in names.items()}
    assert {name: value for name, value in values.items() if value is not None} == {
        "max_token_length": 8192, "max_num_workers": 2048, "total_steps": 2500, "lora_rank": 32, "learning_rate": 4e-5,
        "max_token_trainer_length": 9000, "group_size": 16, "batch_size": 128,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("preset = 1", "preset"),
        ('preset = "nope"', "no preset 'nope'; known: rl"),
        ("[fields.a]\nlock = true", "lock"),
        ("= 1", "policy.toml"),
    ],
)
def test_a_bad_file_says_why(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_policy(str(file))
    with pytest.raises(ConfigError, match="presets: rl"):
        load_policy(str(tmp_path / "nosuch.toml"))
