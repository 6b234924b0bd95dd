import re
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import absent_settings, load, settings
from lachesis.schemas.errors import ConfigError


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    batch_size: Annotated[int, Meta(ge=1)] = 8
    """Sequences in
    a batch."""
    names: list[str] = []
    params: dict[str, int] = {}


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    batch_size: Annotated[int, Meta(ge=1)] = 8


class Config(msgspec.Struct, frozen=True, kw_only=True):
    run: str = "demo"
    batching: Inner = Inner()
    maybe: Inner | None = None
    envs: dict[str, Inner] = {}
    many: list[Strict] = []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('run = "r1"\n[batching]\nbatch_size = 16\n[envs.words]\nbatch_size = 3\n')
    return path


def test_later_sources_win_and_are_remembered(file: Path) -> None:
    loaded = load(Config, file=file, environ={"LACHESIS_BATCHING__BATCH_SIZE": "32"}, sets=["run=r2"])
    assert loaded.config == Config(run="r2", batching=Inner(batch_size=32), envs={"words": Inner(batch_size=3)})
    origins = {row.path: row.origin for row in settings(loaded)}
    assert origins["run"] == "--set run=r2"
    assert origins["batching.batch_size"] == "$LACHESIS_BATCHING__BATCH_SIZE"
    assert origins["envs.words.batch_size"] == str(file)
    assert origins["batching.names"] == "default"


def test_a_table_of_any_keys_comes_from_where_they_were_set() -> None:
    rows = {row.path: row for row in settings(load(Config, sets=["batching.params.largest=9"]))}
    assert rows["batching.params"].value == {"largest": 9}
    assert rows["batching.params"].origin == "--set batching.params.largest=9"


def test_settings_carry_their_descriptions(file: Path) -> None:
    rows = {row.path: row for row in settings(load(Config, file=file))}
    assert rows["batching.batch_size"].description == "Sequences in a batch."
    assert rows["batching.batch_size"].value == 16


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["batching.batchsize=3"], "did you mean 'batching.batch_size'"),
        (["envs.words.batch_sise=3"], "did you mean 'envs.words.batch_size'"),
        (["maybe.batch_sise=3"], "did you mean 'maybe.batch_size'"),
        (["zzzz=1"], "known: batching, envs, many, maybe, run"),
        (["batching.batch_size=many"], "batching.batch_size: expected `int`, got `str` (from --set"),
        (["batching.batch_size=0"], "batching.batch_size: expected `int` >= 1"),
        (["batching.names=[1]"], "batching.names[0]: expected `str`, got `int` (from --set"),
        (["batching"], "write it as key.path=value"),
    ],
)
def test_a_wrong_setting_says_what_where_and_how_to_mend_it(sets: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Config, sets=sets)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ('run = "r"\n\n[batching]\nbatch_size = "many"\n', 4, "batching.batch_size: expected `int`, got `str`"),
        ("# batch_size\nbatching.batch_size = 0\n", 2, "batching.batch_size: expected `int` >= 1"),
        ('batching = { names = [], params = { a = "x" } }\n', 1, "batching.params.a: expected `int`"),
        ('[batching]\nnames = [\n  "a",\n  3,\n  "b"]\n', 4, "batching.names[1]: expected `str`, got `int`"),
        ('[envs.a]\nbatch_size = 1\n[envs."b.c"]\nbatch_size = ""\n', 4, "envs.b.c.batch_size: expected `int`"),
        ("[[many]]\nbatch_size = 1\n\n[[many]]\nbatch_size = 0\n", 5, "many[1].batch_size: expected `int` >= 1"),
        ('run = """\n[batching]\nbatch_size = 0\n"""\n[batching]\nbatch_size = 0\n', 6, "batching.batch_size: exp"),
        ("[envs.a]\r\n[batching]\r\nbatch_size = true\r\n", 3, "batching.batch_size: expected `int`"),
        ("[[many]]\nbatch_size = 1\nbatch_sise = 2\n", 3, "many[0]: object contains unknown field"),
        ("[batching]\n\nbatch_sise = 0\n", 3, "unknown setting 'batching.batch_sise'"),
        ("run = 'a'\n[envs.b]\nbatch_size = 1\n[envs.a.nmes]\nx = 1\n", 4, "unknown setting 'envs.a.nmes'"),
        ("\nzzzz = 1\n", 2, "unknown setting 'zzzz'"),
    ],
)
def test_an_error_names_the_line_of_the_file(tmp_path: Path, text: str, line: int, expected: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        load(Config, file=file)
    text, place = str(caught.value), f"{file}, line {line}"
    assert expected in text
    assert text.startswith(f"{place}: ") or text.endswith(f" (from {place})")


def test_a_wrong_value_of_an_option_is_not_looked_for_in_the_file(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Config, file=file, sets=["envs.words.batch_size=0"])
    assert str(caught.value).endswith("(from --set envs.words.batch_size=0)")


def test_an_unknown_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="LACHESIS_BATCHING__SIZE"):
        load(Config, environ={"LACHESIS_BATCHING__SIZE": "1", "OTHER": "x"})


def test_values_may_be_lists_or_bare_strings() -> None:
    loaded = load(Config, sets=['batching.names=["a", "b"]', "run=plain-name"])
    assert loaded.config.batching.names == ["a", "b"]
    assert loaded.config.run == "plain-name"


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load(Config, file=tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("run = ")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(Config, file=bad)


@pytest.mark.parametrize("text", ["run = " + "9" * 5000, "run = " + "[" * 100_000, "run = '\\x00"])
def test_a_file_that_python_itself_chokes_on_is_refused(tmp_path: Path, text: str) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text(text)
    with pytest.raises(ConfigError, match="is not TOML"):
        load(Config, file=bad)


def test_a_table_replaces_a_value_that_an_earlier_source_put_in_its_place() -> None:
    loaded = load(Config, sets=["batching=1", "batching.batch_size=64"])
    assert loaded.config.batching.batch_size == 64


def test_lines_behind_a_value_are_no_settings_that_pass_unseen() -> None:
    assert load(Config, environ={"LACHESIS_RUN": "1\n[other]\nx = 2"}).config.run == "1\n[other]\nx = 2"


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_settings_are_finite_numbers(value: str) -> None:
    with pytest.raises(ConfigError, match=r"batching.score_deadline_s: .*\(from --set"):
        load(run_config_type(), sets=[f"batching.score_deadline_s={value}"])


def test_a_path_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="deeper than"):
        load(run_config_type(), environ={"LACHESIS_ENVIRONMENTS__A__PARAMS" + "__B" * 5000: "1"})


_LOST = "environments.a.lost_samples"
_ESTIMATOR = "environments.a.advantage.estimator"
_TYPOS = {
    "mode=trian": "mode: invalid enum value 'trian'; did you mean 'train'? (from --set mode=trian)",
    "telemetry.protocol=udp": "telemetry.protocol: invalid enum value 'udp'; known: grpc, http/protobuf",
    f"{_LOST}=dorp": f"{_LOST}: invalid enum value 'dorp'; did you mean 'drop'? (from --set {_LOST}=dorp)",
    f"{_ESTIMATOR}=rlo": "environments.a.advantage: advantage.estimator 'rlo' is neither "
    f"module:name nor path/to/file.py:name nor a built-in one; did you mean 'rloo'? (from --set {_ESTIMATOR}=rlo)",
    "environments.b.kind=3": "environments.b.kind: expected `str`, got `int` (from --set environments.b.kind=3)",
    'scoring.raters=[{ waight = 2, rater = "a" }]': "object contains unknown field `waight`; did you mean 'weight'?",
}
"""An assignment, and the error it ends in."""


@pytest.mark.parametrize("setting", _TYPOS)
def test_a_word_that_is_none_of_the_few_is_answered_with_the_nearest(setting: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(_TYPOS[setting])):
        load(run_config_type(), sets=["environments.a.kind=x:Y", setting])


_SERVICE = {
    "SERVICE_HOST": "10.0.0.1",
    "SERVICE_PORT": "8080",
    "SERVICE_PORT_HTTP": "8080",
    "PORT": "tcp://10.0.0.1:8080",
    "PORT_8080_TCP": "tcp://10.0.0.1:8080",
    "PORT_8080_TCP_PROTO": "tcp",
    "PORT_8080_TCP_PORT": "8080",
    "PORT_8080_TCP_ADDR": "10.0.0.1",
}


@pytest.mark.parametrize("service", ["LACHESIS", "LACHESIS_GATEWAY", "LACHESIS_RUN"])
@pytest.mark.parametrize("only", [None, "PORT", "SERVICE_HOST"])
def test_variables_that_kubernetes_sets_for_a_service_are_no_settings(service: str, only: str | None) -> None:
    given = {f"{service}_{name}": value for name, value in _SERVICE.items() if only in {None, name}}
    assert load(Config, environ=given | {"LACHESIS_RUN": "r3"}).config.run == "r3"


@pytest.mark.parametrize(
    ("name", "value"), [("LACHESIS_PORT", "8080"), ("LACHESIS_SERVICE_PORT", "80"), ("LACHESIS_HOST", "10.0.0.1")]
)
def test_a_variable_that_only_looks_like_one_of_kubernetes_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"\${name}: unknown setting"):
        load(Config, environ={name: value})


def test_a_setting_beside_a_service_of_the_same_beginning_counts() -> None:
    given = {"LACHESIS_PORT": "tcp://10.0.0.1:8080", "LACHESIS_BATCHING__BATCH_SIZE": "32"}
    assert load(Config, environ=given).config.batching.batch_size == 32


@pytest.mark.extension
def test_settings_of_tables_that_there_are_not_are_listed_once_for_each_kind_of_table() -> None:
    bare = {row.path: row for row in absent_settings(load(run_config_type()).config)}
    assert bare["inference.ROLE.kind"].value == "reference"
    assert bare["inference.ROLE.engine.max_prefill_tokens"].value == 8192
    assert bare["training.lora.rank"].description.startswith("Rank of each adapter")
    assert bare["environments.NAME.kind"].origin == "needed, once its table is there"
    assert {"nats.url", "training.mlflow.uri", "scoring.raters[N].rater"} <= bare.keys()
    assert not [path for path in bare if path.startswith(("evaluation.", "environments.NAME.scoring."))], (
        "shown already"
    )
    sets = ["inference.eval.kind=vllm", "training.lora.rank=4", "environments.sums.kind=x"]
    there = absent_settings(load(run_config_type(), sets=sets).config)
    assert not [row for row in there if row.path.startswith(("inference.", "training.lora.", "environments.NAME."))]
