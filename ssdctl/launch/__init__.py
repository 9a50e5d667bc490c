"""From "N devices" to a running job, without a shell and without torch.

node.py says what this machine has, plan.py decides what to run (pure). torchrun.py and mpirun.py
write a command line, which run.py runs and processes.py cleans up after; slurm.py and kubernetes.py
(with podspec.py) write a script or a manifest, which batch.py submits and follows. exits.py finds
the job's exit code and who failed first, logs.py keeps what each rank said; pod_install.py runs in
a pod, before ssdctl is there.
"""
