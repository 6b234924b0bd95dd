# ruff: noqa: INP001 - a script, no package
"""Checks the names and first docstring lines of the product code; part of `make lint`.

    python .ci/names.py [FOLDER...]

Reports a public class name that two modules define, an identifier that is banned, a class name that is a participle, a
constant without a quantity, and a first docstring line of a module or a public function that is too long or begins
with a question word. Exit code 1 if anything is reported.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("schemas", "pipeline", "services")
MAX_FIRST_LINE_CHARS = 100

BANNED = {
    "ask": "request, or say what is asked for",
    "bare": "missing",
    "judge": "score_group, evaluate or drop_stale",
    "judged": "result",
    "judging": "scoring",
    "keep": "say what is kept",
    "look": "read, poll or check, with what",
    "note": "record, or set_note",
    "overheard": "peer_metrics",
    "past": "offline, or history",
    "take": "say what is done with it",
    "taught": "with_teacher",
    "tell": "publish, report or request",
    "told": "reported, published or requested",
}
"""Names of modules, classes, functions and methods, compared in lower case and without a leading underscore."""

# fmt: off
PARTICIPLES = frozenset({
    "Asked", "Began", "Committed", "Deleted", "Derived", "Disputed", "Drawn", "Ended", "Exported", "Failed",
    "Folded", "Forked", "Formed", "Found", "Gathered", "Held", "Imported", "Judged", "Lent", "Loaded", "Lost",
    "Made", "Moved", "Named", "Normalized", "Observed", "Overheard", "Past", "Placed", "Planned", "Prepared",
    "Promised", "Purged", "Registered", "Replayed", "Restored", "Said", "Scored", "Settled", "Stored", "Tagged",
    "Taught", "Told", "Trained", "Untrained",
})
# fmt: on
"""A class is a noun of the field. Events of the wire keep the name that is in their schema: see `WIRE`."""

WIRE = frozenset({"Promoted"})

BARE_CONSTANT = re.compile(r"_?(MOST|LEAST|FEW|FEWEST|LARGEST|SMALLEST|LONGEST|SHORTEST|DEEPEST|SHOWN|TOLD)(_[A-Z_]+)?")
QUESTION = re.compile(r"(What|Who|Whose)\b")


def definitions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Yield classes, functions and methods with whether each is public; functions inside functions are nobody's."""
    stack: list[tuple[ast.AST, bool]] = [(tree, True)]
    while stack:
        parent, public = stack.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                seen = public and not node.name.startswith("_")
                yield node, seen
                if isinstance(node, ast.ClassDef):
                    stack.append((node, seen))
            elif isinstance(node, ast.If | ast.Try | ast.With):
                stack.append((node, public))


def constants(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each constant of a module."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id.isupper():
                yield node.lineno, target.id


def first_line_problem(docstring: str | None) -> str | None:
    """Return what is wrong with a docstring's first line, None if nothing is."""
    line = (docstring or "").partition("\n")[0]
    if len(line) > MAX_FIRST_LINE_CHARS:
        return f"the first docstring line has {len(line)} characters; at most {MAX_FIRST_LINE_CHARS} fit"
    if found := QUESTION.match(line):
        return f"the first docstring line begins with {found.group()!r}; say what it does"
    return None


def problems_of(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield what is wrong with the names of one module, as `path:line: text`."""
    stem = Path(path).stem.lower()
    if stem in BANNED:
        yield f"{path}:1: module name {stem!r} is banned; use {BANNED[stem]}"
    if problem := first_line_problem(ast.get_docstring(tree)):
        yield f"{path}:1: {problem}"
    for line, name in constants(tree):
        if BARE_CONSTANT.fullmatch(name):
            yield f"{path}:{line}: constant {name!r} does not name its quantity; use MAX_... or MIN_... with a unit"
    for node, public in definitions(tree):
        where, bare = f"{path}:{node.lineno}", node.name.lstrip("_")
        if bare.lower() in BANNED:
            yield f"{where}: name {node.name!r} is banned; use {BANNED[bare.lower()]}"
        elif isinstance(node, ast.ClassDef):
            if bare in PARTICIPLES - WIRE:
                yield f"{where}: class name {node.name!r} is a participle; use a noun"
        elif public and (problem := first_line_problem(ast.get_docstring(node))):
            yield f"{where}: {node.name}: {problem}"


def duplicate_classes(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield each public class name that more than one module defines at its top level."""
    places = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{found[0]}: class {name!r} is defined {len(found)} times, also at {', '.join(found[1:])}"


def check(root: Path, folders: tuple[str, ...] = FOLDERS) -> list[str]:
    """Return everything that is wrong with the names in `folders` of `root`."""
    trees = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            trees[str(path.relative_to(root))] = ast.parse(path.read_text(encoding="utf-8"))
    found = [problem for path, tree in trees.items() for problem in problems_of(path, tree)]
    return [*found, *duplicate_classes(trees)]


if __name__ == "__main__":
    problems = check(ROOT, tuple(sys.argv[1:]) or FOLDERS)
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    sys.exit(1 if problems else 0)
