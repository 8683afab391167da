"""Model files: Hugging Face folders, GGUF files, the hub, adapters."""
