"""Finds the program in a completion: the last block that is more than a value or an example.

If the tests show what they need (standard input, or a name that they call), blocks after the last one that provides it
are examples. Blocks labelled Python come first, then those without a label. A block that only uses what an earlier one
defines shows how to use it: the earlier one is the answer. If the later block continues the earlier one (it only
defines functions, or reads the input that the earlier one does not read), the answer is both. A block that does not
compile and is not labelled Python is no candidate. A text without any block is the program itself, or holds it between
lines of prose.
"""

import ast
import builtins
import re
import sys
import textwrap
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from lachesis.pipeline.scorer.answers.code_blocks import PYTHON_LABEL, CodeBlock, code_blocks
from lachesis.pipeline.tasks.thoughts import answer_part

__all__ = ["program_in"]

_SESSION_PROMPT = re.compile(r"[ \t]*>>>(?: |$)")
_SESSION_MORE = re.compile(r"[ \t]*\.\.\.(?: |$)")
_MAX_CODE_CHARS = 1 << 16
_MAX_BLOCKS = 64
"""Blocks at the end of an answer that are looked at."""
_MAX_STARTS = 8
_MAX_ENDS = 16
"""Lines of a text without fences at which a program may begin and end."""
_LINES = re.compile(r"\r\n|\r|\n")
_MAX_ENDS_OF_TURN = 8
_END_OF_TURN = re.compile(
    r"(?:<[|\uff5c][\w\u2581]{1,40}[|\uff5c]>|</s>|<eos>|<end_of_turn>|<turn\|>|[\u200b\u2060\ufeff])\s*\Z"
)
_TAGGED = re.compile(r"<(answer|code|solution|python)>(.*?)(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_NAMED_FIRST = re.compile(r"\s*python3?[ \t]*\n", re.IGNORECASE)
_FIRST_LINE = re.compile(
    r"[ \t]*(?:(?:async )?def |class |import |from \w[\w.]* import |@\w|if |for |while |with |try:|"
    r"[A-Za-z_][\w, ]* = |print\()"
)
_BUILTINS = frozenset(dir(builtins))
_DEFINED = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_INPUT = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0\s*[,)]")

_VALUES = (ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.Tuple, ast.List, ast.Set,
    ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.IfExp, ast.Compare, ast.JoinedStr, ast.AnnAssign, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context, ast.Expr, ast.Module)  # fmt: skip
_DOES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.AsyncFor, ast.While, ast.If,
    ast.With, ast.AsyncWith, ast.Try, ast.Match, ast.Delete, ast.Raise)  # fmt: skip
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ACTS = frozenset({"print", "input", "open", "exec", "eval", "stdin", "stdout"})


class _Candidate(NamedTuple):
    """A block as a program. `tree` None: it does not compile."""

    code: str
    tree: ast.Module | None
    is_python: bool
    label: str


def program_in(completion: str, *, for_input: bool = False, called: Collection[str] = ()) -> str | None:
    """Return the Python program that a completion gives as its answer; None without any.

    `for_input`: the program is to read standard input, and is not to be imported. `called`: names that the tests use; a
    program that defines none of them is an example.
    """
    text = _without_end_of_turn(answer_part(completion))
    blocks = [block for block in code_blocks(text) if block.text.strip()][-_MAX_BLOCKS:]
    if not blocks:
        return _unfenced("\n".join(_LINES.split(text)))
    candidates = [_candidate(block) for block in blocks]
    own = [one for one in candidates if one.is_python]
    unlabelled = [one for one in candidates if not one.label and one.tree is not None]
    others = [one for one in candidates if one.tree is not None]
    for among in (own, unlabelled, others):
        chosen = _last(_up_to_answer(among, for_input, called), 2, for_input)
        if chosen is not None:
            return chosen.code
    for least in (2, 1, 0):
        for among in (own, unlabelled, others) if least else (own,):
            chosen = _last(among, least, for_input)
            if chosen is not None and (least or among):
                return chosen.code
    return blocks[-1].text


def _without_end_of_turn(text: str) -> str:
    text = text.rstrip()
    for _ in range(_MAX_ENDS_OF_TURN):
        found = _END_OF_TURN.search(text, max(0, len(text) - 64))
        if found is None:
            break
        text = text[: found.start()].rstrip()
    return text


def _last(candidates: Sequence[_Candidate], least: int, for_input: bool) -> _Candidate | None:
    """Return the last candidate that does at least so much, and does not merely use an earlier one; with
    those before it, if it goes on with them."""
    strong = [one for one in candidates if _strength(one) >= least]
    for at in range(len(strong) - 1, -1, -1):
        used = [one for one in strong[:at] if _uses(strong[at], [one])]
        if not used:
            return strong[at]
        if _goes_on(strong[at], used, for_input):
            before = _last(strong[:at], least, for_input) or used[-1]
            return strong[at]._replace(code=f"{before.code}\n\n{strong[at].code}")
    return None


def _up_to_answer(candidates: Sequence[_Candidate], for_input: bool, called: Collection[str]) -> Sequence[_Candidate]:
    """Return the candidates up to the last one that has what the tests need; none where none has."""
    for at in range(len(candidates) - 1, -1, -1):
        if (for_input and _reads_input(candidates[at])) or not _names(candidates[at]).isdisjoint(called):
            return candidates[: at + 1]
    return ()


def _names(candidate: _Candidate) -> set[str]:
    """Return what a program defines, or would define if it compiled."""
    if candidate.tree is None:
        return set(_DEFINED.findall(candidate.code))
    assigned = {
        node.id
        for statement in candidate.tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    defined = [node for node in ast.walk(candidate.tree) if isinstance(node, _DEFINITIONS) and not _is_stub(node)]
    return assigned.union(node.name for node in defined)


def _goes_on(candidate: _Candidate, used: Sequence[_Candidate], for_input: bool) -> bool:
    """Return whether a program is the second part of those that it uses, and no example or test of them."""
    body = [] if candidate.tree is None else candidate.tree.body
    new = [node for node in body if isinstance(node, _DEFINITIONS)]
    if any(isinstance(node, ast.ImportFrom) and node.module and _is_foreign(node.module) for node in body):
        return False
    if new and all(isinstance(node, (*_DEFINITIONS, ast.Import, ast.ImportFrom)) for node in body):
        known = {name for one in used if one.tree is not None for name in _defined(one.tree)}
        return not any(node.name in known or "test" in node.name.lower() or node.name == "main" for node in new)
    return for_input and _reads_input(candidate) and not any(map(_reads_input, used))


def _reads_input(candidate: _Candidate) -> bool:
    if candidate.tree is None:
        return _INPUT.search(candidate.code) is not None
    return any(
        getattr(node, "id", getattr(node, "attr", None)) in {"input", "stdin", "fileinput"} or _opens_input(node)
        for node in ast.walk(candidate.tree)
    )


def _opens_input(node: ast.AST) -> bool:
    """Return whether a call opens or reads standard input by its number or its path."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return False
    name = getattr(node.func, "id", getattr(node.func, "attr", None))
    first = node.args[0].value
    return name in {"open", "read", "fdopen"} and (first == "/dev/stdin" or (first == 0 and first is not False))


def _strength(candidate: _Candidate) -> int:
    """Return how much a block does.

    2 for a program that defines or does something, and for what was meant to be Python and does not compile; 1 for
    statements such as an import, a call or a signature; 0 for values alone, as what a program printed.
    """
    if candidate.tree is None:
        return 2
    nodes = list(ast.walk(candidate.tree))
    acts = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    acts |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if any(isinstance(node, _DOES) and not _is_stub(node) for node in nodes) or not acts.isdisjoint(_ACTS):
        return 2
    is_value = all(isinstance(node, _VALUES) and getattr(node, "value", node) is not None for node in nodes)
    return 0 if is_value else 1


def _is_stub(node: ast.AST) -> bool:
    """Return whether a definition has no body, as in the signature that an answer quotes."""
    if not isinstance(node, _DEFINITIONS):
        return False
    if isinstance(node, ast.ClassDef) and node.bases:
        return False
    return all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        or _is_stub(one)
        for one in node.body
    )


def _uses(candidate: _Candidate, earlier: Sequence[_Candidate]) -> bool:
    """Return whether a program cannot run without a function or a class of an earlier one."""
    if candidate.tree is None:
        return False
    nodes = list(ast.walk(candidate.tree))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)} | _BUILTINS
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and _is_foreign(node.module):
            read |= {alias.name for alias in node.names}  # from solution import f
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    missing = read - bound - _defined(candidate.tree)
    return any(one.tree is not None and not missing.isdisjoint(_defined(one.tree)) for one in earlier)


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in sys.stdlib_module_names


def _defined(tree: ast.Module) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, _DEFINITIONS)}


def _candidate(block: CodeBlock) -> _Candidate:
    """Return a block as a program, up to a later fence if only so it compiles."""
    is_python = PYTHON_LABEL.fullmatch(block.label) is not None
    for text in (block.text, *block.longer):
        for code in _readings(text):
            tree = _tree(code)
            if tree is not None:
                return _Candidate(code, tree, is_python, block.label)
    return _Candidate(block.text, None, is_python, block.label)


def _readings(text: str) -> Iterator[str]:
    """Yield the ways in which a text may be meant as a program."""
    session = _statements_of_session(text)
    if session is not None:
        yield session
    named = _NAMED_FIRST.match(text)
    if named is not None:
        yield textwrap.dedent(text[named.end() :])
    yield text
    yield textwrap.dedent(text)
    yield text.replace("\u00a0", " ")


def _unfenced(text: str) -> str | None:
    """Return the program that a text without fences is, that stands in a tag, or between lines of prose."""
    tagged = list(_TAGGED.finditer(text))
    found = _candidate(CodeBlock("", (tagged[-1][2] if tagged else text).strip("\n")))
    if found.tree is not None:
        return found.code if _strength(found) else None
    return _between_prose(text.split("\n"))


def _between_prose(lines: list[str]) -> str | None:
    """Return the longest program that begins at one of the first lines that look like Python, and ends before a blank
    line or at the end."""
    starts = [at for at, line in enumerate(lines) if _FIRST_LINE.match(line)][:_MAX_STARTS]
    for start in starts:
        ends = [at for at in range(start + 1, len(lines)) if not lines[at].strip()] + [len(lines)]
        for end in reversed(ends[:_MAX_ENDS]):
            code = textwrap.dedent("\n".join(lines[start:end])).strip("\n")
            found = _candidate(CodeBlock("", code))
            if found.tree is not None and _strength(found) == 2:
                return found.code
    return None


def _tree(code: str) -> ast.Module | None:
    if len(code) > _MAX_CODE_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return None


def _statements_of_session(text: str) -> str | None:
    """Return the statements of an interactive session of Python, without their output; None if it is no session."""
    lines = text.strip("\n").split("\n")
    if not _SESSION_PROMPT.match(lines[0]):
        return None
    statements: list[str] = []
    for line in lines:
        prompt = _SESSION_PROMPT.match(line) or (_SESSION_MORE.match(line) if statements else None)
        if prompt is not None:
            statements.append(line[prompt.end() :])
    return "\n".join(statements).strip("\n")
