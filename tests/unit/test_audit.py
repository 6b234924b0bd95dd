"""The audit of the pinned packages: a known flaw fails it, no network does not, and neither looks like success."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[2] / ".ci" / "audit.py"
FLAW = {"id": "PYSEC-1", "fix_versions": ["2.0"]}


@pytest.mark.outside
@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ({"dependencies": [{"name": "a", "version": "1", "vulns": []}]}, 0, "1 packages audited, 0 advisories"),
        ({"dependencies": [{"name": "a", "version": "1", "vulns": [FLAW]}]}, 1, "a 1: PYSEC-1, fixed in 2.0"),
        ({"dependencies": [{"name": "a", "skip_reason": "no"}]}, 0, "NOT AUDITED: 1 of 1"),
        (None, 0, "NOT AUDITED: no advisories could be had: no network"),
    ],
)
def test_audit(tmp_path: Path, answer: object, code: int, said: str) -> None:
    body = json.dumps(answer) if answer else ""
    program = tmp_path / "pip-audit"
    program.write_text(f"#!{sys.executable}\nimport sys\nprint({body!r})\nprint('no network', file=sys.stderr)\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environ = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, AUDIT], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout
