"""Where a service listens: checked before it is bound, and told in the one line that whoever starts a service waits for."""

import errno
import os
import select
import socket
import sys
from typing import IO

from xgr_runtime.config import ServiceConfig
from xgr_runtime.errors import ConfigError, printable
from xgr_runtime.service.output import write_text

LISTENING = "xgr serve: listening on "


def format_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


DEFAULT_TARGET = format_address(ServiceConfig.host, ServiceConfig.port)


def check_address(host: str, port: int) -> None:
    """Bind and release the address, because gRPC's own refusal names no reason. Raises ConfigError with the system's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (OSError, ValueError) as error:  # ValueError: text that cannot be the name of a host
        reason = error.strerror if isinstance(error, OSError) else f"no name of a host ({error})"
        raise ConfigError(
            f"cannot listen on {format_address(printable(host, 80), port)}: {reason}; "
            "choose another service.port (0 takes a free one) or service.host"
        ) from error


def announce(address: str) -> None:
    """The line on standard output; waits for its reader. Raises OSError when it cannot be written."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, f"standard output is closed: {os.strerror(errno.EBADF)}")
    sys.stdout.flush()
    write_text(sys.stdout, f"{LISTENING}{address}\n")


def read_address(output: IO[str] | None, limit_s: float) -> str:
    """The address from the output of a service that was just started (a pipe, in text mode).

    Empty when it ends, says something else first, or nothing in `limit_s` seconds.
    """
    assert output is not None, "start it with stdout=subprocess.PIPE"
    ready, _, _ = select.select([output], [], [], limit_s)
    line = output.readline() if ready else ""
    return line.removeprefix(LISTENING).strip() if line.startswith(LISTENING) else ""
