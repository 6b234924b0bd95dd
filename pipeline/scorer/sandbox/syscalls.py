"""Makes the seccomp filter of untrusted code: it allows some system calls, and all others fail.

From a machine's name it makes the BPF program, as bytes. Calls that a Python program needs for computing, for its own
files, pipes and processes are allowed. There is no call for sockets, namespaces, mounts, memory without a name
(`memfd_create`, System V), tracing, keys, devices, io_uring or BPF, nor a handler of SIGCHLD. A call the list does not
know fails with ENOSYS, as on an older kernel, so the C library falls back to one that can be checked (`clone3` to
`clone`).
"""

import errno
import struct

__all__ = ["build_filter"]

_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS = {
    # Linux's arch/x86/entry/syscalls/syscall_64.tbl
    "x86_64": """
access=21 alarm=37 arch_prctl=158 brk=12 chdir=80 chmod=90 clock_getres=229 clock_gettime=228
clock_nanosleep=230 clone=56 close=3 close_range=436 copy_file_range=326 creat=85 dup=32 dup2=33 dup3=292
epoll_create=213 epoll_create1=291 epoll_ctl=233 epoll_pwait=281 epoll_wait=232 eventfd=284 eventfd2=290
execve=59 exit=60 exit_group=231 faccessat=269 faccessat2=439 fadvise64=221 fallocate=285 fchdir=81 fchmod=91
fchmodat=268 fcntl=72 fdatasync=75 fgetxattr=193 flistxattr=196 fork=57 fstat=5 fstatfs=138 fsync=74
ftruncate=77 futex=202 futimesat=261 getcpu=309 getcwd=79 getdents=78 getdents64=217 getegid=108 geteuid=107
getgid=104 getgroups=115 getitimer=36 getpgid=121 getpgrp=111 getpid=39 getppid=110 getrandom=318 getresgid=120
getresuid=118 getrlimit=97 getrusage=98 getsid=124 gettid=186 gettimeofday=96 getuid=102 getxattr=191 ioctl=16
kill=62 lgetxattr=192 link=86 linkat=265 listxattr=194 llistxattr=195 lseek=8 lstat=6 madvise=28 membarrier=324
mkdir=83 mkdirat=258 mmap=9 mprotect=10 mremap=25 msync=26 munmap=11 nanosleep=35 newfstatat=262 open=2
openat=257 pause=34 pipe=22 pipe2=293 poll=7 ppoll=271 prctl=157 pread64=17 preadv=295 preadv2=327 prlimit64=302
pselect6=270 pwrite64=18 pwritev=296 pwritev2=328 read=0 readlink=89 readlinkat=267 readv=19 rename=82
renameat=264 renameat2=316 restart_syscall=219 rmdir=84 rseq=334 rt_sigaction=13 rt_sigpending=127
rt_sigprocmask=14 rt_sigreturn=15 rt_sigsuspend=130 rt_sigtimedwait=128 sched_getaffinity=204 sched_yield=24
select=23 sendfile=40 set_robust_list=273 set_tid_address=218 setitimer=38 setpgid=109 setrlimit=160 setsid=112
sigaltstack=131 stat=4 statfs=137 statx=332 symlink=88 symlinkat=266 sysinfo=99 tgkill=234 time=201 times=100
tkill=200 truncate=76 umask=95 uname=63 unlink=87 unlinkat=263 utime=132 utimensat=280 utimes=235 vfork=58
wait4=61 waitid=247 write=1 writev=20
""",
    # Linux's include/uapi/asm-generic/unistd.h
    "aarch64": """
brk=214 chdir=49 clock_getres=114 clock_gettime=113 clock_nanosleep=115 clone=220 close=57 close_range=436
copy_file_range=285 dup=23 dup3=24 epoll_create1=20 epoll_ctl=21 epoll_pwait=22 eventfd2=19 execve=221 exit=93
exit_group=94 faccessat=48 faccessat2=439 fadvise64=223 fallocate=47 fchdir=50 fchmod=52 fchmodat=53 fcntl=25
fdatasync=83 fgetxattr=10 flistxattr=13 fstat=80 fstatfs=44 fsync=82 ftruncate=46 futex=98 getcpu=168 getcwd=17
getdents64=61 getegid=177 geteuid=175 getgid=176 getgroups=158 getitimer=102 getpgid=155 getpid=172 getppid=173
getrandom=278 getresgid=150 getresuid=148 getrlimit=163 getrusage=165 getsid=156 gettid=178 gettimeofday=169
getuid=174 getxattr=8 ioctl=29 kill=129 lgetxattr=9 linkat=37 listxattr=11 llistxattr=12 lseek=62 madvise=233
membarrier=283 mkdirat=34 mmap=222 mprotect=226 mremap=216 msync=227 munmap=215 nanosleep=101 newfstatat=79
openat=56 pipe2=59 ppoll=73 prctl=167 pread64=67 preadv=69 preadv2=286 prlimit64=261 pselect6=72 pwrite64=68
pwritev=70 pwritev2=287 read=63 readlinkat=78 readv=65 renameat=38 renameat2=276 restart_syscall=128 rseq=293
rt_sigaction=134 rt_sigpending=136 rt_sigprocmask=135 rt_sigreturn=139 rt_sigsuspend=133 rt_sigtimedwait=137
sched_getaffinity=123 sched_yield=124 sendfile=71 set_robust_list=99 set_tid_address=96 setitimer=103
setpgid=154 setrlimit=164 setsid=157 sigaltstack=132 statfs=43 statx=291 symlinkat=36 sysinfo=179 tgkill=131
times=153 tkill=130 truncate=45 umask=166 uname=160 unlinkat=35 utimensat=88 wait4=260 waitid=95 write=64
writev=66
""",
}
_OTHER_PROCESS_CALLS = {
    "fork", "vfork", "kill", "tkill", "tgkill", "setsid", "setpgid",
    "chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "futimesat",
}  # fmt: skip
"""Refused to a program without namespaces: a second process, a signal, and attributes of its user's own files."""

_NEW_NAMESPACE = 0x7E020000  # CLONE_NEW*: cgroup, uts, ipc, user, pid, net and mount
_CLONE_THREAD = 0x10000
_SIGCHLD = 17
_ALLOWED_VALUES = {
    # call: (index of its argument, values). The kernel reads the lower 32 bits of each of these arguments, as we do.
    "prctl": (0, (15, 16)),  # PR_SET_NAME, PR_GET_NAME
    "prlimit64": (0, (0,)),  # limits of its own process
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # is it a terminal, its size; FION*, FIO*CLEX
    "fcntl": (1, (0, 1, 2, 3, 4, 5, 1030, 1032)),  # F_DUPFD, descriptor and status flags, F_GETLK, pipe size: no locks
}
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16  # in struct seccomp_data

_Instruction = tuple[int, int, int, int]


def build_filter(machine: str, *, alone: bool = False) -> bytes | None:
    """Return the filter for a machine (as of `os.uname`), None for one without a list.

    `alone` allows threads but no second process and no signals: without a process namespace, one process is all that
    can surely be killed.
    """
    if machine not in _NUMBERS:
        return None
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    for entry in _NUMBERS[machine].split():
        name, _, number = entry.partition("=")
        if not (alone and name in _OTHER_PROCESS_CALLS):
            block = _allow(name, alone=alone)
            program += [(_JUMP_EQUAL, 0, len(block), int(number)), *block]
    program.append((_RETURN, 0, 0, _FAIL | errno.ENOSYS))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _allow(name: str, *, alone: bool) -> list[_Instruction]:
    """Return the instructions for one call; each way through them ends with a verdict."""
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM)
    if name == "clone":
        thread: list[_Instruction] = [(_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD), refuse] if alone else []
        return [(_LOAD, 0, 0, _ARGUMENTS_OFFSET), *thread, (_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACE), refuse, allow]
    if name == "rt_sigaction":  # who ignores the end of children hides their processor time
        return [(_LOAD, 0, 0, _ARGUMENTS_OFFSET), (_JUMP_EQUAL, 0, 1, _SIGCHLD), refuse, allow]
    if name not in _ALLOWED_VALUES:
        return [allow]
    index, values = _ALLOWED_VALUES[name]
    checks = [step for value in values for step in ((_JUMP_EQUAL, 0, 1, value), allow)]
    return [(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * index), *checks, refuse]
