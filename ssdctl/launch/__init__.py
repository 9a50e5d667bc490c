"""Turn "N devices" into a running job, without a shell and without torch.

node.py describes this machine, request.py holds the request and the plan, plan.py decides what to
run (pure), preflight.py refuses what the ranks would refuse. torchrun.py and mpirun.py write a
command line; run.py runs it, process_tree.py ends what is left of it. slurm.py and kubernetes.py
(with pod_spec.py) write a script or a manifest, which batch.py submits and follows. exit_codes.py
derives the job's exit code and who failed first, logs.py keeps the output of each rank;
pod_install.py runs in a pod, before ssdctl is there.
"""
