"""Reads the map of cells, and refuses requests that belong to another cell.

Cells are several installations that divide the tenants among them. Each cell has its own PostgreSQL and RabbitMQ, and
all cells read the same map. The map has the address of each cell, and the cell of each tenant. If a cell gets a
request that belongs to another cell, it refuses the request before it reads or writes anything for it. The answer has
the address of the right cell, and the client sends the request there. So no gateway is needed. But a gateway that reads
the cell's name in the API key saves the client this second request.
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

#: The name of a cell. It is a part of the API keys that the cell makes.
CELL = re.compile(r"[a-z0-9]{1,11}")
#: The largest accepted map, in bytes. A map of this size has room for about a million tenants.
MAX_MAP_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CellMap:
    """A map of cells. `addresses`: cell -> URL of its API. `tenants`: tenant -> its cell; a tenant that is missing here
    may belong to any cell. `homes`: the cells to which `tenants` belong.
    """

    addresses: Mapping[str, str]
    tenants: Mapping[str, str]
    homes: frozenset[str]


def parse(text: str) -> CellMap:
    """Read a map: `{"cells": {"a": "https://a.example"}, "tenants": {"acme": "a"}}`. Raises ValueError."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise ValueError("the map of cells is not JSON") from None
    if not isinstance(document, dict) or not document.keys() <= {"cells", "tenants"}:
        raise ValueError("the map of cells has the fields `cells` and `tenants`, and no others")
    addresses, tenants = _texts_in(document, "cells"), _texts_in(document, "tenants")
    for name, address in addresses.items():
        if not CELL.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for a cell: use 1 to 11 small letters and digits")
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", address):
            raise ValueError(f"the address of cell {name} is not a URL with http:// or https://")
    if unknown := sorted(set(tenants.values()) - addresses.keys()):
        raise ValueError(f"tenants live in cells that the map does not name: {', '.join(unknown)}")
    urls = {name: address.rstrip("/") for name, address in addresses.items()}
    return CellMap(urls, tenants, frozenset(tenants.values()))


def _texts_in(document: Mapping[str, Any], name: str) -> dict[str, str]:
    values = document.get(name, {})
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError(f"`{name}` in the map of cells is not a JSON object with text values")
    return values


class Cells:
    """The map of cells, as the cell `own` uses it. A changed file of the map is read again. If the changed file cannot
    be read, or has no valid map, the last map stays in force.
    """

    def __init__(self, own: str, file: FileSecret) -> None:
        """`file`: the file of the map, which is no secret. It is a FileSecret because a FileSecret reads a changed file
        again. Raises ValueError for a file without a valid map, or with a map that lacks the cell `own`.
        """
        self.own = own
        self._file = file
        self._map = self._read_map()
        file.on_change(self._read_again)

    @classmethod
    def of(cls, settings: Settings) -> Cells | None:
        """The map that the settings name. Returns None if the installation is not a cell. Raises BadSetting."""
        if not settings.cell:
            return None
        if settings.cells_file is None:
            raise BadSetting("LEASEHOLD_CELLS_FILE", "a cell needs the map of all cells")
        try:
            return cls(settings.cell, FileSecret(Path(settings.cells_file), MAX_MAP_BYTES))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadSetting("LEASEHOLD_CELLS_FILE", f"{settings.cells_file}: {reason}") from None

    @property
    def map(self) -> CellMap:
        self._file.get_secret_value()  # calls `_read_again` if the file has changed
        return self._map

    def refuse_elsewhere(self, tenant_id: str | None, key_cell: str | None = None) -> None:
        """Raises WrongCell if the tenant belongs to another cell. The map decides. If the tenant is missing in the map,
        the cell that the key names decides.

        `tenant_id` is None if the tenant is not known yet. `key_cell`: the cell that the API key names; None: it names
        no cell. If the map does not have the key's cell, the key counts as a key of this cell, because cells may be
        renamed.
        """
        current_map = self.map
        cell_of_key = key_cell if key_cell is not None and key_cell in current_map.addresses else self.own
        cell = cell_of_key if tenant_id is None else current_map.tenants.get(tenant_id, cell_of_key)
        if cell != self.own:
            raise WrongCell(cell, current_map.addresses[cell])

    def refuse_before_key_is_read(self, key_cell: str | None) -> None:
        """Call this before the key's row is read. If the map places no tenant in this cell, this method does the same
        as `refuse_elsewhere`. Otherwise it does nothing.

        If the map places tenants in this cell, a key that names another cell may belong to one of these tenants,
        because a tenant that has moved here still uses the keys of its old cell. Only the key's row shows to which
        tenant the key belongs.
        """
        if self.own not in self.map.homes:
            self.refuse_elsewhere(None, key_cell)

    def _read_map(self) -> CellMap:
        new_map = parse(self._file.get_secret_value())
        if self.own not in new_map.addresses:
            raise ValueError(f"the map of cells does not name this cell, {self.own}")
        return new_map

    def _read_again(self) -> None:
        """Raises ValueError for a file without a valid map. FileSecret catches this error, so the last map stays."""
        self._map = self._read_map()
