"""The schemas that torch_npu registers, and those that the tests' stand-ins of its ops were written for: they must be equal.

Runs where torch_npu can be imported (see stubs.py): `python tools/_ladder/l3_schemas.py --json FILE` writes all of them.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

import torch

from tools._ladder.l3_vendor import load_vendor

STAND_INS = ("tests.ascend.vendor_ops", "tests.ascend.vendor_attention")


def vendor_schemas() -> dict[str, str]:
    """Name with overload -> schema, of every op of the vendor's namespace in this process."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("npu::"):
            overload = f".{schema.overload_name}" if schema.overload_name else ""
            found[schema.name + overload] = str(schema)
    return dict(sorted(found.items()))


def schema_failures(ours: dict[str, str], vendors: dict[str, str], where: str) -> list[str]:
    """Differences. ours: op name -> the schema's text from its first parenthesis on."""
    failures = []
    for name, text in ours.items():
        full = f"npu::{name}"
        if full not in vendors:
            failures.append(f"{where}: the vendor has no op {full}")
            continue
        got, expected = (str(torch._C.parse_schema(s)) for s in (full + text, vendors[full]))
        if got != expected:
            failures.append(f"{where}: {full} differs\n  ours:   {got}\n  vendor: {expected}")
    return failures


def stand_in_schemas() -> dict[str, dict[str, str]]:
    """Module -> its SCHEMAS. Importing the modules registers no op."""
    return {name: import_module(name).SCHEMAS for name in STAND_INS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="where the schemas go")
    options = parser.parse_args()
    load_vendor()
    schemas = vendor_schemas()
    options.json.write_text(json.dumps(schemas, indent=1) + "\n", encoding="utf-8")
    print(f"{len(schemas)} schemas in {options.json}")


if __name__ == "__main__":
    main()
