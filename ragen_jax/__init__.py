"""ragen_jax: multi-turn reinforcement learning of language-model agents, in JAX."""

__version__ = "0.1.0"
