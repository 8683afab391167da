"""Tokens, chat templates, phrases and replies."""
