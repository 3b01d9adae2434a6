"""xgr.v1.CatalogService: what an operator does to the catalogues of a running service.

Off unless the configuration allows it, because nobody is asked who they are. Files are named relative to one folder and must
really lie in it, links followed: the port must not read the rest of the machine. Only configured names can be loaded, so the
slots' memory stays within the configuration.

Loads take as long as their file; they run one after the other on a thread of their own, so neither the server's loop nor a
request waits for them, nor the end of the process: they write nothing. A call that is given up does not end its load once it has
begun, which cannot be stopped half-way. One that still waits for another is dropped: nobody expects it any more, and what it would
activate later would surprise.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.errors import (
    CatalogError,
    CheckpointError,
    ConfigError,
    DeviceError,
    InvalidRequest,
    NotFound,
    XgrError,
    printable,
    shown,
)
from xgr_runtime.service._pb.xgr.v1 import catalog_pb2 as pb
from xgr_runtime.service.guarded_handlers import GuardedServer
from xgr_runtime.service.receive import new_request_id
from xgr_runtime.service.rpc_errors import (
    DETAILS_KEY,
    MAX_MESSAGE_BYTES,
    REQUEST_ID_KEY,
    RpcFailure,
    ServicerContext,
    failure_from_error,
    internal_failure,
)
from xgr_runtime.service.served_engine import ServedEngine
from xgr_runtime.service.worker_thread import WorkerThread

if TYPE_CHECKING:
    from concurrent.futures import Future

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["CatalogService"].full_name
MAX_PATH_LENGTH = 4096
MAX_SHOWN_PATH = 256
logger = logging.getLogger(__name__)
_CODES = (
    (CatalogError, grpc.StatusCode.FAILED_PRECONDITION),
    (CheckpointError, grpc.StatusCode.FAILED_PRECONDITION),
    (DeviceError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
# grpc and protobuf's messages have no common type here.
Message: TypeAlias = Any
Handler: TypeAlias = Callable[[Message], Awaitable[Message]]


class CatalogServicer:
    """Answers the calls of CatalogService on an engine.

    Raises ConfigError when service.catalog_folder is no folder: every load would fail, each with a reason of its own.
    """

    def __init__(self, engine: ServedEngine, config: RuntimeConfig) -> None:
        if not os.path.isdir(config.service.catalog_folder):
            raise ConfigError(
                f"service.catalog_folder must be a folder that exists, got {printable(config.service.catalog_folder)}"
            )
        self._engine = engine
        self._max_name_length = config.limits.max_name_length
        self._names = tuple(config.catalogs)
        self._folder = os.path.realpath(config.service.catalog_folder)
        self._loads = WorkerThread("xgr-catalog-load")

    def add_to_server(self, server: GuardedServer) -> None:
        """Register the service; bytes that are no message reach the servicer, which answers with a request id."""
        methods: dict[str, tuple[type[Message], Handler]] = {
            "LoadCatalog": (pb.LoadCatalogRequest, self._load),
            "ActivateCatalog": (pb.ActivateCatalogRequest, self._activate),
            "RetireCatalog": (pb.RetireCatalogRequest, self._retire),
            "ListCatalogs": (pb.ListCatalogsRequest, self._list),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._call(name, *method), response_serializer=_serialize
            )
            for name, method in methods.items()
        }
        server.add_registered_method_handlers(SERVICE_NAME, handlers)

    def close(self) -> None:
        """Begin no further load. One that runs goes on for as long as the process does."""
        self._loads.close()

    def _call(
        self, method: str, kind: type[Message], handler: Handler
    ) -> Callable[[bytes, Any], Awaitable[Message]]:
        """The gRPC handler around one of the methods below: parse, run, log, name the failure."""

        async def call(data: bytes, context: ServicerContext) -> Message:
            request_id = new_request_id()
            trailing: tuple[tuple[str, str | bytes], ...] = ((REQUEST_ID_KEY, request_id),)
            context.set_trailing_metadata(trailing)
            try:
                outcome = await self._outcome(kind, data, handler, request_id)
            except asyncio.CancelledError:
                fields = {"request_id": request_id, "status": "CANCELLED"}
                logger.warning("%s %s CANCELLED", method, request_id, extra=fields)
                raise
            if not isinstance(outcome, RpcFailure):
                fields = {"request_id": request_id, "status": "OK"}
                logger.info("%s %s OK: %s", method, request_id, _one_line(outcome), extra=fields)
                return outcome
            code = outcome.code.name
            fields = {"request_id": request_id, "status": code}
            logger.warning("%s %s %s: %s", method, request_id, code, outcome.message, extra=fields)
            if outcome.details:
                trailing = (*trailing, (DETAILS_KEY, outcome.details))
            await context.abort(outcome.code, outcome.message, trailing)
            raise AssertionError("abort returned")

        return call

    async def _outcome(
        self, kind: type[Message], data: bytes, handler: Handler, request_id: str
    ) -> Message | RpcFailure:
        try:
            return await handler(_parse(kind, data))
        except (XgrError, MemoryError) as error:
            return _failure(error, request_id)
        # The border of the process, as for Recommend: the log gets what a client must not see.
        except Exception:
            logger.exception("request %s failed", request_id, extra={"request_id": request_id})
            return internal_failure(request_id)

    async def _load(self, request: pb.LoadCatalogRequest) -> pb.LoadCatalogResponse:
        path = self._path_of(request.name, request.path)

        def load() -> str:
            version = self._engine.load_catalog(request.name, path)
            if request.activate:
                self._engine.activate_catalog(request.name, version)
            return version

        loading = self._loads.submit(load)
        try:
            return self._loaded(request.name, await asyncio.wrap_future(loading))
        except asyncio.CancelledError:
            what = f"the load of {printable(request.path, MAX_SHOWN_PATH)} into {request.name}"
            if loading.cancel():
                logger.warning("%s was given up before it began: dropped", what)
            else:
                logger.warning("%s was given up after it began: it goes on", what)
                loading.add_done_callback(lambda done: _log_end(what, done))
            raise

    def _loaded(self, name: str, version: str) -> pb.LoadCatalogResponse:
        facts = self._catalogs()[name]["versions"].get(version, {})  # retired again by now?
        return pb.LoadCatalogResponse(
            version=version, retired_version=facts.get("retired_version", "")
        )

    async def _activate(self, request: pb.ActivateCatalogRequest) -> pb.ActivateCatalogResponse:
        self._check_named(request.name, request.version)
        before = self._engine.activate_catalog(request.name, request.version)
        return pb.ActivateCatalogResponse(previous_version=before)

    async def _retire(self, request: pb.RetireCatalogRequest) -> pb.RetireCatalogResponse:
        self._check_named(request.name, request.version)
        self._engine.retire_catalog(request.name, request.version)
        return pb.RetireCatalogResponse()

    async def _list(self, _request: pb.ListCatalogsRequest) -> pb.ListCatalogsResponse:
        return pb.ListCatalogsResponse(
            catalogs=[
                pb.CatalogState(
                    name=name,
                    active_version=named["active"],
                    versions=[
                        pb.CatalogVersionState(
                            version=version,
                            num_items=facts["num_items"],
                            num_sids=facts["num_sids"],
                            num_in_use=facts["num_pins"],
                            device_bytes=facts["device_bytes"],
                            retired_version=facts["retired_version"],
                        )
                        for version, facts in named["versions"].items()
                    ],
                )
                for name, named in sorted(self._catalogs().items())
            ]
        )

    def _catalogs(self) -> Mapping[str, Any]:
        catalogs: Mapping[str, Any] = self._engine.describe()["catalogs"]
        return catalogs

    def _path_of(self, name: str, path: str) -> str:
        """The file a load may read. Raises InvalidRequest, NotFound."""
        found = self._faults("name", name)
        if not 1 <= len(path) <= MAX_PATH_LENGTH or not path.isprintable():
            found.append(("path", f"1 to {MAX_PATH_LENGTH} printable characters expected"))
        if found:
            raise InvalidRequest(found)
        if name not in self._names:
            raise NotFound(
                f"catalogue {shown(name)} is not configured; configured: {', '.join(self._names) or 'none'}"
            )
        real = os.path.realpath(os.path.join(self._folder, path))
        if os.path.isabs(path) or os.path.commonpath([self._folder, real]) != self._folder:
            raise InvalidRequest(
                [("path", f"must lie in the server's service.catalog_folder, got {shown(path)}")]
            )
        return real

    def _check_named(self, name: str, version: str) -> None:
        found = [*self._faults("name", name), *self._faults("version", version)]
        if found:
            raise InvalidRequest(found)

    def _faults(self, field: str, value: str) -> list[tuple[str, str]]:
        most = self._max_name_length
        if 1 <= len(value) <= most:
            return []
        text = f"1 to limits.max_name_length = {most} characters expected, got {len(value)}"
        return [(field, text)]


def _serialize(message: Message) -> bytes:
    return bytes(message.SerializeToString())


def _parse(kind: type[Message], data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            [("request", f"is not an {kind.DESCRIPTOR.full_name} message")]
        ) from error


def _failure(error: XgrError | MemoryError, request_id: str) -> RpcFailure:
    if isinstance(error, MemoryError):
        return RpcFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, "the host has no memory for it")
    for kind, code in _CODES:
        if isinstance(error, kind):
            return RpcFailure(code, printable(str(error), MAX_MESSAGE_BYTES // 4))
    failure = failure_from_error(error)
    if failure is None:
        fields = {"request_id": request_id}
        logger.error("request %s failed", request_id, exc_info=error, extra=fields)
    return failure or internal_failure(request_id)


def _log_end(what: str, done: "Future[str]") -> None:
    """What became of a load whose caller has gone; runs in the thread of loads."""
    error = done.exception()
    if error is None:
        logger.info("%s ended: version %s", what, done.result())
    elif isinstance(error, XgrError):
        logger.warning("%s failed: %s", what, printable(str(error), MAX_MESSAGE_BYTES // 4))
    else:
        logger.error("%s failed", what, exc_info=error)


def _one_line(message: Message) -> str:
    return " ".join(str(message).split())[:200]
