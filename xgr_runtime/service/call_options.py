"""Where a client calls and how long it waits, checked before gRPC turns them into something else.

gRPC adds a timeout to the time of day in 64-bit nanoseconds, so that a very long one has passed before the call is sent, and it
takes a port modulo 65536.
"""

from xgr_runtime.errors import ConfigError, shown

# gRPC can count about seven times as far; nobody waits for longer than these three decades.
MAX_TIMEOUT_S = 1e9
MAX_PORT = 65535
# Addresses of gRPC that end in no TCP port.
_PORTLESS = ("unix:", "unix-abstract:", "vsock:")


def check_target(target: str) -> str:
    """Raises ConfigError for text that cannot be an address."""
    if not target or not target.isprintable():
        raise ConfigError(f'a target is "host:port", got {shown(target)}')
    for address in () if target.startswith(_PORTLESS) else target.split(","):
        port = address.rpartition(":")[2]
        if port.isdecimal() and (len(port) > 20 or int(port) > MAX_PORT):
            raise ConfigError(
                f'a target is "host:port" with a port of at most {MAX_PORT}, got {shown(target)}'
            )
    return target


def check_timeout(timeout_s: float | None) -> float | None:
    """Seconds that gRPC can count, or None for ever. Raises ConfigError for what is no time to wait."""
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not is_number or not timeout_s > 0:
        raise ConfigError(f"timeout_s must be seconds above 0, or None, got {shown(timeout_s)}")
    return float(min(timeout_s, MAX_TIMEOUT_S))
