"""The process that owns the KV cache."""
