"""Tiny random models of many families, each with what makes its family hard to decode together."""

from __future__ import annotations

from typing import Any

import torch
import transformers

__all__ = ["CONTEXT", "FAMILIES", "family_model"]

VOCABULARY = 96
CONTEXT = 96
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_ALIBI = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # linear and full attention in turn
    "qwen3_next": ("Qwen3Next", _BASE | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_5": ("Qwen3_5Text:Qwen3_5", _BASE | _DELTA),
    "lfm2": ("Lfm2", _BASE | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_ff_dim": 48}),
    # sliding windows, shorter than the sequences
    "gemma2": ("Gemma2", _BASE | {"tie_word_embeddings": False, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3Text:Gemma3",
        _BASE
        | {"tie_word_embeddings": False, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": ("Mistral", _BASE | {"sliding_window": 8}),
    "gpt_oss": (
        "GptOss",
        _BASE | {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    ),
    # alibi
    "bloom": ("Bloom", {**_ALIBI, "n_layer": 2, "n_head": 4}),
    "falcon": (
        "Falcon",
        {**_ALIBI, "alibi": True, "new_decoder_architecture": False, "max_position_embeddings": CONTEXT},
    ),
    "mpt": ("Mpt", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": CONTEXT}),
    # learned positions
    "gpt2": (
        "GPT2:GPT2:LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    ),
    "opt": (
        "OPT",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"max_position_embeddings": CONTEXT, "word_embed_proj_dim": 32},
    ),
    # state-space models, alone and beside attention
    "mamba": ("Mamba", _MAMBA),
    "mamba2": (
        "Mamba2",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8}
        | {"head_dim": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "falcon_mamba": ("FalconMamba", _MAMBA),
    "jamba": (
        "Jamba",
        _BASE
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    "bamba": (
        "Bamba",
        _BASE
        | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
        | {"mamba_chunk_size": 8, "mamba_n_groups": 1},
    ),
    "zamba2": (
        "Zamba2",
        _BASE
        | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"], "mamba_d_state": 8}
        | {"mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1}
        | {"attention_head_dim": 16, "attention_hidden_size": 64, "num_key_value_heads": 4, "use_mem_rope": False}
        | {"adapter_rank": 4},
    ),
    "falcon_h1": (
        "FalconH1",
        _BASE
        | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
        | {"mamba_chunk_size": 8, "mamba_n_groups": 1},
    ),
    # a cache class of its own, and states that no cache class holds
    "minimax": (
        "MiniMax",
        _BASE | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2, "block_size": 8},
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        _BASE | {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    ),
    "xlstm": (
        "xLSTM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_heads": 2,
            "num_hidden_layers": 2,
            "num_blocks": 2,
            "chunk_size": 8,
        }
        | {"mode": "inference"},
    ),
    # the base of rotary positions changes where a sequence exceeds the first context
    "phi3": (
        "Phi3",
        _BASE
        | {"original_max_position_embeddings": 24}
        | {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
            }
        },
    ),
    # attention that is compressed
    "deepseek_v3": (
        "DeepseekV3",
        _BASE | _LATENT,
    ),
    # a limit of time steps that the cached pass leaves out
    "nemotron_h": (
        "NemotronH",
        _BASE
        | {"layers_block_type": ["mamba", "attention", "mamba", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 8}
        | {"ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "conv_kernel": 4, "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16}
        | {"n_group": 1, "topk_group": 1},
    ),
    # attention within chunks
    "llama4": (
        "Llama4Text:Llama4",
        _BASE
        | {"num_local_experts": 4, "attention_chunk_size": 16, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 1}
        | {"intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    # further ones of 2025 and 2026
    "granite_hybrid": (
        "GraniteMoeHybrid",
        _BASE
        | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}
        | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 16},
    ),
    "olmo_hybrid": ("OlmoHybrid", _BASE | _DELTA),
    "kimi_linear": (
        "KimiLinear",
        _BASE
        | _LATENT
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {
            "linear_attn_config": {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}
            | {"kda_layers": [1], "full_attn_layers": [2]}
        },
    ),
    "olmo3": ("Olmo3", _BASE | _SLIDING),
    "gemma3n": (  # layers that read the keys of others
        "Gemma3nText:Gemma3n",
        _BASE
        | {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"laurel_rank": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
        | {"num_kv_shared_layers": 2, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    ),
    "gemma4": (
        "Gemma4Text:Gemma4",
        _BASE
        | {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 16}
        | {"num_global_key_value_heads": 2, "num_kv_shared_layers": 2},
    ),
    "glm4_moe": ("Glm4Moe", _BASE | _LATENT),
    "ernie4_5_moe": ("Ernie4_5_Moe", _BASE | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "smollm3": ("SmolLM3", _BASE),
    "qwen3": ("Qwen3", _BASE),
}


def family_model(name: str, seed: int = 0) -> Any:
    """Return a tiny random model of a family, sharp enough that a wrong position, mask or state shows."""
    kind, settings = FAMILIES[name]
    config_name, _, rest = kind.partition(":")
    model_name, _, head = rest.partition(":")
    config = getattr(transformers, f"{config_name}Config")(**settings)
    model_class = getattr(transformers, f"{model_name or config_name}{head or 'ForCausalLM'}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
    return model
