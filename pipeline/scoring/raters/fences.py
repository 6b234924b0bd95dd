"""Finds the program in a completion: pairs fences from the start, and tells which block answers.

Fences are of three or more backticks or tildes; one closes with as many of its kind. They may be indented, quoted,
begin behind text, or not close at all. The answer is the last block of the language; else the last block that compiles.
"""

import ast
import re
import textwrap
import warnings
from typing import NamedTuple

from lachesis.pipeline.tasks.thoughts import answer_part

__all__ = ["FencedBlock", "fenced_blocks", "program_in"]

_MAX_CODE_CHARS = 1 << 16
_MAX_SHORT_CHARS = 512
"""Characters up to which a block may be nothing but a value: what a program printed."""
_MAX_BLOCKS = 64
"""Blocks at the end of an answer that are looked at."""
_MAX_LONGER = 4
"""Closing fences that are tried further on, where a program holds fences itself."""
_MAX_NESTED = 4
"""Blocks of Markdown, each in the one before, that are looked into."""
_LINES = re.compile(r"\r\n|\r|\n")
_QUOTE = re.compile(r"(?<![ \t])[ \t]*(?:>[ \t]?)+")
_FENCE = re.compile(r"(?P<before>[^\n]*?)(?P<fence>`{3,}|(?<![^ \t>])~{3,})(?P<info>[^`\n]*)")
_CLOSING = re.compile(r"(?<![ \t])[ \t]*[`~]{3,}[ \t]*$")
_ONE_LINE = re.compile(r"[^`\n]*(?P<fence>`{3,})[ \t]*(?P<code>[^`\n]+?)[ \t]*(?P=fence)[^`\n]*")
_LABEL = re.compile(r"[\s{.\[]*([^\s:{},;=()\[\]]*)")
_PYTHON = re.compile(r"i?python[\d.]*|py[\d.]*|pypy[\d.]*|cpython|sage", re.IGNORECASE)
_LISTED = re.compile(r"(?<![ \t])[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]+")
_MARKDOWN = frozenset({"markdown", "md", "mdx", "commonmark"})
_TAGGED = re.compile(r"<(answer|code|solution|python)>(.*?)(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_VALUES = (ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.operator,
    ast.unaryop, ast.expr_context, ast.Expr, ast.Module, ast.Compare, ast.cmpop)  # fmt: skip


class FencedBlock(NamedTuple):
    """A block: its label in lower case, and its text without the indentation of its fence."""

    label: str
    text: str
    longer: tuple[str, ...] = ()
    """The text up to later fences that might close it instead."""


def program_in(completion: str) -> str | None:
    """Return the Python program that a completion gives as its answer; None without any."""
    text = answer_part(completion)
    blocks = [block for block in fenced_blocks(text) if block.text.strip()][-_MAX_BLOCKS:]
    if not blocks:
        return _unfenced(text)
    own = [block for block in blocks if _PYTHON.fullmatch(block.label)]
    if own:
        programs = [block for block in own if not _is_value(block.text)]
        return _whole((programs or own)[-1])
    unlabelled = [block for block in blocks if not block.label]
    for candidates in (unlabelled, blocks):
        for block in reversed(candidates):
            code = _whole(block)
            if not _is_value(code) and _tree(code) is not None:
                return code
    return blocks[-1].text


def fenced_blocks(text: str, nested: int = _MAX_NESTED) -> list[FencedBlock]:
    """Return the fenced blocks of a text in their order; those in a block of Markdown instead of it."""
    lines = _LINES.split(text)
    blocks: list[FencedBlock] = []
    at = 0
    while at < len(lines):
        one = _ONE_LINE.fullmatch(lines[at])
        if one is not None:
            label, _, code = one["code"].partition(" ")
            python = bool(_PYTHON.fullmatch(label)) and bool(code)
            blocks.append(FencedBlock("python" if python else "", code if python else one["code"]))
            at += 1
            continue
        opening = _FENCE.fullmatch(lines[at])
        if opening is None or (_behind_text(opening) and len(opening["info"].split()) > 1):
            at += 1
            continue
        ends = _ends(lines, at + 1, opening["fence"])
        block = _block(lines, at, ends[0], opening)
        if nested and block.label in _MARKDOWN:
            blocks += fenced_blocks(block.text, nested - 1)
        else:
            longer = tuple(_block(lines, at, end, opening).text for end in ends[1:])
            blocks.append(block._replace(longer=longer))
        at = ends[0] + 1
    return blocks


def _ends(lines: list[str], first: int, fence: str) -> list[int]:
    """Return the lines that may close a block: the nearest, and some after it. The end of the text closes all."""
    found = []
    closing = re.compile(rf"(?:(?!{fence[0]}{{3}})[^\n])*{fence[0]}{{{len(fence)},}}[ \t]*")
    for at in range(first, len(lines)):
        if closing.fullmatch(_QUOTE.sub("", lines[at], count=1)):
            found.append(at)
            if len(found) > _MAX_LONGER:
                break
        elif not found and _opens_python(lines[at], fence):
            return [at - 1]  # the block before was not closed
    return found or [len(lines)]


def _behind_text(opening: re.Match[str]) -> bool:
    return bool(_LISTED.sub("", opening["before"]).strip(" \t>"))


def _opens_python(line: str, fence: str) -> bool:
    found = _FENCE.fullmatch(line)
    return (
        found is not None
        and not _behind_text(found)
        and found["fence"] == fence
        and bool(_PYTHON.fullmatch(_label(found["info"])))
    )


def _block(lines: list[str], opening: int, end: int, found: re.Match[str]) -> FencedBlock:
    quoted = ">" in found["before"] and not found["before"].replace(">", "").strip()
    inner = lines[opening + 1 : end]
    if end < len(lines):
        last = _CLOSING.sub("", lines[end])
        if last.strip(" \t>"):
            inner = [*inner, last]  # code in front of the fence
    if quoted:
        inner = [_QUOTE.sub("", line, count=1) for line in inner]
    before = _LISTED.sub(lambda marker: " " * len(marker.group()), found["before"])
    indent = len(before.expandtabs(4)) if not before.strip() else 0
    return FencedBlock(_label(found["info"]), "\n".join(_outdented(line, indent) for line in inner))


def _label(info: str) -> str:
    found = _LABEL.match(info)
    return found[1].strip(".").lower() if found is not None else ""


def _outdented(line: str, indent: int) -> str:
    if not indent:
        return line
    line = line.expandtabs(4) if line[:indent].find("\t") >= 0 else line
    return line[min(indent, len(line) - len(line.lstrip(" "))) :]


def _whole(block: FencedBlock) -> str:
    """Return the text of a block as a program, up to a later fence if only so it compiles."""
    for text in (block.text, *block.longer):
        for code in (text, textwrap.dedent(text), text.replace("\u00a0", " ")):
            if _tree(code) is not None:
                return code
    return block.text


def _unfenced(text: str) -> str | None:
    """Return the program that a text without fences is, or that stands in a tag."""
    tagged = list(_TAGGED.finditer(text))
    code = (tagged[-1][2] if tagged else text).strip("\n")
    code = "\n".join(_LINES.split(code))
    return code if _tree(code) is not None and not _is_value(code) else None


def _is_value(code: str) -> bool:
    """Return whether a block holds values alone, as what a program printed does, or nothing."""
    if len(code) > _MAX_SHORT_CHARS:
        return False
    tree = _tree(code)
    return tree is not None and all(isinstance(node, _VALUES) for node in ast.walk(tree))


def _tree(code: str) -> ast.Module | None:
    if len(code) > _MAX_CODE_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return None
