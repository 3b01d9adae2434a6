"""HTTP/2 by hand, for what no well-made client sends: frames, headers without compression, and the status in a reply."""

from __future__ import annotations

import re
import socket
import struct
from typing import TYPE_CHECKING

from tests.service.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0,
    1,
    3,
    4,
    6,
    7,
    8,
    9,
)
END_STREAM, END_HEADERS = 1, 4
METHOD = b"/xgr.v1.RecommendService/Recommend"
Header = tuple[bytes, bytes]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


OPENING = PREFACE + frame(SETTINGS, 0, 0)


def headers(
    path: bytes = METHOD,
    extra: Sequence[Header] = (),
    *,
    without: Sequence[bytes] = (),
    flags: int = END_HEADERS,
) -> bytes:
    """A HEADERS frame of stream 1 that starts a gRPC call; `extra` replaces headers of the same name."""
    values = {
        b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers",
        b"content-type": b"application/grpc",
    }  # fmt: skip
    values |= dict(extra)
    block = b"".join(
        b"\x00" + _string(name) + _string(value)
        for name, value in values.items()
        if name not in without
    )
    return frame(HEADERS, flags, 1, block)


def message(data: bytes, *, length: int | None = None, flag: int = 0) -> bytes:
    """A gRPC message of a DATA frame: the length may lie."""
    return struct.pack(">BI", flag, len(data) if length is None else length) + data


def data(payload: bytes, *, ends: bool = True) -> bytes:
    return frame(DATA, END_STREAM if ends else 0, 1, payload)


def _string(value: bytes) -> bytes:
    """An HPACK string literal without Huffman coding."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, out = len(value) - 127, b"\x7f"
    while rest > 127:
        out += bytes([rest & 127 | 128])
        rest >>= 7
    return out + bytes([rest]) + value


def exchange(address: tuple[str, int], sent: bytes, timeout_s: float = PATIENCE_S) -> bytes:
    """Send bytes over a connection of its own; everything that comes back until the call or the connection ends."""
    received = b""
    with socket.create_connection(address, timeout=timeout_s) as connection:
        try:
            connection.sendall(sent)
            while not is_over(received):
                part = connection.recv(65536)
                if not part:
                    break
                received += part
        except ConnectionError:  # the server closed it at once; what it said before counts
            pass
    return received


def frames(received: bytes) -> list[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, payload) of every whole frame."""
    found = []
    while len(received) >= 9:
        length = int.from_bytes(received[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", received[3:9])
        found.append((kind, flags, stream, received[9 : 9 + length]))
        received = received[9 + length :]
    return found


def is_over(received: bytes) -> bool:
    """Whether stream 1 or the connection has been ended by the server."""
    return any(
        kind == GOAWAY or (stream == 1 and (kind == RST_STREAM or flags & END_STREAM))
        for kind, flags, stream, _ in frames(received)
    )


def status_of(received: bytes) -> int | None:
    """The grpc-status of the first call of a connection; gRPC's own encoder writes it as a literal."""
    found = re.search(rb"grpc-status[\x01\x02](\d{1,2})", received)
    return None if found is None else int(found[1])
