"""What commands write is private to their user unless the configuration shares it: tried in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hostile

_WRITE = """
import os, sys
os.umask(0o022)
from pathlib import Path
from lachesis.services import cli
from lachesis.services.cli import commands
from lachesis.services.cli.options import Options

def command(prog_name, standalone_mode):
    config = Options(sets=tuple(sys.argv[1:])).config()
    Path("folder").mkdir()
    Path("folder/file").write_text("x")
    os.system("touch folder/of_a_child")

cli.app = command
cli.main()
"""


@pytest.mark.outside
@pytest.mark.parametrize(("sets", "folder", "file"), [((), 0o700, 0o600), (("shared_files=true",), 0o755, 0o644)])
def test_what_a_command_writes_is_private_unless_it_is_shared(
    tmp_path: Path, sets: tuple[str, ...], folder: int, file: int
) -> None:
    subprocess.run([sys.executable, "-c", _WRITE, *sets], cwd=tmp_path, check=True)
    assert (tmp_path / "folder").stat().st_mode & 0o777 == folder
    for name in ("file", "of_a_child"):
        assert (tmp_path / "folder" / name).stat().st_mode & 0o777 == file
