"""Check whether this machine can run ssdctl; each problem comes with a remedy. Read-only.

run_checks.py runs all checks in parallel; software.py, devices.py, gaudi.py, machine.py, limits.py,
launchers.py, data.py, network.py and self_test.py return the results of one heading each. What may
hang or crash (torch, drivers, third-party programs) runs in a subprocess (subprocess_probe.py): the
`*_probe` modules are these programs, and print JSON. Torch is never imported into this process.

Device names are literals here because the results are about them: a device that cannot be opened
has no object of ssdctl.device.
"""
