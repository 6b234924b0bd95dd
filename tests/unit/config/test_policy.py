"""An operator's policy: rules by path and pattern, held against the values that come out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from lachesis.pipeline.common.paths import OpenSwitch, opens_run, reach_of
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.policy import ConfigPolicy, FieldRule, load_policy, presets
from lachesis.schemas.errors import ConfigError

pytestmark = pytest.mark.hostile


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


SENSITIVE = [
    ("scoring.raters", [{"rater": "pydoc:pipepager"}]),
    ("scoring.promotable", [{"rater": "pydoc:pipepager"}]),
    ("environments.sums.scoring.raters", [{"rater": "code", "params": {"required": []}}]),
    ("environments.sums.kind", "/home/me/evil.py:Evil"),
    ("environments.sums.params", {"path": "/etc/passwd"}),
    ("environments.sums.params", {"command": ["sh"]}),
    ("evaluation.sums.params", {"url": "http://evil"}),
    ("gateway.needs_token", False),
    ("shared_files", True),
    ("inference.policy.python", "/bin/sh"),
    ("inference.policy.args", ["--chat-template=/etc/passwd"]),
    ("inference.policy.url", "http://evil"),
    ("inference.policy.host", "evil.example"),
    ("inference.policy.key_file", "/etc/passwd"),
    ("nats.url", "nats://evil"),
    ("nats.ca_file", "evil.pem"),
    ("model", "evil/model"),
    ("folder", "/home"),
    ("training.inputs", [{"input": "os:system"}]),
    ("training.mlflow.uri", "http://evil"),
    ("training.tinker.url", "http://evil"),
    ("telemetry.endpoint", "http://evil"),
    ("advantage.estimator", "os:system"),
    ("advantage.params", {"f": "x"}),
    ("curriculum.strategy", "evil.py:Evil"),
    ("health.webhook_file", "/etc/passwd"),
    ("gateway.token_file", "/etc/passwd"),
    ("services.alive_file", "/etc/passwd"),
]


@pytest.mark.extension
@pytest.mark.parametrize(("path", "value"), SENSITIVE)
@pytest.mark.parametrize("given", ["rl", "empty", "wide", "bounded"])
def test_what_names_code_files_programs_or_addresses_is_locked_under_any_policy(
    tmp_path: Path, given: str, path: str, value: object
) -> None:
    texts = {
        "empty": "",
        "wide": "".join(f'[fields."{".".join("*" * n)}"]\nlocked = false\n' for n in range(1, 6)),
        "bounded": 'others = "free"\n[fields."training.steps"]\nmax = 9\n',
    }
    file = tmp_path / "policy.toml"
    file.write_text(texts.get(given, ""))
    policy = load_policy(given if given == "rl" else str(file))
    with pytest.raises(ConfigError, match=rf"^{path}.*: locked by the operator's policy"):
        policy.check({}, {path: value})
    with pytest.raises(ConfigError, match=rf"^{path}.*: locked by the operator's policy"):
        policy.check({path: value}, {})
    ConfigPolicy().check({}, {path: value})


@pytest.mark.extension
def test_every_setting_that_names_any_is_known_by_its_type() -> None:
    """A text of the configuration that is not among these is a name or a choice, which leads nowhere."""
    harmless = {
        "RunConfig.run", "RunConfig.revision", "RunConfig.recipe",
        "ConnectionConfig.inbox_prefix", "ConnectionConfig.user", "ConnectionConfig.domain",
        "WandbConfig.entity", "EnvironmentConfig.success_rater",
        "RaterConfig.name", "FormatMarker.marker", "RewardConfig.format_markers", "TeacherConfig.environments",
        "TeacherConfig.prompt",
        "HealthConfig.halts", "HealthConfig.off", "TrainingConfig.name", "TrainingConfig.device",
        "TinkerConfig.base_model", "WandbConfig.project", "MlflowConfig.experiment", "ModelInputConfig.columns",
        "InferenceConfig.device", "RunConfig.model_exceptions", "EnvironmentConfig.chat_template_kwargs",
            "ServicesConfig.together",
    }  # fmt: skip
    assert set(_unmarked(run_config_type(), set())) == harmless


def _unmarked(kind: Any, seen: set[Any]) -> Iterator[str]:
    for hint in (kind, *get_args(kind)):
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint not in seen:
            seen.add(hint)
            hints = get_type_hints(hint, include_extras=True)
            for name in hint.__struct_fields__:
                is_text = "str" in str(hints[name]).replace("dict[str,", "") or "Any" in str(hints[name])
                structs = any(isinstance(arg, type) and issubclass(arg, msgspec.Struct) for arg in _leaves(hints[name]))
                is_names = "Literal" in str(hints[name]) or (structs and name != "format_markers")
                if is_text and not is_names and reach_of(hint, name) is None:
                    yield f"{hint.__name__}.{name}"
                yield from _unmarked(hints[name], seen)
        elif hint is not kind:
            yield from _unmarked(hint, seen)


def _leaves(hint: Any) -> list[Any]:
    return [hint, *(leaf for arg in get_args(hint) for leaf in _leaves(arg))]


@pytest.mark.extension
@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("advantage.estimator", "centred", "rloo"),
        ("curriculum.strategy", "irt", "sec"),
        ("environments.sums.params", {"largest": 9}, {"largest": 99, "hard": True}),
        ("environments.sums.samples", 1, 2),
        ("training.wandb.project", None, "mine"),
        ("batching.mix", {"sums": 0.5}, {"sums": 0.6}),
    ],
)
def test_numbers_switches_and_built_in_names_stay_free(path: str, old: object, new: object) -> None:
    load_policy("rl").check({path: old}, {path: new})


def test_a_rule_by_its_name_frees_such_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(
        '[fields."environments.*.params.level"]\nchoices = ["easy", "hard"]\n'
        '[fields."scoring.raters"]\nlocked = false\n[fields."inference.*.url"]\nchoices = ["http://ours"]\n'
    )
    policy = load_policy(str(file))
    before = {"environments.sums.params": {"level": "easy"}}
    policy.check(before, {"environments.sums.params": {"level": "hard"}})
    policy.check({}, {"scoring.raters": [{"rater": "a:b"}], "inference.eval.url": "http://ours"})
    for changed in ({"level": "other"}, {"level": "easy", "path": "/etc"}):
        with pytest.raises(ConfigError, match=r"environments\.sums\.params\.(level|path): "):
            policy.check(before, {"environments.sums.params": changed})
    with pytest.raises(ConfigError, match="is not allowed by the operator's policy: one of http://ours"):
        policy.check({}, {"inference.eval.url": "http://evil"})


def test_a_rule_of_a_table_counts_for_all_that_is_in_it() -> None:
    policy = ConfigPolicy(fields={"batching.mix": FieldRule(locked=True), "a.params": FieldRule(max=9)})
    with pytest.raises(ConfigError, match=r"batching\.mix\.sums: locked"):
        policy.check({"batching.mix": {"sums": 0.5}}, {"batching.mix": {"sums": 0.6}})
    with pytest.raises(ConfigError, match=r"a\.params\.n: 10 is not allowed"):
        policy.check({"a.params": {"n": 1}}, {"a.params": {"n": 10}})


@pytest.mark.extension
def test_a_refusal_shows_no_secret() -> None:
    before = {"nats.url": "nats://me:hidden@h", "environments.sums.params": {"api_key": "hidden"}}
    for path, new in (("nats.url", "nats://me:hidden@other"), ("environments.sums.params", {"api_key": "hidden2"})):
        with pytest.raises(ConfigError, match="locked") as refused:
            load_policy("rl").check(before, {**before, path: new})
        assert "hidden" not in str(refused.value)
    bounded = ConfigPolicy(fields={"nats.url": FieldRule(choices=["nats://h"])})
    with pytest.raises(ConfigError, match="is not allowed") as refused:
        bounded.check({}, {"nats.url": "nats://me:hidden@h"})
    assert "hidden" not in str(refused.value)


def test_what_was_removed_counts_as_changed() -> None:
    with pytest.raises(ConfigError, match=r"a\.b: locked"):
        ConfigPolicy(fields={"a.b": FieldRule(locked=True)}).check({"a.b": 1}, {})


@pytest.mark.extension
def test_a_file_adds_to_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('preset = "rl"\n[fields."training.steps"]\nmin = 1\nmax = 9\n')
    policy = load_policy(str(file))
    assert policy.rule("training.steps") == FieldRule(min=1, max=9)
    assert policy.values("sums")["environments.sums.longest_tokens"] == 8192
    assert policy.names["group_size"] == "environments.*.samples"
    assert load_policy("rl") is presets()["rl"]


@pytest.mark.extension
def test_the_preset_has_the_defaults_that_users_of_such_tools_know() -> None:
    policy = presets()["rl"]
    names = policy.names
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


@pytest.mark.extension
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


@pytest.mark.parametrize("name", ["place", "python"])
def test_a_rule_for_all_parameters_frees_none_that_names_what_is_run(name: str) -> None:
    path = f"environments.words.params.{name}"
    free = FieldRule()
    assert ConfigPolicy(fields={"environments.*.params.*": free}).locks(path, None, "x.py") is not None
    assert ConfigPolicy(fields={"environments.*.params": free}).locks(path, None, "x.py") is not None
    assert ConfigPolicy(fields={f"environments.*.params.{name}": free}).locks(path, None, "x.py") is None
    assert ConfigPolicy(fields={"environments.*.params.*": free}).locks(f"{path}s", None, 4) is None


class OwnSection(msgspec.Struct):
    """A section as an extension of others would bring it."""

    shared: OpenSwitch = False
    quiet: bool = False


class OwnRun(msgspec.Struct):
    own: OwnSection | msgspec.UnsetType = msgspec.UNSET
    named: dict[str, OwnSection] = {}


def test_the_type_of_a_setting_says_that_it_lets_others_in() -> None:
    paths = ["own.shared", "own.quiet", "named.x.shared", "own.no_such", "own", "nothing.at.all"]
    assert [path for path in paths if opens_run(OwnRun, path)] == ["own.shared", "named.x.shared"]


@pytest.mark.parametrize("value", ["[" * 5000, "1" * 5000, "x"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, value: str) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(f"others = {value}")
    with pytest.raises(ConfigError, match=r"the policy .*policy\.toml: "):
        load_policy(str(file))
