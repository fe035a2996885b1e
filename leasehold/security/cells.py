"""Cells: several installations, each with its own PostgreSQL and RabbitMQ, that share the tenants among them.

A map says which cells there are, and in which cell a tenant lives. Each cell reads the same map. A request that belongs
to another cell is refused with that cell's address, before anything is read or written for it. No gateway is needed
for that; one that reads the cell's name in the key saves clients the second request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from leasehold.domain.errors import BadSetting, WrongCell
from leasehold.file_secrets import FileSecret
from leasehold.settings import Settings

#: The name of a cell. It is a part of the keys that the cell makes.
CELL = re.compile(r"[a-z0-9]{1,11}")


@dataclass(frozen=True, slots=True)
class CellMap:
    """`addresses`: cell -> URL of its API. `tenants`: tenant -> cell. A tenant that is not in it may live anywhere.
    `homes`: the cells of `tenants`.
    """

    addresses: Mapping[str, str]
    tenants: Mapping[str, str]
    homes: frozenset[str]


def parse(text: str) -> CellMap:
    """Read a map: `{"cells": {"a": "https://a.example"}, "tenants": {"acme": "a"}}`. Raises ValueError."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise ValueError("the map of cells is no JSON") from None
    if not isinstance(document, dict) or not document.keys() <= {"cells", "tenants"}:
        raise ValueError("the map of cells has the fields `cells` and `tenants`, and no others")
    addresses, tenants = _texts(document, "cells"), _texts(document, "tenants")
    for name, address in addresses.items():
        if not CELL.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a cell: 1 to 11 small letters and digits")
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", address):
            raise ValueError(f"the address of cell {name} is no URL with http:// or https://")
    if unknown := sorted(set(tenants.values()) - addresses.keys()):
        raise ValueError(f"tenants live in cells that the map does not name: {', '.join(unknown)}")
    urls = {name: address.rstrip("/") for name, address in addresses.items()}
    return CellMap(urls, tenants, frozenset(tenants.values()))


def _texts(document: Mapping[str, Any], name: str) -> dict[str, str]:
    values = document.get(name, {})
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError(f"`{name}` of the map of cells is no object of texts")
    return values


class Cells:
    """The map, as the cell `own` sees it. The file is read again when it changes. A file that cannot be read, or holds
    no map, leaves the last map in force.
    """

    def __init__(self, own: str, file: FileSecret) -> None:
        """Raises ValueError for a file that holds no map, or a map without the cell `own`."""
        self.own = own
        self._file = file
        self._map = self._checked()
        file.on_change(self._read_again)

    @classmethod
    def of(cls, settings: Settings) -> Cells | None:
        """The map of the settings. None: the installation is no cell. Raises BadSetting."""
        if not settings.cell:
            return None
        if settings.cells_file is None:
            raise BadSetting("LEASEHOLD_CELLS_FILE", "a cell needs the map of all cells")
        try:
            return cls(settings.cell, FileSecret(Path(settings.cells_file)))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadSetting("LEASEHOLD_CELLS_FILE", f"{settings.cells_file}: {reason}") from None

    @property
    def map(self) -> CellMap:
        self._file.get_secret_value()  # reads a changed file
        return self._map

    def refuse_elsewhere(self, tenant_id: str | None, key_cell: str | None = None) -> None:
        """Raises WrongCell if the tenant lives in another cell: that of the map, else that which its key names.

        `tenant_id`: None if nobody knows it. `key_cell`: None for a key without a cell. A cell that the map does not
        name counts as this one, because cells may be renamed.
        """
        known = self.map
        named = key_cell if key_cell in known.addresses else self.own
        cell = known.tenants.get(tenant_id, named) if tenant_id is not None else named
        if cell is not None and cell != self.own:
            raise WrongCell(cell, known.addresses[cell])

    def refuse_key_of(self, key_cell: str | None) -> None:
        """As `refuse_elsewhere`, before the key's row is read. While the map places tenants in this cell, a key of
        another cell may be that of a tenant which moved here: only its row decides.
        """
        if self.own not in self.map.homes:
            self.refuse_elsewhere(None, key_cell)

    def _checked(self) -> CellMap:
        found = parse(self._file.get_secret_value())
        if self.own not in found.addresses:
            raise ValueError(f"the map of cells does not name this cell, {self.own}")
        return found

    def _read_again(self) -> None:
        self._map = self._checked()
