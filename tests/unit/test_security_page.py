"""The tables of attacks say only what tests show, name tests that are there, and leave SECURITY.md short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POLICY = (ROOT / "SECURITY.md").read_text()
AUDIT = (ROOT / "tests/integration/security/README.md").read_text()
ATTACKS = AUDIT.partition("\n## Attacks\n")[2].partition("\n## ")[0]
MAX_POLICY_BYTES = 6000


def test_the_policy_is_short_and_leads_to_the_tables() -> None:
    assert len(POLICY.encode()) <= MAX_POLICY_BYTES
    linked = re.findall(r"\]\(([\w/.]+)\)", POLICY)
    assert "tests/integration/security/README.md" in linked
    assert [path for path in linked if not (ROOT / path).is_file()] == []


@pytest.mark.extension
def test_every_test_that_they_name_is_there() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", POLICY + AUDIT)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.slow
@pytest.mark.outside
def test_the_table_of_attacks_counts_the_cases_that_make_attack_runs() -> None:
    rows = {}
    for line in ATTACKS.splitlines():
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if len(cells) == 4 and cells[2].isdigit():
            rows[cells[0]] = int(cells[2]), re.findall(r"`(tests/[\w/.]+)`", cells[3])
    assert len(rows) > 25
    command = [sys.executable, "-m", "pytest", "-m", "hostile", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    files = sorted({file for _, files in rows.values() for file in files})
    found = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    cases = {promise: sum(line.startswith(tuple(files)) for line in found) for promise, (_, files) in rows.items()}
    assert cases == {promise: count for promise, (count, _) in rows.items()}
