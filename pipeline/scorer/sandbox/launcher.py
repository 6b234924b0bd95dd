"""Runs one untrusted program.

It is started as `python -I -S launcher.py KEY=VALUE...` and never imported.

There are three processes. The launcher takes the request from standard input: the seccomp filter, the program and the
program's own input. It enters namespaces of its own and makes a root with the interpreter, /dev/null and one small
writable folder. It starts the init, process 1 of the namespace: trusted code that starts the program and waits for it.
The launcher kills the init at the deadline, when the scorer says so (a byte on standard input) or when the scorer is
dead (standard input closes), and when all processes of the program together take more processor time or memory than it
may. With an init, whether killed or done, the kernel kills everything in its namespace. The launcher's wait for the
init returns only when all of that is dead: the launcher's end means that nothing is alive.

The exit status is 0 only if the program's was. Failures of the setup go to standard error, which the program cannot
reach; so do, after `USED`, the seconds of processor time that the program took. The launcher needs only the standard
library, since it starts in a bare interpreter.
"""

import ctypes
import math
import os
import resource
import select
import struct
import sys
import time

FAILED, REFUSED = 1, 97
EPERM = 1
USED = "\0cpu "
INIT_BYTES = 32 << 20
MIN_PAUSE_S, MEMORY_PAUSE_S = 0.02, 0.01
PAGE_BYTES, TICK_S = os.sysconf("SC_PAGE_SIZE"), 1 / os.sysconf("SC_CLK_TCK")
SIGKILL, SIGCHLD = 9, 17  # the module signal would cost a fifth of the launcher's start
NOBODY_UID = 65534
NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x2, 0x4, 0x1000, 0x4000, 0x40000, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 442, -100, 0x8000, 1, 2, 4
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, LANDLOCK_BENEATH = 444, 445, 446, 1
LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version: how many rights there are; 16 from version 5 on
READ_FILE_RIGHTS, READ_RIGHTS, DEVICE_RIGHTS = 0x5, 0xD, 0x6  # execute and read; and list; read and write
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 4, 22, 38, 2
PR_SET_SECUREBITS, ROOT_HAS_NO_CAPABILITIES = 28, 0x3
MAX_ROOT_INODES, MAX_SCRATCH_INODES, ROOT_SPARE_BYTES = 4096, 4096, 1 << 20
MAX_OPEN_FILES = 64
PROGRAM, INPUT, SCRATCH, OLD_ROOT, EMPTY = "/program.py", "/input", "/tmp", "/old", "/empty"  # in the new root
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL")}
"""NumPy's libraries start a thread for each core of the machine at import, more than a program may have."""

libc = ctypes.CDLL(None, use_errno=True)


class LauncherSettings:
    """The scorer's request, read from the command line."""

    def __init__(self, arguments: list[str]) -> None:
        given = dict(argument.split("=", 1) for argument in arguments)
        self.sizes = [int(size) for size in given["bytes"].split(",")]  # of filter, program and input
        self.wall_s = float(given["wall_s"])
        cpu_s, *others = given["limits"].split(",")
        self.cpu_s = float(cpu_s)
        self.memory_bytes, self.scratch_bytes, self.processes = map(int, others)
        self.python = given["python"]
        self.readable = lines(given["readable"])
        self.links = [fields(link) for link in lines(given["links"])]
        self.hidden = lines(given["hidden"])
        self.drops_root = bool(given["drops_root"])  # root becomes the user nobody; else it may be the only user
        self.folder = given["folder"]  # without namespaces: where program, input and scratch lie; else empty
        self.landlock = bool(self.folder and given["landlock"])
        self.cgroups = [fields(group) for group in lines(given["cgroups"])]  # folder, then FILE=VALUE...


def lines(text: str) -> list[str]:
    return text.split("\n") if text else []


def fields(text: str) -> list[str]:
    return text.split("\t")


class ProtectionMissingError(OSError):
    """A protection that the machine does not grant; the message starts with its name."""


class RequiredProtection:
    """Name the protection in errors, so that the scorer knows what is missing."""

    def __init__(self, protection: str) -> None:
        self.protection = protection

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError):
            raise ProtectionMissingError(f"{self.protection}: {error}") from error


def check_call(result: int, what: str) -> None:
    """Raise OSError if a call of the C library failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def write(path: str, content: bytes, folder: int | None = None) -> None:
    """Write a file, made if it does not exist; `folder` is the descriptor that `path` starts from."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444, dir_fd=folder)
    try:
        while content:
            content = content[os.write(file, content) :]
    finally:
        os.close(file)


def write_kernel_file(path: str, text: str, folder: int | None = None) -> None:
    """Write a file of /proc or of a cgroup, in one call."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"write {text!r} to {path}: {error.strerror}") from error
    finally:
        os.close(file)


def read_exactly(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            os._exit(FAILED)  # the scorer died before anything was started
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    check_call(
        libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()),
        f"mount {source} at {target}",
    )


def protect(path: str, flags: int) -> None:
    """Make what is mounted at `path` read-only, without devices and set-user-id programs."""
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    check_call(
        libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), size), f"protect {path}"
    )


def own_user_namespace(proc: int, flags: int = 0) -> None:
    """Enter a user namespace with one user that is not root in it; `proc` is an open /proc."""
    uid, gid = os.getuid(), os.getgid()
    check_call(libc.unshare(NEWUSER | flags), "enter namespaces")
    write_kernel_file("self/setgroups", "deny", proc)
    write_kernel_file("self/uid_map", f"{uid or NOBODY_UID} {uid} 1", proc)
    write_kernel_file("self/gid_map", f"{gid or NOBODY_UID} {gid} 1", proc)


def enter_namespaces(proc: int, *, drops_root: bool) -> None:
    """Enter namespaces of our own.

    Root keeps its user until the init drops it, since it may own the interpreter.
    """
    flags = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP
    if drops_root:
        check_call(libc.unshare(flags), "enter namespaces")
    else:
        own_user_namespace(proc, flags)


def make_root(settings: LauncherSettings, program: bytes, text: bytes) -> None:
    """Make a root of the interpreter's files, /dev/null, the program, its input and the scratch folder."""
    uid, gid = (NOBODY_UID, NOBODY_UID) if os.getuid() == 0 else (os.getuid(), os.getgid())
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    size = len(program) + len(text) + ROOT_SPARE_BYTES
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=755,nr_inodes={MAX_ROOT_INODES}")
    os.mkdir("/tmp" + OLD_ROOT)
    number = PIVOT_ROOT.get(os.uname().machine, -1)
    check_call(libc.syscall(number, b"/tmp", b"/tmp" + OLD_ROOT.encode()), "change the root")
    os.chdir("/")
    os.umask(0o022)
    for folder in (EMPTY, SCRATCH, "/dev"):
        os.mkdir(folder)
    scratch = f"size={settings.scratch_bytes},mode=700,nr_inodes={MAX_SCRATCH_INODES},uid={uid},gid={gid}"
    mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, scratch)
    for path in settings.readable:  # after the scratch folder, which would hide an environment that lies below /tmp
        bind(OLD_ROOT + path, path)
        protect(path, AT_RECURSIVE)
    for path, target in settings.links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for path in settings.hidden:
        mount(EMPTY, path, "", MS_BIND)
        protect(path, 0)
    write(PROGRAM, program)
    write(INPUT, text)
    bind(OLD_ROOT + "/dev/null", "/dev/null")
    os.symlink(INPUT, "/dev/stdin")  # some programs read it by this name
    check_call(libc.umount2(OLD_ROOT.encode(), MNT_DETACH), "let go of the machine's files")
    os.rmdir(OLD_ROOT)
    protect("/", 0)


def bind(source: str, target: str) -> None:
    """Show a file or folder at another place, under the same name."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        write(target, b"")
    mount(source, target, "", MS_BIND | MS_REC)


def restrict_files(settings: LauncherSettings) -> None:
    """Restrict a program to the interpreter's files and its folder with Landlock.

    For a program that has no root of its own.
    """
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    check_call(version, "Landlock")
    rights = (1 << LANDLOCK_RIGHTS.get(version, 16)) - 1
    signals = 2 if version >= 6 else 0  # it may signal no process but its own
    handled = struct.pack("=QQQ", rights, 0, signals)[: 24 if version >= 6 else 8]
    ruleset = libc.syscall(LANDLOCK_CREATE, handled, len(handled), 0)
    check_call(ruleset, "Landlock")
    allowed = [(path, READ_RIGHTS) for path in (*settings.readable, settings.python)]
    for path, wanted in [*allowed, (settings.folder, READ_RIGHTS), (settings.folder + SCRATCH, rights)]:
        allow_path(ruleset, path, wanted if os.path.isdir(path) else wanted & READ_FILE_RIGHTS)
    allow_path(ruleset, "/dev/null", DEVICE_RIGHTS)
    check_call(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "Landlock")


def allow_path(ruleset: int, path: str, rights: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    check_call(
        libc.syscall(LANDLOCK_ADD, ruleset, LANDLOCK_BENEATH, struct.pack("=Qi", rights, file), 0), f"allow {path}"
    )
    os.close(file)


def drop_root(proc: int, settings: LauncherSettings) -> None:
    """Become the user nobody in a user namespace of our own: process limits do not hold for root.

    The root of a container that has no other user keeps that user, without its capabilities.
    """
    if os.getuid() != 0:
        return
    if not settings.drops_root:
        if not settings.landlock:
            raise OSError(EPERM, "root cannot change to the user nobody here, and nothing else guards its files")
        libc.prctl(PR_SET_SECUREBITS, ROOT_HAS_NO_CAPABILITIES, 0, 0, 0)  # refused: it has none to begin with
        return
    try:
        os.setgroups([])
        os.setresgid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
        os.setresuid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
    except OSError as error:
        raise OSError(error.errno, f"root cannot change to the user nobody: {error.strerror}") from error
    if not settings.folder:
        with RequiredProtection("namespaces"):
            check_call(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "own /proc/self")
            own_user_namespace(proc)


def die_with(launcher: int) -> None:
    """Die when the launcher dies; `launcher` is its pidfd. After all changes of user, which would undo it."""
    check_call(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "die with the launcher")
    watch = select.poll()
    watch.register(launcher, select.POLLIN)
    if watch.poll(0):
        os._exit(FAILED)


def limit(settings: LauncherSettings) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, math.ceil(settings.cpu_s)),
        (resource.RLIMIT_AS, settings.memory_bytes),
        (resource.RLIMIT_NPROC, settings.processes),
        (resource.RLIMIT_FSIZE, settings.scratch_bytes),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CORE, 1),  # 1, not 0: the kernel then starts no core dump handler of the machine either
    ):
        if kind == resource.RLIMIT_NPROC and settings.folder:
            # without a user namespace it would also count the user's other processes; only threads can be made
            continue
        highest = resource.getrlimit(kind)[1]
        lower = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(kind, (lower, lower))


def execute(settings: LauncherSettings, filter_code: bytes) -> None:
    """Become the program."""
    folder = settings.folder
    os.dup2(os.open(folder + INPUT, os.O_RDONLY), 0)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.chdir(folder + SCRATCH)
    check_call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    if settings.landlock:
        with RequiredProtection("landlock"):
            restrict_files(settings)
    limit(settings)
    if filter_code:
        held = ctypes.create_string_buffer(filter_code, len(filter_code))
        described = struct.pack("HxxxxxxQ", len(filter_code) // 8, ctypes.addressof(held))
        with RequiredProtection("seccomp"):
            check_call(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0), "set the filter")
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder + SCRATCH, "LANG": "C.UTF-8", **ONE_THREAD}
    os.execve(settings.python, [settings.python, "-I", folder + PROGRAM], environment)  # noqa: S606


def attempt(settings: LauncherSettings, filter_code: bytes, report: int) -> None:
    """Become the program, or report why not; never return."""
    try:
        execute(settings, filter_code)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the program never ran
        report_error(report, error)
    finally:
        os._exit(REFUSED)


def report_error(report: int, error: BaseException) -> None:
    os.write(report, (str(error) if isinstance(error, OSError) else repr(error)).encode())


class ControlGroups:
    """The control groups of this program, which limit the memory and the processes of all of it together."""

    def __init__(self) -> None:
        self.name = f"lachesis-{os.getpid()}"
        self.folders: list[int] = []

    def make(self, settings: LauncherSettings) -> None:
        for path, *limits in settings.cgroups:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.mkdir(self.name, dir_fd=folder)
            self.folders.append(folder)
            for entry in limits:
                file, _, value = entry.partition("=")
                write_kernel_file(f"{self.name}/{file}", value, folder)

    def join(self) -> None:
        for folder in self.folders:
            write_kernel_file(f"{self.name}/cgroup.procs", "0", folder)

    def remove(self) -> None:
        """Remove the groups; nothing is in them any more."""
        for folder in self.folders:
            os.rmdir(self.name, dir_fd=folder)


def be_init(settings: LauncherSettings, filter_code: bytes, groups: ControlGroups, proc: int, launcher: int) -> None:
    """Start the program and wait for it, as process 1; without namespaces become the program.

    Never return.
    """
    report, program = os.dup(2), None
    try:
        with RequiredProtection("cgroups"):
            groups.join()
        write_kernel_file("self/oom_score_adj", "1000", proc)  # the first to go where memory is short
        drop_root(proc, settings)
        die_with(launcher)
        os.close(proc)
        program = 0 if settings.folder else os.fork()
        if program == 0:
            attempt(settings, filter_code, report)
        os.closerange(0, 2)
        ended = 0
        while ended != program:
            ended, status = os.wait()  # orphans too
        os._exit(0 if status == 0 else FAILED)
    except BaseException as error:  # noqa: BLE001 - a report, unless it is the program's doing, by a signal
        if program is None:
            report_error(report, error)
    finally:
        os._exit(REFUSED)


class Usage:
    """Resource use of the init and all processes below it, read from the machine's /proc."""

    def __init__(self, settings: LauncherSettings, proc: int, init: int) -> None:
        self.settings = settings
        self.proc = proc
        self.init = init
        self.cpu_s = 0.0
        self.cpus = len(os.sched_getaffinity(0))
        try:
            read_at(proc, f"{init}/task/{init}/children")
        except OSError:
            self.lists_children = False
        else:
            self.lists_children = True

    def pause_s(self) -> float | None:
        """Return the seconds until the program can have taken more than it may; None: it has."""
        settings, cpu_s = self.settings, 0.0
        resident: dict[int, int] = {}
        for pid, fields in self.processes():
            cpu_s += sum(map(int, fields[11:15])) * TICK_S  # its own, and of those it waited for
            resident[pid] = int(fields[21]) * PAGE_BYTES
        self.cpu_s = max(self.cpu_s, cpu_s)  # the kernel does not count what it ends with the init
        left_s = settings.cpu_s - cpu_s
        if left_s <= 0 or len(resident) > settings.processes + 1:  # limits of processes do not hold for every root
            return None
        pause_s = max(MIN_PAUSE_S, left_s / self.cpus)
        if settings.cgroups:
            return pause_s
        most = settings.memory_bytes + INIT_BYTES
        is_near = sum(resident.values()) > most  # pages that processes share count for each of them here
        if is_near and sum(self.own_bytes(pid, size) for pid, size in resident.items()) > most:
            return None
        if settings.folder and files_exceed(settings.folder + SCRATCH, settings.scratch_bytes):
            return None
        return min(pause_s, MEMORY_PAUSE_S)

    def processes(self) -> "list[tuple[int, list[str]]]":
        """Return the processes, each with its fields in /proc/PID/stat from the third on.

        One that ends meanwhile is left out.
        """
        found: list[tuple[int, list[str]]] = []
        below = None if self.lists_children else self.all_children()
        waiting = [self.init]
        while waiting:
            pid = waiting.pop()
            try:
                found.append((pid, stat_fields(self.proc, pid)))
                waiting += self.children(pid) if below is None else below.get(pid, [])
            except OSError:
                continue
        return found

    def children(self, pid: int) -> list[int]:
        folder = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc)
        try:
            return [
                int(child) for thread in os.listdir(folder) for child in read_at(folder, f"{thread}/children").split()
            ]
        finally:
            os.close(folder)

    def all_children(self) -> "dict[int, list[int]]":
        """Return the children of every process of the machine."""
        found: dict[int, list[int]] = {}
        for name in os.listdir(self.proc):
            if name.isdigit():
                try:
                    found.setdefault(int(stat_fields(self.proc, int(name))[1]), []).append(int(name))
                except OSError:
                    continue
        return found

    def own_bytes(self, pid: int, most: int) -> int:
        """Return the memory of a process, with its part of what it shares.

        `most` where the kernel does not say.
        """
        try:
            sizes = read_at(self.proc, f"{pid}/smaps_rollup").splitlines()
        except PermissionError:
            return most
        except OSError:  # it has ended
            return 0
        return next((int(line.split()[1]) << 10 for line in sizes if line.startswith("Pss:")), most)


def read_at(folder: int, path: str) -> str:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(file, 1 << 16).decode()
    finally:
        os.close(file)


def stat_fields(proc: int, pid: int) -> list[str]:
    return read_at(proc, f"{pid}/stat").rpartition(")")[2].split()


def files_exceed(folder: str, limit_bytes: int) -> bool:
    """Whether the files below a folder are too many, or take more of the disk than `limit_bytes`."""
    size = number = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                size += os.lstat(f"{parent}/{name}").st_blocks * 512
            except OSError:
                continue
            number += 1
    return number > MAX_SCRATCH_INODES or size > limit_bytes


def wait_for(init: int, deadline: float, usage: Usage) -> int:
    """Wait until the init ends or must end; return the exit status once nothing in the namespace is alive."""
    ended = os.pidfd_open(init)
    watch = select.poll()
    for file in (0, ended):
        watch.register(file, select.POLLIN)
    ready: list[tuple[int, int]] = []
    while not ready and (pause_s := usage.pause_s()) is not None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        ready = watch.poll(min(left_s, pause_s) * 1000)
    if not any(file == ended for file, _ in ready):
        usage.pause_s()
        os.kill(init, SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])


def main() -> int:
    started = time.monotonic()
    settings = LauncherSettings(sys.argv[1:])
    filter_code, program, text = map(read_exactly, settings.sizes)
    groups = ControlGroups()
    try:
        with RequiredProtection("cgroups"):
            groups.make(settings)
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        if settings.folder:
            write(settings.folder + PROGRAM, program)
            write(settings.folder + INPUT, text)
        else:
            with RequiredProtection("namespaces"):
                enter_namespaces(proc, drops_root=settings.drops_root)
                make_root(settings, program, text)
        launcher = os.pidfd_open(os.getpid())
        libc.signal(SIGCHLD, None)  # children that are ignored would take their processor time with them
        init = os.fork()
        if init == 0:
            be_init(settings, filter_code, groups, proc, launcher)
        os.closerange(1, 2)  # the program's output ends with the program
        usage = Usage(settings, proc, init)
        status = wait_for(init, started + settings.wall_s, usage)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        os.write(2, f"{USED}{max(used.ru_utime + used.ru_stime, usage.cpu_s)}".encode())
        return 0 if status == 0 else FAILED
    finally:
        groups.remove()


if __name__ == "__main__":
    try:
        os._exit(main())
    except BaseException as error:  # noqa: BLE001
        report_error(2, error)
        os._exit(FAILED)
