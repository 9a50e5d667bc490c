"""From "N devices" to a running job, without a shell and without torch.

node.py says what this machine has, plan.py decides what to run (pure), torchrun.py and mpirun.py
write the command line, run.py owns the processes, exits.py finds the job's exit code.
"""
