"""Submit a job and follow it: the engines' clients are small programs that print what the real ones do."""

import dataclasses
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from launch.plans import IN_A_POD

from ssdctl.errors import DistributedError, UsageError
from ssdctl.launch import base
from ssdctl.launch.base import Job
from ssdctl.launch.engines import kubernetes, slurm
from ssdctl.launch.engines.kubernetes import Kubernetes
from ssdctl.launch.engines.slurm import Slurm

# Prints, call by call, what `answers.json` lists as [exit code, stdout, stderr]; the last one again.
CLIENT = """#!{python}
import json, sys
from pathlib import Path
here = Path({folder!r})
with (here / "asked").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "--parsable":
    (here / "given").write_text(sys.stdin.read())
answers = json.loads((here / "answers.json").read_text())
code, out, err = answers[0]
(here / "answers.json").write_text(json.dumps(answers[1:] or answers))
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
SLURM = Job(slurm.ARGV, {}, "slurm", 2, text="#!/bin/sh\n")
MANIFEST = {"metadata": {"namespace": "me"}}
KUBERNETES = Job(kubernetes.ARGV, {}, "kubernetes", 2, text="", manifest=MANIFEST)
ENGINES = {"slurm": Slurm(), "kubernetes": Kubernetes()}
MPI_JOB = "mpijob.kubeflow.org/mine"
Answers = list[tuple[int, str, str]]
SetAnswers = Callable[[Answers], object]


@pytest.fixture
def set_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetAnswers:
    for name in ("sbatch", "scontrol", "kubectl"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(CLIENT.format(python=sys.executable, folder=str(tmp_path)))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for module in (base, kubernetes, slurm):
        monkeypatch.setattr(module, "POLL_S", 0.01)

    return lambda answers: (tmp_path / "answers.json").write_text(json.dumps(answers))


def follow(job_id: str, plan: Job = KUBERNETES) -> tuple[int, list[str]]:
    output: list[str] = []
    return ENGINES[plan.launcher].follow(job_id, plan, output.append), output


def client_calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "asked").read_text().splitlines()]


def test_submit_passes_a_script_and_returns_the_id(set_answers: SetAnswers, tmp_path: Path) -> None:
    set_answers([(0, "4711;north\n", ""), (1, "", "sbatch: error: invalid account\n")])
    assert Slurm().submit(SLURM) == "4711;north"
    assert (tmp_path / "given").read_text() == SLURM.text
    assert Slurm().cancel("4711", SLURM) == "scancel 4711"
    assert Slurm().cancel("4711;north", SLURM) == "scancel -M north 4711"
    assert Kubernetes().cancel("job.batch/a", KUBERNETES) == "kubectl delete job.batch/a -n me"
    with pytest.raises(UsageError, match="sbatch: error: invalid account"):
        Slurm().submit(SLURM)


def test_a_job_with_a_service(set_answers: SetAnswers, tmp_path: Path) -> None:
    """The output of pod 0 is followed, where rank 0 is; `kubectl create` names the job last."""
    plan = dataclasses.replace(KUBERNETES, manifest={"items": [MANIFEST, MANIFEST]})
    set_answers([(0, "service/mine\njob.batch/mine\n", "")])
    name = "job.batch/mine"
    assert Kubernetes().submit(plan) == name
    assert Kubernetes().cancel(name, plan) == "kubectl delete service/mine job.batch/mine -n me"
    (tmp_path / "asked").unlink()
    set_answers([pods(), pods(("a-0", "Succeeded", 0)), (0, "", ""), status("Complete")])
    assert follow(name, plan)[0] == 0
    labels = [call[5] for call in client_calls(tmp_path) if call[:2] == ["get", "pods"]]
    pod_0 = "job-name=mine,batch.kubernetes.io/job-completion-index=0"
    assert labels == ["job-name=mine", pod_0]


def job(state: str, code: str, out: Path) -> tuple[int, str, str]:
    facts = f"JobId=1 JobName=a b JobState={state} Reason=None ExitCode={code} StdOut={out} Power="
    return 0, facts + "\n", ""


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "75:0", 75),
        ("FAILED", "1:0", 8),  # a code that any program leaves
        ("CANCELLED", "0:15", 130),
        ("TIMEOUT", "0:15", 8),
        ("OUT_OF_MEMORY", "0:125", 8),
    ],
)
def test_the_end_of_a_slurm_job(
    state: str, code: str, expected: int, set_answers: SetAnswers, tmp_path: Path
) -> None:
    out = tmp_path / "slurm 1.out"
    output: list[str] = []

    def write(text: str) -> None:
        output.append(text)
        if len(output) < 3:  # the job prints more before it ends
            with out.open("ab") as file:
                file.write(b"\xa9step %d\n\xc3" % (len(output) + 1))

    out.write_bytes(b"step 1\n\xc3")  # the first byte of a character
    runs = job("RUNNING", "0:0", out)
    set_answers([job("PENDING", "0:0", tmp_path / "a\0b"), runs, runs, job(state, code, out)])
    assert Slurm().follow("1", SLURM, write) == expected
    assert output == ["step 1\n", "éstep 2\n", "éstep 3\n\ufffd"]


def test_a_controller_may_be_unavailable_for_a_while(
    set_answers: SetAnswers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = (1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")
    set_answers([away, away, job("COMPLETED", "0:0", tmp_path / "none")])
    assert follow("1;north", SLURM) == (0, [])
    assert client_calls(tmp_path) == [["show", "job", "--oneliner", "-M", "north", "1"]] * 3
    monkeypatch.setattr(base, "UNREACHABLE_S", 0.05)
    set_answers([away])
    with pytest.raises(DistributedError, match=r"scontrol.*slurm controller"):
        follow("1", SLURM)


@pytest.mark.parametrize(
    ("plan", "job_id", "words"),
    [
        (SLURM, "1", "slurm_load_jobs error: Invalid job id specified"),
        (KUBERNETES, "job.batch/a", 'Error from server (NotFound): jobs.batch "a" not found'),
    ],
)
def test_a_job_that_the_engine_no_longer_lists(
    plan: Job, job_id: str, words: str, set_answers: SetAnswers, tmp_path: Path
) -> None:
    set_answers([(1, "", words)])
    with pytest.raises(DistributedError, match=re.escape(words)):
        follow(job_id, plan)
    assert len(client_calls(tmp_path)) == 1


def ended(code: int | None) -> dict[str, Any]:
    return {"state": {} if code is None else {"terminated": {"exitCode": code}}}


def pod(
    name: str, phase: str = "Pending", code: int | None = None, **status: object
) -> dict[str, Any]:
    metadata = {"name": name, "creationTimestamp": name}
    sidecar, own = {"name": "a", **ended(0)}, {"name": "main", **ended(code)}
    given = {"phase": phase, "containerStatuses": [sidecar, own], **status}
    return {"metadata": metadata, "status": given}


def pods(*items: tuple[str, str, int | None] | dict[str, Any]) -> tuple[int, str, str]:
    listed = [item if isinstance(item, dict) else pod(*item) for item in items]
    return 0, json.dumps({"items": listed}), ""


def status(*ends: str) -> tuple[int, str, str]:
    conditions = [{"type": end, "status": "True"} for end in ends]
    return 0, json.dumps({"status": {"conditions": conditions}}), ""


@pytest.mark.parametrize(
    ("codes", "expected"), [((8, 3), 3), ((3, 75), 75), ((1, 137), 8), ((None, None), 8)]
)
def test_the_end_of_an_mpi_job_is_its_last_pods(
    codes: tuple[int | None, int | None], expected: int, set_answers: SetAnswers, tmp_path: Path
) -> None:
    """Kubernetes starts a launcher that failed again, in another pod: each is followed once.

    The connection to the first one breaks.
    """
    first, second = codes
    none = pods()  # the workers
    set_answers([
        none, pods(("b", "Pending", None)), status("Running"),
        none, pods(("b", "Running", None)), (1, "step 1\n", "unexpected EOF\n"),
        (0, "step 1\nstep 2\n", ""), status("Running"),
        none, pods(("c", "Running", None), ("b", "Failed", first)), (0, "step 3\n", ""),
        status("Failed"), pods(("c", "Failed", second), ("b", "Failed", first)),
    ])  # fmt: skip
    assert follow(MPI_JOB) == (expected, ["step 1\n", "step 2\n", "step 3\n"])
    calls = client_calls(tmp_path)
    workers = "training.kubeflow.org/job-name=mine,training.kubeflow.org/job-role=worker"
    assert calls[0][:6] == ["get", "pods", "-n", "me", "-l", workers]
    assert calls[1][:6] == ["get", "pods", "-n", "me", "-l", "job-name=mine-launcher"]
    assert [call[-1] for call in calls if call[0] == "logs"] == ["b", "b", "c"]


def worker(starts: int = 1, **state: object) -> tuple[int, str, str]:
    container = {"name": "install-ssdctl", "restartCount": starts - 1, **state}
    return pods(pod("w-0", initContainerStatuses=[container], containerStatuses=INITIALIZING))


UNSCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
               "message": "0/9 nodes are available:\n9 Insufficient habana.ai/gaudi."}  # fmt: skip
INITIALIZING = [{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}]
PULLING = {"waiting": {"reason": "ImagePullBackOff", "message": 'image "a:1"'}}


def test_what_workers_wait_for_is_reported_once_per_change(
    set_answers: SetAnswers, caplog: pytest.LogCaptureFixture
) -> None:
    """The launcher's pod starts only after all workers: without this nothing would be reported."""
    none = pods()
    unscheduled = pods(pod("w-0", conditions=[UNSCHEDULED]))
    set_answers([
        unscheduled, none, status(), unscheduled, none, status(),
        worker(state=PULLING), none, status(),
        worker(state={"running": {}}), none, status(),
        pods(("w-0", "Running", None)), pods(("l", "Succeeded", 0)), (0, "step 1\n", ""),
        status("Succeeded"),
    ])  # fmt: skip
    caplog.set_level(logging.INFO, "ssdctl")
    assert follow(MPI_JOB) == (0, ["step 1\n"])
    assert caplog.messages == [
        "w-0: waits: Unschedulable: 0/9 nodes are available: 9 Insufficient habana.ai/gaudi.",
        'w-0: waits: install-ssdctl: ImagePullBackOff: image "a:1"',
    ]


def test_a_failed_installation(set_answers: SetAnswers, caplog: pytest.LogCaptureFixture) -> None:
    container = {"name": "install-ssdctl", **ended(3)}
    failed = pod("a-1", "Failed", initContainerStatuses=[container], containerStatuses=[])
    set_answers([pods(failed), (0, "", ""), status("Failed"), pods(failed)])
    caplog.set_level(logging.INFO, "ssdctl")
    assert follow("job.batch/a") == (8, [])
    (message,) = caplog.messages
    assert message.startswith("a-1: install-ssdctl failed with exit code 3 (kubectl logs")


WARNING = "\x1b[2JWARNING: version differs\n{}"


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("answer", [WARNING, "[]", "[" * 100_000])
def test_unexpected_output_of_kubectl(answer: str, before: int, set_answers: SetAnswers) -> None:
    """The answer about the pods, or about the job."""
    set_answers([pods()] * before + [(0, answer, "")])
    with pytest.raises(DistributedError, match="kubectl") as caught:
        follow("job.batch/a")
    assert caught.value.hint
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("plan", [SLURM, KUBERNETES], ids=["slurm", "kubernetes"])
@pytest.mark.parametrize("answer", ["", "--all", "\x1b]0;a\x07"])
def test_an_engine_that_prints_no_id(plan: Job, answer: str, set_answers: SetAnswers) -> None:
    set_answers([(0, answer, "")])
    with pytest.raises(DistributedError) as caught:
        ENGINES[plan.launcher].submit(plan)
    assert plan.argv[0] in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (137, 8)])
def test_what_a_pod_prints_cannot_control_the_terminal(
    code: int, expected: int, set_answers: SetAnswers, cli: Cli, tmp_path: Path
) -> None:
    words = ["launch", *IN_A_POD, "--set", "kubernetes.namespace=me"]
    foreign = "loss 1.5\tok\r\n\x1b]0;title\x07\x1b[2J \u202e\x9b2J\n"
    shown = "loss 1.5\tok\n\\x1b]0;title\\x07\\x1b[2J \\u202e\\x9b2J\n"
    submitted = (0, "job.batch/mine\n", "")
    end = status("Failed" if code else "Complete")
    last = pods(("a", "Failed", code))
    followed = [submitted, last, (0, foreign, ""), end, last]
    set_answers([submitted])
    result = cli(*words)
    assert (result.code, result.out) == (0, "job.batch/mine\n")
    set_answers(followed)
    result = cli(*words, "--wait")
    assert (result.code, result.out) == (expected, shown)
    assert ["logs", "-n", "me", "--follow", "a"] in client_calls(tmp_path)
    set_answers(followed)
    result = cli(*words, "--wait", "--json")
    assert json.loads(result.out)["exit_code"] == expected  # nothing else is on stdout
    assert shown in result.err
