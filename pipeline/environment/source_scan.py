"""Finds environments in Python source without running it, with their docstrings and settings.

From the bytes of one module it returns its environments: subclasses of `lachesis.Environment` and of the classes of
other projects that an extension runs, and the functions with which verifiers loads one (`load_environment`). Guarantees
that nothing of the source is run or imported, so a default is shown as it is written. Base classes are followed within
the text alone; one from elsewhere is known by its name.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from typing import TypeAlias

from msgspec import Struct

from lachesis.pipeline.common.safe_text import encodable
from lachesis.pipeline.extension import foreign_classes
from lachesis.schemas.errors import ConfigError

__all__ = ["MAX_SOURCE_BYTES", "EnvironmentField", "FoundEnvironment", "find_environments"]

MAX_SOURCE_BYTES = 1 << 18
"""Longer modules are refused: parsing takes up to a thousand times as much memory."""
_MAX_BRACES = 10_000
"""`{` of a module. Parsing an f-string takes as long as its expressions times its length."""
_MAX_CLASSES = 1000
"""Classes of a module."""
_MAX_SETTINGS = 2000
"""Settings of all environments of a module; environments may share theirs by a base."""
_MAX_TEXT_CHARS = 4000
"""Characters of a docstring, type, default or help that are kept."""
_MAX_BASES = 16
"""Bases that are followed of a class, and classes that are followed from one to its bases."""

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class EnvironmentField(Struct, frozen=True, kw_only=True):
    """One setting of an environment, each part as its source has it."""

    name: str
    """Its name."""
    type: str | None = None
    """Its annotation. None: it has none."""
    default: str | None = None
    """Its default. None: it has none, and must be given."""
    help: str | None = None
    """The author's description. None: there is none that can be read without running the code."""


class FoundEnvironment(Struct, frozen=True, kw_only=True):
    """The description of one environment in its source."""

    name: str
    """Name of the class; of verifiers' environments, of the function."""
    family: str
    """The project that defines its interface: lachesis, verifiers, or the kind of environment that runs it."""
    line: int
    """Line of its definition."""
    docstring: str | None = None
    """None: it has none."""
    methods: list[str] = []
    """Methods that it defines itself: `task` and `get_next_item` make prompts, `reward` and `score` give scores."""
    fields: list[EnvironmentField] = []
    """Its settings."""

    @property
    def summary(self) -> str | None:
        """The first line of its docstring. None: it has none."""
        return (self.docstring or "").partition("\n")[0] or None


def find_environments(source: bytes) -> list[FoundEnvironment]:
    """Return the environments that a module defines at its top level, in their order.

    Raises `ConfigError` where the source is no Python, or would take long to read.
    """
    if len(source) > MAX_SOURCE_BYTES:
        raise ConfigError(f"is larger than {MAX_SOURCE_BYTES} bytes")
    bases = ["Environment", "load_environment", *(one.base for one in foreign_classes().values())]
    if not any(base.encode() in source for base in bases):  # it defines no environment, and is not parsed
        return []
    if source.count(b"{") > _MAX_BRACES:
        raise ConfigError(f"has more than {_MAX_BRACES} braces: move its data to another file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the source's own: escapes that Python does not know, say
            return list(_Module(ast.parse(source)).environments())
    except ConfigError:
        raise
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"is no Python: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError("is nested too deeply to be parsed") from error


class _Module:
    """One parsed module: its classes by name, and what its names were imported from."""

    def __init__(self, tree: ast.Module) -> None:
        self._body = tree.body
        self._classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        if len(self._classes) > _MAX_CLASSES:
            raise ConfigError(f"has more than {_MAX_CLASSES} classes")
        self._foreign = foreign_classes()
        self._families = {("Environment", "lachesis"): "lachesis"}
        self._families |= {(one.base, one.package): family for family, one in self._foreign.items()}
        """By base class and its package."""
        self._settings = 0
        self._read_fields: dict[ast.AST, list[EnvironmentField]] = {}
        """By the node that has them: environments may share theirs."""
        self._imported: dict[str, tuple[str, str]] = {}
        """By the name it has here: module, and name there."""
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                self._imported |= {one.asname or one.name: (node.module or "", one.name) for one in node.names}
            elif isinstance(node, ast.Import):
                self._imported |= {one.asname or one.name.partition(".")[0]: (one.name, "") for one in node.names}
        self._uses_verifiers = any(module.partition(".")[0] == "verifiers" for module, _ in self._imported.values())

    def environments(self) -> Iterator[FoundEnvironment]:
        for node in self._body:
            if isinstance(node, ast.ClassDef) and (family := self._family(node)) is not None:
                yield self._class(node, family)
            elif isinstance(node, _Function) and self._is_loader(node):
                yield FoundEnvironment(
                    name=node.name,
                    family="verifiers",
                    line=node.lineno,
                    docstring=_docstring(node),
                    fields=self._fields(node),
                )

    def _is_loader(self, node: _Function) -> bool:
        """Whether verifiers loads an environment by it; the one in verifiers itself takes any configuration."""
        takes_any = any(_text(one.annotation) == "EnvConfig" for one in node.args.args)
        return node.name == "load_environment" and self._uses_verifiers and not takes_any

    def _class(self, node: ast.ClassDef, family: str) -> FoundEnvironment:
        lineage = self._lineage(node)
        if family in self._foreign:
            fields = self._config_fields(lineage, self._foreign[family].settings_class)
        else:
            makers = (_method(one, "__init__") for one in lineage)
            maker = next((one for one in makers if one is not None), None)
            fields = [] if maker is None else self._fields(maker)[1:]
        return FoundEnvironment(
            name=node.name,
            family=family,
            line=node.lineno,
            docstring=_docstring(node),
            methods=[one.name for one in node.body if isinstance(one, _Function) and not one.name.startswith("_")],
            fields=fields,
        )

    def _config_fields(self, lineage: list[ast.ClassDef], attribute: str) -> list[EnvironmentField]:
        """Return the fields of the pydantic class that the attribute names, and of its bases in this module."""
        values = (_assigned(one, attribute) for one in lineage)
        named = next((value.id for value in values if isinstance(value, ast.Name)), "")
        config = self._classes.get(named)
        found: dict[str, EnvironmentField] = {}
        for kind in reversed(self._lineage(config) if config is not None else []):
            found |= {field.name: field for field in self._fields(kind)}
        return list(found.values())

    def _fields(self, node: ast.ClassDef | _Function) -> list[EnvironmentField]:
        """Return the fields of a class, or the parameters of a function."""
        if node not in self._read_fields:
            self._read_fields[node] = list(_annotated(node) if isinstance(node, ast.ClassDef) else _parameters(node))
        self._settings += len(self._read_fields[node])
        if self._settings > _MAX_SETTINGS:
            raise ConfigError(f"has environments with more than {_MAX_SETTINGS} settings")
        return self._read_fields[node]

    def _lineage(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        """Return the class and its bases in this module, nearest first; safe where they go in a circle."""
        found = [node]
        for kind in found:
            if len(found) >= _MAX_BASES:
                break
            names = [base.id for base in kind.bases[:_MAX_BASES] if isinstance(base, ast.Name)]
            inner = (self._classes.get(name) for name in dict.fromkeys(names))
            found += [one for one in inner if one is not None and one not in found]
        return found

    def _family(self, node: ast.ClassDef) -> str | None:
        """Return the project of its base class; None if the name is not known, or is of another package."""
        for base in (base for kind in self._lineage(node) for base in kind.bases[:_MAX_BASES]):
            if isinstance(base, ast.Name) and base.id not in self._classes:
                module, name = self._imported.get(base.id, ("", base.id))
            elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
                module, name = self._imported.get(base.value.id, (base.value.id, ""))[0], base.attr
            else:
                continue
            family = self._families.get((name, module.partition(".")[0]))
            if family is not None:
                return family
        return None


def _parameters(node: _Function) -> Iterator[EnvironmentField]:
    given = [*node.args.posonlyargs, *node.args.args]
    defaults: list[ast.expr | None] = [None] * (len(given) - len(node.args.defaults))
    pairs = [*zip(given, [*defaults, *node.args.defaults], strict=True)]
    pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    helps = _parameter_helps(ast.get_docstring(node) or "", [one.arg for one, _ in pairs])
    for one, default in pairs:
        yield EnvironmentField(
            name=one.arg, type=_text(one.annotation), default=_text(default), help=helps.get(one.arg)
        )


def _parameter_helps(docstring: str, names: list[str]) -> dict[str, str]:
    """Return what a docstring says of the parameters.

    It follows "`name`:" in a text, or "name:" or "name (type):" in a list, and ends where another one or a paragraph
    begins. "`a`, `b`:" says it of both.
    """
    text = docstring[:_MAX_TEXT_CHARS]
    found: dict[str, re.Match[str]] = {}
    for name in names:
        match = re.search(rf"(?:^[ ]*|`){re.escape(name)}`?(?:, `\w+`)*(?: \([^()\n]*\))?:\s", text, re.MULTILINE)
        if match is not None:
            found[name] = match
    starts = [match.start() for match in found.values()]
    starts += [match.start() for match in re.finditer(r"\n\s*\n|\bRaises\b", text)]
    helps = {}
    for name, match in found.items():
        end = min((start for start in starts if start >= match.end()), default=len(text))
        if said := " ".join(text[match.end() : end].split()):
            helps[name] = encodable(said)
    return helps


def _annotated(kind: ast.ClassDef) -> Iterator[EnvironmentField]:
    """Yield the annotated fields of a pydantic class."""
    for index, node in enumerate(kind.body):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        default, description = node.value, None
        if isinstance(default, ast.Call) and _text(default.func) in {"Field", "pydantic.Field"}:
            named = {one.arg: one.value for one in default.keywords}
            description = _string(named.get("description"))
            default = default.args[0] if default.args else named.get("default") or named.get("default_factory")
        if isinstance(default, ast.Constant) and default.value is ...:
            default = None
        after = kind.body[index + 1 : index + 2]
        if description is None and after and isinstance(after[0], ast.Expr):
            description = _string(after[0].value)
        yield EnvironmentField(
            name=node.target.id, type=_text(node.annotation), default=_text(default), help=description
        )


def _assigned(kind: ast.ClassDef, name: str) -> ast.expr | None:
    for node in kind.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node.value
    return None


def _method(kind: ast.ClassDef, name: str) -> _Function | None:
    return next((node for node in kind.body if isinstance(node, _Function) and node.name == name), None)


def _docstring(node: ast.ClassDef | _Function) -> str | None:
    text = ast.get_docstring(node)
    return None if text is None else encodable(text[:_MAX_TEXT_CHARS])


def _string(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return encodable(" ".join(node.value.split())[:_MAX_TEXT_CHARS])
    return None


def _text(node: ast.expr | None) -> str | None:
    """Return the source of an expression."""
    return None if node is None else ast.unparse(node)[:_MAX_TEXT_CHARS]
