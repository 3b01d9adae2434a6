from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadCatalogRequest(_message.Message):
    __slots__ = ("name", "path", "activate")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ACTIVATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    activate: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., activate: bool = ...) -> None: ...

class LoadCatalogResponse(_message.Message):
    __slots__ = ("version", "retired_version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RETIRED_VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    retired_version: str
    def __init__(self, version: _Optional[str] = ..., retired_version: _Optional[str] = ...) -> None: ...

class ActivateCatalogRequest(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class ActivateCatalogResponse(_message.Message):
    __slots__ = ("previous_version",)
    PREVIOUS_VERSION_FIELD_NUMBER: _ClassVar[int]
    previous_version: str
    def __init__(self, previous_version: _Optional[str] = ...) -> None: ...

class RetireCatalogRequest(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class RetireCatalogResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCatalogsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCatalogsResponse(_message.Message):
    __slots__ = ("catalogs",)
    CATALOGS_FIELD_NUMBER: _ClassVar[int]
    catalogs: _containers.RepeatedCompositeFieldContainer[CatalogState]
    def __init__(self, catalogs: _Optional[_Iterable[_Union[CatalogState, _Mapping]]] = ...) -> None: ...

class CatalogState(_message.Message):
    __slots__ = ("name", "active_version", "versions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    active_version: str
    versions: _containers.RepeatedCompositeFieldContainer[CatalogVersionState]
    def __init__(self, name: _Optional[str] = ..., active_version: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[CatalogVersionState, _Mapping]]] = ...) -> None: ...

class CatalogVersionState(_message.Message):
    __slots__ = ("version", "num_items", "num_sids", "num_in_use", "device_bytes", "retired_version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_ITEMS_FIELD_NUMBER: _ClassVar[int]
    NUM_SIDS_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_USE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETIRED_VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    num_items: int
    num_sids: int
    num_in_use: int
    device_bytes: int
    retired_version: str
    def __init__(self, version: _Optional[str] = ..., num_items: _Optional[int] = ..., num_sids: _Optional[int] = ..., num_in_use: _Optional[int] = ..., device_bytes: _Optional[int] = ..., retired_version: _Optional[str] = ...) -> None: ...
