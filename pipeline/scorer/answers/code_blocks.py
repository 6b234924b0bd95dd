"""Finds the blocks of code in a text: fences, and their equivalents in LaTeX, HTML and models.

Fences are paired from the start. They are of three or more backticks or tildes; one closes with as many of its kind.
They may be indented, quoted, begin behind text, or not close at all. Within a fence nothing else is looked for.
"""

import html
import re
from typing import NamedTuple

__all__ = ["PYTHON_LABEL", "CodeBlock", "code_blocks"]

_MAX_LONGER = 4
"""Closing fences that are tried further on, where a program holds fences itself."""
_MAX_NESTED = 4
"""Blocks of Markdown, each in the one before, that are looked into."""
_LINES = re.compile(r"\r\n|\r|\n")
_QUOTE = re.compile(r"\A[ \t]*(?:>[ \t]?)+")
_FENCE = re.compile(r"(?P<before>[^\n]*?)(?P<fence>`{3,}|(?<![^ \t>])~{3,})(?P<info>[^`\n]*)")
_TRAILER = (
    r"(?:[ \t]*(?:</?\w[\w:-]{0,40}>|<[|\uff5c][^|\uff5c>\n]{1,40}[|\uff5c]>|[}$.,;:*\u200b\u2060\ufeff]))*[ \t]*"
)
"""What may follow a closing fence on its line: the end of a tag, of a box or of the turn."""
_CLOSING = re.compile(rf"(?<![ \t])[ \t]*[`~]{{3,}}{_TRAILER}$")
_ONE_LINE = re.compile(r"[^`\n]*(?P<fence>`{3,})[ \t]*(?P<code>[^`\n]+?)[ \t]*(?P=fence)[^`\n]*")
_LABEL = re.compile(r"[\s{.\[]*([^\s:{},;=()\[\]]*)")
PYTHON_LABEL = re.compile(r"i?python[\d.]*|py[\d.]*|pypy[\d.]*|cpython|sage", re.IGNORECASE)
_LISTED = re.compile(r"(?<![ \t])[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]+")
_MARKDOWN = frozenset({"markdown", "md", "mdx", "commonmark"})
_WRAPPED = re.compile(
    r"\[(?P<kind>PYTHON|CODE)\](?P<marked>.*?)(?:\[/(?P=kind)\]|\Z)"
    r"|\[BEGIN\](?P<begun>.*?)(?:\[DONE\]|\Z)"
    r"|\\begin\{(?P<env>lstlisting|[vV]erbatim|minted|python|pycode)\*?\}(?P<given>(?:\[[^\]\n]{0,200}\])?"
    r"(?:\{[^}\n]{0,40}\})?)(?P<typeset>.*?)(?:\\end\{(?P=env)\*?\}|\Z)"
    r"|<pre[^>\n]{0,200}>\s{0,20}(?:<code(?P<class>[^>\n]{0,200})>)?(?P<html>.*?)(?:</code>|</pre>|\Z)"
    r"|<\|python_(?:tag|start)\|>(?P<run>.*?)(?:<\|eom_id\|>|<\|python_end\|>|\Z)"
    r"|<(?P<art>(?:ant)?artifact)\b(?P<about>[^>\n]{0,400})>(?P<made>.*?)(?:</(?P=art)>|\Z)",
    re.DOTALL | re.IGNORECASE,
)
"""Blocks of CodeLlama, MBPP, LaTeX, HTML, Llama 3 and Claude."""
_INNER = ("marked", "begun", "typeset", "html", "run", "made")
_ABOUT = re.compile(r"(?:language|lang)[-=: ]*[\"']?([\w+#.]+)|\{([\w+#.]+)\}", re.IGNORECASE)


class CodeBlock(NamedTuple):
    """A block: its label in lower case, and its text without the indentation of its fence."""

    label: str
    text: str
    longer: tuple[str, ...] = ()
    """The text up to later fences that might close it instead."""


def code_blocks(text: str, nested: int = _MAX_NESTED) -> list[CodeBlock]:
    """Return the blocks of a text in their order; those in a block of Markdown instead of it."""
    lines = _LINES.split(text)
    blocks: list[CodeBlock] = []
    at = prose = 0
    while at < len(lines):
        one = _ONE_LINE.fullmatch(lines[at])
        if one is not None:
            label, _, code = one["code"].partition(" ")
            blocks += _wrapped(lines[prose:at])
            python = bool(PYTHON_LABEL.fullmatch(label)) and bool(code)
            blocks.append(CodeBlock("python" if python else "", code if python else one["code"]))
            at = prose = at + 1
            continue
        opening = _FENCE.fullmatch(lines[at])
        if opening is None or (_behind_text(opening) and len(opening["info"].split()) > 1):
            at += 1
            continue
        blocks += _wrapped(lines[prose:at])
        ends = _ends(lines, at + 1, opening["fence"])
        block = _block(lines, at, ends[0], opening)
        if nested and block.label in _MARKDOWN:
            blocks += code_blocks(block.text, nested - 1)
        else:
            longer = tuple(_block(lines, at, end, opening).text for end in ends[1:])
            blocks.append(block._replace(longer=longer))
        at = prose = ends[0] + 1
    return blocks + _wrapped(lines[prose:])


def _wrapped(lines: list[str]) -> list[CodeBlock]:
    """Return the blocks of prose, which holds no fence."""
    blocks = []
    for found in _WRAPPED.finditer("\n".join(lines)):
        about = _ABOUT.search("".join(found[name] or "" for name in ("given", "class", "about")))
        label = (about[1] or about[2]).lower() if about is not None else ""
        if found["run"] is not None or (found["kind"] or found["env"] or "").lower() in {"python", "pycode"}:
            label = "python"
        text = next(found[name] for name in _INNER if found[name] is not None)
        blocks.append(CodeBlock(label, (html.unescape(text) if found["html"] is not None else text).strip("\n")))
    return blocks


def _ends(lines: list[str], first: int, fence: str) -> list[int]:
    """Return the lines that may close a block: the nearest, and some after it. The end of the text closes all."""
    found = []
    closing = re.compile(rf"(?:(?!{fence[0]}{{3}})[^\n])*{fence[0]}{{{len(fence)},}}{_TRAILER}")
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
        and bool(PYTHON_LABEL.fullmatch(_label(found["info"])))
    )


def _block(lines: list[str], opening: int, end: int, found: re.Match[str]) -> CodeBlock:
    quoted = ">" in found["before"] and not found["before"].replace(">", "").strip()
    inner = lines[opening + 1 : end]
    if end < len(lines):
        last = _CLOSING.sub("", lines[end])
        if last.strip(" \t>\u200b\u2060\ufeff"):
            inner = [*inner, last]  # code in front of the fence
    if quoted:
        inner = [_QUOTE.sub("", line, count=1) for line in inner]
    before = _LISTED.sub(lambda marker: " " * len(marker.group()), found["before"])
    indent = len(before.expandtabs(4)) if not before.strip() else 0
    return CodeBlock(_label(found["info"]), "\n".join(_outdented(line, indent) for line in inner))


def _label(info: str) -> str:
    found = _LABEL.match(info)
    return found[1].strip(".").lower() if found is not None else ""


def _outdented(line: str, indent: int) -> str:
    if not indent:
        return line
    line = line.expandtabs(4) if line[:indent].find("\t") >= 0 else line
    return line[min(indent, len(line) - len(line.lstrip(" "))) :]
