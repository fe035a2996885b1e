"""Reads secret settings from files. LEASEHOLD_NAME_FILE names a file with the value of the secret setting
LEASEHOLD_NAME.

A changed file is read again. So the next connection, signature or encryption uses the new value, without a restart. A
setting may be a mapping of names to secrets. Its file is JSON, and a process uses only the names that the file had when
the process started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import structlog
from pydantic import SecretStr, model_validator
from pydantic_settings import BaseSettings, DotEnvSettingsSource

log = structlog.get_logger(__name__)

#: A file with more bytes cannot be a secret, so its path must be wrong.
MAX_BYTES = 1024 * 1024


class FileSecret(SecretStr):
    """The content of a file, without white space around it. The constructor raises OSError or ValueError when the file
    cannot be read.

    The file may later be missing, empty or unreadable, for example during a rotation. The last value then stays in
    force, and the log gets one line. Code in an event loop may read the value, because a read costs one stat(2), and
    Kubernetes keeps Secrets in memory.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """`max_bytes`: a larger file is refused."""
        self.path = path
        self._max_bytes = max_bytes
        self._stamp = stamp_of(path)
        self._was_readable = True
        self._callbacks: list[Callable[[], None]] = []
        super().__init__(_content_of(path, max_bytes))

    def get_secret_value(self) -> str:
        try:
            if (stamp := stamp_of(self.path)) != self._stamp:
                self._secret_value = _content_of(self.path, self._max_bytes)
                self._stamp = stamp
                self._call_back()  # an error counts as an unreadable file: see `on_change`
                log.info("the file of a setting was read again", path=str(self.path))
            self._was_readable = True
        except (OSError, ValueError) as error:
            if self._was_readable:
                log.warning("the file of a setting cannot be read: the last value stays in force", path=str(self.path),
                            error=type(error).__name__)  # fmt: skip
            self._was_readable = False
        return self._secret_value

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each change of the value. If a callback raises OSError or ValueError, the file counts
        as unreadable, and the log gets a line. The other callbacks are still called.
        """
        self._callbacks.append(callback)

    def _call_back(self) -> None:
        errors: list[OSError | ValueError] = []
        for callback in self._callbacks:
            try:
                callback()
            except (OSError, ValueError) as error:
                errors.append(error)
        if errors:
            raise errors[0]


class FileSecretOfMapping(SecretStr):
    """One secret of a file with a mapping of secrets. If the file later has no such secret, the last value stays in
    force.
    """

    def __init__(self, file: FileSecret, name: str, value: str) -> None:
        self._file = file
        self._name = name
        self._text = file.get_secret_value()
        super().__init__(value)

    def get_secret_value(self) -> str:
        text = self._file.get_secret_value()
        if text != self._text:
            self._text = text
            value = _value_in(text, self._name)
            if value:
                self._secret_value = value
            else:
                log.warning("the file of a setting has no such secret: the last value stays in force",
                            path=str(self._file.path), name=self._name)  # fmt: skip
        return self._secret_value

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each change of the file."""
        self._file.on_change(callback)


class SettingsWithFiles(BaseSettings):
    """Settings whose secrets may be in files. The settings of a kind of work may derive from this class, too."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: Any, **named_sources: Any
    ) -> tuple[Any, ...]:
        """A file that the environment names overrides a value of `.env`, just as a variable of the environment does."""
        for source in (*sources, *named_sources.values()):
            if isinstance(source, DotEnvSettingsSource):
                source.env_vars = cls.without_files(source.env_vars)
        return super().settings_customise_sources(settings_cls, *sources, **named_sources)

    @classmethod
    def without_files(cls, variables: Mapping[str, str | None]) -> dict[str, str | None]:
        """`variables` without the settings for which the environment names a file."""
        in_files = {cls._variable_of(name) for name in cls._files()}
        return {name: value for name, value in variables.items() if name.upper() not in in_files}

    @classmethod
    def _files(cls) -> dict[str, str]:
        """The paths of the files that the environment names, by the names of the settings."""
        paths = {
            name: os.environ.get(f"{cls._variable_of(name)}_FILE")
            for name, field in cls.model_fields.items()
            if holds_secrets(field.annotation)
        }
        return {name: path for name, path in paths.items() if path}

    @classmethod
    def _variable_of(cls, name: str) -> str:
        return f"{cls.model_config.get('env_prefix', '')}{name}".upper()

    @model_validator(mode="before")
    @classmethod
    def _read_files(cls, values: Any) -> Any:
        for name, path in cls._files().items():
            variable = cls._variable_of(name)
            if variable in os.environ:
                raise ValueError(f"{variable} and {variable}_FILE are both set: set one of them")
            values.setdefault(name, _value_from_file(f"{variable}_FILE", path, cls.model_fields[name].annotation))
        return values


def _value_from_file(variable: str, path: str, annotation: object) -> Any:
    """The value of a setting of the type `annotation`. `variable`: the variable with the path. Raises ValueError."""
    try:
        secret = FileSecret(Path(path))
        return secret if annotation is SecretStr else _secrets_of(secret)
    except json.JSONDecodeError:
        raise ValueError(f"{variable}: {path} is not JSON") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{variable}: {path}: {reason}") from None


def holds_secrets(annotation: object) -> bool:
    """Whether a setting of this type is a secret, or a mapping of secrets."""
    return annotation is SecretStr or SecretStr in get_args(annotation)


def _secrets_of(file: FileSecret) -> Any:
    """The mapping in the file, with a secret for each text. Other values stay, because Pydantic then refuses them with
    a message. Raises JSONDecodeError.
    """
    mapping = json.loads(file.get_secret_value())
    if not isinstance(mapping, dict):
        return mapping
    return {
        name: FileSecretOfMapping(file, name, value) if isinstance(value, str) else value
        for name, value in mapping.items()
    }


def _value_in(text: str, name: str) -> str | None:
    """The secret of this name in the JSON text; None: the text has no such secret."""
    try:
        mapping = json.loads(text)
    except json.JSONDecodeError:
        return None
    value = mapping.get(name) if isinstance(mapping, dict) else None
    return value if isinstance(value, str) else None


def stamp_of(path: Path) -> tuple[int, int, int]:
    """The inode of the file, the time of its last change in nanoseconds, and its size. A file is read again only if one
    of these differs.
    """
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _content_of(path: Path, max_bytes: int) -> str:
    if path.stat().st_size > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    text = path.read_text(encoding="utf-8").strip()
    if not text:
        raise ValueError("it is empty")
    return text
