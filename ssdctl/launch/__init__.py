"""Start a job on N devices, without a shell and without torch.

    engine = load_engine("mpirun").configure(config, request)
    job = make_job(engine, request, read_node())
    job.argv, job.environment

base.py has the request, the job and the abstract launchers, engines/ a file for each launcher.
processes.py runs a job on this machine, and derives its exit code and the rank that failed first.
"""
