"""A recording fake of the Gaudi bridge: it computes on the CPU and records its calls.

It has the names that ssdctl uses and nothing more. Tests put this folder on the path.
"""
