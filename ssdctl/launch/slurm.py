"""Build the batch script of Slurm's sbatch: one task per device, started by srun.

Before the time limit Slurm sends the tasks SIGUSR1; they save and exit 75, the script queues the
job again, and the next run resumes. Options are in `#SBATCH` lines, which no shell parses: so the
form of each is checked. Arguments of the user are quoted in the script's body.
"""

from __future__ import annotations

import re
import shlex

from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.config.sections.launch import SlurmConfig
from ssdctl.errors import UsageError
from ssdctl.launch.exit_codes import EXITS_VARIABLE
from ssdctl.launch.node import Node
from ssdctl.launch.request import LaunchRequest

ARGV = ("sbatch", "--parsable")  # reads the script from its input
WORD = r"[A-Za-z0-9_[][A-Za-z0-9_.,:@+&|()*=/\[\]-]*"
FORMS = {
    "job_name": r"[A-Za-z0-9_][A-Za-z0-9_.-]*",
    "time": r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}",
    "memory": r"\d+[KMGT]?",
    "options": r"--[a-z][a-z-]*(=" + WORD + ")?",
    "srun_options": r"--[a-z][a-z-]*(=[^\x00-\x1f\x7f]+)?",  # quoted, unlike sbatch's
}
# Options of the user that control hardware threads; Slurm refuses --hint together with them.
THREAD_OPTIONS = ("--hint", "--threads-per-core", "--ntasks-per-core", "--cpu-bind")
START_S = 60  # imports and first reads; a signal before that saves nothing
FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
HEAD = 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'
BODY = """\
exits=$PWD/.ssdctl-$SLURM_JOB_ID  # where each task leaves its exit code
export {variable}=$exits
while :; do
  rm -rf -- "$exits" && mkdir -p -- "$exits"
  MASTER_PORT=$({python} -c "{free_port}")
  export MASTER_PORT
  srun {options}--export=ALL --wait=0 --cpus-per-task={cores} --kill-on-bad-exit=1 "${{command[@]}}"
  {python} -m ssdctl.launch.exit_codes "$exits" $? {count}
  code=$?
  rm -rf -- "$exits"
  case $code in 1 | 8) ;; *) break ;; esac
  [ $restarts -gt 0 ] || break
  restarts=$((restarts - 1))
  echo "starting again after exit code $code" >&2
{resume}done
"""
REQUEUE = """\
if [ $code -eq 75 ]; then  # saved before the time limit: queue the job again
  scontrol requeue "$SLURM_JOB_ID"
fi
"""


def build(request: LaunchRequest, node: Node) -> str:
    """Return the script.

    Raises:
        UsageError: A setting has a form that Slurm would misread.
    """
    if request.device == "xla":
        raise UsageError(
            "--launcher slurm does not support TPUs", hint="omit --launcher: torchrun starts them"
        )
    ranks, config = request.ranks_per_node, request.config
    _check_time(request.slurm)
    cores = max(1, (config.cores_per_node or node.cores) // (config.devices_per_node or ranks))
    environment = dict(request.settings)
    if "OMP_NUM_THREADS" not in request.environment:
        environment["OMP_NUM_THREADS"] = str(cores)
    command = (request.python, "-m", "ssdctl", *request.command)
    is_train = request.command[0] == "train"
    resume = "command+=(--resume=auto)"
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in _options(request, ranks, cores)),
        "# Written by ssdctl launch.",
        "set -u",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        "export MASTER_ADDR",
        "MASTER_ADDR=127.0.0.1" if config.nodes == 1 else f"MASTER_ADDR=$({HEAD})",
        f"command=({shlex.join(command)})",
    ]
    if is_train:
        lines.append(f'[ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ] || {resume}')
    lines.append(f"restarts={config.restarts}")
    options = [_checked("srun_options", option) for option in request.slurm.srun_options]
    body = BODY.format(
        variable=EXITS_VARIABLE,
        python=shlex.quote(request.python),
        free_port=FREE_PORT,
        options="".join(f"{shlex.quote(str(option))} " for option in options),
        cores=cores,
        count=request.count,
        resume=f"  {resume}\n" if is_train else "",
    )
    requeue = REQUEUE if request.slurm.requeue else ""
    return "\n".join(lines) + "\n" + body + requeue + "exit $code\n"


def warnings(request: LaunchRequest) -> tuple[str, ...]:
    """Return warnings about assumptions on the nodes."""
    if request.config.cores_per_node is not None:
        return ()
    text = "--cpus-per-task is based on this machine's cores, and the nodes may have another number"
    return (f"{text}: give --cores-per-node N",)


def _options(request: LaunchRequest, ranks: int, cores: int) -> list[str]:
    slurm = request.slurm
    default = DEVICE_TYPES[request.device].slurm_gres or "none"
    gres = default if slurm.gres is None else slurm.gres
    values = {
        "job-name": _checked("job_name", slurm.job_name),
        "nodes": str(request.config.nodes),
        "ntasks": str(request.count),
        "ntasks-per-node": str(ranks),
        "cpus-per-task": str(cores),
        # Without it --cpus-per-task counts hardware threads on nodes with SMT: half the cores.
        "hint": None if _controls_threads(slurm) else "nomultithread",
        "gres": None if gres == "none" else f"{_checked('gres', gres)}:{ranks}",
        "mem": _checked("memory", slurm.memory),
        "partition": _checked("partition", slurm.partition),
        "account": _checked("account", slurm.account),
        "qos": _checked("qos", slurm.qos),
        "constraint": _checked("constraint", slurm.constraint),
        "time": _checked("time", slurm.time),
        "signal": f"USR1@{slurm.signal_before}",
        "open-mode": "append",
    }
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    options.append("--requeue" if slurm.requeue else "--no-requeue")
    return [*options, *(str(_checked("options", option)) for option in slurm.options)]


def _controls_threads(slurm: SlurmConfig) -> bool:
    """Return whether the user's options control hardware threads."""
    options = [option.partition("=")[0] for option in (*slurm.options, *slurm.srun_options)]
    return any(option in THREAD_OPTIONS for option in options)


def _check_time(slurm: SlurmConfig) -> None:
    """Refuse a time limit that ends a job before it trains: it would be queued again and again."""
    if slurm.time is None or not slurm.requeue:
        return
    seconds, minimum = _seconds(str(_checked("time", slurm.time))), slurm.signal_before + START_S
    if seconds <= minimum:
        raise UsageError(
            f"slurm.time: {slurm.time} is {seconds} s, and slurm.signal_before stops the ranks "
            f"{slurm.signal_before} s before its end: nothing would be trained",
            hint=f"give at least {minimum // 60 + 1} minutes, or a smaller slurm.signal_before",
        )


def _seconds(time: str) -> int:
    """Return the seconds of Slurm's M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def _checked(name: str, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(FORMS.get(name, WORD), value, re.ASCII):
        raise UsageError(f"slurm.{name}: {value!r} is not a value that Slurm accepts there")
    return value
