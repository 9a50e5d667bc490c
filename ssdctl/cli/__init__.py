"""The command line: thin files of commands; console.py is the one sink."""
