"""The settings: one class per table of the config file."""
