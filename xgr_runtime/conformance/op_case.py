"""A call of an op as the parity comparison makes it, and how its inputs are drawn.

A case holds the arguments on the CPU, in the dtype under test; what an op writes in place is filled with NaN or
garbage before, and everything the contract says is ignored (stale pages, padding rows) holds NaN too. `view` picks
what the contract specifies out of the arguments and the result.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Args = dict[str, Any]


def results_only(args: Args, result: Any) -> dict[str, torch.Tensor]:
    """All returned tensors."""
    if isinstance(result, torch.Tensor):
        return {"result": result}
    return {f"result[{place}]": tensor for place, tensor in enumerate(result or ())}


@dataclass(frozen=True)
class OpCase:
    """A call of an op.

    args: on the CPU, floating ones in the dtype under test where the op takes it. dims: of the sizes that a provider may ask
    for (`hal.registry`), those this call has. is_exact: every bit has to agree, else the tolerance of the dtype applies.
    mutates: the arguments that the contract lets the op write to. view: what the contract specifies, by default all results.
    """

    label: str
    args: Args
    dims: Mapping[str, int] = field(default_factory=dict)
    is_exact: bool = False
    mutates: tuple[str, ...] = ()
    view: Callable[[Args, Any], dict[str, torch.Tensor]] = results_only


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def int32(values: Any) -> torch.Tensor:
    """Whole numbers as an int32 tensor."""
    return torch.from_numpy(np.asarray(values, np.int32))


def starts_of(lengths: list[int]) -> list[int]:
    """Where each range starts, and where the last one ends."""
    return [0, *itertools.accumulate(lengths)]


Generator = Callable[[torch.dtype], Iterator[OpCase]]
