"""The decoder family of Qwen3, Qwen2 and Llama: pre-norm, rotary attention, gated feed-forward.

`context` needs the last layer only for its keys and values and for each history's last token, so that layer's
attention, feed-forward and the final norm run on H rows instead of T. Of few tokens they run on all: a product of so many rows
takes as long as of one, the time that its weight is read in, while picking rows of the queries and of the stream is two kernels
more, and the one behind each of them cannot start early.

H histories, N packed beam rows, T packed tokens, M hidden size.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from xgr_runtime.errors import CheckpointError
from xgr_runtime.hal.bound import BoundOps
from xgr_runtime.kvcache.layout import KVGroup, KVSpec
from xgr_runtime.models.base import ContextInputs, KVCaches, StepInputs
from xgr_runtime.models.decoder_config import DecoderConfig
from xgr_runtime.models.head import Head
from xgr_runtime.models.layers.attention import CosSin, SelfAttention
from xgr_runtime.models.layers.linear import (
    StreamLinear,
    StreamRows,
    load_split_by_input,
    load_split_by_output,
)
from xgr_runtime.models.layers.mlp import GatedMlp, load_mlp
from xgr_runtime.models.layers.parallel import ParallelContext
from xgr_runtime.models.layers.rotary import rotary_frequency
from xgr_runtime.models.weights import WeightReader

# Up to so many tokens, the largest size that `xschedule.ladder` has for them, a layer takes as long as its weights take to read,
# however many rows it has (figures: ops/cuda/linear.py), so the last one runs on all of them: two kernels fewer.
FEW_TOKENS = 64


@dataclass(frozen=True)
class DecoderLayer:
    """One block. The norms are those before the attention and before the feed-forward layer."""

    attention_norm_M: torch.Tensor
    attention: SelfAttention
    mlp_norm_M: torch.Tensor
    mlp: GatedMlp


class Decoder:
    """A RecModel. Built by `load_decoder`."""

    first_scores_from: Literal["context", "step"] = "context"

    def __init__(
        self,
        config: DecoderConfig,
        embedding_VM: torch.Tensor,
        layers: tuple[DecoderLayer, ...],
        final_norm_M: torch.Tensor,
        head: Head,
        parallel: ParallelContext,
    ) -> None:
        self.config = config
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.head = head
        self.kv_spec = _kv_spec(config, embedding_VM.dtype, parallel)
        self.op_sizes = {
            "M": config.hidden_size,
            "F": parallel.part_of(config.intermediate_size, "intermediate_size"),
            "Q": parallel.part_of(config.num_heads, "num_attention_heads"),
            "G": self.kv_spec.shared.num_kv_heads,
            "D": config.head_dim,
            "V": config.vocab_size,
        }
        self._embedding_VM = embedding_VM
        self._layers = layers
        self._final_norm_M = final_norm_M
        self._frequency_D = rotary_frequency(
            config.head_dim, config.rope_theta, embedding_VM.device
        )

    def context(self, ops: BoundOps, inputs: ContextInputs, kv: KVCaches) -> torch.Tensor:
        """Write the histories' keys and values; [H, M] after the final norm at last_row_H."""
        eps = self.config.eps
        packed = inputs.packed
        rows, cos_sin = self._begin(ops, packed.token_ids_T, None, inputs.positions_T)
        residual, is_short = rows.residual_NM, packed.token_ids_T.shape[0] <= FEW_TOKENS
        if packed.embeds_EM is not None and packed.embed_positions_E is not None:
            residual.index_copy_(0, packed.embed_positions_E, packed.embeds_EM)
            rows = StreamRows(residual, self._layers[0].attention_norm_M, eps)
        for layer, next_norm_M in zip(self._layers, self._next_norms(), strict=True):
            is_last = layer is self._layers[-1] and not is_short
            x = layer.attention.context(ops, rows, cos_sin, inputs, kv, last_only=is_last)
            if is_last:
                residual = residual.index_select(0, inputs.last_row_H)
            rows = StreamRows(residual, layer.mlp_norm_M, eps, (x, layer.attention.out))
            x = layer.mlp.gated(ops, rows)
            rows = StreamRows(residual, next_norm_M, eps, (x, layer.mlp.down))
        hidden = rows.normed(ops)
        if is_short:
            return torch.index_select(hidden, 0, inputs.last_row_H, out=inputs.out_HM)
        return hidden

    def step(self, ops: BoundOps, inputs: StepInputs, kv: KVCaches) -> torch.Tensor:
        """Write one own token per beam row; [N, M] after the final norm."""
        eps = self.config.eps
        rows, cos_sin = self._begin(ops, inputs.ids_N, inputs.token_of_C, inputs.positions_N)
        residual = rows.residual_NM
        for layer, next_norm_M in zip(self._layers, self._next_norms(), strict=True):
            x = layer.attention.step(ops, rows, cos_sin, inputs, kv)
            rows = StreamRows(residual, layer.mlp_norm_M, eps, (x, layer.attention.out))
            x = layer.mlp.gated(ops, rows)
            rows = StreamRows(residual, next_norm_M, eps, (x, layer.mlp.down))
        return rows.normed(ops)

    def _begin(
        self,
        ops: BoundOps,
        id_T: torch.Tensor,
        token_of_C: torch.Tensor | None,
        position_T: torch.Tensor,
    ) -> tuple[StreamRows, CosSin]:
        """The stream of the tokens' embeddings, normalised for the first layer, and what heads are turned by."""
        norm_M, eps = self._layers[0].attention_norm_M, self.config.eps
        residual, rows_TM, cos_TD, sin_TD = ops.embedding_rms_norm_cos_sin(
            self._embedding_VM, id_T, token_of_C, norm_M, eps, position_T, self._frequency_D
        )
        return StreamRows(residual, norm_M, eps, known_NM=rows_TM), (cos_TD, sin_TD)

    def _next_norms(self) -> tuple[torch.Tensor, ...]:
        """Per layer, the norm that follows it: the next layer's first, or the final one."""
        return (*(layer.attention_norm_M for layer in self._layers[1:]), self._final_norm_M)


def load_decoder(config: DecoderConfig, reader: WeightReader, parallel: ParallelContext) -> Decoder:
    """Build a decoder from a checkpoint. Raises CheckpointError for missing, misshapen or unused tensors."""
    vocab_shape = (config.vocab_size, config.hidden_size)
    embedding_VM = reader.take("model.embed_tokens.weight", vocab_shape)
    layers = tuple(_load_layer(config, reader, i, parallel) for i in range(config.num_layers))
    final_norm_M = reader.take("model.norm.weight", (config.hidden_size,))
    head_VM = embedding_VM
    if "lm_head.weight" in reader or not config.is_tied:
        head_VM = reader.take("lm_head.weight", vocab_shape)
    if config.is_tied and not torch.equal(head_VM, embedding_VM):
        raise CheckpointError(
            f"{reader.folder}: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight; "
            "set tie_word_embeddings to false in config.json, or remove lm_head.weight"
        )
    reader.discard(".rotary_emb.inv_freq")  # derived from rope_theta; older exports store it
    reader.finish()
    head = Head(embedding_VM if config.is_tied else head_VM)
    return Decoder(config, embedding_VM, layers, final_norm_M, head, parallel)


def _load_layer(
    config: DecoderConfig, reader: WeightReader, index: int, parallel: ParallelContext
) -> DecoderLayer:
    prefix, hidden_size = f"model.layers.{index}", config.hidden_size
    return DecoderLayer(
        attention_norm_M=reader.take(f"{prefix}.input_layernorm.weight", (hidden_size,)),
        attention=_load_attention(config, reader, index, parallel),
        mlp_norm_M=reader.take(f"{prefix}.post_attention_layernorm.weight", (hidden_size,)),
        mlp=load_mlp(
            reader,
            f"{prefix}.mlp",
            hidden_size,
            config.intermediate_size,
            config.has_mlp_bias,
            parallel,
        ),
    )


def _load_attention(
    config: DecoderConfig, reader: WeightReader, index: int, parallel: ParallelContext
) -> SelfAttention:
    prefix = f"model.layers.{index}.self_attn"
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    names = [
        (f"{prefix}.q_proj", q_size),
        (f"{prefix}.k_proj", kv_size),
        (f"{prefix}.v_proj", kv_size),
    ]
    norm_shape = (config.head_dim,)
    return SelfAttention(
        qkv=load_split_by_output(reader, names, config.hidden_size, config.has_qkv_bias, parallel),
        out=StreamLinear(
            load_split_by_input(
                reader,
                f"{prefix}.o_proj",
                config.hidden_size,
                q_size,
                config.has_out_bias,
                parallel,
            ),
            parallel,
        ),
        q_norm_D=reader.take(f"{prefix}.q_norm.weight", norm_shape) if config.has_qk_norm else None,
        k_norm_D=reader.take(f"{prefix}.k_norm.weight", norm_shape) if config.has_qk_norm else None,
        num_heads=parallel.part_of(config.num_heads, "num_attention_heads"),
        num_kv_heads=parallel.part_of(config.num_kv_heads, "num_key_value_heads"),
        head_dim=config.head_dim,
        eps=config.eps,
        layer=index,
    )


def _kv_spec(config: DecoderConfig, dtype: torch.dtype, parallel: ParallelContext) -> KVSpec:
    num_kv_heads = parallel.part_of(config.num_kv_heads, "num_key_value_heads")
    shape = (config.num_layers, num_kv_heads, config.head_dim, dtype)
    return KVSpec(KVGroup("history", "paged", *shape), KVGroup("beams", "rows", *shape))
