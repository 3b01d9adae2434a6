"""`xgr catalog build | info | verify`. The handlers return 0; refusals are CatalogErrors, which `xgr` prints."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from xgr_runtime.errors import shown
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import FORMATS, build_catalog_from_file
from xgr_runtime.xbeam.catalog_input import refuse_overwrite
from xgr_runtime.xbeam.token_map import read_token_map

_ITEM_HELP = (
    "JSONL, one item a line: 'sid' (list of codes) and 'item_id' or 'key'; optional 'title', 'weight', 'tags', 'servable'; "
    "keys and tags have at most 4,096 bytes, tags no control characters. CSV with the same columns in a header: the SID as "
    "one column 'sid' (3 0 1) or as sid_0, sid_1, ..., tags with | between. NPZ with the arrays sids [n, levels], item_ids, "
    "keys, titles, weights, servable, tag_names, tag_offsets [n + 1], tag_indices"
)
_MAX_DIGITS = 10


def add_parser(subparsers: Any) -> Any:
    """Adds the `catalog` command to the `xgr` parser; every sub-command sets `handler` (args -> exit code).

    Returns the sub-commands, to which others may add theirs.
    """
    catalog = subparsers.add_parser(
        "catalog",
        help="build, inspect and verify catalogue files, load them into a running service",
    )
    commands = catalog.add_subparsers(dest="catalog_command", required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="compile items into one catalogue file")
    build.add_argument("items", help=_ITEM_HELP)
    build.add_argument(
        "output", help="the catalogue file to write; replaced in one step when it exists"
    )
    build.add_argument(
        "--format",
        choices=FORMATS,
        help="what the items are in (default: csv or npz where the name ends so, else jsonl)",
    )
    tokens = build.add_mutually_exclusive_group(required=True)
    tokens.add_argument(
        "--token-offsets",
        type=_whole_numbers,
        metavar="T0,T1,...",
        help="per level the token of code 0, the other codes following it; needs --codes",
    )
    tokens.add_argument(
        "--token-map",
        metavar="FILE",
        help="JSON list with, per level, a list of tokens (null = none) or an object {code: token}",
    )
    build.add_argument(
        "--codes",
        type=_whole_numbers,
        metavar="N0,N1,...",
        help="codes per level (with --token-map: optional)",
    )
    build.add_argument(
        "--sid-field",
        default="sid",
        help="field with the codes (default: sid; in NPZ with an s behind it)",
    )
    build.add_argument(
        "--id-field", default="item_id", help="field with the id (default: item_id, else id)"
    )
    build.add_argument(
        "--version",
        help="name of this version, 1 to 128 printable characters (default: a digest of the content)",
    )
    build.set_defaults(handler=run_build)

    info = commands.add_parser("info", help="print what a catalogue file holds (reads the header)")
    info.add_argument("path", help="a catalogue file")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(handler=run_info)

    verify = commands.add_parser(
        "verify", help="check every byte and the structure of a catalogue file"
    )
    verify.add_argument("path", help="a catalogue file")
    verify.set_defaults(handler=run_verify)
    return commands


def _whole_numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= _MAX_DIGITS for part in parts):
        raise argparse.ArgumentTypeError(
            f"whole numbers with commas between expected, got {shown(text)}"
        )
    return [int(part) for part in parts]


def run_build(args: argparse.Namespace) -> int:
    """Builds, opens and verifies the file, then prints what it holds."""
    start = time.perf_counter()
    sources = {} if args.token_map is None else {"the token map": args.token_map}
    refuse_overwrite(args.output, {"the items": args.items, **sources})
    build_catalog_from_file(
        args.output,
        args.items,
        source_format=args.format,
        num_codes=args.codes,
        token_of=None if args.token_map is None else read_token_map(args.token_map, args.codes),
        token_offsets=args.token_offsets,
        sid_field=args.sid_field,
        id_field=args.id_field,
        version=args.version,
    )
    with Catalog.open(args.output) as catalog:
        catalog.verify()
        _print_table(describe(catalog))
    print(f"built and verified in {time.perf_counter() - start:.2f} s")
    return 0


def run_info(args: argparse.Namespace) -> int:
    """Prints what the header of a file says."""
    with Catalog.open(args.path) as catalog:
        facts = describe(catalog)
    if args.json:
        print(json.dumps(facts))
    else:
        _print_table(facts)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Verifies a file, in memory as a server does, and says so."""
    start = time.perf_counter()
    with Catalog.open(args.path, is_private=True) as catalog:
        catalog.verify()
        summary = f"version {catalog.version}, {catalog.num_items} items, {catalog.num_sids} SIDs"
    print(f"{args.path}: verified in {(time.perf_counter() - start) * 1e3:.1f} ms ({summary})")
    return 0


def describe(catalog: Catalog) -> dict[str, Any]:
    """The facts `info` prints, in order; plain values that JSON can hold."""
    return {
        "path": catalog.path,
        "version": catalog.version,
        "digest": catalog.digest,
        "num_items": catalog.num_items,
        "num_servable": catalog.num_servable,
        "num_sids": catalog.num_sids,
        "num_levels": catalog.num_levels,
        "num_codes": list(catalog.num_codes),
        "num_nodes": [len(codes) for codes in catalog.codes],
        "max_fanout": list(catalog.max_fanout),
        "num_tags": 0 if catalog.tag_index is None else len(catalog.tag_index.names),
        "has_keys": catalog.key_index is not None,
        "has_titles": catalog.titles is not None,
        "file_bytes": os.path.getsize(catalog.path),
    }


def _print_table(facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        print(f"{name:<13} {text}")
