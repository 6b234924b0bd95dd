import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from lachesis.pipeline.common.late_output import keep_output
from lachesis.pipeline.common.safe_text import SafeOutput, printable, printable_lines, protect_output
from lachesis.services.output import SafeConsole, json_text

pytestmark = pytest.mark.hostile

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\x7f\u202e\r\x08\u2028\x85\U000e0041[bold]"


def test_control_characters_are_spelled_out_and_letters_stay() -> None:
    assert printable("a\x1b[2Jb\n\u202e\x9b") == "a\\x1b[2Jb\\n\\u202e\\x9b"
    assert printable("Zürich 東京 ░█ 🙂") == "Zürich 東京 ░█ 🙂"
    assert printable_lines("a\x1b\nb\r\n") == "a\\x1b\nb\\r\n"


@given(st.text())
def test_nothing_but_printable_characters_and_line_ends_gets_through(text: str) -> None:
    sink = io.StringIO()
    out = SafeOutput(sink)
    out.write(text)
    out.writelines([text])
    assert sink.getvalue().replace("\n", "").replace("\t", "").isprintable()
    assert json.loads(json_text(text)) == text
    assert json_text(text).isprintable()


def test_output_and_log_of_a_process_are_protected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    protect_output()
    protect_output()
    print("a\x1bb")
    handler = logging.StreamHandler(sys.stderr)
    handler.emit(logging.LogRecord("x", logging.WARNING, "", 1, "log %s", (HOSTILE,), None))
    assert out.getvalue() == "a\\x1bb\n"
    assert err.getvalue() == f"log {printable(HOSTILE)}\n"
    assert not sys.stdout.isatty()


def test_output_that_outlives_a_full_disk_is_protected_too(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log"
    with file.open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        keep_output()
        keep_output()
        print(HOSTILE)
    assert file.read_text() == printable(HOSTILE) + "\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_takes_text_for_text(terminal: bool) -> None:
    table = Table("head")
    table.add_row(HOSTILE, style="bold red")
    consoles = [SafeConsole(file=io.StringIO(), force_terminal=terminal, width=200) for _ in range(2)]
    for console, title in zip(consoles, (HOSTILE, "x" * len(HOSTILE)), strict=True):
        console.print(table)
        console.print(title)
        console.print("[/nothing]")
    shown = consoles[0].file.getvalue()
    assert printable(HOSTILE) in shown
    assert "[/nothing]" in shown
    assert "\x1b[2J" not in shown
    assert ("\x1b[" in shown) == terminal, "its own colours"
    assert not set("\x07\x9b\x7f\u202e\r\x08\u2028\x85") & set(shown)


def _process(code: str, redirects: str = "", **variables: str) -> tuple[int, bytes]:
    command = ["bash", "-c", f'exec "$0" -c "$1" {redirects}', sys.executable, code]
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ | variables)
    return done.returncode, done.stdout + done.stderr


_PRINTED = "from lachesis.pipeline.common.safe_text import protect_output; protect_output(); "


@pytest.mark.outside
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_an_encoding_lacks_is_spelled_out_and_ends_no_process(encoding: str) -> None:
    code = f"{_PRINTED}from lachesis.services.output import print_json; print('Zürich 東'); print_json(['東🙂ü'])"
    returned, said = _process(code, PYTHONIOENCODING=encoding)
    first, *rest = said.decode(encoding).split("\n", 1)
    assert returned == 0
    assert first == {
        "ascii": "Z\\xfcrich \\u6771", "latin-1": "Zürich \\u6771", "utf-8": "Zürich 東",
    }[encoding]  # fmt: skip
    assert json.loads(rest[0]) == ["東🙂ü"]


@pytest.mark.outside
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("then", ["", "from lachesis.pipeline.common.late_output import keep_output; keep_output(); "])
def test_a_process_without_a_standard_stream_prints_nowhere_else(closed: str, then: str, tmp_path: Path) -> None:
    file = tmp_path / "opened.txt"
    code = (
        f"{_PRINTED}{then}import os, sys; opened = open({str(file)!r}, 'w'); "
        "print('out'); print('err', file=sys.stderr); sys.stdout.flush(); os.system('echo child; echo child >&2'); "
        "opened.write(f'{opened.fileno() > 2} {sys.stdin.read()!r} {sys.stdout.isatty()}')"
    )
    returned, _ = _process(code, f"{closed} </dev/null" if "<" not in closed else closed)
    assert returned == 0
    assert file.read_text() == "True '' False"
