import json

import pytest

from lachesis.pipeline.config.load import ConfigSetting
from lachesis.services.cli.config_command import config_schema, masked, show_settings
from lachesis.services.cli.options import Options


def test_secrets_are_masked_wherever_they_are() -> None:
    row = ConfigSetting(
        "environments.x.params", {"api_key": "k1", "deep": [{"password": "k2"}], "max_tokens": 3}, "f", ""
    )
    assert masked(row).value == {"api_key": "***", "deep": [{"password": "***"}], "max_tokens": 3}
    row = ConfigSetting("nats.url", "nats://me:k3@h:1,nats://k4@h:2", "--set nats.url=nats://me:k3@h:1", "")
    assert masked(row).value == "nats://***@h:1,nats://***@h:2"
    assert masked(row).origin == "--set nats.url"
    assert masked(ConfigSetting("x.max_new_tokens", 5, "default", "")).value == 5
    assert masked(ConfigSetting("flow.teacher_bytes_per_token", 4, "default", "")).value == 4
    assert masked(ConfigSetting("nats.token_file", "/etc/t", "default", "")).value == "/etc/t"
    assert masked(ConfigSetting("x.token", None, "default", "")).value is None


def test_show_prints_value_origin_and_meaning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACHESIS_SEED", "7")
    show_settings(Options(sets=("revision=v2",)), as_json=True)
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["seed"]["value"], rows["seed"]["origin"]) == (7, "$LACHESIS_SEED")
    assert (rows["revision"]["value"], rows["revision"]["origin"]) == ("v2", "--set revision")
    assert "random" in rows["seed"]["description"]
    show_settings(Options(), as_json=False)
    assert "streams.rollouts_bytes" in capsys.readouterr().out


def test_every_setting_says_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    show_settings(Options(nats="nats://h:1"), as_json=True)
    assert [row["path"] for row in json.loads(capsys.readouterr().out) if not row["description"]] == []


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    config_schema()
    assert json.loads(capsys.readouterr().out)["$defs"]["RunConfig"]["properties"]["seed"]["default"] == 0
