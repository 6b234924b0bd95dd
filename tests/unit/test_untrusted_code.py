"""Nothing in the packages hands text that may come from elsewhere to a shell, an unpickler or an interpreter.

Read from the syntax trees, so that a new use fails here whatever it is named in the file.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.hostile

ROOT = Path(__file__).parents[2]
FILES = sorted(file for folder in ("schemas", "pipeline", "services", "src") for file in (ROOT / folder).rglob("*.py"))

FORBIDDEN_MODULES = {
    "pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "pty", "code", "codeop",
    "jsonpickle", "xmlrpc",
}  # fmt: skip
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "execfile",
    "os.system", "os.popen", "os.execl", "os.execv", "os.execvp", "os.spawnl", "os.spawnv", "os.posix_spawn",
    "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
    "torch.load", "torch.hub.load", "numpy.load", "np.load", "runpy.run_path", "runpy.run_module",
    "jinja2.Environment", "jinja2.Template", "ctypes.cdll.LoadLibrary", "multiprocessing.connection.Client",
}  # fmt: skip
FORBIDDEN_ARGUMENTS = {"shell": False, "trust_remote_code": False, "allow_pickle": False, "use_safetensors": True}
"""Arguments that may have one value only."""
IMPORTERS = {
    "pipeline/extensions/reasoning_gym/datasets.py",  # reasoning_gym, if it is there
    "pipeline/tasks/packed_files.py",  # pyarrow, if it is there
    "pipeline/tasks/rows.py",  # datasets and pyarrow, if they are there
    "pipeline/extensions/endpoint/function_program.py",  # the agent's function that the configuration names, likewise
    "pipeline/extensions/atropos/native/child.py",  # the class that the configuration names, in a process of its own
    "pipeline/common/user_code.py",  # an environment, a rater or a strategy that the configuration names
    "pipeline/scorer/runner.py",  # in a worker, the module of a rater that its scorer has loaded
    "pipeline/extension.py",  # what an installed extension names in its own value
    "services/supervisor/forkserver.py",  # modules out of a fixed table
    "services/cli/commands.py",  # a command out of a fixed table, or an entry point of an installed package
    "src/lachesis/__init__.py",  # a name out of a fixed table
}
"""Where modules are imported by a name that is not written in the file."""


def uses(source: str) -> Iterator[str]:
    """Yield what is forbidden in `source`, with its line."""
    tree = ast.parse(source)
    names = imported(tree)
    for name, line in names.values():
        if name.partition(".")[0] in FORBIDDEN_MODULES:
            yield f"line {line}: import of {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                only = FORBIDDEN_ARGUMENTS.get(keyword.arg or "")
                if only is not None and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is only):
                    yield f"line {node.lineno}: {keyword.arg} is not {only}"
        elif (
            isinstance(node, (ast.Name, ast.Attribute))
            and not isinstance(node.ctx, ast.Store)  # a setting of such a name
            and spelled(node, names) in FORBIDDEN_CALLS
        ):
            yield f"line {node.lineno}: {spelled(node, names)}"


def imported(tree: ast.Module) -> dict[str, tuple[str, int]]:
    """Return what the names that a file imports stand for, and in which line it does."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = (alias.name if alias.asname else top, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = (f"{node.module}.{alias.name}", node.lineno)
    return names


def spelled(node: ast.expr, names: dict[str, tuple[str, int]]) -> str | None:
    """Return the full dotted name, with the file's imports put in."""
    if isinstance(node, ast.Name):
        return names[node.id][0] if node.id in names else node.id
    if isinstance(node, ast.Attribute):
        inner = spelled(node.value, names)
        return f"{inner}.{node.attr}" if inner else None
    return None


@pytest.mark.slow
def test_no_new_way_in() -> None:
    found = {str(file.relative_to(ROOT)): list(uses(file.read_text())) for file in FILES}
    assert {file: what for file, what in found.items() if what} == {}


@pytest.mark.slow
def test_models_are_loaded_from_safetensors_and_without_their_code() -> None:
    calls = [
        (file.name, {keyword.arg for keyword in node.keywords})
        for file in FILES
        if "from_pretrained" in file.read_text()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]
    assert calls
    assert [call for call in calls if "trust_remote_code" not in call[1]] == []
    assert any("use_safetensors" in arguments for _, arguments in calls)


@pytest.mark.extension
def test_modules_are_imported_by_name_only_where_configuration_or_a_table_names_them() -> None:
    found = {str(file.relative_to(ROOT)) for file in FILES if "import_module(" in file.read_text()}
    assert found == IMPORTERS


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import os as o\no.system('x')",
        "from os import popen\npopen('x')",
        "import torch\ntorch.load('x')", "import numpy as np\nnp.load('x')", "eval('1')", "f = exec", "import yaml",
        "import subprocess\nsubprocess.run('x', shell=True)", "run('x', shell=yes)", "load(x, trust_remote_code=True)",
        "import asyncio\nasyncio.create_subprocess_shell('x')", "load(x, use_safetensors=None)",
    ],
)  # fmt: skip
def test_the_check_can_fail(source: str) -> None:
    assert list(uses(source)) != []
