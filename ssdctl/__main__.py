"""`python -m ssdctl`: how launchers start it, wherever the entry point's script lies."""

from ssdctl.cli.main import main
from ssdctl.launch.exits import recorded_exit

if __name__ == "__main__":
    with recorded_exit():
        main()
