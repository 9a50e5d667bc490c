"""Slurm: a batch script for sbatch, whose srun starts one task per device.

Before the time limit Slurm sends the tasks SIGUSR1; they save and exit 75, the script queues the
job again, and the next run resumes. Options and arguments of the user are quoted: sbatch reads the
quotes of `#SBATCH` lines, and bash those of the script's body.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import re
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ssdctl.config.fields import device_type
from ssdctl.config.sections import SlurmConfig
from ssdctl.distributed.rank_process import EXITS_VARIABLE, PASSED_ON
from ssdctl.errors import ExitCode, UsageError
from ssdctl.launch.base import (
    FREE_PORT,
    POLL_S,
    UNSET_OUTER_JOB,
    WRITTEN,
    BatchEngine,
    Job,
    LaunchRequest,
    Node,
    Write,
    check_text,
    query,
    require_program,
    submit_text,
)

if TYPE_CHECKING:
    from ssdctl.config import Config

log = logging.getLogger(__name__)

ARGV = ("sbatch", "--parsable")  # reads the script from its input
OPTION = re.compile(r"-[^\s=]+(=.*)?", re.DOTALL)
CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # a line end would begin another option
# Options of the user that control hardware threads; Slurm refuses --hint together with them.
THREAD_OPTIONS = {"--hint", "--threads-per-core", "--ntasks-per-core", "--cpu-bind"}
ENDED = re.compile(
    r"BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|LAUNCH_FAILED|NODE_FAIL|OUT_OF_MEMORY|"
    r"PREEMPTED|REVOKED|TIMEOUT"
)
ASSUMED_CORES = (
    "--cpus-per-task is based on this machine's cores, and the nodes may have another number: "
    "give --cores-per-node N"
)
START_S = 60  # for imports and first reads; an earlier signal saves nothing
HEAD = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
RESUME = "command+=(--resume=auto)"
SCRIPT = """\
#!/usr/bin/env bash
{written}
{directives}
set -u
{unset}
{exports}export MASTER_ADDR
MASTER_ADDR={head}
command=({command})
{resume_after_requeue}restarts={restarts}
exits=$PWD/.ssdctl-$SLURM_JOB_ID  # where each task leaves its exit code
export {variable}=$exits
trap 'rm -rf -- "$exits"' EXIT
while :; do
  rm -rf -- "$exits" && mkdir -p -- "$exits"
  MASTER_PORT=$({python} -c "{free_port}")
  export MASTER_PORT
  srun {options}--export=ALL --wait=0 --cpus-per-task={cores} --kill-on-bad-exit=1 "${{command[@]}}"
  {python} -m ssdctl.launch.processes "$exits" $? {count}
  code=$?
  case $code in 1 | 8) ;; *) break ;; esac
  [ $restarts -gt 0 ] || break
  restarts=$((restarts - 1))
  echo "starting again after exit code $code" >&2
{resume}done
{requeue}exit $code
"""
REQUEUE = """\
if [ $code -eq 75 ]; then  # saved before the time limit: queue the job again
  scontrol requeue "$SLURM_JOB_ID"
fi
"""


@dataclass(frozen=True)
class Slurm(BatchEngine):
    name = "slurm"
    submit_command = "sbatch"
    settings: SlurmConfig = field(default_factory=SlurmConfig)

    @classmethod
    def configure(cls, config: Config, request: LaunchRequest) -> Slurm:
        others = ["launch.rdzv_endpoint", "launch.bind_to"]
        config.require_not_given(others, "does not apply to --launcher slurm", "leave it out")
        all_travel = "leave it out: jobs take all variables along"
        config.require_not_given(["launch.export_env"], "is for mpirun", all_travel)
        return cls(config.slurm)

    def require(self) -> None:
        require_program(
            "sbatch",
            "run this on a login node of the cluster; --write FILE writes the script for there",
        )

    def build_job(self, request: LaunchRequest, node: Node) -> Job:
        if request.device in ("tpu", "xla"):
            raise UsageError(
                "--launcher slurm does not support TPUs",
                hint="omit --launcher: torchrun starts them",
            )
        ranks, config, slurm = request.ranks_per_node, request.config, self.settings
        _check_time(slurm)
        cores = max(1, (config.cores_per_node or node.cores) // (config.devices_per_node or ranks))
        # The script's own Python must not import random.py of the job's folder.
        environment = {**request.variables, "PYTHONSAFEPATH": "1"}
        if "OMP_NUM_THREADS" not in request.environment:
            environment["OMP_NUM_THREADS"] = str(cores)
        requeued = f'[ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ] || {RESUME}\n'
        directives = self._directives(request, ranks, cores)
        # Variables such as SBATCH_PARTITION override directives, but not options.
        argv = (*ARGV, *directives)
        for option in (*slurm.options, *slurm.srun_options):
            if not OPTION.fullmatch(option):
                hint = "write --option, --option=value or -xVALUE"
                raise UsageError(f"slurm: {option!r} is not an option", hint=hint)
        for option in (*directives, *slurm.srun_options):
            check_text(option)
            if CONTROL.search(option):
                raise UsageError(
                    f"slurm: {option!r} contains a control character", hint="delete it"
                )
        # Unlike a shell, sbatch reads a backslash in quotes as an escape.
        quoted = [shlex.quote(option.replace("\\", r"\\")) for option in directives]
        text = SCRIPT.format(
            directives="\n".join(f"#SBATCH {option}" for option in quoted),
            written=WRITTEN,
            unset=UNSET_OUTER_JOB,
            exports="".join(f"export {k}={shlex.quote(v)}\n" for k, v in environment.items()),
            head="127.0.0.1" if config.nodes == 1 else HEAD,
            command=shlex.join((request.python, "-m", "ssdctl", *request.command)),
            resume_after_requeue=requeued if request.resumes_automatically else "",
            restarts=config.restarts,
            variable=EXITS_VARIABLE,
            python=shlex.quote(request.python),
            free_port=FREE_PORT,
            options="".join(f"{shlex.quote(option)} " for option in slurm.srun_options),
            cores=cores,
            count=request.count,
            resume=f"  {RESUME}\n" if request.resumes_automatically else "",
            requeue=REQUEUE if slurm.requeue and request.resume is not None else "",  # a training
        )
        warnings = (ASSUMED_CORES,) if config.cores_per_node is None else ()
        return Job(argv, {}, self.name, request.count, config.nodes, text=text, warnings=warnings)

    def _directives(self, request: LaunchRequest, ranks: int, cores: int) -> list[str]:
        slurm = self.settings
        default = device_type(request.device).slurm_gres or "none"
        gres = default if slurm.gres is None else slurm.gres
        own = {option.partition("=")[0] for option in (*slurm.options, *slurm.srun_options)}
        options = [
            f"--job-name={slurm.job_name}",
            f"--nodes={request.config.nodes}",
            f"--ntasks={request.count}",
            f"--ntasks-per-node={ranks}",
            f"--cpus-per-task={cores}",
        ]
        if not own & THREAD_OPTIONS:
            # Without it --cpus-per-task counts hardware threads on nodes with SMT: half the cores.
            options.append("--hint=nomultithread")
        if gres != "none":
            options.append(f"--gres={gres}:{ranks}")
        for name in ("memory", "partition", "account", "qos", "constraint", "time"):
            if (value := getattr(slurm, name)) is not None:
                options.append(f"--{'mem' if name == 'memory' else name}={value}")
        options += [f"--signal=USR1@{slurm.signal_before}", "--open-mode=append"]
        options.append("--requeue" if slurm.requeue else "--no-requeue")
        return [*options, *slurm.options]

    def submit(self, job: Job) -> str:
        return submit_text(job, "squeue --me")  # ID, or ID;CLUSTER of several clusters

    def cancel(self, job_id: str, job: Job) -> str:
        return shlex.join(["scancel", *_named(job_id)])

    def follow(self, job_id: str, job: Job, write: Write) -> int:
        if any(option.startswith(("--array", "-a")) for option in self.settings.options):
            text = "%s is an array of jobs: only its first one to end is followed"
            log.warning(text, job_id)
        tails = dict[str, _Tail]()
        while True:
            line = query("scontrol", "show", "job", "--oneliner", *_named(job_id)).strip()
            # NAME=VALUE fields, separated by blanks; values may contain blanks.
            pairs = re.findall(r"(?:^| )([\w:/]+)=(.*?)(?= [\w:/]+=|$)", line)
            fields = {"StdOut": "", "JobState": "", "ExitCode": "", **dict(pairs)}
            state = fields["JobState"]
            for path in {fields["StdOut"]: None, fields.get("StdErr", fields["StdOut"]): None}:
                tail = tails.setdefault(path, _Tail(Path(path)))
                if text := tail.read(is_last=ENDED.match(state) is not None):
                    write(text)
            if ENDED.match(state):
                break
            time.sleep(POLL_S)
        for path in tails:
            if not Path(path).is_file():
                log.warning("the output of %s cannot be read here: %s", job_id, path)
        if state == "COMPLETED":
            return 0
        if state.startswith("CANCELLED"):
            return ExitCode.INTERRUPTED
        code = fields["ExitCode"].partition(":")[0]
        is_own = state == "FAILED" and code in {str(int(own)) for own in PASSED_ON}
        return int(code) if is_own else ExitCode.DISTRIBUTED


ENGINE = Slurm


def _check_time(slurm: SlurmConfig) -> None:
    """Refuse a time limit that ends a job before it trains: it would be queued again and again."""
    # M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; sbatch checks others
    limit_text = slurm.time or ""
    is_number = re.fullmatch(r"(\d{1,9}-)?\d{1,9}(:\d\d?){0,2}", limit_text, re.ASCII)
    if not is_number or not slurm.requeue:
        return
    days, dash, rest = limit_text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)  # no hours
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    limit = 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds
    minimum = slurm.signal_before + START_S
    if 0 < limit <= minimum:  # 0 is no limit
        raise UsageError(
            f"slurm.time: {slurm.time} is {limit} s, and slurm.signal_before stops the ranks "
            f"{slurm.signal_before} s before its end: nothing would be trained",
            hint=f"give at least {minimum // 60 + 1} minutes, or a smaller slurm.signal_before",
        )


def _named(job_id: str) -> list[str]:
    """Return the arguments that name a job to Slurm's clients."""
    number, _, cluster = job_id.partition(";")
    return [*(["-M", cluster] if cluster else []), number]


class _Tail:
    """What a job writes into one of its files."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, *, is_last: bool) -> str:
        """Return what was written since the last call; nothing if the file cannot be read."""
        content = b""
        # A NUL in the path is a ValueError.
        with contextlib.suppress(OSError, ValueError), self._path.open("rb") as file:
            file.seek(self._position)
            content = file.read()
        self._position += len(content)
        # A character may be written in two parts.
        return self._decoder.decode(content, final=is_last)
