"""Compiles ahead what captures are about to need: first every bucket's kernels are found, then all of them are compiled side by side.

A capture that meets a kernel which nobody has compiled waits for the compiler, which works on one processor: a start without
the compiler's cache on disk would take minutes. On devices that compile nothing there is nothing to search.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xgr_runtime.errors import DeviceLost
from xgr_runtime.hal.kernels import Compilation
from xgr_runtime.xschedule.batch import Batch
from xgr_runtime.xschedule.graph_runner import GraphRunner
from xgr_runtime.xschedule.progress import Progress

if TYPE_CHECKING:
    from xgr_runtime.hal.device import Kernel

logger = logging.getLogger(__name__)

STEP_S = 0.1  # of waiting for compilers, where there is nothing else to do
NUM_SLOWEST = 3  # kernels that the log names


class KernelSearch:
    """The kernels of a list of buckets. Steps belong to the thread that runs batches, with none on the way but while compiling.

    run: runs a batch to its end. batches: by the names of their buckets.
    """

    def __init__(
        self,
        graphs: GraphRunner,
        run: Callable[[Batch], object],
        batches: Sequence[tuple[str, Callable[[], Batch]]],
    ) -> None:
        self._graphs, self._run, self._batches = graphs, run, deque(batches)
        self._found: dict[Kernel, None] = {}
        self._progress = Progress("finding kernels", len(batches))
        self._compilation: Compilation | None = None

    @property
    def is_compiling(self) -> bool:
        """Whether all that is left is done by other threads."""
        return self._compilation is not None

    def step(self, wait_s: float = STEP_S) -> bool:
        """Search one bucket, or see what has been compiled after `wait_s` at most; False once all is compiled.

        Raises what a kernel that fails raises.
        """
        if self._batches:
            self._search(*self._batches.popleft())
            return True
        if self._compilation is None:
            self._progress.finish()
            if not self._found:
                return False
            self._progress = Progress("compiling kernels", len(self._found))
            self._compilation = Compilation(tuple(self._found))
        return self._compile(self._compilation, wait_s)

    def end(self) -> None:
        """Begin nothing more: the search has come to no good end."""
        self._progress.finish()
        self._graphs.forget_searches()
        if self._compilation is not None:
            self._compilation.cancel()

    def _search(self, name: str, make_batch: Callable[[], Batch]) -> None:
        self._progress.step(name)
        try:
            with self._graphs.finding(self._found):
                self._run(make_batch())
        except DeviceLost:
            raise
        # What cannot be searched may still run: whoever runs the bucket next, where an error counts, says whether it can.
        except Exception as error:
            self._batches.clear()
            logger.warning(
                "kernels are compiled one after the other from %s on: %s",
                name,
                error,
                exc_info=error,
            )

    def _compile(self, compilation: Compilation, wait_s: float) -> bool:
        try:
            is_done = compilation.wait(wait_s)
        except Exception:
            failed = compilation.failed
            logger.error("kernel %s failed to compile", failed.name if failed else "?")
            raise
        first_open = compilation.first_open
        self._progress.reach(compilation.num_done, first_open.name if first_open else "")
        if is_done:
            seconds = compilation.seconds
            slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:NUM_SLOWEST]
            logger.info(
                "%d kernels are compiled: %.1f s; the slowest %s",
                len(seconds),
                self._progress.elapsed_s,
                ", ".join(f"{kernel.name} {seconds[kernel]:.1f} s" for kernel in slowest),
            )
        return not is_done
