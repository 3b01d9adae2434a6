"""A slot's arrays against a walk over the items: nodes, codes, rule rows, in both layouts, with room to spare."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.catalogs import TAGS, catalogs, contiguous_tokens, random_catalog
from tests.helpers.engines import node_prefixes, write_catalog
from tests.helpers.oracle import Catalog as Described
from tests.helpers.oracle import Item, Rules
from xgr_runtime.config import CacheConfig
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.rules import TagExpression, build_rule_set, clear_exclusions
from xgr_runtime.xbeam.slot import CatalogSlot, mean_fanout_share, plan_slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.oracle import Sid

CPU = CpuDevice()
SPARSE = CacheConfig(dense_level_bytes=0)  # level 0 stays dense, the others are CSR
ROOMY = CacheConfig(catalog_headroom=3.0)


def compiled(catalog: Described) -> Catalog:
    with tempfile.TemporaryDirectory() as folder:
        result = Catalog.open(write_catalog(Path(folder) / "items.xgr", catalog))
        result.verify()
    return result


def loaded(catalog: Catalog, config: CacheConfig, rows: int = 3, scratch: int = 2) -> CatalogSlot:
    slot = CatalogSlot(plan_slot(catalog, config), CPU, rows, scratch)
    slot.load(catalog)
    return slot


def children(slot: CatalogSlot, catalog: Catalog, row: int) -> dict[Sid, dict[int, Sid]]:
    """Per prefix its alive codes and where each leads, read off the slot's arrays one element at a time."""
    assert slot.catalog is catalog
    nodes: dict[int, Sid] = {0: ()}
    result: dict[Sid, dict[int, Sid]] = {}
    prefixes = node_prefixes(catalog)
    for level, trie in enumerate(slot.levels):
        alive = trie.alive_RE[row].tolist()
        below: dict[int, Sid] = {}
        for node, prefix in nodes.items():
            found: dict[int, Sid] = {}
            if trie.child_node is not None:
                for code in range(trie.num_codes):
                    child = int(trie.child_node[node * trie.num_codes + code])
                    if alive[node * trie.num_codes + code]:
                        assert child >= 0, "alive without a child"
                        found[code] = (*prefix, code)
                        below[child] = (*prefix, code)
            else:
                assert trie.offsets is not None
                assert trie.codes is not None
                for edge in range(int(trie.offsets[node]), int(trie.offsets[node + 1])):
                    code = int(trie.codes[edge])
                    if alive[edge]:
                        found[code] = (*prefix, code)
                        below[edge] = (*prefix, code)
                assert int(trie.offsets[node + 1] - trie.offsets[node]) <= trie.max_fanout
            if found:
                result[prefix] = found
        assert not any(alive[-1:]), "the last entry absorbs padding"
        for child, prefix in below.items():
            assert tuple(prefixes[level][child].tolist()) == prefix
        nodes = below
    return result


def expected(catalog: Described) -> dict[Sid, dict[int, Sid]]:
    return {
        prefix: {code: (*prefix, code) for code in codes}
        for prefix, codes in catalog.children.items()
        if codes
    }


@given(catalog=catalogs(max_items=20), config=st.sampled_from([CacheConfig(), SPARSE, ROOMY]))
@settings(max_examples=40)
def test_every_rule_row_is_the_rebuilt_catalogue(catalog: Described, config: CacheConfig) -> None:
    product = compiled(catalog)
    slot = loaded(product, config)
    assert children(slot, product, 0) == expected(catalog)
    for row, rules in ((1, Rules(require=((TAGS[0], TAGS[1]),))), (2, Rules((), (TAGS[2],)))):
        expression = TagExpression.canonical(rules.require, rules.exclude_tags)
        rule_set = build_rule_set(product, expression)
        slot.write_rule_set(row, rule_set)
        kept = catalog.keep(rules)
        assert children(slot, product, row) == expected(kept)
        gone = [item.item_id for item in catalog.items[::2]]
        positions = product.positions_of_ids(gone)
        scratch = slot.scratch_row(row - 1)
        slot.copy_row(row, scratch)
        slot.clear(scratch, clear_exclusions(product, rule_set, positions).edges)
        rest = kept.keep(Rules(exclude_item_ids=gone))
        assert children(slot, product, scratch) == expected(rest)
        assert children(slot, product, row) == expected(kept), "the shared row is untouched"
    assert children(slot, product, 0) == expected(catalog)


@given(catalog=catalogs(max_items=12))
@settings(max_examples=20)
def test_tokens(catalog: Described) -> None:
    slot = loaded(compiled(catalog), CacheConfig())
    for table, tokens in zip(slot.token_of, catalog.token_of, strict=True):
        assert table.dtype == torch.int64
        assert table.tolist() == [max(token, 0) for token in tokens]


def full_catalog(num_items: int, num_codes: int, seed: int = 0) -> Described:
    tokens = contiguous_tokens([num_codes] * 3)
    return random_catalog(seed, num_items, tokens)


def test_the_layout_follows_the_measured_fan_out() -> None:
    bushy, sparse = compiled(full_catalog(2000, 8)), compiled(full_catalog(60, 32))
    assert mean_fanout_share(bushy, 1) > 0.9
    assert mean_fanout_share(sparse, 1) < 0.125
    assert [p.is_dense for p in plan_slot(bushy, CacheConfig()).levels] == [True, True, False]
    assert [p.is_dense for p in plan_slot(sparse, CacheConfig()).levels] == [True, False, False]
    assert [p.is_dense for p in plan_slot(bushy, SPARSE).levels] == [True, False, False]
    described = loaded(bushy, CacheConfig()).describe()
    assert [level["layout"] for level in described] == ["dense", "dense", "csr"]
    assert [level["num_edges"] for level in described] == [len(codes) for codes in bushy.codes]
    assert [level["max_fanout"] for level in described] == list(bushy.max_fanout)


@pytest.mark.parametrize("config", [CacheConfig(), SPARSE], ids=["dense", "csr"])
def test_other_versions_in_the_same_arrays(config: CacheConfig) -> None:
    """Addresses stay, the content is the last one's, rows of the version before are gone."""
    versions = [full_catalog(n, 12, seed) for seed, n in enumerate((500, 480, 90, 510, 1))]
    products = [compiled(version) for version in versions]
    slot = loaded(products[0], config)
    addresses = [t.data_ptr() for level in slot.levels for t in tensors(level)]
    size = slot.nbytes
    for described, product in zip(versions[1:], products[1:], strict=True):
        assert slot.plan.fits(product)
        slot.load(product)
        assert children(slot, product, 0) == expected(described)
        assert [t.data_ptr() for level in slot.levels for t in tensors(level)] == addresses
        assert slot.nbytes == size


def tensors(level: object) -> list[torch.Tensor]:
    return [v for v in vars(level).values() if isinstance(v, torch.Tensor)]


def hub(num_children: int) -> Described:
    """The same numbers of nodes and edges for every num_children; only the largest fan-out differs."""
    wide = [(0, code) for code in range(num_children)]
    rest = [(1 + i % 15, i // 15) for i in range(40 - num_children)]
    items = tuple(Item(i, sid) for i, sid in enumerate([*wide, *rest]))
    return Described(items, contiguous_tokens([16, 64]))


FITS: dict[str, tuple[Callable[[], Described], bool]] = {
    "the same": (lambda: full_catalog(400, 12), True),
    "smaller": (lambda: full_catalog(20, 12), True),
    "more items": (lambda: full_catalog(1500, 12), False),
    "more codes": (lambda: full_catalog(400, 13), False),
    "other levels": (lambda: random_catalog(0, 100, contiguous_tokens([12, 12])), False),
}


@pytest.mark.parametrize("name", FITS)
def test_what_fits(name: str) -> None:
    plan = plan_slot(compiled(full_catalog(400, 12)), CacheConfig())
    make, is_fitting = FITS[name]
    assert plan.fits(compiled(make())) == is_fitting


def test_a_larger_hub_does_not_fit() -> None:
    """The largest fan-out sizes workspaces, so it is part of the plan, with head-room like the rest."""
    plan = plan_slot(compiled(hub(20)), CacheConfig(catalog_headroom=1.25, dense_level_bytes=0))
    assert plan.fits(compiled(hub(25)))
    assert not plan.fits(compiled(hub(26)))


def test_wide_edges_need_wide_offsets() -> None:
    """Past 2^31 edges the offsets are int64; nothing of that size is allocated here."""
    plan = plan_slot(compiled(full_catalog(100, 12)), CacheConfig())
    level = replace(plan.levels[2], num_nodes=4, num_edges=2**31, is_dense=False)
    slot = CatalogSlot.__new__(CatalogSlot)
    slot._num_rows = 1
    slot._device = meta_device()
    trie = slot._allocate(level)
    assert trie.offsets is not None
    assert trie.offsets.dtype == torch.int64
    assert trie.alive_RE.shape == (1, 2**31 + 1)
    small = slot._allocate(replace(level, num_edges=2**31 - 1))
    assert small.offsets is not None
    assert small.offsets.dtype == torch.int32


def meta_device() -> CpuDevice:
    device = CpuDevice()
    device.torch_device = torch.device("meta")
    return device


def test_only_verified_catalogues_are_loaded(tmp_path: Path) -> None:
    catalog = Catalog.open(write_catalog(tmp_path / "items.xgr", full_catalog(50, 12)))
    slot = CatalogSlot(plan_slot(catalog, CacheConfig()), CPU, 2, 1)
    with pytest.raises(AssertionError, match=r"items\.xgr"):
        slot.load(catalog)
    with pytest.raises(AssertionError):
        slot.scratch_row(1)


class LateEvent:
    """Waiting for it makes the copies that were issued before it arrive."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._num_before = device, len(device.pending)

    def is_done(self) -> bool:
        return len(self._device.pending) == 0

    def wait(self) -> None:
        for target, source in self._device.pending[: self._num_before]:
            target.copy_(source)
        del self._device.pending[: self._num_before]


class LateDevice(CpuDevice):
    """Copies arrive when somebody waits for them, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.pending.append((target, source.clone()))

    def record_event(self) -> LateEvent:  # type: ignore[override]
        return LateEvent(self)


def test_a_load_waits_until_the_device_has_it() -> None:
    """So that the slot may be freed at once: no copy comes later, into memory that is somebody else's."""
    catalog, device = compiled(full_catalog(300, 12)), LateDevice()
    slot = CatalogSlot(plan_slot(catalog, SPARSE), device, 3, 2)
    slot.load(catalog)
    assert not device.pending
    right = loaded(catalog, SPARSE)
    for level, expected in zip(slot.levels, right.levels, strict=True):
        assert torch.equal(level.alive_RE, expected.alive_RE)
    for table, expected_table in zip(slot.token_of, right.token_of, strict=True):
        assert torch.equal(table, expected_table)


def test_a_load_that_fails_leaves_no_copy_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, device = compiled(full_catalog(300, 12)), LateDevice()
    slot = CatalogSlot(plan_slot(catalog, SPARSE), device, 3, 2)

    def fail(*_: object) -> None:
        assert device.pending
        raise MemoryError

    monkeypatch.setattr(slot, "write_alive", fail)
    with pytest.raises(MemoryError):
        slot.load(catalog)
    assert not device.pending
    assert slot.catalog is None


def test_bytes_are_those_of_the_arrays() -> None:
    slot = loaded(compiled(full_catalog(300, 12)), CacheConfig(catalog_headroom=1.0), 3, 2)
    plans = slot.plan.levels
    expected_bytes = 0
    for plan in plans:
        entries = plan.num_nodes * plan.num_codes if plan.is_dense else plan.num_edges
        expected_bytes += 5 * (entries + 1) + 8 * plan.num_codes
        expected_bytes += 4 * entries
        expected_bytes += 0 if plan.is_dense else 4 * (plan.num_nodes + 1)
    assert slot.nbytes == expected_bytes
    assert np.prod([p.num_codes for p in plans]) == 12**3
