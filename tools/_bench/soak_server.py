"""The service of a soak: `xgr serve` with versions of the catalogue swapped under it, and a last account of itself.

    python -m tools._bench.soak_server CONFIG REPORT SWAP_EVERY_S FILE FILE

Every SWAP_EVERY_S seconds (0: never) the next of the files is loaded beside the running version, activated, and the
version before it retired once no request uses it. When the service has drained, REPORT gets the engine's description, the
number of swaps and whether every page is accounted for, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgr_runtime import Engine, RuntimeConfig
from xgr_runtime.errors import CatalogError
from xgr_runtime.service.address import announce
from xgr_runtime.service.server import ServeEnd, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

REST_S = 60.0


class Swapper:
    """Swaps the versions of the default catalogue from a thread of its own until `stop`."""

    def __init__(self, engine: Engine, every_s: float, files: Sequence[str]) -> None:
        self._engine, self._every_s, self._files = engine, every_s, files
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swapper")
        self.num_swaps = 0
        self.num_refused = 0

    def start(self) -> None:
        if self._every_s:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._every_s:
            self._thread.join()

    def _run(self) -> None:
        name = self._engine.config.default_catalog
        while not self._stop.wait(self._every_s):
            # The active version is one of the files, so the other is the next one.
            path = self._files[(self.num_swaps + 1) % len(self._files)]
            before = active_version(self._engine, name)
            try:
                self._engine.activate_catalog(name, self._engine.load_catalog(name, path))
                self.num_swaps += 1
                self._retire(name, before)
            except CatalogError:  # requests still use the version before: at the next turn
                self.num_refused += 1

    def _retire(self, name: str, version: str) -> None:
        """Free a version as soon as its last request has ended."""
        while not self._stop.wait(0.05):
            try:
                self._engine.retire_catalog(name, version)
            except CatalogError:
                continue
            return


def active_version(engine: Engine, name: str) -> str:
    return str(engine.describe()["catalogs"][name]["active"])


def main(argv: Sequence[str]) -> int:
    config_path, report_path, every_s, *files = argv
    config = RuntimeConfig.from_yaml(config_path)
    with Engine.from_config(config) as engine:
        swapper = Swapper(engine, float(every_s), files)
        swapper.start()
        try:
            end = asyncio.run(serve(engine, config, announce))
        finally:
            swapper.stop()
        is_at_rest = engine.drain(REST_S)
        engine.pages.check_conservation()
        report: dict[str, Any] = {
            "end": end.name,
            "is_at_rest": is_at_rest,
            "num_swaps": swapper.num_swaps,
            "num_swaps_refused": swapper.num_refused,
            "num_pages_in_use": engine.pages.num_in_use,
            "engine": engine.describe(),
        }
    Path(report_path).write_text(json.dumps(report, default=str))
    return 0 if end is ServeEnd.DRAINED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
