"""SECURITY.md says only what tests show, and names tests that are there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_test_that_it_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_make_attack_runs_what_the_table_of_attacks_names() -> None:
    table = (ROOT / "SECURITY.md").read_text().partition("\n## Attacks\n")[2].partition("\n## ")[0]
    command = (ROOT / "Makefile").read_text().partition("\nattack: ")[2].partition("\n\n")[0]
    for path in re.findall(r"`(tests/[\w/.]+)`", table):
        assert any(path.startswith(part) for part in command.split() if part.startswith("tests/")), path


@pytest.mark.slow
def test_the_table_of_attacks_counts_the_cases_that_there_are() -> None:
    lines = (ROOT / "SECURITY.md").read_text().partition("\n## Attacks\n")[2].partition("\n## ")[0].splitlines()
    rows = {}
    for line in lines:
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if len(cells) == 4 and cells[2].isdigit():
            rows[cells[0]] = int(cells[2]), re.findall(r"`(tests/[\w/.]+)`", cells[3])
    assert len(rows) > 25
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    files = sorted({file for _, files in rows.values() for file in files})
    found = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    cases = {promise: sum(line.startswith(tuple(files)) for line in found) for promise, (_, files) in rows.items()}
    assert cases == {promise: count for promise, (count, _) in rows.items()}
