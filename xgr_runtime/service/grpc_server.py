"""grpc.aio's server without its one weak point: a call whose path is no text.

Recent gRPC decodes the path of every call in its one serving task. A path that is not UTF-8, which any caller can send, ends that
task and with it the server, while the process goes on. Here no such path gets there: the methods that exist are registered with
gRPC's core, which tells calls of them from others by bytes, and the others are answered UNIMPLEMENTED without a look at their
path. gRPC has no public place for this, hence the subclass of an inner class; where another version of gRPC has no such inner
method, it is never called and nothing changes.

gRPC also logs four tracebacks for every header that is no text, whatever its name, and one for every caller that leaves in the
moment of its answer, as callers with deadlines do by the hundred when there is more work than time; those are left out.
"""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc

_making = threading.Lock()
_grpc_logger = logging.getLogger("grpc._cython.cygrpc")


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """Waits for the calls of methods that are not registered in a task of its own."""

    def _make_request_call_future(self, method_bytes: bytes | None) -> Any:
        if method_bytes is not None:
            return super()._make_request_call_future(method_bytes)
        return asyncio.ensure_future(self._refuse_unknown())

    async def _refuse_unknown(self) -> None:
        """Until the server stops: then waiting for a call raises, as the caller of this expects."""
        refusals: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            task = asyncio.ensure_future(_refuse(call))
            refusals.add(task)
            task.add_done_callback(refusals.discard)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    try:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    except (cygrpc.AbortError, cygrpc.ExecuteBatchError):  # told, or the caller has gone
        return


def _is_about_the_server(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, cygrpc.ExecuteBatchError):
        return False
    return not str(record.msg).startswith("Invalid encoding on")


def open_grpc_server(options: Sequence[tuple[str, int]]) -> Any:
    """A grpc.aio server that no path of a call can stop."""
    _grpc_logger.addFilter(_is_about_the_server)
    plain = cygrpc.AioServer
    with _making:
        cygrpc.AioServer = _AioServer
        try:
            return grpc.aio.server(options=options)
        finally:
            cygrpc.AioServer = plain


def add_handlers(server: Any, service: str, handlers: Mapping[str, Any]) -> None:
    """Registers the methods of a service, under both of gRPC's ways to find one."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_registered_method_handlers(service, handlers)
