"""A recording fake of the Gaudi bridge: it computes on the CPU and records its calls.

It has the names that ssdctl uses and nothing more. Tests put this folder on the path. As with the
vendor's package, an entry point lets `import torch` load it.
"""

import importlib
import os


def __autoload() -> None:
    if os.environ.get("PT_HPU_AUTOLOAD", "1") != "0":
        importlib.import_module("habana_frameworks.torch.core")
