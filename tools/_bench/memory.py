"""Memory of this process as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

_FIELDS = {"Rss": "resident_mib", "Anonymous": "anonymous_mib"}


def memory_mib() -> dict[str, float]:
    """Resident and anonymous memory, MiB, from /proc/self/smaps_rollup."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] = round(int(rest.split()[0]) / 1024, 1)
    return found
