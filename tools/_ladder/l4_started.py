"""What launchers would start on a GPU, found on a CPU: calls are made, and Triton's own binder says which kernels it would compile.

Between a launcher and the compiler stand the types, sizes and options of each start; they decide what is compiled. Nothing runs: a
driver that only has a target is Triton's, and `jit_cache_hook` takes every start over. Arguments may be on the CPU or hold nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = GPUTarget("cuda", 90, 32)  # sm_90, threads of a warp


class NoDriver:
    """A driver of a GPU that nothing is started on."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


@dataclass(frozen=True)
class Started:
    """A kernel for the types, constants and options of a start. data: these, as Triton serialises them; by: the first call."""

    name: str
    data: str = field(repr=False)
    function: Any = field(compare=False, repr=False)
    by: str = field(compare=False)

    @property
    def kind(self) -> tuple[str, ...]:
        """Name and types of pointers: what most of a kernel's operations depend on."""
        kinds = json.loads(self.data)["signature"].values()
        return (self.name, *(str(kind) for kind in kinds if str(kind).startswith("*")))


class Starts:
    """The kernels that were started, each once, and how many starts each caller made."""

    def __init__(self) -> None:
        self.kernels: dict[Started, None] = {}
        self.num_starts: Counter[str] = Counter()
        self._caller = self._call = ""

    def begin(self, caller: str, call: str) -> None:
        """What is started from now on is started by this call of that caller."""
        self._caller, self._call = caller, call

    def note(self, **told: Any) -> bool:
        """`jit_cache_hook`: True, as what is told is taken care of."""
        data, function = told["compile"]["specialization_data"], told["fn"].jit_function
        by = f"{self._caller}, {self._call}"
        self.kernels.setdefault(Started(function.__name__, data, function, by))
        self.num_starts[self._caller] += 1
        return True


@contextmanager
def noting_starts() -> Iterator[Starts]:
    """Inside, no kernel of Triton starts; what would is noted. Triton keeps the driver, so a process can do nothing else with it."""
    starts, before = Starts(), knobs.runtime.jit_cache_hook
    driver.set_active(NoDriver())
    knobs.runtime.jit_cache_hook = starts.note
    try:
        # a launcher may ask; without a GPU torch has no answer
        with patch("torch.cuda.is_current_stream_capturing", return_value=False):
            yield starts
    finally:
        knobs.runtime.jit_cache_hook = before
