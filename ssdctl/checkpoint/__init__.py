"""Read, verify and write checkpoints, weights and exported graphs. What is read is untrusted."""
