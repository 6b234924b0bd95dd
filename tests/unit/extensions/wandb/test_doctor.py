"""Whether `lachesis doctor` finds a key of wandb, and never shows it."""

from pathlib import Path

import pytest

from lachesis.pipeline.config.extended import run_config_type, training_config_type
from lachesis.pipeline.extensions.wandb.config import WandbConfig
from lachesis.pipeline.extensions.wandb.doctor import check_key


def found() -> str:
    training = training_config_type()(wandb=WandbConfig(project="p"))  # type: ignore[call-arg]
    (finding,) = check_key(run_config_type()(training=training))
    return str(finding)


def test_a_key_is_found_but_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert "WARN" in found()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password s3cret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert "OK" in found()
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    assert "s3cret" not in found()
