"""Linear layers: the one file that knows how weights are stored and how they shard.

Formats today: bf16, fp16 and fp32, converted to the model's dtype when loaded. Products of the same input are fused
into one weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xgr_runtime.hal.bound import BoundOps
from xgr_runtime.models.layers.parallel import ParallelContext
from xgr_runtime.models.weights import WeightReader


@dataclass(frozen=True)
class Linear:
    """y = x weight^T + bias. weight_OI: [out, in]; bias_O: [out] or None."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None = None

    def __call__(self, ops: BoundOps, x_NI: torch.Tensor) -> torch.Tensor:
        if self.bias_O is not None:  # in one, so that product and bias are rounded once
            return torch.nn.functional.linear(x_NI, self.weight_OI, self.bias_O)
        out_NO: torch.Tensor = ops.linear(x_NI, self.weight_OI)
        return out_NO


@dataclass(frozen=True)
class StreamLinear:
    """A product that is summed over ranks and added to the residual stream; comes back normalised for what reads it next."""

    linear: Linear
    parallel: ParallelContext

    @property
    def weight_alone(self) -> torch.Tensor | None:
        """[out, in] where the product is nothing but that of the weight: no bias, one rank."""
        is_alone = self.linear.bias_O is None and self.parallel.size == 1
        return self.linear.weight_OI if is_alone else None

    def __call__(
        self,
        ops: BoundOps,
        x_NI: torch.Tensor,
        residual_NM: torch.Tensor,
        norm_weight_M: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """rms_norm of the new residual stream, [N, M]; residual_NM is MUTATED."""
        norm = (residual_NM, norm_weight_M, eps)
        weight_MI = self.weight_alone
        if weight_MI is not None:
            x_NM: torch.Tensor = ops.linear_add_rms_norm(x_NI, weight_MI, *norm)
        else:
            x_NM = ops.add_rms_norm(self.parallel.all_reduce(self.linear(ops, x_NI)), *norm)
        return x_NM


@dataclass(frozen=True)
class StreamRows:
    """Normalised rows of the residual stream for the product that reads them, once: only then are they computed.

    added: what the stream still lacks: inputs [N, I] and the product of them that is added. residual_NM is MUTATED when the
    rows are read. A reader that can make both products in one op takes `product` in place of `normed`. known_NM: the rows, where
    what began the stream has computed them.
    """

    residual_NM: torch.Tensor
    norm_weight_M: torch.Tensor
    eps: float
    added: tuple[torch.Tensor, StreamLinear] | None = None
    known_NM: torch.Tensor | None = None

    def normed(self, ops: BoundOps) -> torch.Tensor:
        """The rows, [N, M]."""
        norm = (self.residual_NM, self.norm_weight_M, self.eps)
        if self.known_NM is not None:
            return self.known_NM
        if self.added is None:
            x_NM: torch.Tensor = ops.rms_norm(*norm)
        else:
            x_NI, linear = self.added
            x_NM = linear(ops, x_NI, *norm)
        return x_NM

    @property
    def product(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float] | None:
        """What ops named `stream_...` begin with, or None where they cannot be used."""
        if self.added is None:
            return None
        x_NI, linear = self.added
        weight_MI = linear.weight_alone
        if weight_MI is None:
            return None
        return x_NI, weight_MI, self.residual_NM, self.norm_weight_M, self.eps


def load_split_by_output(
    reader: WeightReader,
    names_and_sizes: Sequence[tuple[str, int]],
    in_size: int,
    has_bias: bool,
    parallel: ParallelContext,
) -> Linear:
    """Fuse layers with one input; every rank holds a slice of each one's outputs, so no sum follows."""
    weights, biases = [], []
    for name, size in names_and_sizes:
        weights.append(parallel.shard(reader.take(f"{name}.weight", (size, in_size)), 0, name))
        if has_bias:
            biases.append(parallel.shard(reader.take(f"{name}.bias", (size,)), 0, name))
    return Linear(torch.cat(weights), torch.cat(biases) if has_bias else None)


def load_split_by_input(
    reader: WeightReader,
    name: str,
    out_size: int,
    in_size: int,
    has_bias: bool,
    parallel: ParallelContext,
) -> Linear:
    """Every rank holds a slice of the inputs; the caller sums over ranks. The bias is added by rank 0 alone."""
    weight = parallel.shard(reader.take(f"{name}.weight", (out_size, in_size)), 1, name)
    bias = reader.take(f"{name}.bias", (out_size,)) if has_bias else None
    return Linear(weight.contiguous(), bias if parallel.rank == 0 else None)
