"""SECURITY.md says only what tests show, and names tests that are there."""

import re
from pathlib import Path

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
