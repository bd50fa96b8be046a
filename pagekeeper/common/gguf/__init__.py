"""What a GGUF file says about itself: tensors, shape of the model, tokenizer. Its weights are read by the runner."""
