"""The process around the servicer: listen, say so, and stop without losing an answer.

The grpc.aio server lives in the main thread's asyncio loop; the engine runs its own thread. At the first SIGTERM, ctrl-C or SIGHUP
health turns NOT_SERVING, new calls are answered UNAVAILABLE, calls in flight get `service.drain_s` seconds, then the server stops. The
second signal stops at once. An engine that stops by itself, idle or not, ends the service too. Every call ends with its answer or
UNAVAILABLE. Waiting for the calls and not for gRPC's own grace period matters: a load balancer's health watch never ends by itself
and would always use up the whole period.
"""

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.service.address import check_address, format_address
from xgr_runtime.service.catalog_admin import SERVICE_NAME as CATALOG_SERVICE_NAME
from xgr_runtime.service.catalog_admin import CatalogServicer
from xgr_runtime.service.grpc_server import open_grpc_server
from xgr_runtime.service.guarded_handlers import GuardedServer
from xgr_runtime.service.health import ServiceHealth
from xgr_runtime.service.metrics import ServiceMetrics
from xgr_runtime.service.metrics_http import MetricsEndpoint
from xgr_runtime.service.reflection import add_reflection_to_server
from xgr_runtime.service.served_engine import ServedEngine
from xgr_runtime.service.servicer import SERVICE_NAME, RecommendServicer, add_to_server
from xgr_runtime.service.stop_signals import StopSignals
from xgr_runtime.service.worker_thread import WorkerThread

# Long enough for a client to receive an answer and send its next call.
HOLD_S = 0.1
# For the answers of the calls that are cut off to leave, on a busy machine too; gRPC stops as soon as they have.
FLUSH_S = 2.0
KEEPALIVE_ANSWER_S = 20.0
NAMED_EXCESS_BYTES = 1024 * 1024
MAX_OPTION = 2**31 - 1
logger = logging.getLogger(__name__)


class ServeEnd(enum.Enum):
    """Why `serve` returned."""

    DRAINED = "every request was answered"
    CUT_OFF = "requests were cut off"
    ENGINE_CLOSED = "the engine stopped by itself"


class RecommendServer:
    """A listening service on a started engine. `start` must be awaited in the loop that will serve."""

    def __init__(self, engine: ServedEngine, config: RuntimeConfig) -> None:
        self._engine, self._config = engine, config.service
        self._server = open_grpc_server(server_options(config))
        self._others = GuardedServer(self._server, config.service.receive_s)
        self._health = ServiceHealth([SERVICE_NAME], config.limits.max_name_length)
        self.servicer = RecommendServicer(
            engine,
            config.limits,
            config.service.receive_s,
            log_requests=config.service.log_requests,
        )
        self._catalogs: CatalogServicer | None = None
        if config.service.allow_catalog_admin:
            self._catalogs = CatalogServicer(engine, config)
        self._metrics: MetricsEndpoint | None = None
        if config.service.metrics_port:
            metrics = ServiceMetrics(self.servicer.calls, engine.stats, tuple(config.catalogs))
            self._metrics = MetricsEndpoint(
                metrics.render, config.service.metrics_host, config.service.metrics_port
            )
        self._watch: asyncio.Future[None] | None = None
        self._grpc_watch: asyncio.Future[None] | None = None
        self._is_stopping = False

    async def start(self) -> int:
        """Listen; returns the port. Raises ConfigError when the address cannot be bound."""
        add_to_server(self.servicer, self._server)
        await self._health.add_to_server(self._others)
        names = [SERVICE_NAME]
        if self._catalogs is not None:
            self._catalogs.add_to_server(self._others)
            names.append(CATALOG_SERVICE_NAME)
        if self._config.reflection:
            add_reflection_to_server(names, self._others)
        check_address(self._config.host, self._config.port)
        address = format_address(self._config.host, self._config.port)
        port = int(self._server.add_insecure_port(address))
        if self._metrics is not None:
            await self._metrics.start()
        await self._server.start()
        await self._health.set_serving()
        self._watch = asyncio.ensure_future(self._watch_engine())
        self._grpc_watch = asyncio.ensure_future(self._watch_grpc())
        return port

    async def stop(self, stop_now: asyncio.Event) -> int:
        """Drain, then stop; returns the number of calls that were cut off. `stop_now` ends the drain early."""
        self._is_stopping = True
        await self._health.set_stopping()
        self.servicer.refuse_new()
        waits = [
            asyncio.ensure_future(self.servicer.wait_idle()),
            asyncio.ensure_future(stop_now.wait()),
        ]
        await asyncio.wait(waits, timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        num_cut_off = await self._close()
        if self._metrics is not None:
            await self._metrics.close()
        if self._watch is not None:
            self._watch.cancel()
        if self._grpc_watch is not None:
            await self._grpc_watch
        return num_cut_off

    async def _close(self) -> int:
        """Stop gRPC; returns the number of accepted calls that were cut off.

        A call that reaches gRPC between its stop and the client's notice of it ends CANCELLED: the runtime's own client takes
        that for UNAVAILABLE, others for no reason to try elsewhere. So no call is answered around the stop: clients that send
        one call after the other have theirs here when the connection closes to further ones.
        """
        self.servicer.hold_refusals()
        await asyncio.sleep(HOLD_S)
        stopping = asyncio.ensure_future(self._server.stop(HOLD_S + FLUSH_S))
        await asyncio.sleep(HOLD_S)
        num_cut_off = self.servicer.end_calls()
        self._others.end_calls()
        if self._catalogs is not None:
            self._catalogs.close()
        await stopping
        return num_cut_off

    async def _watch_engine(self) -> None:
        """No balancer may send requests to an engine that has stopped, and no request needs to find it out."""
        await self._engine.wait_stopped()
        await self._health.set_stopping()
        self.servicer.engine_closed.set()

    async def _watch_grpc(self) -> None:
        """A process that nobody can reach must not live on: whatever ends gRPC's server ends the service."""
        try:
            await self._server.wait_for_termination()
        except Exception:  # what its serving task died of, of any kind
            logger.exception("gRPC stopped by itself")
        if not self._is_stopping:
            self.servicer.engine_closed.set()


def server_options(config: RuntimeConfig) -> list[tuple[str, int]]:
    """What gRPC itself keeps callers to. Times are in milliseconds."""
    limits, service = config.limits, config.service
    # Calls that nobody has taken in yet. Beyond a thousand gRPC drops some at random, and they end CANCELLED, which no caller
    # expects but the runtime's own client. Taking in a call and refusing it by name costs little, so all that may be open may
    # wait.
    most_pending = min(limits.max_concurrent_streams * limits.max_connections, MAX_OPTION)
    return [
        # Beyond the limit itself: up to there the servicer refuses a message by the limit's name, gRPC names none.
        ("grpc.max_receive_message_length", limits.max_message_bytes + NAMED_EXCESS_BYTES),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        # One number for both: between the two gRPC refuses calls at random.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        # Without it a second server on the same port starts without an error and takes half of the calls.
        ("grpc.so_reuseport", 0),
        # Only plain messages: older gRPC unpacks a compressed one, a megabyte to a gigabyte, before it looks at its size.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
        # Else a call counts until gRPC has freed it, after its caller has begun the next: a client that keeps to the limit has
        # nearly all its waiting calls refused, each refusal making room for the next.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server.max_pending_requests", most_pending),
        ("grpc.server.max_pending_requests_hard_limit", most_pending),
        ("grpc.server_handshake_timeout_ms", round(1e3 * service.handshake_s)),
        ("grpc.max_connection_idle_ms", round(1e3 * service.idle_s)),
        ("grpc.keepalive_time_ms", round(1e3 * service.keepalive_s)),
        ("grpc.keepalive_timeout_ms", round(1e3 * KEEPALIVE_ANSWER_S)),
    ]


async def serve(
    engine: ServedEngine, config: RuntimeConfig, on_listening: Callable[[str], None]
) -> ServeEnd:
    """Serve until a stop signal; `on_listening` gets the address with the real port, in a thread of its own.

    Must run in the main thread (it installs signal handlers). Afterwards stop signals are ignored when everything was answered,
    else the next one ends the process with exit code 1 (one that comes while Python itself ends: by the signal). Raises
    ConfigError when the address cannot be bound, and the OSError of `on_listening` when it cannot be told.
    """
    server = RecommendServer(engine, config)
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    with StopSignals(on_signal) as signals:
        port = await server.start()
        engine_closed = server.servicer.engine_closed
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, engine_closed)]
        try:
            await _tell(partial(on_listening, format_address(config.service.host, port)), waits)
        except OSError:  # nobody would learn the address
            stop_now.set()
            await server.stop(stop_now)
            raise
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        logger.info("stopping; %d requests in flight", server.servicer.num_in_flight)
        stop.set()
        num_cut_off = await server.stop(stop_now)
        if not num_cut_off and not engine_closed.is_set():
            signals.ignore_from_now()
            return ServeEnd.DRAINED
        signals.exit_from_now()
        return ServeEnd.ENGINE_CLOSED if engine_closed.is_set() else ServeEnd.CUT_OFF


async def _tell(say: Callable[[], None], ends: Sequence[asyncio.Future[Any]]) -> None:
    """Until it is said or one of `ends` comes: a reader of standard output that has stalled keeps nobody from a stop."""
    thread = WorkerThread("xgr-announce")
    saying = asyncio.wrap_future(thread.submit(say))
    thread.close()
    await asyncio.wait([saying, *ends], return_when=asyncio.FIRST_COMPLETED)
    if saying.done():
        saying.result()
