"""How an extra is installed: from a checkout, or by name."""

import re
import tomllib
from pathlib import Path

import pytest

from lachesis.pipeline.common import installation
from lachesis.pipeline.common.installation import install_command


def test_a_checkout_is_installed_from_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = Path(installation.__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    assert install_command("train") == "pip install -e '.[train]'"
    assert install_command("server", "plots") == "pip install -e '.[server,plots]'"
    assert install_command() == "pip install -e ."
    monkeypatch.chdir(tmp_path)
    assert install_command("train").startswith("pip install -e")
    assert f"{root}[train]" in install_command("train")


@pytest.mark.parametrize("beside", [None, '[project]\nname = "somebody-elses"\n'])
def test_a_wheel_is_installed_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, beside: str | None) -> None:
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "lachesis" / "pipeline" / "installation.py"))
    if beside is not None:
        (tmp_path / "pyproject.toml").write_text(beside)
    assert install_command("train") == "pip install 'lachesis-rl[train]'"
    assert install_command() == "pip install lachesis-rl"


def test_messages_name_extras_that_exist_and_leave_the_command_to_one_place() -> None:
    root = Path(installation.__file__).resolve().parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for file in (file for folder in ("pipeline", "services") for file in (root / folder).rglob("*.py")):
        text = file.read_text()
        assert "pip install 'lachesis-rl[" not in text, f"{file}: use install_command"
        named |= {
            name
            for call in re.findall(r"install_command\(([^)]*)\)", text)
            for name in re.findall(r"['\"]([^'\"]+)", call)
        }
    assert {"train", "server", "raters"} <= named <= set(extras)
