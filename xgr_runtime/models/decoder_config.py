"""What a decoder checkpoint's config.json says, checked: the one place that tells the variants of the family apart.

Qwen3, Qwen2 and Llama differ in the switches of `_Variant` only (qk-norm, biases of products ...). Everything the runtime does not compute exactly is refused by name. Generation defaults are
never read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xgr_runtime.errors import CheckpointError, shown


@dataclass(frozen=True)
class DecoderConfig:
    """The numbers of one decoder. max_positions: positions it was made for, from 0."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    eps: float
    rope_theta: float
    is_tied: bool
    has_qk_norm: bool
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool


@dataclass(frozen=True)
class _Variant:
    has_qk_norm: bool
    has_qkv_bias: (
        bool | None
    )  # None: config.json's attention_bias decides for qkv and for the output product
    reads_mlp_bias: bool
    has_window_switch: bool  # whether use_sliding_window decides, or sliding_window alone


_VARIANTS: Mapping[str, _Variant] = {
    "Qwen3ForCausalLM": _Variant(True, None, reads_mlp_bias=False, has_window_switch=True),
    "Qwen2ForCausalLM": _Variant(False, True, reads_mlp_bias=False, has_window_switch=True),
    "LlamaForCausalLM": _Variant(False, None, reads_mlp_bias=True, has_window_switch=False),
}
DECODER_ARCHITECTURES = tuple(_VARIANTS)


def parse_decoder_config(raw: Mapping[str, Any], architecture: str, source: str) -> DecoderConfig:
    """Check config.json's content `raw` (read from `source`). Raises CheckpointError."""
    fields = _Fields(raw, source)
    variant = _VARIANTS[architecture]
    _refuse_unsupported(fields, variant)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads must be a multiple of num_key_value_heads, "
            f"got {num_heads} and {num_kv_heads}"
        )
    has_attention_bias = fields.flag("attention_bias") if variant.has_qkv_bias is None else False
    return DecoderConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, hidden_size, num_heads),
        max_positions=fields.count("max_position_embeddings"),
        eps=fields.number("rms_norm_eps"),
        rope_theta=_rope_theta(fields),
        is_tied=fields.flag("tie_word_embeddings"),
        has_qk_norm=variant.has_qk_norm,
        has_qkv_bias=bool(variant.has_qkv_bias) or has_attention_bias,
        has_out_bias=has_attention_bias,
        has_mlp_bias=variant.reads_mlp_bias and fields.flag("mlp_bias"),
    )


class _Fields:
    """Typed access to a JSON object."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def get(self, name: str) -> Any:
        if self.raw.get(name) is None:
            raise CheckpointError(f"{self.source} lacks the key {name!r}")
        return self.raw[name]

    def count(self, name: str) -> int:
        value = self.get(name)
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"{self.source}: {name} must be a positive integer, got {shown(value)}"
            )
        return value

    def whole(self, name: str) -> int:
        """A count that may be 0, and is 0 where it is left out."""
        value = self.raw.get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise CheckpointError(
                f"{self.source}: {name} must be an integer of at least 0, got {shown(value)}"
            )
        return value or 0

    def number(self, name: str) -> float:
        value = self.get(name)
        if type(value) not in (int, float) or not 0.0 < value < float("inf"):
            raise CheckpointError(
                f"{self.source}: {name} must be a positive number, got {shown(value)}"
            )
        return float(value)

    def flag(self, name: str) -> bool:
        """A switch that the format leaves out when it is off."""
        value = self.raw.get(name, False)
        if type(value) is not bool:
            raise CheckpointError(
                f"{self.source}: {name} must be true or false, got {shown(value)}"
            )
        return value


def _refuse_unsupported(fields: _Fields, variant: _Variant) -> None:
    raw, source = fields.raw, fields.source
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            f"{source}: quantization_config is set, but quantised checkpoints are not supported; "
            "use the bf16, fp16 or fp32 one"
        )
    if fields.get("hidden_act") != "silu":
        raise CheckpointError(
            f"{source}: hidden_act must be 'silu', got {shown(raw['hidden_act'])}"
        )
    other = _sparse_layers(fields, variant)
    if other:
        raise CheckpointError(
            f"{source}: every layer must be 'full_attention', got {', '.join(sorted(other))} "
            "(sliding-window and other sparse attention is not supported)"
        )
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{source}: partial_rotary_factor must be 1, got {shown(raw['partial_rotary_factor'])}"
        )


def _sparse_layers(fields: _Fields, variant: _Variant) -> set[str]:
    """What config.json asks for besides full attention: layer by layer, or from one layer on where it is older."""
    num_layers, names = fields.count("num_hidden_layers"), fields.raw.get("layer_types")
    if names is not None:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                f"{fields.source}: layer_types must be a list of names, got {shown(names)}"
            )
        if len(names) != num_layers:
            raise CheckpointError(
                f"{fields.source}: layer_types must name each of the {num_layers} layers (num_hidden_layers), "
                f"got {len(names)} names"
            )
        return set(names) - {"full_attention"}
    if not variant.has_window_switch:
        return set() if fields.raw.get("sliding_window") is None else {"sliding_attention"}
    is_windowed = fields.flag("use_sliding_window") and fields.whole("sliding_window") > 0
    is_used = is_windowed and fields.whole("max_window_layers") < num_layers
    return {"sliding_attention"} if is_used else set()


def _head_dim(fields: _Fields, hidden_size: int, num_heads: int) -> int:
    if fields.raw.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.source}: hidden_size must be a multiple of num_attention_heads where head_dim is not given, "
            f"got {hidden_size} and {num_heads}"
        )
    head_dim = hidden_size // num_heads
    if fields.raw.get("head_dim") is not None:
        head_dim = fields.count("head_dim")
    if head_dim % 2:
        raise CheckpointError(f"{fields.source}: head_dim must be even, got {head_dim}")
    return head_dim


def _rope_theta(fields: _Fields) -> float:
    """The base of unscaled rotary embedding, from `rope_parameters` (newer) or `rope_theta` and `rope_scaling`."""
    found = {
        _Fields(parameters, f"{fields.source}, {name}").number("rope_theta")
        for name in ("rope_parameters", "rope_scaling")
        if "rope_theta" in (parameters := _unscaled_rope(fields, name))
    }
    if not found or fields.raw.get("rope_theta") is not None:
        found.add(fields.number("rope_theta"))
    if len(found) > 1:
        values = " and ".join(map(str, sorted(found)))
        raise CheckpointError(f"{fields.source}: rope_theta is given twice: {values}")
    return found.pop()


def _unscaled_rope(fields: _Fields, name: str) -> Mapping[str, Any]:
    """The object `name` (empty where absent) after checking that it asks for no scaling."""
    source, parameters = fields.source, fields.raw.get(name)
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"{source}: {name} must be an object, got {shown(parameters)}")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type != "default":
        raise CheckpointError(
            f"{source}: {name} asks for rope type {shown(rope_type)}; only 'default' (unscaled) is supported"
        )
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if parameters.keys() - known or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{source}: {name} must hold rope_type 'default' and rope_theta only, got {shown(parameters)}"
        )
    return parameters
