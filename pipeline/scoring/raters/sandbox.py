"""Runs one command that nobody trusts: `python sandbox.py LIMITS COMMAND...`, started by the code rater, not imported.

Linux alone, and without privileges: in user, mount, process and network namespaces of its own the command sees a
read-only file system with one small writable folder, no process but its own, and no network; a system call filter lets
it open no socket of any kind, since a path socket would lead out of every namespace. What its user may read, it may
read. Limits hold for time, memory, files and processes. Where any of this cannot be had the command does not run, and
the reason goes to the pipe named first. Only the standard library: it starts in a bare interpreter.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys

REFUSED = 97
NEWNS, NEWUSER, NEWPID, NEWNET, NEWIPC = 0x20000, 0x10000000, 0x20000000, 0x40000000, 0x8000000
MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x4000, 0x40000, 0x2, 0x4
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, LAST_CAP = 1, 22, 24, 38, 63
SECCOMP_MODE_FILTER, RET_ALLOW, RET_ERRNO, EPERM = 2, 0x7FFF0000, 0x00050000, 1
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
REFUSED_CALLS = {
    # (audit architecture): socket, socketpair, io_uring_setup, unshare, setns, mount, umount2, mount_setattr, ptrace,
    # process_vm_readv, process_vm_writev, bpf, keyctl, add_key, userfaultfd
    "x86_64": (0xC000003E, (41, 53, 425, 272, 308, 165, 166, 442, 101, 310, 311, 321, 250, 248, 323)),
    "aarch64": (0xC00000B7, (198, 199, 425, 97, 268, 40, 39, 442, 117, 270, 271, 280, 219, 217, 282)),
}
X32_CALLS = 0x40000000

libc = ctypes.CDLL(None, use_errno=True)


def must(result: int, what: str) -> None:
    """Raise OSError if a call of the C library failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123 - a bare interpreter starts faster without pathlib
        file.write(text)


def separate(scratch: str, scratch_bytes: int) -> None:
    """Enter namespaces of our own and make the file system read-only, but for a new folder at `scratch`."""
    uid, gid = os.getuid(), os.getgid()
    must(libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC), "unshare")
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"0 {uid} 1")
    write("/proc/self/gid_map", f"0 {gid} 1")
    must(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "make mounts private")
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY, 0, 0, 0)
    must(
        libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)),
        "make the file system read-only",
    )
    flags = MS_NOSUID | MS_NODEV
    must(
        libc.mount(b"tmpfs", scratch.encode(), b"tmpfs", flags, f"size={scratch_bytes},mode=700".encode()),
        "mount tmpfs",
    )


def refuse_calls() -> None:
    """Let the kernel refuse what leads out of the sandbox, for this process and all that come of it."""
    machine = os.uname().machine
    if machine not in REFUSED_CALLS:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    architecture, numbers = REFUSED_CALLS[machine]
    n = len(numbers)
    program = [
        (LOAD, 0, 0, 4),
        (JUMP_EQUAL, 0, n + 3, architecture),
        (LOAD, 0, 0, 0),
        (JUMP_AT_LEAST, n + 1, 0, X32_CALLS),
    ]
    program += [(JUMP_EQUAL, n - i, 0, number) for i, number in enumerate(numbers)]
    program += [(RETURN, 0, 0, RET_ALLOW), (RETURN, 0, 0, RET_ERRNO | EPERM)]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code)
    described = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(held))
    must(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0), "set the system call filter")


def limit(seconds: int, memory_bytes: int, processes: int) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def hide_processes() -> None:
    """Replace /proc, which would show everybody's processes, by that of the own namespace, or by nothing."""
    if libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV, None) != 0:
        must(libc.mount(b"none", b"/proc", b"tmpfs", MS_NOSUID | MS_NODEV, b"size=0"), "hide /proc")


def main() -> int:
    report, scratch, *numbers = sys.argv[1:7]
    scratch_bytes, seconds, memory_bytes, processes = map(int, numbers)
    command = sys.argv[7:]
    os.set_inheritable(int(report), False)  # the command cannot write to it
    try:
        separate(scratch, scratch_bytes)
        child = os.fork()  # the first process of the new namespace: with it all others end
        if child:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(status)
        must(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "die with the parent")
        hide_processes()
        os.chdir(scratch)
        for capability in range(LAST_CAP + 1):
            dropped = libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0
            must(0 if dropped or ctypes.get_errno() == errno.EINVAL else -1, "drop capabilities")
        must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        limit(seconds, memory_bytes, processes)
        refuse_calls()
        os.execve(command[0], command, {"PATH": "/usr/bin:/bin", "HOME": scratch, "LANG": "C.UTF-8"})  # noqa: S606
    except OSError as error:
        os.write(int(report), str(error).encode())
        os._exit(REFUSED)


if __name__ == "__main__":
    sys.exit(main())
