"""The system-call filter of a child process: no network, no programs, no other processes.

The filter is a deny list. It denies the calls with which a hostile picture that controls its decoder could reach
anything outside the child. An allow list would be tighter. But each version of a decoder or tensor library uses other
calls, and operators soon switch off a filter that breaks a release. Calls that are newer than this list fail, too,
because the filter answers them as an older kernel would (ENOSYS). The numbers come from the kernel's `unistd` tables.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from typing import NamedTuple


class Machine(NamedTuple):
    """An architecture. `audit_arch`: the number by which the kernel names it to a filter. `column`: its column in the
    tables below. `seccomp`: the number of the call seccomp(2).
    """

    audit_arch: int
    column: int
    seccomp: int


#: The supported architectures, by the name that uname(2) gives.
MACHINES = {
    "x86_64": Machine(0xC000003E, 0, 317),
    "aarch64": Machine(0xC00000B7, 1, 277),
}

#: The calls that the filter answers with EPERM -> their numbers (x86_64, aarch64). A number is None if the architecture
#: has no such call.
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    # the network; the child's socket to the worker needs none of these calls, only read(2) and write(2)
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200),
    "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206),
    "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # programs and processes; the rule on clone admits threads
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    # other processes; for kill and tgkill see `_only_self`
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "get_robust_list": (274, 100), "kcmp": (312, 272), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    # calls for which the kernel checks only the user id, which the worker and its other children share
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    # another view of the file system, and ways around path checks
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "setns": (308, 268),
    "unshare": (272, 97), "open_tree_attr": (467, 467), "statmount": (457, 457), "listmount": (458, 458),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # links and devices: the worker uploads what lies in the attempt's directory, so nothing there may point elsewhere
    "symlink": (88, None), "symlinkat": (266, 36), "link": (86, None), "linkat": (265, 37),
    "mknod": (133, None), "mknodat": (259, 33),
    # owners, modes and attributes of files that the worker's user has outside of the attempt's directory
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "getxattrat": (464, 464), "listxattrat": (465, 465),
    # calls that old versions of Landlock do not check, and calls that watch files of other programs
    "truncate": (76, 45), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27), "fanotify_mark": (301, 263), "lookup_dcookie": (212, 18),
    # memory that the address-space limit does not count, or that outlives the process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192),
    "semctl": (66, 191), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    # the worker sets the limits; the child must not loosen them
    "setrlimit": (160, 164),
    # large interfaces of the kernel, with a history of holes
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "personality": (135, 92),
    "fanotify_init": (300, 262), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161),
    "setdomainname": (171, 162), "vhangup": (153, 58), "lsm_set_self_attr": (460, 460),
}  # fmt: skip

#: The filter answers these calls with ENOTSUP, as a file system without extended attributes does. Programs then copy
#: files without the attributes.
_UNSUPPORTED: dict[str, tuple[int, int]] = {
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13),
}  # fmt: skip

#: The number of the newest call in these tables. The filter answers every call with a higher number with ENOSYS. This
#: works for all architectures, because from 424 on a number means the same call on each of them.
NEWEST = 467

#: The filter answers these calls with ENOSYS, as a kernel without them does. clone3 passes its flags behind a pointer,
#: where a filter cannot read them. Without clone3 the C library uses clone(2), whose flags a filter can read. io_uring
#: would make socket calls that no rule above sees.
_ABSENT: dict[str, tuple[int, int]] = {
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}

#: The numbers (x86_64, aarch64) of the calls that `build_filter` admits or denies by their arguments.
_CLONE, _KILL, _TGKILL, _PRLIMIT64, _PRCTL = (56, 220), (62, 129), (234, 131), (302, 261), (157, 167)
_FCNTL, _IOCTL, _SCHED_SETAFFINITY = (72, 25), (16, 29), (203, 122)

_CLONE_THREAD = 0x00010000
_PR_SET_PDEATHSIG = 1
#: Forbidden commands of fcntl and ioctl. They choose a signal, and the process to which the kernel sends this signal
#: when a file changes or gets input. So a child could signal any process. Only the last command is of another kind: it
#: puts input into a terminal.
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_NOTIFY = 8, 10, 15, 1026
_FIOSETOWN, _SIOCSPGRP, _TIOCSTI = 0x8901, 0x8902, 0x5412
_X32_BIT = 0x40000000  # set in the numbers of the x32 calls, a second set of numbers for the same calls

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF opcodes
#: The answers of the filter. 0x00050000 lets the call fail with the error number in the low 16 bits.
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_DENY, _NO_SUCH_CALL = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NOT_SUPPORTED = 0x00050000 | errno.ENOTSUP
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data

# Two operations of seccomp(2), and the flag that puts all threads of the process under the filter.
_SET_MODE_FILTER, _GET_ACTION_AVAIL, _FLAG_TSYNC = 1, 2, 1


def _low(argument: int) -> int:
    """The offset of the argument's low 32 bits in struct seccomp_data. Both architectures are little-endian."""
    return 16 + 8 * argument


def _high(argument: int) -> int:
    return _low(argument) + 4


def _bpf(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction. `k`: its operand. `if_true`, `if_false`: how many instructions a jump skips."""
    return struct.pack("=HBBI", code, if_true, if_false, k)


def _for_call(number: int, *body: bytes) -> bytes:
    """Run `body` only for the system call `number`. A body may load another value in place of the call's number.
    Because every body ends in a return, no later test of the number runs.
    """
    return _bpf(_JUMP_EQ, number, 0, len(body)) + b"".join(body)


def _only_threads() -> tuple[bytes, ...]:
    """Admit clone if it makes a thread."""
    return _bpf(_LOAD, _low(0)), _bpf(_JUMP_SET, _CLONE_THREAD, 0, 1), _bpf(_RETURN, _ALLOW), _bpf(_RETURN, _DENY)


def _only_self(pid: int) -> tuple[bytes, ...]:
    """Admit the call if its first argument is the child's own process id."""
    return _bpf(_LOAD, _low(0)), _bpf(_JUMP_EQ, pid, 0, 1), _bpf(_RETURN, _ALLOW), _bpf(_RETURN, _DENY)


def _none_of(argument: int, *values: int) -> tuple[bytes, ...]:
    """Admit the call unless the argument has one of these values."""
    # A match jumps over the tests that follow it and over the ALLOW, to the DENY.
    tests = [_bpf(_JUMP_EQ, value, len(values) - number, 0) for number, value in enumerate(values)]
    return _bpf(_LOAD, _low(argument)), *tests, _bpf(_RETURN, _ALLOW), _bpf(_RETURN, _DENY)


def _only_this_thread(pid: int) -> tuple[bytes, ...]:
    """Admit the call if its first argument is 0, which is the calling thread, or the child's own process id."""
    return (
        _bpf(_LOAD, _low(0)), _bpf(_JUMP_EQ, 0, 2, 0), _bpf(_JUMP_EQ, pid, 1, 0),
        _bpf(_RETURN, _DENY), _bpf(_RETURN, _ALLOW),
    )  # fmt: skip


def _only_reading_limits() -> tuple[bytes, ...]:
    """Admit prlimit if it only reads, which means that the pointer to the new limit is null."""
    return (
        _bpf(_LOAD, _low(2)), _bpf(_JUMP_EQ, 0, 0, 3),
        _bpf(_LOAD, _high(2)), _bpf(_JUMP_EQ, 0, 0, 1),
        _bpf(_RETURN, _ALLOW), _bpf(_RETURN, _DENY),
    )  # fmt: skip


def build_filter(machine: Machine, pid: int) -> bytes:
    """Assemble the classic BPF program for the process `pid` on `machine`."""
    column = machine.column
    program = [
        _bpf(_LOAD, _ARCH), _bpf(_JUMP_EQ, machine.audit_arch, 1, 0), _bpf(_RETURN, _KILL_PROCESS),
        _bpf(_LOAD, _NUMBER),
        _bpf(_JUMP_GE, _X32_BIT, 0, 1), _bpf(_RETURN, _DENY),
        _for_call(_CLONE[column], *_only_threads()),
        _for_call(_KILL[column], *_only_self(pid)),
        _for_call(_TGKILL[column], *_only_self(pid)),
        _for_call(_PRLIMIT64[column], *_only_reading_limits()),
        _for_call(_PRCTL[column], *_none_of(0, _PR_SET_PDEATHSIG)),  # a child must die with its parent
        _for_call(_FCNTL[column], *_none_of(1, _F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_NOTIFY)),
        _for_call(_IOCTL[column], *_none_of(1, _FIOSETOWN, _SIOCSPGRP, _TIOCSTI)),
        _for_call(_SCHED_SETAFFINITY[column], *_only_this_thread(pid)),
        _bpf(_JUMP_GE, NEWEST + 1, 0, 1), _bpf(_RETURN, _NO_SUCH_CALL),
    ]  # fmt: skip
    program += [_for_call(numbers[column], _bpf(_RETURN, _NO_SUCH_CALL)) for numbers in _ABSENT.values()]
    program += [_for_call(numbers[column], _bpf(_RETURN, _NOT_SUPPORTED)) for numbers in _UNSUPPORTED.values()]
    forbidden = [numbers[column] for numbers in _FORBIDDEN.values()]
    program += [_for_call(number, _bpf(_RETURN, _DENY)) for number in forbidden if number is not None]
    program.append(_bpf(_RETURN, _ALLOW))
    return b"".join(program)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def supported_machine() -> Machine | None:
    """The entry of this machine in MACHINES, or None if it has no entry, or its kernel cannot filter system calls."""
    machine = MACHINES.get(os.uname().machine)
    if machine is None or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:  # noqa: PLR2004 - 64 bits
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    answer_errno = ctypes.c_uint32(_DENY & ~0xFFFF)  # the action without its error number
    available = libc.syscall(machine.seccomp, _GET_ACTION_AVAIL, 0, ctypes.byref(answer_errno))
    return machine if available == 0 else None


def install_filter(machine: Machine) -> None:
    """Put every thread of this process under the filter. No call removes the filter again. The process must have set
    no_new_privs. Raises OSError when the kernel refuses.
    """
    instructions = build_filter(machine, os.getpid())
    program = _Program(len(instructions) // 8, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    answer = libc.syscall(machine.seccomp, _SET_MODE_FILTER, _FLAG_TSYNC, ctypes.byref(program))
    if answer != 0:  # a positive answer: the id of a thread that the kernel could not put under the filter
        raise OSError(ctypes.get_errno() or errno.EBUSY, "the kernel refused the system-call filter")
