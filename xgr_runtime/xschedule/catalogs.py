"""The catalogue versions of an engine: load beside traffic, activate between batches, roll back, retire.

A version occupies a slot from load to retirement. A request pins the version it starts with; a version is retired only
when it is neither active nor pinned, oldest first, when its slot is needed or when asked.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xgr_runtime.config import CacheConfig
from xgr_runtime.errors import CatalogError, NotFound
from xgr_runtime.hal.device import Device
from xgr_runtime.models.head import CatalogHead, Head, LevelRows
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.rules import RuleCache, TagExpression
from xgr_runtime.xbeam.slot import CatalogSlot, SlotPlan, plan_slot
from xgr_runtime.xschedule.rule_rows import RuleRowTable


@dataclass
class LoadedCatalog:
    """A version on the device. slot_index is unique for the life of the process per allocated slot."""

    name: str
    version: str
    catalog: Catalog
    slot: CatalogSlot
    slot_index: int
    head: CatalogHead
    rule_rows: RuleRowTable
    num_pins: int = 0


@dataclass
class _Named:
    versions: dict[str, LoadedCatalog] = field(default_factory=dict)
    active: str = ""
    is_loading: bool = False
    free_slots: list[tuple[int, CatalogSlot]] = field(default_factory=list)


class CatalogStore:
    """All catalogues of one engine by name. Methods may be called from any thread."""

    def __init__(
        self,
        config: CacheConfig,
        device: Device,
        head: Head,
        rule_cache: RuleCache,
        num_batch_searches: int,
        on_slot_dropped: Callable[[int], None],
    ) -> None:
        self._config, self._device, self._head = config, device, head
        self._rule_cache = rule_cache
        self._num_batch_searches = num_batch_searches
        self._on_slot_dropped = on_slot_dropped
        self._lock = threading.Lock()
        self._names: dict[str, _Named] = {}
        self._next_slot_index = 0
        self._rows_of_slot: dict[int, list[weakref.ref[LevelRows]]] = {}
        self.by_slot: dict[int, LoadedCatalog] = {}

    def load(self, name: str, path: str, max_levels: int | None) -> str:
        """Open, verify and load a file beside the running version; returns its version. Changes nothing on failure."""
        catalog = Catalog.open(path)
        catalog.verify()
        catalog.prepare()
        if max_levels is not None and catalog.num_levels > max_levels:
            raise CatalogError(
                f"{path} has {catalog.num_levels} levels; this engine was started for at most {max_levels}; "
                "raise cache.max_levels and restart"
            )
        head = self._head.for_catalog(catalog.token_of)
        named = self._begin_load(name, catalog)
        taken: tuple[int, CatalogSlot] | None = None
        try:
            taken = self._take_slot(named, name, plan_slot(catalog, self._config), catalog)
            index, slot = taken
            self._drop_graphs_of_other_head(index, head.levels)
            slot.load(catalog)
        except BaseException:
            with self._lock:
                named.is_loading = False
                if taken is not None:
                    named.free_slots.append(taken)
            raise
        loaded = LoadedCatalog(
            name,
            catalog.version,
            catalog,
            slot,
            index,
            head,
            RuleRowTable(slot.num_rule_rows, TagExpression()),
        )
        with self._lock:
            named.versions[catalog.version] = loaded
            named.is_loading = False
            self.by_slot[index] = loaded
        return catalog.version

    def activate(self, name: str, version: str) -> None:
        """New requests without a pinned version use `version` from now on."""
        with self._lock:
            self._find(name, version)
            self._names[name].active = version

    def retire(self, name: str, version: str) -> None:
        """Free a version that is neither active nor in use."""
        with self._lock:
            loaded = self._find(name, version)
            if loaded.num_pins or self._names[name].active == version:
                state = (
                    "active"
                    if self._names[name].active == version
                    else f"used by {loaded.num_pins} requests"
                )
                raise CatalogError(
                    f"version {version!r} of catalogue {name!r} is {state} and cannot be retired"
                )
            self._retire(self._names[name], loaded)

    def pin(self, name: str, version: str = "") -> LoadedCatalog:
        """The active version, or the named one, kept until `release`. Raises NotFound."""
        with self._lock:
            loaded = self._find(name, version)
            loaded.num_pins += 1
            return loaded

    def release(self, loaded: LoadedCatalog) -> None:
        """Give back a pin."""
        with self._lock:
            assert loaded.num_pins > 0, loaded.version
            loaded.num_pins -= 1

    def describe(self) -> dict[str, object]:
        """Per name: the active version, all loaded ones, and the layout of each level."""
        with self._lock:
            return {
                name: {
                    "active": named.active,
                    "versions": {
                        v.version: {
                            "path": v.catalog.path,
                            "num_items": v.catalog.num_items,
                            "num_sids": v.catalog.num_sids,
                            "num_pins": v.num_pins,
                            "device_bytes": v.slot.nbytes,
                            "levels": v.slot.describe(),
                        }
                        for v in named.versions.values()
                    },
                }
                for name, named in self._names.items()
            }

    def _begin_load(self, name: str, catalog: Catalog) -> _Named:
        with self._lock:
            named = self._names.setdefault(name, _Named())
            if named.is_loading:
                raise CatalogError(
                    f"another version of catalogue {name!r} is being loaded; try again when it is done"
                )
            if catalog.version in named.versions:
                raise CatalogError(
                    f"version {catalog.version!r} of catalogue {name!r} is already loaded from "
                    f"{named.versions[catalog.version].catalog.path}"
                )
            named.is_loading = True
            return named

    def _take_slot(
        self, named: _Named, name: str, plan: SlotPlan, catalog: Catalog
    ) -> tuple[int, CatalogSlot]:
        """A free slot the catalogue fits, else a new one in place of a free or unused one."""
        with self._lock:
            num_slots = len(named.versions) + len(named.free_slots)
            if not named.free_slots and num_slots >= self._config.catalog_slots:
                unused = [
                    v
                    for v in named.versions.values()
                    if not v.num_pins and v.version != named.active
                ]
                if not unused:
                    raise CatalogError(
                        f"catalogue {name!r} has no free slot: {', '.join(named.versions)} are active or in use; "
                        "raise cache.catalog_slots or retry when requests have ended"
                    )
                self._retire(named, unused[0])
            for entry in named.free_slots:
                if entry[1].plan.fits(catalog):
                    named.free_slots.remove(entry)
                    return entry
            if num_slots >= self._config.catalog_slots:
                self._on_slot_dropped(named.free_slots.pop()[0])
            index = self._next_slot_index
            self._next_slot_index += 1
        num_rule_rows = max(self._config.rule_rows, self._num_batch_searches + 1)
        return index, CatalogSlot(plan, self._device, num_rule_rows, self._num_batch_searches)

    def _drop_graphs_of_other_head(self, index: int, levels: Sequence[LevelRows]) -> None:
        """A captured graph reads the head rows of the version it was captured with, whatever the slot holds now."""
        before = self._rows_of_slot.get(index)
        if before is not None and [rows() for rows in before] != list(levels):
            self._on_slot_dropped(index)
        self._rows_of_slot[index] = [weakref.ref(rows) for rows in levels]

    def _retire(self, named: _Named, loaded: LoadedCatalog) -> None:
        del named.versions[loaded.version]
        del self.by_slot[loaded.slot_index]
        self._rule_cache.drop(loaded.catalog)
        loaded.slot.catalog = None
        named.free_slots.append((loaded.slot_index, loaded.slot))

    def _find(self, name: str, version: str) -> LoadedCatalog:
        if name not in self._names or not self._names[name].versions:
            known = (
                ", ".join(sorted(n for n, named in self._names.items() if named.versions)) or "none"
            )
            raise NotFound(f"catalogue {name!r} is not loaded; loaded: {known}")
        named = self._names[name]
        wanted = version or named.active
        if wanted not in named.versions:
            known = ", ".join(named.versions)
            what = f"version {wanted!r}" if wanted else "no active version"
            raise NotFound(f"catalogue {name!r}: {what} is not loaded; loaded: {known}")
        return named.versions[wanted]
