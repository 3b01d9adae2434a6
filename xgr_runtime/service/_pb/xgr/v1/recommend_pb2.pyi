from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OnOverflow(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_OVERFLOW_UNSPECIFIED: _ClassVar[OnOverflow]
    ON_OVERFLOW_TRUNCATE: _ClassVar[OnOverflow]
    ON_OVERFLOW_ERROR: _ClassVar[OnOverflow]

class OnUnknown(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_UNKNOWN_UNSPECIFIED: _ClassVar[OnUnknown]
    ON_UNKNOWN_SKIP: _ClassVar[OnUnknown]
    ON_UNKNOWN_ERROR: _ClassVar[OnUnknown]

class Normalization(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NORMALIZATION_UNSPECIFIED: _ClassVar[Normalization]
    NORMALIZATION_VOCAB: _ClassVar[Normalization]
    NORMALIZATION_LEVEL: _ClassVar[Normalization]
    NORMALIZATION_VALID: _ClassVar[Normalization]

class SearchStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEARCH_STATUS_UNSPECIFIED: _ClassVar[SearchStatus]
    SEARCH_STATUS_OK: _ClassVar[SearchStatus]
    SEARCH_STATUS_FAILED: _ClassVar[SearchStatus]
ON_OVERFLOW_UNSPECIFIED: OnOverflow
ON_OVERFLOW_TRUNCATE: OnOverflow
ON_OVERFLOW_ERROR: OnOverflow
ON_UNKNOWN_UNSPECIFIED: OnUnknown
ON_UNKNOWN_SKIP: OnUnknown
ON_UNKNOWN_ERROR: OnUnknown
NORMALIZATION_UNSPECIFIED: Normalization
NORMALIZATION_VOCAB: Normalization
NORMALIZATION_LEVEL: Normalization
NORMALIZATION_VALID: Normalization
SEARCH_STATUS_UNSPECIFIED: SearchStatus
SEARCH_STATUS_OK: SearchStatus
SEARCH_STATUS_FAILED: SearchStatus

class Int64Values(_message.Message):
    __slots__ = ("values", "values_le")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    VALUES_LE_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    values_le: bytes
    def __init__(self, values: _Optional[_Iterable[int]] = ..., values_le: _Optional[bytes] = ...) -> None: ...

class StringValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class SidValues(_message.Message):
    __slots__ = ("num_levels", "values", "values_le")
    NUM_LEVELS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    VALUES_LE_FIELD_NUMBER: _ClassVar[int]
    num_levels: int
    values: _containers.RepeatedScalarFieldContainer[int]
    values_le: bytes
    def __init__(self, num_levels: _Optional[int] = ..., values: _Optional[_Iterable[int]] = ..., values_le: _Optional[bytes] = ...) -> None: ...

class TagGroup(_message.Message):
    __slots__ = ("any_of",)
    ANY_OF_FIELD_NUMBER: _ClassVar[int]
    any_of: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, any_of: _Optional[_Iterable[str]] = ...) -> None: ...

class Rules(_message.Message):
    __slots__ = ("require", "exclude_tags", "exclude_item_ids", "exclude_keys", "exclude_history")
    REQUIRE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_TAGS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_KEYS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_HISTORY_FIELD_NUMBER: _ClassVar[int]
    require: _containers.RepeatedCompositeFieldContainer[TagGroup]
    exclude_tags: _containers.RepeatedScalarFieldContainer[str]
    exclude_item_ids: Int64Values
    exclude_keys: _containers.RepeatedScalarFieldContainer[str]
    exclude_history: bool
    def __init__(self, require: _Optional[_Iterable[_Union[TagGroup, _Mapping]]] = ..., exclude_tags: _Optional[_Iterable[str]] = ..., exclude_item_ids: _Optional[_Union[Int64Values, _Mapping]] = ..., exclude_keys: _Optional[_Iterable[str]] = ..., exclude_history: bool = ...) -> None: ...

class Search(_message.Message):
    __slots__ = ("catalog", "catalog_version", "rules", "beam_width", "beam_widths", "num_results", "normalization", "max_items_per_sid", "return_level_scores")
    CATALOG_FIELD_NUMBER: _ClassVar[int]
    CATALOG_VERSION_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTHS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESULTS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZATION_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_PER_SID_FIELD_NUMBER: _ClassVar[int]
    RETURN_LEVEL_SCORES_FIELD_NUMBER: _ClassVar[int]
    catalog: str
    catalog_version: str
    rules: Rules
    beam_width: int
    beam_widths: _containers.RepeatedScalarFieldContainer[int]
    num_results: int
    normalization: Normalization
    max_items_per_sid: int
    return_level_scores: bool
    def __init__(self, catalog: _Optional[str] = ..., catalog_version: _Optional[str] = ..., rules: _Optional[_Union[Rules, _Mapping]] = ..., beam_width: _Optional[int] = ..., beam_widths: _Optional[_Iterable[int]] = ..., num_results: _Optional[int] = ..., normalization: _Optional[_Union[Normalization, str]] = ..., max_items_per_sid: _Optional[int] = ..., return_level_scores: bool = ...) -> None: ...

class RecommendRequest(_message.Message):
    __slots__ = ("request_id", "history_item_ids", "history_keys", "history_sids", "prompt_token_ids", "searches", "on_overflow", "on_unknown")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HISTORY_ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_KEYS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_SIDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEARCHES_FIELD_NUMBER: _ClassVar[int]
    ON_OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    ON_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    history_item_ids: Int64Values
    history_keys: StringValues
    history_sids: SidValues
    prompt_token_ids: Int64Values
    searches: _containers.RepeatedCompositeFieldContainer[Search]
    on_overflow: OnOverflow
    on_unknown: OnUnknown
    def __init__(self, request_id: _Optional[str] = ..., history_item_ids: _Optional[_Union[Int64Values, _Mapping]] = ..., history_keys: _Optional[_Union[StringValues, _Mapping]] = ..., history_sids: _Optional[_Union[SidValues, _Mapping]] = ..., prompt_token_ids: _Optional[_Union[Int64Values, _Mapping]] = ..., searches: _Optional[_Iterable[_Union[Search, _Mapping]]] = ..., on_overflow: _Optional[_Union[OnOverflow, str]] = ..., on_unknown: _Optional[_Union[OnUnknown, str]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "run_ms", "total_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    RUN_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    run_ms: float
    total_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., run_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class SearchResult(_message.Message):
    __slots__ = ("status", "reason", "num_items", "num_levels", "item_ids", "sids", "scores", "has_keys", "keys", "level_scores", "num_valid", "catalog", "catalog_version", "normalization", "temperature", "beam_widths", "num_unknown_exclusions")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_ITEMS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEVELS_FIELD_NUMBER: _ClassVar[int]
    ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    SIDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    HAS_KEYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_SCORES_FIELD_NUMBER: _ClassVar[int]
    NUM_VALID_FIELD_NUMBER: _ClassVar[int]
    CATALOG_FIELD_NUMBER: _ClassVar[int]
    CATALOG_VERSION_FIELD_NUMBER: _ClassVar[int]
    NORMALIZATION_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTHS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNKNOWN_EXCLUSIONS_FIELD_NUMBER: _ClassVar[int]
    status: SearchStatus
    reason: str
    num_items: int
    num_levels: int
    item_ids: bytes
    sids: bytes
    scores: bytes
    has_keys: bool
    keys: _containers.RepeatedScalarFieldContainer[str]
    level_scores: bytes
    num_valid: int
    catalog: str
    catalog_version: str
    normalization: Normalization
    temperature: float
    beam_widths: _containers.RepeatedScalarFieldContainer[int]
    num_unknown_exclusions: int
    def __init__(self, status: _Optional[_Union[SearchStatus, str]] = ..., reason: _Optional[str] = ..., num_items: _Optional[int] = ..., num_levels: _Optional[int] = ..., item_ids: _Optional[bytes] = ..., sids: _Optional[bytes] = ..., scores: _Optional[bytes] = ..., has_keys: bool = ..., keys: _Optional[_Iterable[str]] = ..., level_scores: _Optional[bytes] = ..., num_valid: _Optional[int] = ..., catalog: _Optional[str] = ..., catalog_version: _Optional[str] = ..., normalization: _Optional[_Union[Normalization, str]] = ..., temperature: _Optional[float] = ..., beam_widths: _Optional[_Iterable[int]] = ..., num_unknown_exclusions: _Optional[int] = ...) -> None: ...

class RecommendResponse(_message.Message):
    __slots__ = ("request_id", "results", "num_history_used", "num_history_unknown", "num_prompt_tokens", "num_cached_tokens", "model_version", "template_version", "timings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HISTORY_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_HISTORY_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    results: _containers.RepeatedCompositeFieldContainer[SearchResult]
    num_history_used: int
    num_history_unknown: int
    num_prompt_tokens: int
    num_cached_tokens: int
    model_version: str
    template_version: str
    timings: Timings
    def __init__(self, request_id: _Optional[str] = ..., results: _Optional[_Iterable[_Union[SearchResult, _Mapping]]] = ..., num_history_used: _Optional[int] = ..., num_history_unknown: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., model_version: _Optional[str] = ..., template_version: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...
