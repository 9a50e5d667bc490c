import os

from habana_frameworks.torch import calls, environment

environment.update(os.environ)


def mark_step() -> None:
    calls.append("mark_step")
