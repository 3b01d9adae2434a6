"""Captured graphs of a CUDA device.

A capture runs nothing, and what it meets is as far as it can be: kernels of ops are compiled and loaded before
(`missing_kernels`), and the product library, which has a handle for each thread, has run a product of each kind in this one.
Where Triton does not say what it is about to compile, the segment runs once before its capture instead.

All graphs share one pool of memory. A pool that no graph uses any more cannot be used again while a tensor lives in it, as a
library's workspace does; so one graph, of a single kernel, uses it for as long as the device is open, whatever becomes of the
others. After a capture that failed, torch's allocators go on recording into the pool: those of tensors on the device can be
told to stop, those of pinned memory cannot. So the captures that follow have another pool.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.collection import no_collection
from xgr_runtime.hal.device import Kernel
from xgr_runtime.hal.kernels import noting
from xgr_runtime.hal.triton_kernels import missing_kernels, why_not_found

logger = logging.getLogger(__name__)


class CudaGraph:
    """Kernels on a GPU read lengths from device memory, so a replay needs none of the host's."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self, kv_lens: Sequence[int] = ()) -> None:
        self._graph.replay()


class CudaCaptures:
    """Makes the graphs of one device, on one of its streams, one at a time.

    lock: held by others for what may not be issued during a capture.
    """

    def __init__(
        self, place: torch.device, stream: torch.cuda.Stream, lock: threading.Lock
    ) -> None:
        self._place, self._stream, self._lock = place, stream, lock
        self._default = torch.cuda.default_stream(place)
        self._alone = threading.Lock()  # of whoever prepares or captures
        self._ready = threading.local()  # threads whose products have run once
        reason = why_not_found()
        self.is_compiling = reason is None
        if reason is not None:
            logger.warning("kernels are compiled one after the other: %s", reason)
        self._pool: Any = torch.cuda.graph_pool_handle()  # opaque
        self._pool_user: torch.cuda.CUDAGraph | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []  # torch's allocators may ask them yet

    def capture(self, name: str, fn: Callable[[], None]) -> CudaGraph:
        """As `Device.capture`."""
        with self._alone:
            return self._capture(name, fn)

    def _capture(self, name: str, fn: Callable[[], None]) -> CudaGraph:
        self._prepare()
        if not self.is_compiling:
            with torch.cuda.stream(self._stream):
                fn()
            self._stream.synchronize()
        graph, missing = self._record(fn)
        if missing:  # by nobody who asked before
            for kernel in missing:
                kernel.make_ready()
            graph, missing = self._record(fn)
            if missing:
                names = ", ".join(kernel.name for kernel in missing)
                raise DeviceError(f"segment {name!r}: {names} cannot be compiled before its start")
        return CudaGraph(graph)

    def missing_kernels(self, name: str, fn: Callable[[], None]) -> Sequence[Kernel]:
        """As `Device.missing_kernels`: by a capture that is thrown away."""
        with self._alone:
            self._prepare()
            _, missing = self._record(fn, is_kept=False)
        return missing

    def _prepare(self) -> None:
        """Before a capture: nothing is on the way, and the product library has what it allocates at its first product."""
        self._default.synchronize()
        if not getattr(self._ready, "has_products", False):
            with torch.cuda.stream(self._stream):
                for dtype in (torch.float32, torch.float16, torch.bfloat16):
                    one = torch.zeros((16, 16), dtype=dtype, device=self._place)
                    total = torch.mm(one, one)
                    total.addmm_(one, one)
                    torch.addmm(one[0], one, one)
                torch.mm(one, one, out_dtype=torch.float32)
            self._ready.has_products = True
        self._stream.synchronize()
        if self._pool_user is None:
            one = torch.zeros(1, device=self._place)
            self._default.synchronize()

            def add_one() -> None:
                one.add_(1)

            self._pool_user, _ = self._record(add_one)

    def _record(
        self, fn: Callable[[], None], *, is_kept: bool = True
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Kernel]]:
        """What `fn` starts, and the kernels that are not in it because they are still to be compiled."""
        graph = torch.cuda.CUDAGraph(keep_graph=not is_kept)  # kept, it is made ready for replays
        noted = missing_kernels(self._place) if self.is_compiling else noting()
        with (
            self._lock,
            no_collection(),
            warnings.catch_warnings(),
            noted as missing,
            self._capture_may_fail(graph),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            # Where every kernel is still to be compiled, none is recorded.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)
            fn()
        return graph, tuple(missing)

    @contextmanager
    def _capture_may_fail(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Where the driver ended a capture, torch stays on its stream, and its allocators go on recording into the pool."""
        try:
            with torch.cuda.stream(self._stream):
                yield
        except BaseException:
            with suppress(RuntimeError):  # not recording: the capture had ended by itself
                torch._C._cuda_endAllocateToPool(self._place.index, self._pool)
            self._failed.append(graph)
            self._pool, self._pool_user = torch.cuda.graph_pool_handle(), None
            raise
