"""Published catalogues: every item found by its id, its SID gives back the items that share it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.xbeam.catalogs import leaves
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog_from_jsonl

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.shared_data


@pytest.mark.parametrize(
    ("name", "sid_field", "num_levels", "num_items", "num_sids", "largest"),
    [
        ("amazon-beauty", "sid", 4, 12_101, 12_101, 1),
        ("amazon-beauty", "sid_rqvae", 4, 12_101, 11_499, 12),
        ("amazon-scientific", "sid", 4, 4_344, 4_344, 1),
        ("amazon-scientific", "sid_native", 4, 4_344, 3_469, None),
        ("amazon-office", "sid", 3, 3_459, 3_444, 2),
    ],
)
def test_round_trips(
    shared_data: Path,
    tmp_path: Path,
    name: str,
    sid_field: str,
    num_levels: int,
    num_items: int,
    num_sids: int,
    largest: int | None,
) -> None:
    source = shared_data / name / "items.jsonl"
    build_catalog_from_jsonl(
        tmp_path / "c",
        source,
        num_codes=[256] * num_levels,
        token_offsets=[1000 + 256 * level for level in range(num_levels)],
        sid_field=sid_field,
    )
    catalog = Catalog.open(tmp_path / "c")
    catalog.verify()
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    sid_of = {row["id"]: tuple(row[sid_field]) for row in rows}
    ids_of = defaultdict(list)
    for item_id, sid in sorted(sid_of.items()):
        ids_of[sid].append(item_id)
    assert (
        (catalog.num_items, catalog.num_sids) == (num_items, num_sids) == (len(sid_of), len(ids_of))
    )
    if largest is not None:
        assert max(map(len, ids_of.values())) == largest
    assert leaves(catalog) == sorted(ids_of)

    ids = [row["id"] for row in rows]
    positions = catalog.positions_of_ids(ids)
    assert catalog.item_ids[positions].tolist() == ids
    sids = catalog.sids_of_positions(positions)
    assert [tuple(sid) for sid in sids.tolist()] == [sid_of[item_id] for item_id in ids]
    indices = catalog.positions_of_sids(sids)
    assert indices.tolist() == catalog.sid_of_positions(positions).tolist()
    bounds = catalog.sid_item_offsets
    for item_id, index in zip(ids, indices, strict=True):
        found = catalog.item_ids[bounds[index] : bounds[index + 1]].tolist()
        assert found == ids_of[sid_of[item_id]], "all items of the SID, by id"
    if "title" in rows[0]:
        assert catalog.titles_of(positions) == [row.get("title", "") for row in rows]
    absent = np.array([max(ids) + 1, -1])
    assert catalog.positions_of_ids(absent).tolist() == [-1, -1]
