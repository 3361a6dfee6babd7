"""The small models that this program and the real Megatron-LM exchange: numbers only.

Nothing is imported from either program, so that both sides of `tests.parity.interop` can read it.
"""

NUM_LAYERS = 4
HIDDEN = 32
HEADS = 4
FFN = 64
VOCABULARY = 96
SEQUENCE = 16
BATCH = 2

FAMILIES = {
    "gpt2": {"is_llama": False, "is_tied": True},
    "llama": {"is_llama": True, "is_tied": False},
}
"""gpt2: LayerNorm, GELU, biases, learned positions, tied head. llama: RMSNorm, SwiGLU, RoPE, two
key/value groups, no biases, a head of its own."""


def config_values(family: str) -> dict:
    """Return the fields of TransformerConfig that both programs have; activation by name."""
    values = {
        "num_layers": NUM_LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.1,  # large enough that every layer shows in the logits
    }
    if FAMILIES[family]["is_llama"]:
        values |= {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "num_query_groups": 2,
        }
    return values


def token_rows() -> list[list[int]]:
    """Return the tokens [b, s] that both models see."""
    return [
        [(7 * i * i + 3 * i + 11 * b) % VOCABULARY for i in range(SEQUENCE)] for b in range(BATCH)
    ]
