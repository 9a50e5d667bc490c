"""Process-level services: signals, background threads, logging, memory."""
