"""Read, verify and write checkpoints."""
