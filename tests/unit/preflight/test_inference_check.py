"""`lachesis doctor` on inference servers: whether they answer, and whether they take the key of this folder."""

from pathlib import Path

import pytest
from contract.inference_servers import KEY, reference

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.inference.directory import register
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.services.preflight import server

pytestmark = pytest.mark.outside


async def found(url: str, folder: Path, **settings: str) -> tuple[str, str]:
    config = RunConfig(run="r", folder=str(folder), inference={"policy": InferenceConfig(**settings)})
    async with MemoryBus() as bus:
        await register(bus, "r", "policy", url)
        (finding,) = [finding async for finding in server._inference(bus, config)]
    return finding.level, finding.text


async def test_a_server_is_asked_with_the_key_of_this_folder(tmp_path: Path) -> None:
    for name, text in (("right", KEY), ("wrong", "other"), ("empty", "")):
        (tmp_path / name).write_text(text)
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    with reference(policy, tmp_path, tmp_path) as url:
        for settings, level, words in (
            ({"key_file": str(tmp_path / "right")}, "ok", f"at {url}, with the key that {tmp_path}/right holds"),
            ({"key_file": str(tmp_path / "wrong")}, "fail", f"refuses the key in {tmp_path}/wrong"),
            ({"key_file": str(tmp_path / "empty")}, "fail", "is empty"),
            ({"host": "10.0.0.7"}, "fail", "refuses us without a key"),
            ({}, "fail", "refuses us without a key"),
        ):  # fmt: skip
            said = await found(url, tmp_path / "run", **settings)
            assert (said[0].lower(), words in said[1]) == (level, True), said
    assert not (tmp_path / "run" / "inference").exists(), "a check makes no key"
    assert (await found(url, tmp_path / "run"))[0].lower() == "warn"


async def test_a_server_named_by_its_address_is_looked_for_before_the_first_start(tmp_path: Path) -> None:
    away = InferenceConfig(url="http://127.0.0.1:9")
    config = RunConfig(run="r", folder=str(tmp_path / "run"), inference={"policy": away, "eval": InferenceConfig()})
    first, named = await server.check_server(config)
    assert first.level == "OK"
    assert (named.check, named.level) == ("inference.policy", "WARN")
    assert named.text == "does not answer at http://127.0.0.1:9; until it does, what needs it waits"
    assert "inference.policy.url" in named.mend
