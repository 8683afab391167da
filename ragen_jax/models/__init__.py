"""Decoder-only transformers: parameters, forward pass, cache, files."""
