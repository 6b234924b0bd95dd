from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.services.output import human_bytes, human_seconds, print_table


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (8 << 30, "8.0 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_human_bytes(size: int, text: str) -> None:
    assert human_bytes(size) == text


@given(st.integers(1, 1 << 49))
def test_human_bytes_is_within_its_rounding(size: int) -> None:
    number, unit = human_bytes(size).split()
    factor = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(Fraction(number) * factor - size) <= Fraction(factor, 20)
    assert 1 <= float(number) <= 1024


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        (0.0, "0 us"),
        (12e-6, "12 us"),
        (0.5, "500 ms"),
        (75.0, "75 s"),
        (999.6, "1000 s"),
        (1234.0, "1234 s"),
    ],
)
def test_human_seconds(value: float | None, text: str | None) -> None:
    assert human_seconds(value) == text


def test_a_table_spells_control_characters_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A reason in a dead letter may quote what a stranger sent: it must not clear the screen of who reads it."""
    print_table(("a",), [("\x1b[2J\r\n\u202ex",)])
    assert capsys.readouterr().out.splitlines()[1] == "\\x1b[2J\\r\\n\\u202ex"


def test_a_table_without_a_terminal_is_plain_and_uncut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "b"), [("x" * 300, None), ("[red]y[/red]", 0)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["a", "b"]
    assert lines[1].split() == ["x" * 300, "-"]
    assert lines[2].split() == ["[red]y[/red]", "0"]
    assert all(line == line.rstrip() for line in lines)


def test_a_narrow_terminal_folds_long_texts_and_breaks_no_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(("check", "value", "why", "group"), [("faulty_groups", 0.25, "so " * 30, "a" * 32)])
    lines = capsys.readouterr().out.splitlines()
    assert "faulty_groups" in lines[1]
    assert "0.25" in lines[1]
    assert max(map(len, lines[1:])) <= 60
    assert "".join(line[40:].replace(" ", "") for line in lines[1:]).count("a") == 32
