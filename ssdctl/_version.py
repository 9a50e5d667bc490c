"""The version of ssdctl; a module of its own so that every package can import it."""

__version__ = "1.0.0rc1"
