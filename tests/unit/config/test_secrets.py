"""What is taken out of everything that is shown."""

import sys
from pathlib import Path

import pytest

from lachesis.pipeline.common import safe_text
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.secrets import is_secret_name, masked, without_secrets
from lachesis.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nats://a:b@h:1,tls://t@h2", "nats://***@h:1,tls://***@h2"),
        ("nats://h:1", "nats://h:1"),
        ("nats://user:p@ss@h:1", "nats://***@h:1"),
        ("no answer of http://me:k3@h/v1 and nats://k4@h", "no answer of http://***@h/v1 and nats://***@h"),
        ("http://h/a@b", "http://h/a@b"),
        ("'http://h/v1?api_key=k1&n=2&sig=k2' failed", "'http://h/v1?api_key=***&n=2&sig=***' failed"),
        ("http://h/v1?n=2&turkey_club=3", "http://h/v1?n=2&turkey_club=3"),
        ("https://h/cb#access_token=k1;auth=k2", "https://h/cb#access_token=***;auth=***"),
        ("https://hooks.slack.com/services/T0/B0/k1 refused", "https://hooks.slack.com/services/*** refused"),
        ("Authorization: Bearer k1234567 was refused", "Authorization: Bearer *** was refused"),
        ("headers: {'authorization': 'Basic bTpr1234'}", "headers: {'authorization': 'Basic ***'}"),
        ("serve --api-key k1 --port 1 --token=k2", "serve --api-key *** --port 1 --token=***"),
        ("{'X-Api-Key': 'k1 k2', 'n': 'v'}", "{'X-Api-Key': '***', 'n': 'v'}"),
        ('{"password": "k1", "max_tokens": "3"}', '{"password": "***", "max_tokens": "3"}'),
        ("JUDGE_KEY=k1 python x, f(client_secret='k2')", "JUDGE_KEY=*** python x, f(client_secret='***')"),
        ("Ocp-Apim-Subscription-Key: k1", "Ocp-Apim-Subscription-Key: ***"),
        ("Authorization: k1 refused", "Authorization: *** refused"),
        ("Cookie: session=k1", "Cookie: ***"),
        ("token=3, password=None, sort_key=a, key='b'", "token=3, password=None, sort_key=a, key='b'"),
        ("incorrect key sk-abcdefghijklmnop0123", "incorrect key ***"),
        ("basic training, bearer of news, token ring", "basic training, bearer of news, token ring"),
        ("the per-token loss of a multi-token stop", "the per-token loss of a multi-token stop"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_values_by_their_name() -> None:
    given = {
        "api_key": "k",
        "judge": {"token": ["t"], "max_tokens": 3, "budget_tokens": 64, "user_tokens": ["t"]},
        "urls": ["http://k@h"],
        "password": None,
    }
    assert masked("params", given) == {
        "api_key": "***",
        "judge": {"token": ["***"], "max_tokens": 3, "budget_tokens": 64, "user_tokens": ["***"]},
        "urls": ["http://***@h"],
        "password": None,
    }


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("apiKey", "X-API-Key", "Authorization", "HF_TOKEN", "db_password", "clientSecret")),
        *((name, True) for name in ("Cookie", "params.headers.x-auth", "AWS_SECRET_ACCESS_KEY", "credentials")),
        *((name, False) for name in ("max_tokens", "stop_token", "cost_per_token", "token_file", "key_env", "monkey")),
        *((name, False) for name in ("tokens", "tokenizer", "longest_tokens", "api_key_env", "n_tokens")),
        *((name, False) for name in ("end_token", "think_token", "prompt_tokens")),
        *((name, True) for name in ("access_token", "hf_token", "tokens_secret")),
        *(
            (name, True)
            for name in ("judge_key", "OPENAI_KEY", "accountKey", "api_key_2", "token_v2", "private_key_pem")
        ),
        *(
            (name, True)
            for name in ("db_pass", "passcode", "jwt", "creds", "secret_value", "hmacKey", "private_key_pem")
        ),
        *((name, False) for name in ("sort_key", "answer_key", "key", "bypass", "compass", "token_value_file")),
    ],
)
def test_what_a_name_says_of_its_value(name: str, secret: bool) -> None:
    assert is_secret_name(name) == secret


def test_all_that_a_secret_holds_is_one() -> None:
    given = {"credentials": {"user": "u", "keys": ["a", None]}, "headers": {"X-Api-Key": "k"}, "password": 1234}
    assert masked("", given) == {
        "credentials": {"user": "***", "keys": ["***", None]},
        "headers": {"X-Api-Key": "***"},
        "password": "***",
    }


def test_a_secret_that_was_loaded_is_masked_wherever_a_text_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(safe_text, "_HIDDEN", [])
    monkeypatch.setenv("JUDGE_API_KEY", "variable-51c9")
    given = "environments.x={kind='a:B', params={api_key='param-8d2e', url='nats://me:userinfo-77@h'}}"
    load(run_config_type(), sets=["run=r", given])
    said = "param-8d2e! (userinfo-77), variable-51c9"
    assert without_secrets(said) == "***! (***), ***"
    safe_text.SafeOutput(sys.stdout).write(said)
    assert capsys.readouterr().out == "***! (***), ***"


def test_the_working_folder_is_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(safe_text, "_HIDDEN", [])
    monkeypatch.setenv("PWD", str(tmp_path))
    load(run_config_type(), sets=["run=r", "environments.x={kind='a:B', params={pwd='param-8d2e'}}"])
    assert without_secrets(f"{tmp_path}/past.jsonl: param-8d2e") == f"{tmp_path}/past.jsonl: ***"


def test_what_a_refused_setting_says() -> None:
    for text in ("environments.x.params.api_key=k3", "nats.token=k3", "nats.url=nats://k3@h", "nats=k3://k3@h"):
        with pytest.raises(ConfigError) as caught:
            load(run_config_type(), sets=[text, "unknown=1"])
        assert "k3@" not in str(caught.value)
        assert "=k3" not in str(caught.value)


@pytest.mark.parametrize("part", ["a-", "--", "a_key-", "x='", "-Key: ", "?key", "://", "eyJaaaaaaaa."])
def test_a_long_text_is_read_at_once(part: str) -> None:
    assert without_secrets(part * (200_000 // len(part)))
