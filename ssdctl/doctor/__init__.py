"""Check what this machine has and lacks for ssdctl, each with a remedy. Nothing is changed.

run_checks.py runs all checks in parallel; software.py, devices.py, gaudi.py, machine.py, limits.py,
launchers.py, data.py, network.py and self_test.py return the results of one heading each. What may
hang or crash (torch, drivers, programs of others) runs in a process of its own
(subprocess_probe.py): the `*_probe` modules are these programs, and print JSON. Torch is never
imported into the doctor's own process.

Device names are spelled here because the results are about them: a device that cannot be opened has
no object of ssdctl.device.
"""
