"""One input generator per op. The parity comparison runs every implementation of every op on what these give."""

from collections.abc import Mapping

from xgr_runtime.conformance.attention_cases import (
    beam_attention,
    merge_attention_states,
    prefill_attention,
    shared_attention,
    unshared_attention,
)
from xgr_runtime.conformance.cache_cases import (
    copy_page_starts,
    reorder_unshared_kv,
    write_shared_kv,
    write_unshared_kv,
)
from xgr_runtime.conformance.layer_cases import (
    add_rms_norm,
    embedding_rms_norm_cos_sin,
    rms_norm,
    rotary_embedding,
    silu_mul,
)
from xgr_runtime.conformance.op_case import Generator, OpCase, results_only
from xgr_runtime.conformance.product_cases import (
    head_logits,
    head_logsumexp,
    linear,
    linear_add_rms_norm,
    linear_silu_mul,
)
from xgr_runtime.conformance.qkv_cases import (
    linear_rope_write_shared_kv,
    linear_rope_write_unshared_kv,
)
from xgr_runtime.conformance.rope_write_cases import (
    rope_write_shared_kv,
    rope_write_unshared_kv,
)
from xgr_runtime.conformance.selection_cases import (
    children_logsumexp,
    flag_failed_searches,
    flagged_level_logsumexp,
    level_logsumexp,
    select_beams,
)
from xgr_runtime.conformance.stream_cases import (
    stream_linear_rope_write_shared_kv,
    stream_linear_rope_write_unshared_kv,
    stream_linear_silu_mul,
)

__all__ = ["GENERATORS", "Generator", "OpCase", "results_only"]

GENERATORS: Mapping[str, Generator] = {
    generator.__name__: generator
    for generator in (
        select_beams,
        children_logsumexp,
        level_logsumexp,
        flag_failed_searches,
        flagged_level_logsumexp,
        prefill_attention,
        shared_attention,
        unshared_attention,
        merge_attention_states,
        beam_attention,
        write_shared_kv,
        copy_page_starts,
        write_unshared_kv,
        reorder_unshared_kv,
        rope_write_shared_kv,
        rope_write_unshared_kv,
        linear_rope_write_shared_kv,
        linear_rope_write_unshared_kv,
        embedding_rms_norm_cos_sin,
        rms_norm,
        add_rms_norm,
        rotary_embedding,
        silu_mul,
        linear,
        linear_add_rms_norm,
        linear_silu_mul,
        stream_linear_silu_mul,
        stream_linear_rope_write_shared_kv,
        stream_linear_rope_write_unshared_kv,
        head_logits,
        head_logsumexp,
    )
}
