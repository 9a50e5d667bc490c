"""The command line: one thin file a command; console.py is the one sink."""
