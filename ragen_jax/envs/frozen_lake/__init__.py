"""FrozenLake: rules, levels, texts, pictures, planning and demonstrations."""
