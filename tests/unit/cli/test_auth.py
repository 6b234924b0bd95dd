"""`lachesis auth init`: what it writes, and what it leaves alone when it is repeated."""

import json
import stat
from pathlib import Path

import nkeys
import pytest

from lachesis.pipeline.access import OBSERVER, OPERATOR
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.extension import access_of
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.auth import run_auth_init, server_tls, show_auth
from lachesis.services.cli.options import Options
from lachesis.services.registry import services
from lachesis.services.run.permission_scope import scope_of


def init(folder: Path, run: str = "one", *sets: str, force: bool = False) -> None:
    run_auth_init(Options(run=run, sets=sets), folder, force=force, tls=None)


def seeds(folder: Path, run: str = "one") -> dict[str, str]:
    return {file.stem: file.read_text() for file in (folder / "auth" / run).iterdir()}


def test_one_key_for_each_service_and_for_people(tmp_path: Path) -> None:
    init(tmp_path)
    found = seeds(tmp_path)
    assert set(found) == {*services(), OPERATOR, OBSERVER} - {"environment"}
    assert len(set(found.values())) == len(found)
    account = (tmp_path / "auth" / "one.conf").read_text()
    for identity, seed in found.items():
        pair = nkeys.from_seed(bytearray(seed.strip().encode()))
        assert pair.public_key.decode() in account
        assert seed.strip() not in account, "public keys alone"
        file = tmp_path / "auth" / "one" / f"{identity}.nk"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "auth" / "one").stat().st_mode) == 0o700


def test_repeating_keeps_keys_and_renews_permissions(tmp_path: Path) -> None:
    init(tmp_path)
    before = seeds(tmp_path)
    (tmp_path / "auth" / "one" / "scorer.nk").unlink()
    (tmp_path / "auth" / "one" / "trainer.nk").chmod(0o644)  # as a copy may have left it
    init(tmp_path, "one", "environments.words.kind=reasoning_gym")
    after = seeds(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"scorer"}
    assert "environment-words" in (tmp_path / "auth" / "one.conf").read_text()
    assert stat.S_IMODE((tmp_path / "auth" / "one" / "trainer.nk").stat().st_mode) == 0o600
    init(tmp_path, "one", "environments.words.kind=reasoning_gym", force=True)
    assert not set(after.values()) & set(seeds(tmp_path).values())


def test_a_key_that_nobody_has_any_more_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(tmp_path, "one", "environments.words.kind=reasoning_gym")
    assert "opens nothing" not in capsys.readouterr().out
    init(tmp_path)
    assert "environment-words.nk opens nothing any more" in capsys.readouterr().out


@pytest.mark.extension
def test_each_environment_has_a_key_and_the_gateway_those_that_come_through_it(tmp_path: Path) -> None:
    init(tmp_path, "one", "environments.words.kind=reasoning_gym", "environments.far.kind=gateway")
    assert {"environment-words", "environment-far"} <= set(seeds(tmp_path))
    config = RunConfig(run="one", environments={"words": EnvironmentConfig(kind="reasoning_gym"),
                                                "far": EnvironmentConfig(kind="gateway")})  # fmt: skip
    assert access_of(scope_of(config))["gateway"].writes == ("rl.rollout.one.far", "rl.blob.rollout.one.far.*")


def test_nobody_is_in_the_account_that_holds_the_streams(tmp_path: Path) -> None:
    init(tmp_path)
    accounts = (tmp_path / "auth" / "one.conf").read_text().split("\n\n")
    streams, *others = [account for account in accounts if account.strip()]
    assert streams.startswith('"lachesis-one" {')
    assert "jetstream: enabled" in streams
    assert "users" not in streams
    assert "imports" not in streams
    assert len(others) == len(seeds(tmp_path))
    assert all("jetstream" not in account and account.count("nkey:") == 1 for account in others)


def test_each_run_has_its_accounts(tmp_path: Path) -> None:
    init(tmp_path)
    one = seeds(tmp_path)
    init(tmp_path, "two")
    assert seeds(tmp_path) == one
    text = (tmp_path / "auth.conf").read_text()
    assert 'include "auth/one.conf"' in text
    assert 'include "auth/two.conf"' in text
    assert "tls" not in text


def test_a_file_that_holds_no_seed_is_named(tmp_path: Path) -> None:
    init(tmp_path)
    torn = seeds(tmp_path)["scorer"].strip()[:-4]
    for content in ("", "nonsense", "SUAN" + "A" * 54, torn, torn + "AAAA"):
        (tmp_path / "auth" / "one" / "scorer.nk").write_text(content)
        with pytest.raises(ConfigError, match=r"scorer\.nk holds no nkey seed of a user"):
            init(tmp_path)


def test_tls_stays(tmp_path: Path) -> None:
    tls = server_tls(tmp_path / "c", tmp_path / "k", None)
    run_auth_init(Options(run="one"), tmp_path, force=False, tls=tls)
    init(tmp_path, "two")
    assert 'include "tls.conf"' in (tmp_path / "auth.conf").read_text()
    assert "verify" not in (tmp_path / "tls.conf").read_text()
    with pytest.raises(ConfigError, match="both --cert and --key"):
        server_tls(tmp_path / "c", None, None)


def test_the_scope_holds_every_environment_once() -> None:
    words = EnvironmentConfig(kind="reasoning_gym")
    config = RunConfig(run="one", environments={"a": words, "b": words}, evaluation={"b": words, "c": words})
    assert scope_of(config).environments == ("a", "b"), "held-out tasks are the evaluator's"


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    show_auth(Options(run="one"), as_json=False)
    table = capsys.readouterr().out
    assert "rl.score.one.live.*" in table
    assert "rl.heartbeat.one.scorer" not in table, "what all may do says nothing"
    show_auth(Options(run="one"), as_json=True)
    allowed = json.loads(capsys.readouterr().out)
    assert "rl.score.one.live.*" in allowed["scorer"]["publish"]
    assert "_INBOX_scorer.>" in allowed["scorer"]["subscribe"]
