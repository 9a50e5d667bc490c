"""Start a job on N devices, without a shell and without torch. One file per launcher.

A file, or the module of an entry point in the group `ssdctl.launchers`, has:

    Settings                    (optional) its table of the config, named like the launcher
    RUNS_ELSEWHERE              (optional) True if its ranks cannot read this machine's files
    inspect(request)            (optional) add what this machine says, such as a version
    plan(request, node)         return the LaunchPlan, without side effects (base.py)
    require()                   raise UsageError if this machine cannot run a plan
    SUBMIT                      batch engines: the command that submits a written file
    submit(plan)                batch engines: submit the job, return its id
    follow(job, plan, write)    batch engines: write the job's output, return its exit code
    cancel(job, plan)           batch engines: return the command that ends the job

`_run.py` runs the plan of a launcher that is not a batch engine. exit_codes.py derives the exit
code of a job, and the rank that failed first. Other files begin with an underscore.
"""

import ssdctl.config  # noqa: F401 - it imports the launchers for their tables: before the first one
