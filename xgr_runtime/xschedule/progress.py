"""How far a long piece of work is: a bar on standard error where somebody looks at it, else a line of the log now and then."""

import logging
import sys
import time

logger = logging.getLogger(__name__)

WIDTH = 30
LINE_EVERY_S = 5.0
REDRAW_EVERY_S = 0.1


class Progress:
    """what: as the bar is headed. total: how many steps. `step` before each, or `reach`; `finish` at the end, whatever the end is."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._start_s = self._last_s = time.monotonic()
        self._num_done = -1
        self._is_watched = sys.stderr is not None and sys.stderr.isatty()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._start_s

    def step(self, name: str) -> None:
        """One more step begins."""
        self.reach(self._num_done + 1, name)

    def reach(self, num_done: int, name: str) -> None:
        """So many steps are done, and one of that name is under way."""
        is_first = self._num_done < 0
        self._num_done = num_done
        now_s = time.monotonic()
        if self._is_watched:
            if is_first or now_s - self._last_s >= REDRAW_EVERY_S:
                self._last_s = now_s
                self._draw(f"{self._bar()} {name}")
        elif now_s - self._last_s >= LINE_EVERY_S:
            self._last_s = now_s
            logger.info(
                "%s: %d of %d, %.0f s", self._what, self._num_done, self._total, self.elapsed_s
            )

    def finish(self) -> None:
        """Take the bar away."""
        if self._is_watched:
            self._draw("")

    def _bar(self) -> str:
        filled = WIDTH * self._num_done // max(1, self._total)
        bar = "#" * filled + "." * (WIDTH - filled)
        return f"{self._what} [{bar}] {self._num_done}/{self._total}, {self.elapsed_s:.0f} s,"

    def _draw(self, text: str) -> None:
        # Over the line before, and its rest cleared: a control sequence that every terminal knows.
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()
