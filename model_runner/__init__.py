"""The process that owns the weights and runs the model."""
