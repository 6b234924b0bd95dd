# ruff: noqa: INP001 - a script, no package
"""Checks docstrings, comments and READMEs, and the messages of the product; part of `make lint`.

    python .ci/prose.py

Reports a name in backticks that occurs nowhere in the code, a file that a docstring or comment points to and that does
not exist, "a" before a vowel, words of the former dialect, for which messages in the code are searched as well, and
lines of pages that are too long. Exit code 1 if anything is found.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("schemas", "pipeline", "services", "deploy")
PROSE = (*PRODUCT, "tests")
CODE = (*PROSE, ".ci")
CODE_SUFFIXES = frozenset({".py", ".js", ".html", ".toml", ".yaml", ".yml", ".sh", ".json", ".conf"})
FOREIGN_PAGES = frozenset({"MIGRATING.md", "CHANGELOG.md"})
"""Pages that name what other projects have, and what this one had."""

# fmt: off
FOREIGN = frozenset({
    "PIP_EXTRA_INDEX_URL", "Env", "PreTrainedModel", "RetryError", "b3sum", "collect_trajectory", "concat",
    "concat_chat", "concat_with_action", "curr_step", "data_path_to_save_groups", "episode_tracking", "gem",
    "gymnasium", "make_vec", "max_batches_offpolicy", "nohup", "polars", "RequestOutputKind",
    "scan_pyarrow_dataset", "spaces", "stamina",
})
# fmt: on
"""Names of other projects that no code here mentions."""
EXAMPLES = frozenset({"_INBOX_SERVICE", "concise", "one", "shopping"})
"""Names that a reader of a README gives, of a run or a rater."""

WORD = re.compile(r"[A-Za-z_]\w*")
QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
PLACE = re.compile(
    r"(?<![\w./<{*-])((?:[a-z_]\w*/){2,}[a-z_]\w*(?:\.py)?|(?:[a-z_]\w*/)*[a-z_]\w*\.py)"
    r"(?![\w/<{*-]|\.\w)"
)
"""A file or folder of the tree, or the end of its path: two folders at least, or `.py`."""
EXAMPLE_PLACES = frozenset({"path/to/file.py", "health/shop/truncated", "reward/shop/rater/format"})
DIALECT = re.compile(
    r"(?im)\b(?:told|asked|taught|judged|whoever|whom|(?<!user )nobody|lest|anew|of\s+late|the\s+past"
    r"|what\s+goes\s+in|what\s+comes\s+out|go(?:es)?\s+by)\b"
    r"|\w's\s+alone\b|^[ \t]*(?:In|Out):(?=\s)"
)
"""Words that make a reader stop: name the subject and use the usual word."""
DIALECT_PAGES = frozenset({"CHANGELOG.md", "MIGRATING.md", "SECURITY.md", "permissions.md"})
"""Pages that are not checked for them; `permissions.md` is printed by a test."""
MAX_PAGE_LINE_CHARS = 125
NO_WRAP = re.compile(r" {4}| *\||`[^`]*`$")
"""Begins a line of code or of a table, or is a line that is one command."""
ARTICLE = re.compile(r"(?:\ba|(?:^|[.:] )A) (?!(?:one|once|ever|eu|uni|us|ut|ub)\w*)([aeiou][a-z]+)")


class Text(NamedTuple):
    """A piece of prose: `line` is that of its first line in `path`."""

    path: Path
    line: int
    text: str
    is_message: bool = False
    """Whether it is a text with a blank in it that the code uses: mostly one that people read."""


def files(folders: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of code and the READMEs in these folders."""
    for folder in folders:
        yield from sorted(
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {*CODE_SUFFIXES, ".md"} or path.name == "Dockerfile"
        )


def split(path: Path) -> tuple[list[Text], set[str]]:
    """Return docstrings, comments and messages of a Python file, and the words of its code."""
    text = path.read_text()
    prose: list[Text] = []
    quoted: set[int] = set()
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if node in docstrings:
            prose.append(Text(path, node.lineno, node.value))
            quoted.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif " " in node.value:
            prose.append(Text(path, node.lineno, node.value, is_message=True))
    words: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            prose.append(Text(path, token.start[0], token.string))
        elif token.type != tokenize.STRING or token.start[0] not in quoted:
            words.update(WORD.findall(token.string))
    return prose, words


def main() -> int:
    """Print what is found, a line each."""
    prose: list[Text] = []
    words = {
        *FOREIGN,
        *EXAMPLES,
        *WORD.findall((ROOT / "pyproject.toml").read_text() + (ROOT / "Makefile").read_text()),
    }
    products, readable = set(files(PRODUCT)), set(files(PROSE))
    for path in files(CODE):
        words.update(WORD.findall(str(path.relative_to(ROOT))))
        if path.suffix == ".md":
            continue
        if path.suffix != ".py":
            words.update(WORD.findall(path.read_text()))
            continue
        texts, found = split(path)
        words |= found
        if path in readable:
            prose += [text for text in texts if path in products or not text.is_message]
    pages = [*ROOT.glob("*.md"), *(path for path in readable if path.suffix == ".md")]
    prose += [Text(path, 1, path.read_text()) for path in sorted(pages)]
    places = set(EXAMPLE_PLACES)
    for path in files(CODE):
        for place in (path, path.with_suffix(""), path.parent):
            parts = place.relative_to(ROOT).parts
            places.update("/".join(parts[i:]) for i in range(len(parts)))
    faults = sorted(
        fault for text in prose for fault in (*faults_of(text, words), *unknown_places(text, places), *long_lines(text))
    )
    for path, line, fault in faults:
        print(f"{path.relative_to(ROOT)}:{line}: {fault}")
    return bool(faults)


def faults_of(text: Text, words: set[str]) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and fault."""
    if text.path.name not in FOREIGN_PAGES and not text.is_message:
        for match in QUOTED.finditer(text.text):
            missing = [part for part in match[1].split(".") if not part.isdigit() and part and part not in words]
            if missing:
                yield text.path, line_of(text, match), f"`{match[1]}`: {missing[0]} occurs nowhere in the code"
    if text.path.name not in DIALECT_PAGES:
        for match in DIALECT.finditer(QUOTED.sub(blank, text.text)):
            yield text.path, line_of(text, match), f'"{" ".join(match[0].split())}": say it in plain English'
    for match in () if text.is_message else ARTICLE.finditer(text.text):
        yield text.path, line_of(text, match), f'"{match[0]}": an'


def unknown_places(text: Text, places: set[str]) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and fault of each place that a docstring or comment names and the tree does not have."""
    if text.path.suffix == ".py" and not text.is_message:
        for match in PLACE.finditer(text.text):
            if match[1] not in places:
                yield text.path, line_of(text, match), f"{match[1]}: there is no such file or folder"


def long_lines(text: Text) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and fault of each line of a page that should be wrapped."""
    is_code = text.path.suffix != ".md" or text.path.name in {"CHANGELOG.md", "permissions.md"}
    for number, line in enumerate(text.text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and len(line) > MAX_PAGE_LINE_CHARS and not NO_WRAP.match(line):
            yield text.path, number, f"{len(line)} characters in a line; wrap it at {MAX_PAGE_LINE_CHARS}"


def blank(match: re.Match[str]) -> str:
    """Return spaces for a match, so that places after it stay the same."""
    return re.sub(r"\S", " ", match[0])


def line_of(text: Text, match: re.Match[str]) -> int:
    """Return the line of a match in its file."""
    return text.line + text.text[: match.start()].count("\n")


if __name__ == "__main__":
    sys.exit(main())
