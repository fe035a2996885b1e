"""`leasehold cells` asks each cell whether it serves, moves a tenant between cells, and configures a gateway. A cell is
one of several installations. Each tenant belongs to one cell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import SplitResult, urlsplit

import typer

from leasehold.cli.answers import AsJson
from leasehold.cli.running import environment, failure_printed, run_or_exit
from leasehold.cli.terminal import print_json, print_table
from leasehold.security.cells import CellMap, parse
from leasehold.settings import Settings

if TYPE_CHECKING:
    from leasehold.security.other_cells import CellAnswer

app = typer.Typer(no_args_is_help=True, help="Ask the cells that share the tenants, and configure a gateway for them.")
_Map = Annotated[
    Path | None, typer.Option("--map", help="Read the map of cells from this file; else LEASEHOLD_CELLS_FILE names it.")
]
#: A cell that does not answer within this time is shown as one that does not serve.
_ANSWER_SECONDS = 5.0


def _read_map(path: Path | None) -> CellMap:
    """The map of cells: each cell's address, and the tenants' cells. If the file has no map, the command prints why,
    and ends.
    """
    file = path or environment().cells_file
    if file is None:
        raise typer.BadParameter("name the map of cells: --map, or LEASEHOLD_CELLS_FILE")
    try:
        return parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise failure_printed(f"{file}: {getattr(error, 'strerror', None) or error}") from None


@app.command()
def status(
    path: _Map = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            help='A file with a key of scope fleet:operate for each cell: {"a": "lh_a_..."}. Else LEASEHOLD_CELLS_KEYS '
            "has them.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask each cell whether it serves and, with operators' keys, for its load. A value that a cell does not answer is
    unknown (null in JSON). Exit with 1 if a cell does not serve.
    """
    rows = run_or_exit(_ask_all(_read_map(path), _keys_in(keys)))
    if as_json:
        print_json(rows)
    else:
        columns = ("cell", "address", "state", "due", "oldest", "running", "failed", "tenants", "versions", "seconds")
        print_table(
            columns, [["unknown" if row[column] is None else row[column] for column in columns] for row in rows]
        )
    if not all(row["state"] == "ready" for row in rows):
        raise typer.Exit(1)


def _keys_in(path: Path | None) -> Mapping[str, str]:
    """Cell -> its key. If the file has no map of keys, the command prints why, and ends. The message never contains a
    key.
    """
    from leasehold.security.other_cells import parse_keys  # noqa: PLC0415 - each command loads only what it needs

    source = "LEASEHOLD_CELLS_KEYS" if path is None else str(path)
    try:
        text = environment().cells_keys.get_secret_value() if path is None else path.read_text(encoding="utf-8")
        return parse_keys(text)
    except (OSError, ValueError) as error:
        raise failure_printed(f"{source}: {getattr(error, 'strerror', None) or error}") from None


async def _ask_all(cells: CellMap, keys: Mapping[str, str]) -> list[dict[str, Any]]:
    from leasehold.security.other_cells import ask, open_http  # noqa: PLC0415 - each command loads only what it needs

    async with open_http() as http:
        answers = await asyncio.gather(
            *(
                ask(http, cell, address, keys.get(cell), _ANSWER_SECONDS)
                for cell, address in sorted(cells.addresses.items())
            )
        )
    return [_row(answer, cells) for answer in answers]


def _row(answer: CellAnswer, cells: CellMap) -> dict[str, Any]:
    """The row to print for a cell's answer. A value that the cell did not report is None."""
    load = {} if answer.load is None else answer.load.model_dump()
    return {
        "cell": answer.cell,
        "address": answer.address,
        "state": answer.state,
        "because": answer.because,
        "due": load.get("due"),
        "has_more": load.get("has_more"),
        "oldest": load.get("oldest_seconds"),
        "running": load.get("running"),
        "failed": load.get("failed"),
        "tenants": load.get("tenants"),
        "tenants_placed": sum(cell == answer.cell for cell in cells.tenants.values()),
        "version": load.get("version"),
        "versions": load.get("versions"),
        "seconds": answer.seconds,
    }


@app.command()
def move(
    tenant: str,
    to: Annotated[
        str | None, typer.Option("--to", help="The cell that the tenant moves to. Only --status works without it.")
    ] = None,
    target_env: Annotated[
        Path | None,
        typer.Option("--target-env", help="A file with the settings of the other cell, a variable=value on each line."),
    ] = None,
    maps: Annotated[
        list[Path] | None,
        typer.Option("--map", help="Change the tenant's cell in this map, too. Repeat for more maps."),
    ] = None,
    drain_seconds: Annotated[float, typer.Option(help="Wait up to this time for the tenant's running steps.")] = 300.0,
    abort: Annotated[
        bool,
        typer.Option(
            "--abort",
            help="End the move: the tenant stays in this cell. Possible until the other cell answers its requests.",
        ),
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Delete this cell's rows and objects of a tenant that has moved.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Show the stage of a move.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move a tenant from this cell to another while both cells work. After an interruption, run the command again. It
    then goes on.

    It needs the rights of `leasehold migrate` in both databases.
    """
    from leasehold.cli import moving  # noqa: PLC0415 - each command loads only what it needs

    settings = environment()
    if abort + clean + status > 1:
        raise typer.BadParameter("--abort, --clean and --status exclude each other")
    if status:
        answer = run_or_exit(moving.state_of_move(settings, tenant))
    else:
        if to is None:
            raise typer.BadParameter("name the cell that the tenant moves to: --to")
        if target_env is None:
            raise typer.BadParameter("name the settings of the other cell: --target-env")
        action = moving.abort if abort else moving.clean if clean else moving.move_tenant
        options = moving.Move(tenant, to, tuple(maps or ()), drain_seconds)
        answer = run_or_exit(_run_action(action, settings, target_env, options))
    if as_json:
        print_json(answer)
    else:
        print_table(list(answer), [list(answer.values())])


async def _run_action(action: Any, settings: Settings, target_env: Path, options: Any) -> dict[str, Any]:
    from leasehold.cli import moving  # noqa: PLC0415 - each command loads only what it needs

    answer: dict[str, Any] = await action(settings, moving.target_settings(target_env), options)
    return answer


@app.command()
def nginx(
    default: Annotated[str, typer.Option(help="The cell that gets requests whose key names no cell.")],
    path: _Map = None,
    port: Annotated[int, typer.Option(help="The port on which nginx listens.")] = 8080,
) -> None:
    """Print the lines for nginx's `http` block that send each request to the cell that the key names."""
    cells = _read_map(path)
    if default not in cells.addresses:
        raise typer.BadParameter(f"the map names no cell {default!r}")
    typer.echo(_nginx_configuration(cells, default, port), nl=False)


def _nginx_configuration(cells: CellMap, default: str, port: int) -> str:
    """The configuration. nginx reads the name of the cell in the prefix of the key, and then looks up the parts of this
    cell's address.
    """
    urls = {cell: urlsplit(address) for cell, address in sorted(cells.addresses.items())}
    cells_by_key = "".join(f'    "~^(?i:Bearer) lh_{cell}_" {cell};\n' for cell in urls)
    hosts_and_ports = "".join(f"    {cell} {url.netloc};\n" for cell, url in urls.items())
    host_names = "".join(f"    {cell} {url.hostname};\n" for cell, url in urls.items())
    schemes = "".join(f"    {cell} {url.scheme};\n" for cell, url in urls.items())
    paths = "".join(f'    {cell} "{url.path}";\n' for cell, url in urls.items())
    upstreams = "".join(
        f"upstream leasehold_{cell} {{\n    server {_host_of(url)}:{_port_of(url)};\n    keepalive 32;\n}}\n"
        for cell, url in urls.items()
    )
    return f"""map $http_authorization $leasehold_cell {{
    default {default};
{cells_by_key}}}
map $leasehold_cell $leasehold_host_and_port {{
{hosts_and_ports}}}
map $leasehold_cell $leasehold_host_name {{
{host_names}}}
map $leasehold_cell $leasehold_scheme {{
{schemes}}}
map $leasehold_cell $leasehold_path {{
{paths}}}
{upstreams}server {{
    listen {port};
    client_max_body_size 0;
    location / {{
        proxy_pass $leasehold_scheme://leasehold_$leasehold_cell$leasehold_path$request_uri;
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $leasehold_host_and_port;
        proxy_ssl_server_name on;
        proxy_ssl_name $leasehold_host_name;
        proxy_buffering off;
        proxy_request_buffering off;
        proxy_read_timeout 120s;
    }}
}}
"""


def _host_of(url: SplitResult) -> str:
    """The host name or IP address in the URL. An IPv6 address gets brackets."""
    name = url.hostname or ""
    return f"[{name}]" if ":" in name else name


def _port_of(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)
