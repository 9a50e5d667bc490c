"""The version of ssdctl; a module of its own so that every package can import it."""

__version__ = "0.1.0"
