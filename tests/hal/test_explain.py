"""Errors of torch become errors that users can act on, by the kind of device; others stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.helpers.engines import make_config, make_engine, request_of
from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.explain import EXPLAINERS, explain_cuda_error, explain_error

if TYPE_CHECKING:
    from tests.helpers.versions import Versions


def test_out_of_memory_on_a_gpu_names_what_to_lower() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    found = explain_error("cuda", error)
    assert isinstance(found, DeviceError)
    assert "Tried to allocate 2.00 GiB." in str(found)
    assert "more" not in str(found)
    assert "lower scheduler.max_batch_rows" in str(found)
    assert str(explain_cuda_error(torch.OutOfMemoryError(""))).startswith(
        "the GPU is out of memory"
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu", "strict"])
def test_what_says_nothing_special_stays(kind: str) -> None:
    assert explain_error(kind, ZeroDivisionError("division by zero")) is None


def test_a_batch_fails_with_the_explained_error(
    versions: Versions, versions_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = DeviceError("no room; lower something")
    config = make_config(versions_model, {"main": Path(versions.path(1))})
    with make_engine(config) as engine:
        kind = engine.device.kind
        monkeypatch.setitem(EXPLAINERS, kind, lambda error: named if "odd" in str(error) else None)

        def fail(*args: object) -> None:
            raise RuntimeError(texts.pop(0))

        texts = ["odd", "unknown"]
        monkeypatch.setattr(engine.runner.inputs, "fill", fail)
        with pytest.raises(DeviceError, match="lower something"):
            engine.recommend([request_of("odd", [1])])
        with pytest.raises(RuntimeError, match=r"^unknown$"):
            engine.recommend([request_of("unknown", [1])])
