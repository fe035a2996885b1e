"""Finds an installed RabbitMQ server, or downloads the packages of the Linux distribution and unpacks them into the
cache.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
import re
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from leasehold.embedded.debian import unpack_packages
from leasehold.embedded.directories import cache_directory
from leasehold.embedded.process import EmbeddedError

# The parts of Erlang that RabbitMQ needs. They are listed here, because apt's own choice would be 150 packages.
ERLANG = (
    "asn1 base crypto eldap ftp inets mnesia os-mon parsetools public-key "
    "runtime-tools snmp ssl syntax-tools tftp tools xmerl"
)
PACKAGES = ["rabbitmq-server", *(f"erlang-{part}" for part in ERLANG.split())]

# Shared libraries that a bare image may lack, and the packages that contain them (Debian's name, then Ubuntu's).
LIBRARIES = {
    "libcrypto.so.3": ("libssl3", "libssl3t64"),
    "libssl.so.3": ("libssl3", "libssl3t64"),
    "libtinfo.so.6": ("libtinfo6",),
    "libstdc++.so.6": ("libstdc++6",),
    "libgcc_s.so.1": ("libgcc-s1",),
    "libsystemd.so.0": ("libsystemd0",),
    "libz.so.1": ("zlib1g",),
    "libzstd.so.1": ("libzstd1",),
    "libsctp.so.1": ("libsctp1", "libsctp1t64"),
}


@dataclass(frozen=True)
class RabbitServer:
    """The path of RabbitMQ's program, and the PATH and library path that its processes need."""

    program: Path
    search_path: str
    library_path: str

    @classmethod
    def at(cls, root: Path) -> RabbitServer | None:
        """The server below `root` (the system's root or an unpacked release), if there is one."""
        # Debian's own directory comes first. On Debian, /sbin (a link to /usr/sbin) has a wrapper of the same name. The
        # wrapper changes to the user `rabbitmq`, so only root and this user can run the wrapper.
        places = ("usr/lib/rabbitmq/bin", "sbin", "bin")
        programs = [root / place / "rabbitmq-server" for place in places]
        program = next((program for program in programs if program.exists()), None)
        if program is None:
            return None
        bundled_erl = root / "usr/lib/erlang/bin/erl"  # `erl` starts the Erlang VM
        erl = str(bundled_erl) if bundled_erl.exists() else shutil.which("erl") or "/usr/bin/erl"
        libraries = [] if root == Path("/") else [*root.glob("usr/lib/*-gnu"), *root.glob("lib/*-gnu")]
        return cls(
            program,
            os.pathsep.join([str(Path(erl).parent), "/usr/sbin:/usr/bin:/sbin:/bin"]),
            os.pathsep.join(map(str, libraries)),
        )


def find_rabbitmq() -> RabbitServer | None:
    """The server at $LEASEHOLD_RABBIT. If the variable is not set, it is the system's server, else the server that
    `install_rabbitmq` has unpacked, else None. Raises EmbeddedError if there is no server at $LEASEHOLD_RABBIT.
    """
    if configured_root := os.environ.get("LEASEHOLD_RABBIT"):
        server = RabbitServer.at(Path(configured_root).absolute())  # RabbitMQ runs in another folder
        if server is None:
            raise EmbeddedError(f"LEASEHOLD_RABBIT: there is no rabbitmq-server below {configured_root}")
        return server
    if Path("/usr/lib/rabbitmq/bin/rabbitmq-server").exists() and shutil.which("erl"):
        return RabbitServer.at(Path("/"))
    try:
        return RabbitServer.at(_unpack_folder())
    except (OSError, RuntimeError):  # no cache can be made, or the user has no home, so nothing was unpacked
        return None


async def install_rabbitmq() -> RabbitServer:
    """Find RabbitMQ, or unpack the distribution's packages (35 MB to download) into the cache.

    Raises:
        EmbeddedError: the system is neither Debian nor Ubuntu, or a download failed.
    """
    target = _unpack_folder()
    with (target.parent / "rabbitmq.lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)  # another process may be unpacking RabbitMQ now
        if server := find_rabbitmq():
            return server
        with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as scratch:
            root = Path(scratch) / "root"
            root.mkdir()
            root.chmod(0o755)  # whatever the umask is
            await unpack_packages(PACKAGES, root)
            await _add_libraries(root)
            if RabbitServer.at(root) is None:  # check this before the rename, so that the next call unpacks again
                raise EmbeddedError("the unpacked packages have no rabbitmq-server at the expected path")
            _relocate_erlang(root, target)
            root.rename(target)
    server = RabbitServer.at(target)
    assert server is not None
    return server


def _unpack_folder() -> Path:
    """The folder of the cache into which `install_rabbitmq` unpacks: one for each release of the system."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:  # not Linux
        release = {}
    return cache_directory() / "-".join(
        ["rabbitmq", release.get("ID", "linux"), release.get("VERSION_ID", "0"), platform.machine()]
    )


def _relocate_erlang(root: Path, target: Path) -> None:
    """Change the directory of Erlang that Debian's script `erl` names to the directory below `target`. No environment
    variable can do this. `target`: the path that `root` will have later.
    """
    home = shlex.quote(str(target / "usr/lib/erlang"))
    for erl in [root / "usr/lib/erlang/bin/erl", *root.glob("usr/lib/erlang/erts-*/bin/erl")]:
        if erl.is_file() and not erl.is_symlink():
            script = re.sub(r"ROOTDIR=/usr/lib/erlang\b", lambda _: f"ROOTDIR={home}", erl.read_text())
            erl.write_text(script)


async def _add_libraries(root: Path) -> None:
    """Unpack the shared libraries that Erlang needs and the system lacks."""
    missing_libraries = await _find_missing_libraries(root)
    unknown_libraries = missing_libraries - LIBRARIES.keys()
    if unknown_libraries:
        raise EmbeddedError(f"this system lacks shared libraries of Erlang: {', '.join(sorted(unknown_libraries))}")
    for library in sorted(missing_libraries):
        await _unpack_first_available(LIBRARIES[library], root)


async def _unpack_first_available(names: tuple[str, ...], root: Path) -> None:
    """Unpack the first of these packages that the distribution has. If it has none of them, this raises EmbeddedError
    with the reason for each package.
    """
    reasons = []
    for name in names:
        try:
            return await unpack_packages([name], root)
        except EmbeddedError as error:
            reasons.append(str(error))
    raise EmbeddedError("; ".join(reasons))


async def _find_missing_libraries(root: Path) -> set[str]:
    """The shared libraries that Erlang's native files need and the dynamic linker does not find."""
    ldd = await asyncio.create_subprocess_exec(
        "ldd",
        *map(str, _native_files(root)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await ldd.communicate()
    return set(re.findall(r"^\s*(\S+) => not found$", output.decode(), re.MULTILINE))


def _native_files(root: Path) -> list[Path]:
    return [*root.glob("usr/lib/erlang/erts-*/bin/*"), *root.glob("usr/lib/erlang/lib/**/*.so")]
