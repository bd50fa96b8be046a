"""The decoder, its layers and its weights."""
