"""Writes a model directory as a GGUF file, which llama.cpp, Ollama and LM Studio load.

Names of keys and tensors, and what llama.cpp expects in them: the specification of GGUF, and `gguf.constants`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from orchestrator import _native, gguf_tokenizer
from orchestrator.command_error import CommandError
from orchestrator.exported_model import F16_MAX, Model
from orchestrator.paths import shown
from orchestrator.safetensors_shards import StoredTensor
from orchestrator.temporary_folder import staging_of
from orchestrator.written_files import sync

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from numpy.typing import NDArray

Type = Literal["f32", "f16", "bf16", "q8_0"]
"""The types that matrices are written in. Vectors are always f32."""

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INNER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
"""GGUF's names of a block's tensors, by Hugging Face's names."""
WITHOUT_KEY: dict[str, Any] = {
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "no_repeat_ngram_size": 0,
    "num_beams": 1, "guidance_scale": None, "penalty_alpha": None, "sequence_bias": None, "bad_words_ids": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "stop_strings": None, "min_length": 0, "min_new_tokens": None, "max_new_tokens": None,
}  # fmt: skip
"""Keys of generation_config.json that change what is generated and that GGUF lacks, and values that change nothing."""
BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The architecture that llama.cpp runs a model as, by its `model_type`."""


WRITTEN_BY = "transformer_candle.version"
"""The key of a file that says which version wrote it. It is the second of all, after the architecture."""
BEGINNING = 512
"""Bytes in which the first two keys are."""


def is_own(path: Path) -> bool:
    """Whether a file is a GGUF file of ours, which an export may replace."""
    with path.open("rb") as file:
        beginning = file.read(BEGINNING)
    return beginning.startswith(b"GGUF") and WRITTEN_BY.encode() in beginning


def write(model: Model, target: Path, kind: Type) -> list[str]:
    """Write the model to the file `target`, complete or not at all.

    Args:
        model: A model in Hugging Face's format.
        target: The file to write; an existing one is replaced.
        kind: The type of the matrices.

    Returns:
        What the file cannot express, a sentence each.
    """
    import gguf

    config = model.checked_config
    architecture = ARCHITECTURES[config["model_type"]]
    if architecture != "llama" and _rope_divisors(config) is not None:
        raise CommandError(
            f"{shown(model.folder)} scales its rotary angles, which llama.cpp does not do for {architecture}"
        )
    staging = staging_of(target.absolute())
    writer = gguf.GGUFWriter(staging, architecture, use_temp_file=False)
    try:
        writer.add_string(WRITTEN_BY, _native.__version__)
        writer.add_name(model.name)
        _add_sizes(writer, config)
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        notes = [*_add_generation(writer, model.generation), *gguf_tokenizer.add(writer, model)]
        _write_tensors(writer, model, config, gguf.GGMLQuantizationType[kind.upper()])
        writer.close()
        sync(staging)
        staging.replace(target)
        sync(target.absolute().parent)
        return notes
    finally:
        writer.close()
        staging.unlink(missing_ok=True)


def _add_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    head_size = config["head_dim"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_generation(writer: GGUFWriter, generation: dict[str, Any]) -> list[str]:
    """Add the sampling settings that generation_config.json recommends, which llama.cpp takes as defaults.

    Returns:
        What of them the file cannot express, a sentence each.
    """
    adders = {
        "temperature": writer.add_sampling_temp, "top_k": writer.add_sampling_top_k, "top_p": writer.add_sampling_top_p,
        "min_p": writer.add_sampling_min_p, "repetition_penalty": writer.add_sampling_penalty_repeat,
    }  # fmt: skip
    if generation.get("do_sample"):
        for key, add in adders.items():
            if isinstance(generation.get(key), int | float):
                add(generation[key])
    lost_keys = [
        key for key, neutral in WITHOUT_KEY.items() if generation.get(key, neutral) not in (None, neutral, [], {})
    ]
    if not lost_keys:
        return []
    return [f"GGUF has no key for {', '.join(lost_keys)} of generation_config.json: llama.cpp generates without"]


def _rope_divisors(config: dict[str, Any]) -> NDArray[np.float32] | None:
    """Return the divisors of RoPE's frequencies, by which llama.cpp applies Llama 3's scaling; None without scaling."""
    import numpy as np

    rope, size = config["rope_parameters"], config["head_dim"]
    if rope["rope_type"] != "llama3":
        return None
    frequencies: NDArray[np.float64] = rope["rope_theta"] ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float32] = (1.0 / (share + (1.0 - share) / rope["factor"])).astype(np.float32)
    return divisors


def _write_tensors(writer: GGUFWriter, model: Model, config: dict[str, Any], kind: GGMLQuantizationType) -> None:
    """Write the tensors one after the other, so that one of them is in memory at a time."""
    import gguf
    import numpy as np

    tensors = [(_gguf_name(name), tensor) for name, tensor in _weights(model.tensors, config)]
    divisors = _rope_divisors(config)
    if divisors is not None:
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
    for name, source in tensors:
        own = _kind_of(source, kind)
        size = math.prod(gguf.quant_shape_to_byte_shape(source.shape, own))
        writer.add_tensor_info(name, source.shape, np.dtype(np.float32), size, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if divisors is not None:
        writer.write_tensor_data(divisors)
    for name, source in tensors:
        values = source.values()
        if writer.arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            is_query = name.endswith("attn_q.weight")
            values = _interleaved(values, config["num_attention_heads" if is_query else "num_key_value_heads"])
        own = _kind_of(source, kind)
        if own is gguf.GGMLQuantizationType.F16 and np.abs(values).max(initial=0) > F16_MAX:
            raise CommandError(f"{name} has numbers over {F16_MAX}, the largest of f16: take --type bf16 or f32")
        writer.write_tensor_data(gguf.quants.quantize(values, own))


def _weights(tensors: dict[str, StoredTensor], config: dict[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors without a tied head and RoPE's frequencies, of which old checkpoints may hold copies."""
    for name, tensor in tensors.items():
        if "rotary_emb" not in name and not (name == "lm_head.weight" and config["tie_word_embeddings"]):
            yield name, tensor


def _gguf_name(name: str) -> str:
    block = BLOCK.fullmatch(name)
    return OUTER[name] if block is None else f"blk.{block[1]}.{INNER[block[2]]}.{block[3]}"


def _kind_of(tensor: StoredTensor, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """Return the type that a tensor is written in: vectors stay f32, and rows must be whole blocks."""
    import gguf

    if len(tensor.shape) == 1:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if tensor.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _interleaved(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head: for a Llama, RoPE rotates neighbours in llama.cpp, halves in Hugging Face."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    interleaved: NDArray[np.float32] = halves.swapaxes(1, 2).reshape(rows, columns)
    return interleaved
