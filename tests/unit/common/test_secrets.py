"""What is taken out of everything that is shown."""

import re
import sys
from pathlib import Path

import pytest

from lachesis.pipeline.common import safe_text
from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.common.secrets import is_secret_name, masked, without_secrets
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
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
        ("nats://u:pa/s,s@h:1/x", "nats://***@h:1/x"),
        ("http://h:80/a@b", "http://h:80/a@b"),
        ("nats://u:p1@h1:4222,u:p2@h2:4222", "nats://***@h2:4222"),
        ("proxy me:k1@10.0.0.1:8 refused", "proxy ***@10.0.0.1:8 refused"),
        ("img:1.2@sha256:ab, kind a:B", "img:1.2@sha256:ab, kind a:B"),
        (
            "https://h/f?code=k1&X-Amz-Security-Token=k2&n=2&pat=4",
            "https://h/f?code=***&X-Amz-Security-Token=***&n=2&pat=***",
        ),
        ("Authorization: Bearer k1", "Authorization: Bearer ***"),
        ("Cookie: a=k1; b=k2", "Cookie: ***"),
        ("X-Auth-Token: k1, api_key: k2, an unknown token: x", "X-Auth-Token: ***, api_key: ***, an unknown token: x"),
        ("curl -u me:k1 https://h", "curl -u *** https://h"),
        ("password = 'k1 k2', pin=1", "password = '***', pin=1"),
        ("api_key='cut at the e", "api_key='***"),
        ('{\\"api_key\\": \\"k1 k2\\", \\"n\\": 1}', '{\\"api_key\\": \\"***\\", \\"n\\": 1}'),
        ("Server=x;User Id=y;Password=k1;", "Server=x;User Id=y;Password=***;"),
        ("set `gateway.needs_token = false`, or token = `k1`.", "set `gateway.needs_token = false`, or token = ***"),
        (
            "kv_tokens=1234567, user_tokens=7654321, key_pass=123456",
            "kv_tokens=1234567, user_tokens=7654321, key_pass=***",
        ),
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
        *(
            (name, True)
            for name in ("PAT", "github_pat", "pem", "access_key_id", "AWS_ACCESS_KEY_ID", "passphrase", "dsn")
        ),
        *(
            (name, True)
            for name in ("sas", "private_key", "cookie", "session", "session_id", "sessionKey", "webhook_url")
        ),
        *((name, True) for name in ("apikey1", "tokenA", "api_key_prod_eu", "openai_api_key_for_judge", "mypassword")),
        *((name, True) for name in ("service_account_json", "secret_id", "userToken", "oauth", "csrf_token", "hf_tok")),
        *(
            (name, True)
            for name in ("connectionString", "recovery_phrase", "id_rsa", "dbPass", "x-session-token", "totp")
        ),
        *(
            (name, False)
            for name in ("monkey_path", "pattern", "compact", "path", "patience", "session_timeout_s", "sessions")
        ),
        *(
            (name, False)
            for name in ("first_pass", "n_pass", "separator_token", "vocab_tokens", "turns_per_session", "seed")
        ),
        *(
            (name, False)
            for name in ("password_min_length", "secret_name", "auth_url", "session_length", "token_type", "pass")
        ),
        *(
            (name, False)
            for name in ("secretary", "author", "dissent", "pass_rate", "tokenizer_path", "passage", "item")
        ),
        *((name, False) for name in ("pass@1", "eval/pass@k", "prefill_tokens", "draft_token", "assistant_token")),
        *((name, False) for name in ("sort_key", "answer_key", "key", "bypass", "compass", "token_value_file")),
    ],
)
def test_what_a_name_says_of_its_value(name: str, secret: bool) -> None:
    assert is_secret_name(name) == secret


def test_the_name_that_a_person_gave_an_environment_says_nothing_of_its_settings() -> None:
    env = {"kind": "words.py:SecretWord", "params": {"api_key": "k"}}
    shown = {"kind": "words.py:SecretWord", "params": {"api_key": "***"}}
    for table in ("environments", "evaluation"):
        assert masked("", {table: {"secret_word": env}}) == {table: {"secret_word": shown}}
        assert masked(f"{table}.secret_word", env) == shown
    assert masked("", {"batching": {"mix": {"secret_word": 0.5}}}) == {"batching": {"mix": {"secret_word": 0.5}}}


def test_of_a_very_long_error_the_end_is_left_out_and_no_half_of_a_secret_shown() -> None:
    for place in range(8100, 8200, 7):
        text = error_text(ValueError(f"{'a ' * (place // 2)}nats://user:hunter2secret@h:1 {'b ' * 500_000}"))
        assert "hunter2" not in text
        assert "user" not in text
        assert len(text) < 8192
        assert text.startswith("ValueError: a a ")
        assert re.fullmatch(r".*\.\.\. \(\d{7} characters\)", text)


def test_all_that_a_secret_holds_is_one() -> None:
    given = {"credentials": {"user": "u", "keys": ["a", None]}, "headers": {"X-Api-Key": "k"}, "password": 1234}
    assert masked("", given) == {
        "credentials": {"user": "***", "keys": ["***", None]},
        "headers": {"X-Api-Key": "***"},
        "password": "***",
    }


@pytest.mark.parametrize(
    "text",
    [
        *("sk-proj-canary-abcdefghij", "sk-ant-api03-1", "sk-canary12", "npm_" + "a" * 36,
          "hf_abcDEF1234", "ghp_" + "a" * 36, "AKIAIOSFODNN7EXAMPLE"),
        *("ASIA" + "B" * 16, "glpat-" + "a" * 20, "sk_live_" + "a" * 24, "SG." + "a" * 22 + "." + "b" * 43),
        *("github_pat_" + "a" * 30, "eyJhbGciOiJI.eyJzdWIiOiIx.abc-_", "xoxb-12345-abcdef",
          "gsk_" + "a" * 40, "hvs." + "a" * 24),
        *("Bearer k1", "Basic dXNlcjpwYXNz", "Token a1", "SU" + "A" * 56, "AIza" + "a" * 35, "ya29.a0" + "a" * 20),
    ],
)  # fmt: skip
def test_the_form_of_a_key_under_an_innocent_name(text: str) -> None:
    assert masked("hint", {"note": [text]})["note"][0].split(" ")[-1] == "***"
    kept = "sk-learn, hf_hub, task-1234567890abcdefgh, Bearer of news, Basic math, eyJust kidding, npm_config_registry"
    assert masked("hint", kept) == kept
    assert masked("hint", "Basic math") == "Basic math"


@pytest.mark.parametrize("kind", ["PRIVATE KEY", "RSA PRIVATE KEY", "OPENSSH PRIVATE KEY", "PGP PRIVATE KEY BLOCK"])
@pytest.mark.parametrize("line", ["\n", "\\n", " "])
def test_a_private_key_is_masked_whole_or_cut(kind: str, line: str) -> None:
    begin, end = f"-----BEGIN {kind}-----", f"-----END {kind}-----"
    for text in (f"a {begin}{line}k1{line}k2{line}{end} b", f"{begin}{line}k1{line}k2"):
        shown = masked("hint", text)
        assert "k1" not in shown
        assert "k2" not in shown
        assert shown.endswith(f"{end} b") or end not in text


def test_where_else_a_secret_has_a_name() -> None:
    given = {
        "headers": [["Authorization", "k1"], ["Accept", "v"]],
        "lines": ["X-Api-Key: k1 k2", "Accept: v w"],
        "env": [{"name": "API_KEY", "value": "k1"}, {"key": "n", "value": "v"}],
        "command": ["serve", "--api-key", "k1", "--port", "1"],
        "deep": [[{"a": [{"pat": ["k1", ["k2"]]}]}], ("b",)],
        "https://u:k1@h": {"https://v"},
        "settings": '{"api_key": "k1", "n": 1}',
    }
    assert masked("params", given) == {
        "headers": [["Authorization", "***"], ["Accept", "v"]],
        "lines": ["X-Api-Key: ***", "Accept: v w"],
        "env": [{"name": "API_KEY", "value": "***"}, {"key": "n", "value": "v"}],
        "command": ["serve", "--api-key", "***", "--port", "1"],
        "deep": [[{"a": [{"pat": ["***", ["***"]]}]}], ["b"]],
        "https://***@h": ["https://v"],
        "settings": '{"api_key": "***", "n": 1}',
    }
    assert masked("environments.x.params.credentials.user", "u") == "***"
    assert masked("environments.credentials.samples", 4) == 4
    assert masked("", {"environments": {"auth": {"samples": 4}}}) == {"environments": {"auth": {"samples": 4}}}
    assert masked("", {"session": 3, "password": 3}) == {"session": 3, "password": "***"}


def test_each_secret_in_a_configuration_is_masked_wherever_a_text_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_text, "_HIDDEN", [])
    monkeypatch.setenv("DATABASE_URL", "postgres://me:variable-77@h/d")
    params = (
        "{headers=[['Authorization', 'Bearer pair-1234']], hint='sk-canary-12345678', u='https://h?sig=query-12%2B34', "
        "env=[{name='API_KEY', value='table-1234'}], session='evaluation', pin=87654321, password=12345678, "
        "command=['-x', '--token', 'option-1234'], u2='http://me:user:info-1@h'}"
    )
    load(run_config_type(), sets=["run=r", f"environments.x={{kind='a:B', params={params}}}"])
    said = "variable-77 pair-1234 12345678 query-12+34 table-1234 option-1234 user:info-1"
    assert set(without_secrets(said).split()) == {"***"}
    assert without_secrets("an evaluation, 87654321") == "an evaluation, 87654321"


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


@pytest.mark.parametrize(
    "part",
    [
        "a-",
        "--",
        "a_key-",
        "x='",
        "-Key: ",
        "?key",
        "://",
        "eyJaaaaaaaa.",
        "xai-a",
        "sk-a",
        "-----BEGIN PRIVATE KEY-----",
        "u:p@",
        "Bearer ",
        '{"api_key": "',
    ],
)
def test_a_long_text_is_read_at_once(part: str) -> None:
    assert without_secrets(part * (200_000 // len(part)))
