"""What happens to the file of a catalogue that is being served: nothing that a request could see."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.engines import loaded_catalog, request_of, same_bits
from tests.helpers.versions import Versions, ask, assert_is_version
from xgr_runtime.errors import CatalogError
from xgr_runtime.types import RecResult, Rules, Search

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime import Engine


def overwrite_in_place(path: str, content: bytes) -> None:
    """As `cp new old` does: the same file, other bytes."""
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate()


def damages(versions: Versions) -> dict[str, Callable[[str], None]]:
    other = Path(versions.path(9)).read_bytes()
    return {
        "overwritten with another version": lambda path: overwrite_in_place(path, other),
        "overwritten with zeros": lambda path: overwrite_in_place(
            path, bytes(os.path.getsize(path))
        ),
        "shortened": lambda path: os.truncate(path, 100),
        "emptied": lambda path: os.truncate(path, 0),
        "removed": os.unlink,
    }


def test_a_served_catalog_does_not_follow_its_file(engine: Engine, versions: Versions) -> None:
    """Searches, rules and look-ups by id touch every array: all answers stay, bit for bit, whatever is done."""
    path = versions.path(1)
    # Checked first, so that a mapping fails this test and does not end the process with SIGBUS below.
    assert path not in Path("/proc/self/maps").read_text(encoding="utf-8")
    ids = [item.item_id for item in versions.catalogs[1].items]
    tags = sorted({tag for item in versions.catalogs[1].items for tag in item.tags})
    assert tags

    def answers() -> list[RecResult]:
        searches = [
            Search(beam_width=600, num_results=1000),
            Search(beam_width=600, num_results=1000, rules=Rules(exclude_tags=tuple(tags[:1]))),
            Search(beam_width=600, num_results=1000, rules=Rules(exclude_item_ids=tuple(ids[:70]))),
        ]
        # One at a time: the bits of a score may depend on what shares its batch.
        return [engine.recommend([request_of("r", ids[:20], one)])[0] for one in searches]

    answers()  # from the second time on the same part of the prompt comes from the prefix cache
    before = answers()
    for what, damage in damages(versions).items():
        damage(path)
        after = answers()
        assert all(map(same_bits, before, after)), what
        assert_is_version(ask(engine), 1, versions)
    loaded_catalog(engine).verify()


def test_a_version_on_stand_by_does_not_follow_its_file(engine: Engine, versions: Versions) -> None:
    engine.load_catalog("main", versions.path(2))
    overwrite_in_place(versions.path(2), Path(versions.path(3)).read_bytes())
    engine.activate_catalog("main", "v2")
    assert_is_version(ask(engine), 2, versions)
    assert engine.load_catalog("main", versions.path(3)) == "v3"


def test_loading_a_pipe_is_refused_at_once(
    engine: Engine, versions: Versions, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    start = time.monotonic()
    with pytest.raises(CatalogError, match="a regular file is needed, this is a pipe"):
        engine.load_catalog("main", str(tmp_path / "pipe"))
    with pytest.raises(CatalogError, match="cannot open the catalogue"):
        engine.load_catalog("main", "a\0b")
    assert time.monotonic() - start < 60
    assert_is_version(ask(engine), 1, versions)
