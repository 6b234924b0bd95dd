"""A run's folder that others may have written is not used: what lies in it would run as this user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.options import Options
from lachesis.services.observe.runs import look_at_runs
from lachesis.services.run import trusted
from lachesis.services.run.known_runs import find_run

pytestmark = pytest.mark.hostile

STRANGER = 54321


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the run `mine` below the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SUDO_UID", raising=False)
    folder = tmp_path / "runs/mine"
    folder.mkdir(parents=True, mode=0o755)
    folder.parent.chmod(0o755)
    folder.chmod(0o755)
    for name, text in (("run.toml", 'run = "mine"\nfolder = "."\n'), ("env.py", "")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
    return folder


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file belong to another user: by its owner, or where only root may do that by who asks."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        stat = Path.stat

        def found(self: Path, *args: bool, **kwargs: bool) -> os.stat_result:
            real = stat(self, *args, **kwargs)
            return os.stat_result((*real[:4], STRANGER, *real[5:])) if self == path else real

        monkeypatch.setattr(Path, "stat", found)


def test_a_folder_of_ones_own_is_used(folder: Path) -> None:
    assert find_run("mine") == folder
    assert Options(run="mine").config().path == folder
    assert [run.run for run in look_at_runs()] == ["mine"]


@pytest.mark.parametrize("whose", [".", "..", "run.toml", "env.py"])
def test_a_folder_of_another_user_is_not_used_and_the_error_says_how_to_mend_it(
    folder: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away((folder / whose).resolve(), monkeypatch)
    for use in (lambda: find_run("mine"), Options(run="mine").load, Options(sets=('run="mine"',)).load):
        with pytest.raises(ConfigError, match=f"belongs to the user {STRANGER}.*chown.*trusted_folders"):
            use()
    assert look_at_runs() == []


@pytest.mark.parametrize(("path", "mode"), [(".", 0o777), ("..", 0o777), ("run.toml", 0o666), ("env.py", 0o646)])
def test_a_folder_that_others_can_write_is_not_used(folder: Path, path: str, mode: int) -> None:
    (folder / path).chmod(mode)
    with pytest.raises(ConfigError, match=r"can be written by every user.*chmod -R go-w"):
        find_run("mine")


@pytest.mark.parametrize(
    "path", ["judge/__init__.py", "judge/", "plain/code.py", "plain/", "env.so", "env.pyc", "__pycache__/", "a/b/c.py"]
)
def test_nothing_that_python_imports_may_be_written_by_others(folder: Path, path: str) -> None:
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    for package in (folder / "judge", folder / "plain", folder / "a" / "b"):
        package.mkdir(parents=True, exist_ok=True)
        (package / "code.py").write_text("")
    (folder / "a" / "__init__.py").write_text("")
    (folder / "judge" / "round").symlink_to(folder / "judge")
    place.mkdir(exist_ok=True) if path.endswith("/") else place.write_text("")
    for one in (folder, *folder.rglob("*")):
        one.chmod(0o755 if one.is_dir() else 0o644)
    assert find_run("mine") == folder
    place.chmod(0o777 if path.endswith("/") else 0o666)
    with pytest.raises(ConfigError, match=r"can be written by every user.*chmod -R go-w"):
        find_run("mine")


def test_a_group_can_write_only_where_it_is_the_owners_own(folder: Path) -> None:
    folder.chmod(0o775)
    if folder.stat().st_gid != folder.stat().st_uid:
        with pytest.raises(ConfigError, match="by the group"):
            find_run("mine")
    elif os.geteuid() == 0:
        assert find_run("mine") == folder
        os.chown(folder, 0, STRANGER)
        with pytest.raises(ConfigError, match=f"by the group {STRANGER}"):
            find_run("mine")


def test_nobody_replaces_a_folder_below_one_that_is_sticky(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert find_run("mine") == folder


def test_a_list_of_the_users_own_is_the_way_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o777)
    file = trusted.trusted_folders_file(os.environ)
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_text(f"# mounted\n{folder.parent}\n")
    file.chmod(0o600)
    assert find_run("mine") == folder
    assert trusted.is_trusted(folder)
    file.write_text(f"{folder}x\nruns/mine\n")  # another folder, and one that depends on where one stands
    assert not trusted.is_trusted(folder)
    file.write_text(f"{folder}\n")
    file.chmod(0o666)
    assert not trusted.is_trusted(folder)


def test_who_became_root_by_sudo_is_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", str(STRANGER))
    monkeypatch.setattr(trusted.os, "geteuid", lambda: 0)
    assert STRANGER in trusted._own_users()
    monkeypatch.setattr(trusted.os, "geteuid", lambda: 1)
    assert STRANGER not in trusted._own_users()


SHADOWS = ("msgspec", "typer", "wandb")


def command(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Call a command in a folder as its script does, or as `python -m`."""
    called = [sys.executable, *(options or ("-P", "-c", "from lachesis.services.cli import main; main()")), "status"]
    return subprocess.run(called, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.outside
def test_modules_that_another_user_put_into_the_current_folder_are_not_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid():
        pytest.skip("needs root, to give a file away")
    here, ran = folder.parent.parent, folder / "ran"
    for name in SHADOWS:
        (here / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write(__name__)\n")
        give_away(here / f"{name}.py", monkeypatch)
    for options in ((), ("-P", "-m", "lachesis")):
        said = command(here, *options).stderr
        assert "modules in the current folder are not used" in said
        assert f"belongs to the user {STRANGER}" in said
        assert "Traceback" not in said
    assert not ran.exists()
    trusted_list = here / "config/lachesis/trusted_folders"
    trusted_list.parent.mkdir(parents=True)
    trusted_list.write_text(f"{here}\n")
    trusted_list.chmod(0o600)
    assert "modules in the current folder" not in command(here).stderr


@pytest.mark.parametrize("module", ["services", "pipeline"])
def test_no_process_of_ours_begins_with_the_modules_of_the_current_folder(module: str) -> None:
    """`python -m` without -P imports from there before anything can be checked."""
    source = Path(__file__).parents[3] / module
    begun = [
        f"{path.relative_to(source)}:{number}"
        for path in source.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if 'sys.executable, "-m"' in line
    ]
    assert begun == []
