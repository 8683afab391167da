"""Decoder-only transformers: parameters, forward pass, adapters, files."""
