"""Check whether this machine can run ssdctl; each problem comes with a remedy. Read-only.

run_checks.py runs all checks in parallel and formats their results; machine.py, devices.py and
data.py have the checks of one heading or a few. What may hang or crash (torch, drivers, third-party
programs) runs in a subprocess (check.py), torch in probes.py. Torch is never imported into this
process.

Device names are literals here because the results are about them: a device that cannot be opened
has no object of ssdctl.device.
"""
