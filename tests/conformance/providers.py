"""Providers that are registered for the time of one test, in front of all others."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import Impl, all_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def provided(
    op_name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    kind: str = "cpu",
    refusal: str | None = None,
) -> Iterator[None]:
    """`make` gets the op's reference and returns what the provider "temporary" runs."""
    op = all_ops()[op_name]
    load_providers(kind)
    fn = make(op.reference)
    op.impls.insert(0, Impl("temporary", kind, fn, lambda _: refusal))
    try:
        yield
    finally:
        del op.impls[0]
