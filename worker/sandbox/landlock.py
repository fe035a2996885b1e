"""Uses Landlock, a mechanism of the kernel by which a process without privileges restricts which files it can use. If
the kernel's Landlock can also deny TCP, the process gives up TCP, too.

A Landlock domain (the restrictions that a thread has entered) covers the calling thread, and the threads and processes
that this thread starts later. A library may start a thread pool while it loads. So a zygote (the process that forks the
children of steps) enters its domain before it loads a handler's module.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

# Numbers that the kernel defines: three system calls (the same on every architecture), a flag, and a type of rule.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_FILE = 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # `refer`: to rename or link a file from one folder to another

READ = READ_FILE | READ_DIR
#: The rights of a step in its own directory. They allow renames between folders, but no symlinks, sockets or devices.
WRITE = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _REFER | _TRUNCATE
_FOR_FILES = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE  # the rights that the kernel accepts for a file

#: A bit mask of rights -> the files and folders that get these rights.
Grants = Mapping[int, Iterable[Path]]

_BASE_RIGHTS = (1 << 13) - 1  # the rights of Landlock version 1
# What a ruleset denies besides rights on files. `_NET_TCP`: bind and connect. `_SCOPES`: connections to abstract
# sockets of processes outside the domain, and signals to these processes.
_NET_TCP = 0b11
_SCOPES = 0b11


def version() -> int:
    """The version of the kernel's Landlock; 0 if the kernel has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def _rights(abi: int) -> int:
    """The rights that Landlock of the version `abi` can deny. A ruleset denies all of them, except where a rule allows
    them.
    """
    rights = _BASE_RIGHTS
    if abi >= 2:  # noqa: PLR2004 - the first version with it
        rights |= _REFER
    if abi >= 3:  # noqa: PLR2004 - the first version with it
        rights |= _TRUNCATE
    return rights


# The two structs that the kernel reads: landlock_ruleset_attr, and landlock_path_beneath_attr.
class _Attributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def _create(libc: ctypes.CDLL, abi: int) -> int:
    # Fields that an old kernel does not know must be zero. Otherwise the kernel refuses the ruleset.
    net = _NET_TCP if abi >= 4 else 0  # noqa: PLR2004 - the first version with it
    scoped = _SCOPES if abi >= 6 else 0  # noqa: PLR2004 - the first version with it
    attributes = _Attributes(_rights(abi), net, scoped)
    ruleset = int(libc.syscall(_CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock: no ruleset")
    return ruleset


class Ruleset:
    """The restrictions of a thread. Call `allow` any number of times for the rights that the thread keeps, then `enter`
    once. `enter` cannot be undone. `abi`: the version of Landlock.

    The thread must have set no_new_privs before `enter`. Every method raises OSError when the kernel refuses.
    """

    def __init__(self, abi: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._rights = _rights(abi)
        self._ruleset = _create(self._libc, abi)

    def allow(self, grants: Grants) -> None:
        for rights, paths in grants.items():
            for path in paths:
                self._allow(path, rights & self._rights)

    def _allow(self, path: Path, rights: int) -> None:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # the path is absent, or an outer domain hides it, so there is nothing to allow
            return
        try:
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            rule = _PathRule(rights if is_folder else rights & _FOR_FILES, descriptor)
            if self._libc.syscall(_ADD_RULE, self._ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0) != 0:
                raise OSError(ctypes.get_errno(), f"Landlock: no rule for {path}")
        finally:
            os.close(descriptor)

    def enter(self) -> None:
        try:
            if self._libc.syscall(_RESTRICT_SELF, self._ruleset, 0) != 0:
                raise OSError(ctypes.get_errno() or errno.EPERM, "Landlock: refused")
        finally:
            os.close(self._ruleset)


def ruleset(grants: Grants) -> Ruleset | None:
    """A new Ruleset that allows `grants`. The caller may allow more. Returns None if the kernel has no Landlock."""
    abi = version()
    if abi == 0:
        return None
    new_ruleset = Ruleset(abi)
    new_ruleset.allow(grants)
    return new_ruleset
