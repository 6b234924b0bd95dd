"""Defines an extension, which adds to the pipeline, and finds those that are installed.

An extension ties the pipeline to somebody else's project. It is one `Extension` value, which a package offers as an
entry point of the group `lachesis.extensions`; the built-in ones, in `pipeline/extensions/`, are found the same way.
Its commands, and those that it adds to a group such as `lachesis env`, are entry points of the group
`lachesis.commands` (see `services/cli/commands.py`), so that `lachesis --help` imports none of it.
Guarantees that nothing in the pipeline depends on an extension: it is reached by names in this value alone, and what it
needs is imported when it is used. Two extensions that add the same name are refused, and so is one that adds a name of
the pipeline's own.
"""

import functools
import importlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from lachesis.pipeline.access import Access, Scope, access_table
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.errors import LachesisError

__all__ = [
    "GROUP",
    "EngineSpec",
    "EnvironmentKind",
    "Extension",
    "ForeignClasses",
    "HeldSocket",
    "ServiceSpec",
    "Setting",
    "TrackerSpec",
    "TrainerSpec",
    "access_of",
    "added",
    "call_each",
    "extensions",
    "foreign_classes",
    "load_place",
    "wanted_trackers",
    "with_added",
]

GROUP = "lachesis.extensions"
"""The group of entry points by which extensions are found."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the run's configuration. `type`: a struct for a table, or the type of a value.

    `description` says what it is and what its default means, as the text under a field of a struct does.
    """

    type: Any
    default: Any
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignClasses:
    """Classes of another project that a kind of environment runs: subclasses of `base`, which its `package` defines.

    They are found in source, and offered to agents. The kind has the parameters `place`, which names one, `settings` of
    it, and `python`, an interpreter that has the package.
    """

    base: str
    package: str
    settings_class: str
    """Attribute of such a class that names the class of its settings."""
    params: tuple[str, ...] = ()
    """All parameters of the kind but `place` and `settings`."""
    model_setting: str | None = None
    """Its setting that is the run's model unless it is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """A kind of environment. `place`: `module:Class` of a `lachesis.Environment`.

    None: a service of the extension publishes what it generated elsewhere; the run draws none of its tasks and starts
    no process for it.
    """

    place: str | None
    param_paths: Mapping[str, str] = field(default_factory=dict)
    """Which parameters are paths: file, program, code or model. Relative ones are to the configuration's file.

    `folder`, if it is one, is the folder of that file unless it is given. "params of NAME": parameters of the
    environment whose kind the parameter NAME holds, a data set if there is none.
    """
    choices: tuple[str, str] | None = None
    """A parameter, and a function that returns what can be chosen for it; `StartupError` where a package is missing."""
    renders_prompts: bool = False
    """Whether its own code renders prompts, so that `chat_template_kwargs` would change nothing."""
    classes: ForeignClasses | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSocket:
    """A listening socket that the supervisor holds while the service behind it starts again.

    `open`: function that gets the configuration and returns the socket, or raises `StartupError`. `variable` names its
    file descriptor to the service. `table`: the settings whose `host` and `port` say where it listens.
    """

    open: str
    variable: str
    table: str


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One service. `stage`: `module:function`, of a module in full.

    `phase`: services of a lower one are ready before those of a higher one start, and stop after them. `extra`: the
    extra of this distribution that it needs; another package requires what its own need. `part`: the part it plays
    where none is named; None: it has no parts.
    """

    name: str
    stage: str
    phase: int
    about: str
    extra: str | None = None
    part: str | None = None
    is_single: bool = False
    """Whether a run has one of it alone: one that starts first checks whether another one runs."""
    held_up: tuple[str, ...] = ()
    """What waits while it does not work, in words, as notices name it."""
    settings: str | None = None
    """Function that gets the configuration and returns what the stage takes of it. None: the stage takes it whole."""
    socket: HeldSocket | None = None
    backend: str | None = None
    """What the stage loads later, and is imported with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """A back end of the trainer, which computes elsewhere. `open`: function that gets the service, the trainer's
    settings and the run's configuration, and returns an async context manager of a `TrainerBackend`
    (`trainer/backend.py`).

    `serving`: what serves the roles `policy` and `eval`, since the weights are there as well. `extra`: what has to be
    installed for both.
    """

    open: str
    serving: str
    extra: str
    model: str
    """Function that gets the configuration and returns the setting that names the model there, and its name or None.
    """
    port: str
    """Path of the setting with the port at which the policy is served where `inference.policy.port` names none."""
    tries: str | None = None
    """Function that gets the configuration, signs in for `lachesis doctor` and returns what it found; it raises
    `ConfigError`, `AccessError` or `InfrastructureError`. Without one nothing is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSpec:
    """An experiment tracker. `open`: function that gets the configuration and the run's name there and returns a
    `Tracker`; it is called where `is_wanted`, which gets the configuration, is true. `place`: function that gets the
    configuration and says where its figures are. `extra`: what to install for it.
    """

    open: str
    place: str
    is_wanted: Callable[[Any], bool]
    extra: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An inference engine, which `inference.ROLE.kind` names.

    `serve`: function that gets service, the server's settings (`ServerSettings`) and the model, and serves the role
    until the service drains. `says`: what its server says that it is. `extra`: what to install for it, unless
    `inference.ROLE.python` names another interpreter.
    """

    serve: str
    says: str
    extra: str | None = None
    loads_here: bool = False
    """Whether the service's own process loads the weights by this project's code, so that `doctor` can try them."""
    is_light: bool = False
    """Whether a second one, for evaluation, is started without being named."""
    records_kept_tokens: bool = False
    """Whether it says which tokens `top_p` left (the column `sampling_mask`)."""
    constrains_answers: bool = False
    """Whether it serves requests that force what an answer must match (`structured_outputs`)."""
    shares_memory: bool = False
    """Whether it computes with weights that the trainer shares (`weights.transport = "shared_memory"`)."""
    context_option: str | None = None
    """Option among `inference.ROLE.args` that sets the context, in tokens. None: `inference.ROLE.engine` does."""
    min_head_size: int = 1
    """The smallest attention head that it computes with, in numbers."""
    folder_entries: tuple[str, ...] = ()
    """Names of what it writes into a run's folder, which goes with the run."""
    check_interpreter: str | None = None
    """Function that gets the name of the setting and the interpreter of `inference.ROLE.python`, and returns a
    `DoctorFinding`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """All that an extension adds. Places are `module:NAME`, imported when they are used."""

    name: str
    about: str
    """What it is for, in a few words."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Settings by dotted path: `NAME` at the top of the file, `training.NAME` in that table."""
    check: str | None = None
    """Function that gets the configuration, and raises `ConfigError` for what does not go together."""
    environments: Mapping[str, EnvironmentKind] = field(default_factory=dict)
    raters: Mapping[str, str] = field(default_factory=dict)
    """Raters by name, as a `rater` of [scoring] names them."""
    estimators: Mapping[str, str] = field(default_factory=dict)
    """Advantage estimators by name: functions of a `RewardGroup`."""
    strategies: Mapping[str, str] = field(default_factory=dict)
    """Curriculum strategies by name."""
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    plan: str | None = None
    """Function that gets the configuration and yields (service, part) of each process that the run then has."""
    access: str | None = None
    """Function that gets the `Scope` of a run and returns the `Access` of each of its services."""
    stored_values: str | None = None
    """Function that gets the configuration and yields (key of the run's bucket, function that raises `SchemaError` for
    a value with which its service would end at every start)."""
    folder_entries: tuple[str, ...] = ()
    """Names of what it writes into a run's folder, which goes with the run."""
    announce: str | None = None
    """Function that gets the configuration and returns lines that `lachesis up` prints at its start."""
    trainers: Mapping[str, TrainerSpec] = field(default_factory=dict)
    """Back ends of the trainer by the name that `training.backend` gives."""
    engines: Mapping[str, EngineSpec] = field(default_factory=dict)
    """Inference engines by the name that `inference.ROLE.kind` gives."""
    trackers: Mapping[str, TrackerSpec] = field(default_factory=dict)
    """Trackers by the setting that wants them."""
    importers: Mapping[str, str] = field(default_factory=dict)
    """Functions by the name that `lachesis import --from` gives: each reads a JSON line as a group (`ReadLine` in
    `offline/archive/logic/foreign_lines.py`)."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Policies for agents (`config/policy.py`) by the name that `lachesis mcp --policy` gives: `module:NAME`."""
    doctor: str | None = None
    """Function that gets the configuration and yields a `DoctorFinding` for all that it looks at."""


@functools.cache
def extensions() -> Mapping[str, Extension]:
    """Return the installed extensions by name.

    Raises `StartupError` that names the package, where one cannot be loaded or adds what another adds already.
    """
    found: dict[str, Extension] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        if point.name in found:
            packages = " and ".join(one.dist.name for one in entry_points(group=GROUP, name=point.name) if one.dist)
            raise StartupError(f"the packages {packages} both offer the extension {point.name!r}: uninstall one")
        found[point.name] = _loaded(point)
    _refuse_twice(found.values())
    return MappingProxyType(found)


@functools.cache
def added(what: str) -> Mapping[str, Any]:
    """Return by name everything of one kind (`raters`, `trackers`, ...) that the extensions add."""
    return MappingProxyType({name: one for each in extensions().values() for name, one in getattr(each, what).items()})


def with_added(what: str, own: Mapping[str, T]) -> dict[str, T]:
    """Return the pipeline's own things of one kind by name, and after them those that the extensions add.

    Raises `StartupError` that names an extension which adds a name of the pipeline's own.
    """
    for one in extensions().values():
        if taken := own.keys() & getattr(one, what).keys():
            raise StartupError(
                f"the extension {one.name!r} adds {min(taken)!r} to {what}, which the pipeline itself has: "
                f"{_mend(_package_of(one.name))}"
            )
    return {**own, **added(what)}


def foreign_classes() -> dict[str, ForeignClasses]:
    """Return by kind of environment the classes of other projects that it runs."""
    return {name: kind.classes for name, kind in added("environments").items() if kind.classes is not None}


def wanted_trackers(config: Any) -> dict[str, TrackerSpec]:
    """Return by setting the trackers that the configuration of a run wants."""
    return {setting: spec for setting, spec in added("trackers").items() if spec.is_wanted(config)}


def call_each(what: str, *given: Any) -> Iterator[Any]:
    """Call the function that each extension names as `what`, and yield what it returns.

    Of a generator, that is the list of its values.

    Raises `StartupError` that names the extension where its function fails by an error that is none of this project's.
    """
    for one in extensions().values():
        if getattr(one, what) is not None:
            yield _call(one, what, *given)


def access_of(scope: Scope) -> dict[str, Access]:
    """Return what each service, those of extensions too, and each operator may do in the run of `scope`."""
    further: dict[str, Access] = {}
    for one in extensions().values():
        rows = {} if one.access is None else _call(one, "access", scope)
        if others := rows.keys() - one.services.keys():
            raise StartupError(
                f"the extension {one.name!r} gives permissions to {min(others)!r}, which is no service that it adds: "
                f"{_mend(_package_of(one.name))}"
            )
        further |= rows
    return access_table(scope, further)


def load_place(place: str) -> Any:
    """Import what `module:NAME` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _call(one: Extension, what: str, *given: Any) -> Any:
    try:
        found = load_place(getattr(one, what))(*given)
        return list(found) if isinstance(found, Iterator) else found
    except LachesisError:
        raise
    except Exception as error:  # foreign code: whatever it raises, the package is named
        frame, package = traceback.extract_tb(error.__traceback__)[-1], _package_of(one.name)
        raise StartupError(
            f"`{what}` of the extension {one.name!r} of {package} failed ({type(error).__name__}: {error}, at "
            f"{Path(frame.filename).name}:{frame.lineno}); {_mend(package)}"
        ) from error


def _package_of(name: str) -> str:
    return next((point.dist.name for point in entry_points(group=GROUP, name=name) if point.dist), "its package")


def _mend(package: str) -> str:
    return f"install another version of {package}, or uninstall it"


def _loaded(point: EntryPoint) -> Extension:
    package = point.dist.name if point.dist is not None else "an installed package"
    mend = _mend(package)
    try:
        value = point.load()
    except Exception as error:  # foreign code: whatever it raises, the package is named
        raise StartupError(
            f"the extension {point.name!r} of {package} cannot be loaded ({type(error).__name__}: {error}); {mend}"
        ) from error
    if not isinstance(value, Extension) or value.name != point.name:
        raise StartupError(
            f"the extension {point.name!r} of {package} is {value!r:.80}, not a lachesis Extension of that name; {mend}"
        )
    return value


def _refuse_twice(found: Iterable[Extension]) -> None:
    owners: dict[tuple[str, str], str] = {}
    for one in found:
        for kind in fields(one):
            value = getattr(one, kind.name)
            for name in value if isinstance(value, Mapping) else ():
                first = owners.setdefault((kind.name, name), one.name)
                if first != one.name:
                    raise StartupError(
                        f"the extensions {first!r} and {one.name!r} both add {name!r} to {kind.name}: uninstall one"
                    )
