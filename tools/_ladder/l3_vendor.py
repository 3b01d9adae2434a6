"""What torch_npu lacks for its graphs to be captured over fake tensors, added in this process alone.

torch_npu's own code runs: `torch.npu.graph`, its handlers of fused attention, `NPUGraph.update` and `replay`. Three helpers of
these handlers have no shape rule, and weak references need memory. The shapes are not ours: outputs come from torch_npu's C++ on
tensors of the stubs' memory, and must equal its shape rule of the op itself. The workspace is what the kernel library says,
which is not here: some bytes.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Iterable

ATTENTION = "npu_fused_infer_attention_score"
_LENGTHS = "actual_seq_lengths_kv"


def load_vendor() -> Any:
    """torch_npu, imported; `torch.npu` exists afterwards."""
    return import_module("torch_npu")


class GraphsOfFakes:
    """Registers what is missing, once a process.

    failures: shapes or lengths that do not fit, as text. updates: lengths of histories that graphs were told before a replay,
    and how often.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.num_captured = 0
        self.updates: Counter[tuple[int, ...]] = Counter()
        torch.library.register_fake(f"npu::_{ATTENTION}_get_max_workspace", self._workspace)
        torch.library.register_fake(f"npu::_{ATTENTION}_infer_output", self._infer_output)
        torch.library.register_fake(f"npu::{ATTENTION}.out", self._into)
        for name in (
            "torch_npu.npu.graphs",
            "torch_npu.npu._npugraph_handlers.npugraph_handler",
        ):
            import_module(name).TensorWeakRef = lambda tensor: tensor  # type: ignore[attr-defined]

    def _workspace(self, query: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.empty(64, dtype=torch.uint8, device=query.device)

    def _infer_output(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        with unset_fake_temporarily():
            real_args, real_kwargs = tree_map(_real, (args, kwargs))
            outputs = getattr(torch.ops.npu, f"_{ATTENTION}_infer_output")(
                *real_args, **real_kwargs
            )
            shapes = [(tuple(out.shape), out.dtype, out.device) for out in outputs]
        return tuple(torch.empty(s, dtype=dtype, device=place) for s, dtype, place in shapes)

    def _into(
        self, *args: Any, workspace: Any, out: Iterable[torch.Tensor], **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """The op writing to given memory: at capture, and again with other lengths when a graph is updated."""
        got = tuple(out)
        if torch.npu.is_current_stream_capturing():  # type: ignore[attr-defined]
            self.num_captured += 1
        elif kwargs.get(_LENGTHS) is not None:
            self.updates[tuple(kwargs[_LENGTHS])] += 1
        expected = getattr(torch.ops.npu, ATTENTION)(*args, **kwargs)
        for one, other in zip(expected, got, strict=True):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                self.failures.append(
                    f"{ATTENTION}: the graph's memory is {other.dtype} {tuple(other.shape)}, "
                    f"the op's shape rule says {one.dtype} {tuple(one.shape)}"
                )
        self._check_lengths(args, kwargs)
        return tuple(expected)

    def _check_lengths(self, args: Any, kwargs: Any) -> None:
        """One length for each entry of the batch, none beyond its pages."""
        lengths, pages = kwargs.get(_LENGTHS), kwargs.get("block_table")
        if lengths is None:
            return
        if len(lengths) != args[0].shape[0]:
            self.failures.append(
                f"{ATTENTION}: {len(lengths)} lengths for {args[0].shape[0]} entries"
            )
        if pages is not None and max(lengths) > pages.shape[1] * kwargs["block_size"]:
            self.failures.append(
                f"{ATTENTION}: a length of {max(lengths)} in {pages.shape[1]} pages"
            )


def _real(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)
