"""The settings, table by table of the config file."""
