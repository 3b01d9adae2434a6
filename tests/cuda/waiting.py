"""Where torch may not have the host wait for the GPU."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, an operation of torch's own that would wait raises RuntimeError, on every thread of the process.

    torch warns once that it does not know all that wait, after it has set the mode: as an error that warning would leave the
    mode to every later test.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
