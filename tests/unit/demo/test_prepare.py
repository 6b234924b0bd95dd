from pathlib import Path

import msgspec
import pytest

from lachesis.pipeline.trainer.config import WarmStartConfig
from lachesis.services.demo import prepare as module
from lachesis.services.demo.prepare import cache_folder, cache_key, check_disjoint, prepare
from lachesis.services.demo.settings import DemoOptions, demo_config

PAIRS = [("backward: sun", "nus"), ("backward: moon", "noom")]
CODE = {"model.py": b"a", "tokenizer.py": b"b"}
VERSIONS = {"torch": "2.13.0"}


def key(**changes: object) -> str:
    given = {"pairs": PAIRS, "settings": WarmStartConfig(), "threads": 1, "code": CODE, "versions": VERSIONS}
    merged = given | changes
    return cache_key(merged.pop("pairs"), merged.pop("settings"), **merged)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"pairs": PAIRS[:1]},
        {"pairs": PAIRS[::-1]},
        {"settings": WarmStartConfig(seed=1)},
        {"settings": WarmStartConfig(slips=0.1)},
        {"threads": 2},
        {"code": {**CODE, "model.py": b"c"}},
        {"versions": {"torch": "2.14.0"}},
    ],
)
def test_whatever_decides_the_model_changes_the_key(change: dict[str, object]) -> None:
    assert key(**change) != key()


def test_the_key_is_a_function_of_its_inputs() -> None:
    assert key(code=dict(reversed(CODE.items()))) == key()


def test_a_shared_prompt_is_refused() -> None:
    check_disjoint(a=frozenset("xy"), b=frozenset("z"), c=frozenset())
    with pytest.raises(AssertionError, match="a and c share 1"):
        check_disjoint(a=frozenset("xy"), b=frozenset("z"), c=frozenset("yw"))


def test_the_cache_is_where_it_can_be_written(tmp_path: Path) -> None:
    fallback = tmp_path / "fallback"
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path / "x"), "HOME": "/root"}, fallback).is_relative_to(
        tmp_path / "x"
    )
    assert cache_folder({"HOME": str(tmp_path / "h")}, fallback) == tmp_path / "h" / ".cache" / "lachesis" / "demo"
    assert cache_folder({}, fallback) == fallback
    (tmp_path / "file").touch()
    assert cache_folder({"HOME": str(tmp_path / "file")}, fallback) == fallback


@pytest.mark.slow
def test_a_prepared_model_is_found_again_and_named_as_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def fake(target: Path, *_: object) -> None:
        made.append(target)
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(module, "_make", fake)
    config = demo_config(DemoOptions(folder=tmp_path / "a run"))
    first, second = (prepare(config, tmp_path / "cache") for _ in range(2))
    fresh = prepare(config, tmp_path / "cache", fresh=True)
    other = prepare(msgspec.structs.replace(config, seed=1), tmp_path / "cache")
    assert [first.cached, second.cached, fresh.cached, other.cached] == [False, True, False, False]
    assert first.key == second.key == fresh.key != other.key
    assert len(made) == 3
    assert (Path(second.folder) / "config.json").read_text() == "{}"
    assert len(first.difficulties) == 8000
    assert {3.0, 4.0, 5.0} == set(first.difficulties)


def test_held_out_prompts_that_are_trained_on_are_refused(tmp_path: Path) -> None:
    config = demo_config(DemoOptions(folder=tmp_path, sets=("evaluation.words.params.split=train",)))
    with pytest.raises(AssertionError, match="train and held_out share"):
        prepare(config, tmp_path)
