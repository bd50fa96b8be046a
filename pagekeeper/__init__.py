"""Pagekeeper: an LLM server over gRPC whose KV cache outlives the engine."""

__version__ = "0.1.0"
