"""A run says when its model is another one than at its first start."""

from pathlib import Path

import msgspec
import pytest

from lachesis.pipeline.config.run import RunConfig
from lachesis.services.preflight import first_model
from lachesis.services.preflight.first_model import find_changed_model, note_model


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(3 << 20))
    (tmp_path / "run").mkdir()
    return RunConfig(run="r", model=str(model), folder=str(tmp_path / "run"))


def test_the_same_model_under_another_path_is_the_same(config: RunConfig, tmp_path: Path) -> None:
    assert not list(find_changed_model(config)), "nothing is noted before the first start"
    note_model(config)
    assert not list(find_changed_model(config))
    (tmp_path / "model").rename(tmp_path / "moved")
    assert not list(find_changed_model(msgspec.structs.replace(config, model=str(tmp_path / "moved"))))


@pytest.mark.parametrize("place", [0, -1])
def test_other_weights_of_equal_length_are_named(config: RunConfig, tmp_path: Path, place: int) -> None:
    note_model(config)
    data = bytearray(3 << 20)
    data[place] = 1
    (tmp_path / "model" / "model.safetensors").write_bytes(data)
    note_model(config)
    (finding,) = find_changed_model(config)
    assert finding.level == "WARN"
    assert "is not the model that run r began with" in finding.text
    assert "model.safetensors differ" in finding.text
    assert "goes on from its newest checkpoint" in finding.text


def test_another_name_of_the_hub_is_told(config: RunConfig) -> None:
    hub = msgspec.structs.replace(config, model="org/one")
    note_model(hub)
    assert not list(find_changed_model(hub))
    assert list(find_changed_model(msgspec.structs.replace(config, model="org/two")))


def test_a_model_that_cannot_be_read_is_left_to_what_loads_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_model(config)

    def refuse(_: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(first_model, "_digest", refuse)
    assert not list(find_changed_model(config))
