"""What this machine has and lacks for ssdctl, each with its remedy. Nothing is changed.

examine.py asks everybody, side by side; software.py, devices.py, machine.py, limits.py,
launchers.py, data.py, network.py and self_test.py answer for a heading each. What may hang or crash
(torch, drivers, other people's programs) runs in processes of its own (asking.py): the `*_probe`
modules are their programs, and print JSON. Torch never enters the doctor's own process.

Device names stand here because the answer is about them: a device that cannot be opened has no
object of ssdctl.device to ask.
"""
