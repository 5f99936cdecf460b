"""Predicted against the bytes of torch's own CUDA allocator, on the CUDA build of torch without a card: README.md."""
