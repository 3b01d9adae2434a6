"""xgr-runtime: exact, valid, filterable beam search for generative recommendation.

Importing this package touches no device. The public API is resolved on first use, so that tools which only
need the catalogue or the types (a build machine, a test of the scheduler) never import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xgr_runtime.config import RuntimeConfig
    from xgr_runtime.types import RecRequest, RecResult, Rules, Search, SearchResult
    from xgr_runtime.xbeam.catalog import Catalog
    from xgr_runtime.xschedule.engine import Engine

__version__ = "0.1.0"

_PUBLIC = {
    "Catalog": "xgr_runtime.xbeam.catalog",
    "Engine": "xgr_runtime.xschedule.engine",
    "RecRequest": "xgr_runtime.types",
    "RecResult": "xgr_runtime.types",
    "Rules": "xgr_runtime.types",
    "RuntimeConfig": "xgr_runtime.config",
    "Search": "xgr_runtime.types",
    "SearchResult": "xgr_runtime.types",
}

__all__ = [
    "Catalog",
    "Engine",
    "RecRequest",
    "RecResult",
    "Rules",
    "RuntimeConfig",
    "Search",
    "SearchResult",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'xgr_runtime' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(_PUBLIC[name]), name)
