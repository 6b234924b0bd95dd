"""A package that adds a kind of environment, a rater, a service and a command: installed by pip, run under nkeys."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from integration.harness import RUN, Run
from integration.security.secured import Secured, auth_init

PACKAGE = Path(__file__).parents[2] / "examples" / "extension"
STEPS = 3
CONFIG = f"""
[environments.apples]
kind = "orchard"
params = {{ trees = 3 }}
samples = 4
max_new_tokens = 8
concurrency = 4
longest_tokens = 64

[evaluate]
held_out = 0

[[scoring.raters]]
rater = "ripeness"

[[scoring.raters]]
rater = "repetition"

[batching]
batch_size = 16

[training]
steps = {STEPS}

[orchard]
size = 500

[health]
act = "warn"  # what an untrained model writes would stop any run
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables with which Python finds the package, which is in no other environment than this one."""
    folder, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    for file in (*PACKAGE.glob("*.toml"), *PACKAGE.glob("*/*.py")):  # pip builds beside the source
        target = source / file.relative_to(PACKAGE)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", folder, source], check=True, capture_output=True)
    return {"PYTHONPATH": str(folder)}


def lachesis(environ: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lachesis", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, check=False)


def test_the_commands_list_what_the_package_adds(installed: dict[str, str]) -> None:
    assert "basket" in lachesis(installed, "--help").stdout
    assert "counts the groups that have been stored" in lachesis(installed, "run").stdout
    assert "orchard" in lachesis(installed, "env", "list").stdout
    shown = lachesis(installed, "config", "show").stdout
    assert "orchard.size = 1000" in shown
    assert "Groups that a basket holds" in shown
    schema = json.loads(lachesis(installed, "config", "schema").stdout)
    assert "orchard" in schema["$defs"]["RunConfig"]["properties"]
    wrong = lachesis(installed, "config", "show", "--set", "orchard.sise=3")
    assert "did you mean 'orchard.size'" in wrong.stderr
    small = lachesis(installed, "config", "show", "--set", "orchard.size=3")
    assert "a batch would not fit into the basket" in small.stderr


def test_without_the_package_its_settings_are_unknown() -> None:
    assert "unknown setting 'orchard'" in lachesis({}, "config", "show", "--set", "orchard.size=3").stderr


async def test_it_runs_with_the_keys_that_its_access_needs(
    installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [installed["PYTHONPATH"], os.getenv("PYTHONPATH")])))
    server_folder, folder = tmp_path / "server", tmp_path / "run"
    server_folder.mkdir()
    folder.mkdir()
    auth_init(server_folder, "--run", RUN, config=CONFIG)
    async with Secured(server_folder, RUN, tls=False) as server:
        assert (server.keys / "basket.nk").is_file()
        run = Run(folder, STEPS, server)
        run.config.write_text(CONFIG)
        run.start()
        with run:
            assert await run.wait(500) == 0, run.tail()
        assert "violation" not in server.log_path.read_text().lower()
        counted = json.loads(lachesis({}, "basket", *run.arguments).stdout)
    assert counted["groups"] >= STEPS * 4, "sixteen sequences a step, four a group"
