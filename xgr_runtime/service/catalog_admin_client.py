"""The client of xgr.v1.CatalogService."""

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from xgr_runtime.errors import CatalogError, DeviceError, XgrError
from xgr_runtime.service._pb.xgr.v1 import catalog_pb2 as pb
from xgr_runtime.service._pb.xgr.v1 import catalog_pb2_grpc
from xgr_runtime.service.call_options import check_target, check_timeout
from xgr_runtime.service.client import DEFAULT_TIMEOUT_S
from xgr_runtime.service.rpc_errors import REQUEST_ID_KEY, ServiceError, error_from_rpc

LOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class LoadedVersion:
    """What a load did. retired_version: the one that was retired to make room, "" when a slot was free."""

    version: str
    retired_version: str


class CatalogAdminClient:
    """Administers the catalogues of a running service; safe to share between threads.

    Every method raises CatalogError (a bad file, no free slot, a version in use), DeviceError (no memory for it), NotFound,
    InvalidRequest, DeadlineExceeded or ServiceError.
    """

    def __init__(self, target: str, *, timeout_s: float | None = None) -> None:
        self.target = check_target(target)
        self._timeout_s = check_timeout(timeout_s)
        self._channel = grpc.insecure_channel(target)
        make: Any = catalog_pb2_grpc.CatalogServiceStub
        self._stub = make(self._channel)

    def load(self, name: str, path: str, *, activate: bool = False) -> LoadedVersion:
        """Load a file, named relative to the server's service.catalog_folder. The reply names its version, and the one that was
        retired to make room: where every slot is taken, that is the one that was active longest ago.

        After DeadlineExceeded a load that has begun goes on, as `catalogs` then shows; one that waited for another is dropped.
        """
        request = pb.LoadCatalogRequest(name=name, path=path, activate=activate)
        reply = self._call(self._stub.LoadCatalog, request, LOAD_TIMEOUT_S)
        return LoadedVersion(reply.version, reply.retired_version)

    def activate(self, name: str, version: str) -> str:
        """Make a loaded version the active one; returns the one before."""
        request = pb.ActivateCatalogRequest(name=name, version=version)
        return str(self._call(self._stub.ActivateCatalog, request).previous_version)

    def retire(self, name: str, version: str) -> None:
        """Free a version that is neither active nor in use."""
        request = pb.RetireCatalogRequest(name=name, version=version)
        self._call(self._stub.RetireCatalog, request)

    def catalogs(self) -> dict[str, Any]:
        """By name: the active version and, by version, what is known about it."""
        reply = self._call(self._stub.ListCatalogs, pb.ListCatalogsRequest())
        return {
            one.name: {
                "active_version": one.active_version,
                "versions": {
                    v.version: {
                        "num_items": v.num_items,
                        "num_sids": v.num_sids,
                        "num_in_use": v.num_in_use,
                        "device_bytes": v.device_bytes,
                        "retired_version": v.retired_version,
                    }
                    for v in one.versions
                },
            }
            for one in reply.catalogs
        }

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> "CatalogAdminClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, method: Any, request: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=self._timeout_s or timeout_s)
        except grpc.RpcError as error:
            raise _error(error, self.target) from error


def _error(error: Any, target: str) -> XgrError:
    """What to raise for a grpc.RpcError.

    A call that the server dropped stays CANCELLED here, unlike a recommendation's, which may be asked of another server: what is
    administered is this one, and of a dropped load nobody knows whether it has begun. `catalogs` tells.
    """
    code, message = error.code(), error.details() or ""
    trailing = tuple(error.trailing_metadata() or ())
    is_its_own = REQUEST_ID_KEY in dict(trailing)
    if code is grpc.StatusCode.FAILED_PRECONDITION and is_its_own:
        return CatalogError(message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and is_its_own:
        return DeviceError(message)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ServiceError(
            code, f"{target} offers no administration of catalogues (service.allow_catalog_admin)"
        )
    if code is grpc.StatusCode.UNAVAILABLE and not is_its_own:
        return ServiceError(code, f"cannot reach {target}: {message}")
    return error_from_rpc(code, message, trailing)
