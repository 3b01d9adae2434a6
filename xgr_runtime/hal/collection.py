"""No garbage collection while a graph is captured.

A collection frees whatever died in cycles, such as graphs, events and pinned memory of an engine that was closed: calls to the
device from inside the capture, which break it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the collector from running by itself in this process for a short while."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
