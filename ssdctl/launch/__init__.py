"""Start a job on N devices, without a shell and without torch.

node.py describes this machine, request.py defines the request and the plan, plan.py builds the plan
without side effects, preflight.py checks the settings before the start. torchrun.py and mpirun.py
build a command line; run.py runs it, process_tree.py ends its remaining processes. slurm.py and
kubernetes.py (with pod_spec.py) build a script or a manifest, which submit.py submits and follows.
exit_codes.py derives the job's exit code and the rank that failed first, logs.py keeps the output
of each rank; pod_install.py runs in a pod before ssdctl is installed.
"""
