"""Names of tensors that are looked up outside of a layer."""

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ROPE_FACTORS = "rope_factors.weight"
"""By what each rotary frequency is divided. Only GGUF files hold it; elsewhere the configuration has the numbers."""
