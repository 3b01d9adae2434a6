"""The catalogue versions of an engine: load beside traffic, activate between batches, roll back, retire.

A version occupies a slot from load to retirement. A request pins the version it starts with; a version that is active or
pinned is never retired. When a load needs a slot it retires the version that was active longest ago. One that was loaded
but never activated is somebody's next step: only `retire` frees it.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xgr_runtime.config import CacheConfig
from xgr_runtime.errors import CatalogError, DeviceError, NotFound, shown
from xgr_runtime.hal.device import Device
from xgr_runtime.models.head import CatalogHead, Head, LevelRows
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.rules import RuleCache, TagExpression
from xgr_runtime.xbeam.slot import CatalogSlot, plan_slot
from xgr_runtime.xschedule.engine_stats import CatalogStats
from xgr_runtime.xschedule.rule_rows import RuleRowTable

logger = logging.getLogger(__name__)

MOST_CANDIDATES = 2**32  # rows x codes of one round: selection keeps a candidate's place in 32 bits


@dataclass
class LoadedCatalog:
    """A version on the device. slot_index is unique for the life of the process per allocated slot.

    retired_version: the one that was retired to make room for it, "" when a slot was free. activation: the running number
    of its latest activation, 0 when it was never active; activated_s: its time, of time.monotonic().
    """

    name: str
    version: str
    catalog: Catalog
    slot: CatalogSlot
    slot_index: int
    head: CatalogHead
    rule_rows: RuleRowTable
    retired_version: str
    num_pins: int = 0
    activation: int = 0
    activated_s: float = 0.0


_IndexedSlot = tuple[int, CatalogSlot]


@dataclass(frozen=True)
class _Room:
    """slot: a used one to fill, None for a new one. retired: the version that gave it up, still to be closed."""

    slot: _IndexedSlot | None = None
    retired: LoadedCatalog | None = None


@dataclass
class _Named:
    versions: dict[str, LoadedCatalog] = field(default_factory=dict)
    active: str = ""
    is_loading: bool = False
    free_slots: list[_IndexedSlot] = field(default_factory=list)


class CatalogStore:
    """All catalogues of one engine by name. Methods may be called from any thread.

    num_searches: of all batches that may be in flight at once, each of which may need a rule set and a row of its own.
    """

    def __init__(
        self,
        config: CacheConfig,
        device: Device,
        head: Head,
        rule_cache: RuleCache,
        num_searches: int,
        on_slot_dropped: Callable[[int], None],
    ) -> None:
        self._config, self._device, self._head = config, device, head
        self._rule_cache = rule_cache
        self._num_searches = num_searches
        self._on_slot_dropped = on_slot_dropped
        self._lock = threading.Lock()
        self._names: dict[str, _Named] = {}
        self._next_slot_index = 0
        self._num_activations = 0
        self._rows_of_slot: dict[int, list[weakref.ref[LevelRows]]] = {}
        self.by_slot: dict[int, LoadedCatalog] = {}

    def load(self, name: str, path: str, max_levels: int | None, max_rows: int = 1) -> str:
        """Open, verify and load a file beside the running version; returns its version. max_rows: of a batch.

        Where it goes, the first that is possible: a free slot it fits; a new slot while there are fewer than
        cache.catalog_slots; a new slot in place of a free one; the slot of the version that was active longest ago and is
        now neither active nor pinned. That version is retired, and its slot is filled in place, or freed for a new one when
        the catalogue does not fit.

        Raises CatalogError, CheckpointError, and DeviceError when the device or the host has no memory for it. Whatever is
        raised, every version stays loaded and the active one active, except in the last case: there the version retired for
        its slot stays retired when allocating or filling the slot fails.
        """
        try:
            return self._load(name, path, max_levels, max_rows)
        except MemoryError as error:
            raise DeviceError(
                f"the host has no memory to load {shown(path)} as catalogue {shown(name)}; lower cache.catalog_slots or "
                "cache.rule_cache_bytes, or give the process more memory"
            ) from error

    def _load(self, name: str, path: str, max_levels: int | None, max_rows: int) -> str:
        catalog = Catalog.open(path, is_private=True)
        catalog.verify()
        catalog.prepare()
        if max_levels is not None and catalog.num_levels > max_levels:
            raise CatalogError(
                f"{path} has {catalog.num_levels} levels; this engine was started for at most {max_levels}; "
                "raise cache.max_levels and restart"
            )
        most_codes = max(catalog.num_codes)
        if max_rows * most_codes > MOST_CANDIDATES:
            raise CatalogError(
                f"{path} has a level of {most_codes} codes; with batches of {max_rows} rows a round could choose among "
                f"{max_rows * most_codes} candidates, and at most {MOST_CANDIDATES} can be told apart; lower "
                f"scheduler.max_batch_rows to {MOST_CANDIDATES // most_codes} and restart"
            )
        with self._device.sharing():
            head = self._head.for_catalog(catalog.token_of)
        named = self._begin_load(name, catalog)
        room = _Room()
        try:
            room = self._make_room(named, name, catalog)
            if room.retired is not None:
                room.retired.catalog.close()
            index, slot = room.slot or self._new_slot(catalog)
            slot.load(catalog)
            table = RuleRowTable(slot.num_rule_rows, TagExpression())
            gone = room.retired.version if room.retired is not None else ""
            loaded = LoadedCatalog(name, catalog.version, catalog, slot, index, head, table, gone)
        except BaseException as error:
            self._give_up_load(named, name, room.slot)
            if room.retired is not None and isinstance(error, (DeviceError, MemoryError)):
                raise DeviceError(
                    f"{str(error) or 'the host has no memory'}; version {room.retired.version!r}, retired to make room "
                    "for it, stays retired"
                ) from error
            raise
        with self._lock:
            self._drop_graphs_of_other_head(index, head.levels)
            named.versions[catalog.version] = loaded
            named.is_loading = False
            self.by_slot[index] = loaded
        return catalog.version

    def activate(self, name: str, version: str) -> str:
        """New requests without a pinned version use `version` from now on; returns the version before, "" where none was."""
        with self._lock:
            loaded = self._find(name, version)
            self._num_activations += 1
            loaded.activation = self._num_activations
            loaded.activated_s = time.monotonic()
            before, self._names[name].active = self._names[name].active, loaded.version
            return before

    def retire(self, name: str, version: str) -> None:
        """Free a version that is neither active nor in use."""
        with self._lock:
            loaded = self._find(name, version)
            is_active = self._names[name].active == loaded.version
            if loaded.num_pins or is_active:
                state = "active" if is_active else f"used by {loaded.num_pins} requests"
                raise CatalogError(
                    f"version {loaded.version!r} of catalogue {name!r} is {state} and cannot be retired"
                )
            self._retire(self._names[name], loaded)
        loaded.catalog.close()

    def active_slots(self) -> set[int]:
        """The slots of all active versions."""
        with self._lock:
            return {
                named.versions[named.active].slot_index
                for named in self._names.values()
                if named.active
            }

    def pin(self, name: str, version: str = "") -> LoadedCatalog:
        """The active version, or the named one, kept until `release`. Raises NotFound."""
        with self._lock:
            loaded = self._find(name, version)
            loaded.num_pins += 1
            return loaded

    def pin_all(self) -> list[LoadedCatalog]:
        """Every loaded version, each kept until `release`."""
        with self._lock:
            found = list(self.by_slot.values())
            for loaded in found:
                loaded.num_pins += 1
            return found

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
                            "retired_version": v.retired_version,
                            "levels": v.slot.describe(),
                        }
                        for v in named.versions.values()
                    },
                }
                for name, named in self._names.items()
            }

    def stats(self) -> tuple[CatalogStats, ...]:
        """The active version of each catalogue that has one."""
        now_s = time.monotonic()
        with self._lock:
            return tuple(
                CatalogStats(
                    name=name,
                    version=named.active,
                    age_s=now_s - named.versions[named.active].activated_s,
                    num_items=named.versions[named.active].catalog.num_items,
                    num_versions=len(named.versions),
                )
                for name, named in self._names.items()
                if named.active
            )

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

    def _make_room(self, named: _Named, name: str, catalog: Catalog) -> _Room:
        """A slot that the catalogue fits or may have anew, with the version that was retired for it if one was."""
        with self._lock:
            for entry in named.free_slots:
                if entry[1].plan.fits(catalog):
                    named.free_slots.remove(entry)
                    return _Room(entry)
            if len(named.versions) + len(named.free_slots) < self._config.catalog_slots:
                return _Room()
            retired = None
            if not named.free_slots:
                retired = self._find_retirable(named, name)
                logger.info(
                    "catalogue %s: version %s is retired to make room for version %s",
                    name,
                    retired.version,
                    catalog.version,
                )
                self._retire(named, retired)
            entry = named.free_slots.pop()
            if entry[1].plan.fits(catalog):
                return _Room(entry, retired)
            self._drop_slot(entry)
            return _Room(None, retired)

    def _find_retirable(self, named: _Named, name: str) -> LoadedCatalog:
        """The version that was active longest ago and is neither active nor pinned. Raises CatalogError."""
        unused = [
            v for v in named.versions.values() if not v.num_pins and v.version != named.active
        ]
        retirable = [v for v in unused if v.activation]
        if retirable:
            return min(retirable, key=lambda v: v.activation)
        if unused:
            staged = unused[0].version
            raise CatalogError(
                f"catalogue {name!r} has no free slot, and version {staged!r} was loaded but never activated, so no load "
                f"retires it; activate it, free its slot with retire_catalog({name!r}, {staged!r}), or raise "
                "cache.catalog_slots"
            )
        raise CatalogError(
            f"catalogue {name!r} has no free slot: {', '.join(named.versions)} are active or in use; "
            "raise cache.catalog_slots or retry when requests have ended"
        )

    def _new_slot(self, catalog: Catalog) -> _IndexedSlot:
        num_rule_rows = max(self._config.rule_rows, self._num_searches + 1)
        plan = plan_slot(catalog, self._config)
        with self._device.sharing():
            slot = CatalogSlot(plan, self._device, num_rule_rows, self._num_searches)
        with self._lock:
            index = self._next_slot_index
            self._next_slot_index += 1
        return index, slot

    def _give_up_load(self, named: _Named, name: str, reused: _IndexedSlot | None) -> None:
        """As it was before the load, except for a version that was retired for its slot."""
        with self._lock:
            named.is_loading = False
            if reused is not None:
                named.free_slots.append(reused)
            if not named.versions and not named.free_slots:
                del self._names[name]

    def _drop_slot(self, entry: _IndexedSlot) -> None:
        """Free a slot's memory and whatever is kept about it."""
        index, slot = entry
        self._on_slot_dropped(index)
        self._rows_of_slot.pop(index, None)
        slot.free()

    def _drop_graphs_of_other_head(self, index: int, levels: Sequence[LevelRows]) -> None:
        """A captured graph reads the head rows of the version it was captured with, whatever the slot holds now."""
        before = self._rows_of_slot.get(index)
        if before is not None and [rows() for rows in before] != list(levels):
            self._on_slot_dropped(index)
        self._rows_of_slot[index] = [weakref.ref(rows) for rows in levels]

    def _retire(self, named: _Named, loaded: LoadedCatalog) -> None:
        """Its slot is free. The caller closes the catalogue, without the lock: giving back gigabytes takes a while.

        Closed, not only forgotten: requests that have ended may hold it until the next one comes, for hours.
        """
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
            raise NotFound(f"catalogue {shown(name)} is not loaded; loaded: {known}")
        named = self._names[name]
        wanted = version or named.active
        if wanted not in named.versions:
            known = ", ".join(named.versions)
            what = f"version {shown(wanted)}" if wanted else "no active version"
            raise NotFound(f"catalogue {shown(name)}: {what} is not loaded; loaded: {known}")
        return named.versions[wanted]
