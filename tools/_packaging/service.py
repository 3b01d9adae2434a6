"""`xgr serve --config demo` of an environment, as a process."""

from __future__ import annotations

import signal
import socket
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tools._packaging.environments import environment
from xgr_runtime.service.address import read_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

START_LIMIT_S = 120.0


@contextmanager
def serving(
    commands: Path, folder: Path, python: Sequence[str] = (), settings: Sequence[str] = ()
) -> Iterator[str]:
    """Serve with the Python of a bin folder (`python`: its own options); gives the address, then drains.

    Raises RuntimeError with the server's log, which is `folder`/log, when it does not start, does not end well, or has logged a
    traceback.
    """
    command = [str(commands / "python"), *python, "-m", "xgr_runtime.cli"]
    command += ["serve", "--config", "demo", "--port", "0"]
    command += [part for setting in settings for part in ("--set", setting)]
    log_path = folder / "log"
    with (
        log_path.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        try:
            address = read_address(server.stdout, START_LIMIT_S)
            if not address:
                raise RuntimeError(f"no service: {log_path.read_text(encoding='utf-8')}")
            yield address
        finally:
            server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
    logged = log_path.read_text(encoding="utf-8")
    if code != 0 or "Traceback" in logged:
        raise RuntimeError(f"exit code {code}: {logged}")


def free_port() -> int:
    """A port of the loopback address that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
