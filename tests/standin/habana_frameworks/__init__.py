"""A recording stand-in for the Gaudi bridge: it computes on the CPU and notes what it was asked.

It has the names that ssdctl uses and nothing more. Tests put this folder on the path.
"""
