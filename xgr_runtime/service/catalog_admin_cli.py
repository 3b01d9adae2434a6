"""`xgr catalog load | activate | retire | list`: the catalogues of a running service."""

import argparse
import sys
from typing import Any

from xgr_runtime.errors import XgrError, printable
from xgr_runtime.service.address import DEFAULT_TARGET
from xgr_runtime.service.catalog_admin_client import CatalogAdminClient
from xgr_runtime.service.client_output import error_text, exit_code, json_line


def add_commands(commands: Any) -> None:
    """Add load, activate, retire and list to the sub-commands of `xgr catalog`."""
    load = _command(
        commands,
        "load",
        "load a file beside the running versions of a service; when all slots (cache.catalog_slots) are taken, the version "
        "that was active longest ago is retired",
    )
    load.add_argument("name", help="the catalogue, a name of the server's configuration")
    load.add_argument("path", help="the file, relative to the server's service.catalog_folder")
    load.add_argument("--activate", action="store_true", help="and make it the active version")
    for name, text in (
        (
            "activate",
            "make a loaded version the one that requests use; also the way back to a version that is still loaded",
        ),
        ("retire", "free a version that is neither active nor in use"),
    ):
        command = _command(commands, name, text)
        command.add_argument("name", help="the catalogue")
        command.add_argument("version", help="a loaded version")
    listing = _command(commands, "list", "show the catalogues and versions of a service")
    listing.add_argument("--json", action="store_true", help="print one JSON object")


def _command(commands: Any, name: str, text: str) -> Any:
    codes = (
        "Exit code: 0 done, 1 refused or failed, 2 wrong usage, 3 unreachable, 4 no answer in time."
    )
    command = commands.add_parser(name, help=text, description=f"{text}. {codes}".capitalize())
    command.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT")
    command.set_defaults(handler=handle)
    return command


def handle(args: argparse.Namespace) -> int:
    """Run one of the commands; returns its exit code."""
    with CatalogAdminClient(args.target) as client:
        try:
            for line in _run(client, args):
                print(printable(line))
        except XgrError as error:
            print(f"xgr catalog: {error_text(error)}", file=sys.stderr)
            return exit_code(error)
    return 0


def _run(client: CatalogAdminClient, args: argparse.Namespace) -> list[str]:
    command = args.catalog_command
    if command == "load":
        loaded = client.load(args.name, args.path, activate=args.activate)
        state = "is active" if args.activate else "is loaded"
        lines = [f"{args.name}: version {loaded.version} {state}"]
        if loaded.retired_version:
            lines.append(
                f"{args.name}: version {loaded.retired_version} was retired to make room; load its file again to go back to it"
            )
        return lines
    if command == "activate":
        before = client.activate(args.name, args.version)
        return [f"{args.name}: version {args.version} is active; before: {before}"]
    if command == "retire":
        client.retire(args.name, args.version)
        return [f"{args.name}: version {args.version} is retired"]
    catalogs = client.catalogs()
    return [json_line(catalogs)] if args.json else _table(catalogs)


def _table(catalogs: dict[str, Any]) -> list[str]:
    lines = []
    for name, catalog in catalogs.items():
        for version, facts in catalog["versions"].items():
            is_active = version == catalog["active_version"]
            lines.append(
                f"{name} {version} {'active' if is_active else 'loaded'}: {facts['num_items']} items, "
                f"{facts['num_sids']} SIDs, used by {facts['num_in_use']}, "
                f"{facts['device_bytes'] / 2**20:.1f} MiB on the device"
            )
    return lines
