"""Random launches, read by the launchers' own parsers: nothing is lost, added up wrongly or run.

torchrun's argparse, the schemas of Kubernetes, bash with stand-ins for `python`, `mpirun` and
`srun`, and in slow tests Open MPI and sbatch read what `ssdctl launch` writes. Text of the user is
hostile: blanks, quotes, `$(...)`, newlines. A failure prints the shortest command that fails.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import pytest
import yaml
from conftest import budgets, check_all, run_cli
from hypothesis import note
from hypothesis import strategies as st
from launch.open_mpi import MPIRUNS, environment_for
from launch.process.test_slurm import COMMENT, slurm_daemons  # noqa: F401 - a fixture
from launch.test_kubernetes import checked, containers, templates
from torch.distributed.run import get_args_parser

from ssdctl.config.fields import DEVICE_TYPES
from ssdctl.config.resolve import resolve
from ssdctl.config.settings import all_settings

HOSTILE = ["a b", "it's", '"', "$(touch x)", "`touch x`", "; touch x", "a\nb", "-x", "--", "$$",
           "${local_rank}", "$(NAME)", "\\", "*", "#", "a=b", "'; touch x; '", "é\U0001f600", "1e3",
           "null", "~", "\x07", "%s", "!", ":"]  # fmt: skip
TEXT = st.sampled_from(HOSTILE) | st.text("ab$'\"\\ \n;&|`(){}é=-:#", min_size=1, max_size=8)
DEVICES = {"hpus": "hpu", "gpus": "cuda", "cpus": "cpu", "tpus": "tpu"}
# Settings of batch jobs: valid values, and ones that must be refused.
FORMED = {
    "slurm.job_name": (["a-b", "-x 'a $(touch x)"], ["a\x07"]),
    "slurm.partition": (["main"], ["a\n#SBATCH --uid=0"]),
    "slurm.time": (["60", "1-00:00:00", "2:00:00"], ["1\r2"]),
    "slurm.memory": (["400G"], []),
    "slurm.gres": (["none", "gpu:a"], []),
    "slurm.options": (["--exclusive", "--output=/tmp/%j.out", COMMENT], ["--a=b\nc"]),
    "slurm.srun_options": (["--export-file=$(touch x) 'a"], ["--a=\n"]),
    "kubernetes.labels": (["a.io/b=c"], ["a b"]),
    "kubernetes.node_selector": (["a=b"], ["=b"]),
    "kubernetes.resources": (["cpu=2", "memory=4Gi"], ["cpu"]),
}  # fmt: skip


class Launch(NamedTuple):
    """A launch: the words of its command line, and what is expected of it."""

    plural: str
    count: int
    nodes: int
    launcher: str  # as given, or the default
    cores: int | None
    words: tuple[str, ...]  # without the launched command after `--`
    rest: tuple[str, ...]
    wished: tuple[str, ...]  # what the ranks run; for `train` without the device
    env: str  # the value of a variable in pods
    wrong: tuple[str, ...]  # of which an error has to name one; empty: it is accepted

    @property
    def dashes(self) -> list[str]:
        """The command after `--`, with it."""
        return ["--", *self.rest] if self.rest else []

    @property
    def ranks_per_node(self) -> int:
        return self.count // self.nodes


@st.composite
def launches(draw: Any, *launchers: str) -> Launch:
    plurals = [plural for plural in DEVICES if plural != "tpus" or launchers == ("kubernetes",)]
    plural, launcher = draw(st.sampled_from(plurals)), draw(st.sampled_from(launchers))
    nodes, ranks = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 2, 3, 4, 8]))
    count, wrong, env = nodes * ranks, list[str](), ""
    if nodes > 1 and draw(st.integers(0, 9)) == 0:
        count, wrong = count + 1, ["--nodes"]
    number = [f"--{plural}={count}"], [f"--device={DEVICES[plural]}", f"--devices={count}"]
    words = [*draw(st.sampled_from(number)), f"--launcher={launcher}", f"--nodes={nodes}"]
    cores = draw(st.sampled_from([None, 1, 6, 48]))
    words += [f"--cores-per-node={cores}"] * (cores is not None)
    if (devices := draw(st.sampled_from([None, None, 2, 8]))) is not None:
        words.append(f"--devices-per-node={devices}")
        wrong += ["--devices-per-node"] * (devices < count // nodes)
    words += draw(st.sampled_from([[], ["--bind-to=none"], ["--restarts=1"], ["--tpu-version=v4"]]))
    binds = launcher == "mpirun" or (launcher, plural) == ("kubernetes", "hpus")
    idle = ["--tpu-version"] * (plural != "tpus")
    idle += ["--bind-to"] * (launcher != "torchrun" and not binds)
    wrong += [option for option in idle if words[-1].startswith(option)]
    keys = [key for key in FORMED if key.startswith(launcher)]
    for key in draw(st.lists(st.sampled_from(keys), max_size=3, unique=True)) if keys else ():
        good, bad = FORMED[key]
        is_bad = bool(bad) and draw(st.integers(0, 5)) == 0
        value = draw(st.sampled_from(bad if is_bad else good))
        text = json.dumps([value], ensure_ascii=False) if all_settings()[key].is_list else value
        words.append(f"--set={key}={text}")
        wrong += ["control character" if launcher == "slurm" else key] * is_bad
    if launcher == "kubernetes":
        words += ["--set=kubernetes.image=a:1", "--set=kubernetes.volumes=claim:/runs"]
        install = draw(st.sampled_from(["image", "ssdctl==1", "$(touch x) a.b"]))
        words.append(f"--set=kubernetes.install={install}")
        env = draw(TEXT)
        words.append(f"--set=kubernetes.env={json.dumps([f'NAME={env}'], ensure_ascii=False)}")
    rest, wished = draw(launched())
    runs_mpirun = launcher == "mpirun" or (
        launcher == "kubernetes" and plural == "hpus" and count > 1
    )
    if runs_mpirun and ":" in wished:
        wrong.append("':'")
    is_named = any("resume=" in word for word in wished)
    wrong += ["--resume"] * (launcher == "kubernetes" and "--restarts=1" in words and is_named)
    words += () if rest else wished[1:]
    if draw(st.booleans()):  # pods cannot read the file
        words.append(config := f"--config={Path('my.toml').absolute()}")
        if launcher != "kubernetes":
            wished = (wished[0], config, *wished[1:])
    facts = plural, count, nodes, launcher, cores
    return Launch(*facts, tuple(words), rest, wished, env, tuple(wrong))


@st.composite
def launched(draw: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the command after `--`, if one is given, and the words that ranks are to run."""
    texts = draw(st.lists(TEXT, min_size=1, max_size=3))
    if draw(st.booleans()):
        words = ("evaluate", "--detections=/runs/a", "--", *texts)
        return words, words
    set_to = draw(
        st.sampled_from(["", "--set=train.resume=never", "--set=train.resume=a", "--resume=a"])
    )
    resume = (set_to,) * bool(set_to)
    options = zip(["--data", "--out", "--mllog"], texts, strict=False)
    flags = draw(st.sampled_from([(), (), ("--quiet",), ("--resume-changed",)]))
    return (), ("train", *resume, *(f"{flag}={text}" for flag, text in options), *flags)


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MPI_ROOT"):
        monkeypatch.delenv(name, raising=False)


def planned(launch: Launch) -> Any:
    """Return the plan, None if it was refused as it should be."""
    Path("my.toml").write_text("[evaluate]\nlimit = 3\n")
    note(f"ssdctl launch {shlex.join([*launch.words, '--dry-run', *launch.dashes])}")
    result = run_cli("launch", *launch.words, "--dry-run", "--json", *launch.dashes)
    assert "Traceback" not in result.err
    assert not Path("x").exists()
    if launch.wrong:
        assert (result.code, result.out) == (2, ""), result
        assert any(name in result.err for name in launch.wrong), (launch.wrong, result.err)
        return None
    assert result.code == 0, result.err
    return json.loads(result.out)


def check_plans(
    check: Callable[..., None], examples: int, *launchers: str, **more: st.SearchStrategy[Any]
) -> None:
    """Check the plans of random launches; some are refused, as they should be."""

    def check_one(launch: Launch, **more: Any) -> None:
        plan = planned(launch)
        if plan is not None:
            check(plan, launch, **more)

    drawn = launches(*launchers)
    drawn = drawn.filter(lambda launch: not launch.wrong) | drawn
    check_all(check_one, examples, launch=drawn, **more)


def check_command(words: list[str], launch: Launch) -> None:
    if launch.rest:
        assert words == [*launch.wished]
    else:  # options of `train`, in any order
        assert sorted(words) == sorted([*launch.wished, f"--device={DEVICES[launch.plural]}"])


def check_line(plan: Any) -> None:
    """The printed line means the argv and the variables to a shell."""
    assigned = [f"{name}={value}" for name, value in plan["environment"].items()]
    assert shlex.split(plan["command"]) == [*assigned, *plan["argv"]]


def check_torchrun(plan: Any, launch: Launch) -> None:
    check_line(plan)
    argv = plan["argv"]
    read = get_args_parser().parse_args(argv[argv.index("-m") + 2 :])
    assert (read.module, read.training_script) == (True, "ssdctl")
    nodes = 1 if read.standalone else int(read.nnodes)
    assert (nodes, nodes * int(read.nproc_per_node)) == (launch.nodes, launch.count)
    passed = [Template(w).safe_substitute(local_rank="0") for w in read.training_script_args]
    check_command(passed, launch)
    cores = launch.cores or len(os.sched_getaffinity(0))
    threads = int(plan["environment"]["OMP_NUM_THREADS"])
    assert threads == max(1, cores // launch.ranks_per_node)


# The number of values of mpirun's options.
MPIRUN_OPTIONS = {"-n": 1, "--bind-to": 1, "--map-by": 1, "--rank-by": 1, "--report-bindings": 0,
                  "--allow-run-as-root": 0, "--prefix": 1, "--hostfile": 1, "-x": 1}  # fmt: skip


def read_mpirun(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split mpirun's options from the program, as mpirun does."""
    options, rest = dict[str, str](), argv[1:]
    while rest[0] in MPIRUN_OPTIONS:
        name, *rest = rest
        for _ in range(MPIRUN_OPTIONS[name]):
            key = f"-x {rest[0].partition('=')[0]}" if name == "-x" else name
            options[key] = rest.pop(0)
    return options, rest


def check_mpirun(plan: Any, launch: Launch) -> None:
    check_line(plan)
    options, program = read_mpirun(plan["argv"])
    assert program[:3] == [sys.executable, "-m", "ssdctl"]
    check_command(program[3:], launch)
    assert int(options["-n"]) == launch.count
    ranks, cores = launch.ranks_per_node, launch.cores or len(os.sched_getaffinity(0))
    place = options["--map-by"].split(":")
    if place[0] == "ppr":
        assert (int(place[1]), place[2]) == (ranks, "node")
    share = int(place[-1].removeprefix("PE=")) if "PE=" in place[-1] else 0
    given = [int(w.rpartition("=")[2]) for w in launch.words if "--devices-per-node" in w]
    assert share * max(ranks, *given, 0) <= cores
    assert (share > 0) == (options["--bind-to"] == "core")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", MPIRUNS)
def test_open_mpi_takes_its_command(launcher: str) -> None:
    """It plans the ranks on a synthetic node, and starts none."""
    _, variables = environment_for(launcher)
    topology = {"HWLOC_SYNTHETIC": "pack:2 numa:1 core:24 pu:2", "HWLOC_THISSYSTEM": "1"}

    def check(plan: Any, launch: Launch) -> None:
        if launch.nodes > 1 or launch.cores != 48:
            return
        argv = [plan["argv"][0], "--do-not-launch", *plan["argv"][1:]]
        environment = {**os.environ, **variables, **topology}
        done = subprocess.run(argv, env=environment, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr.decode()

    check_plans(check, 150, "mpirun")


STUB = '#!/bin/sh\nprintf "%s\\0" "$@" >"{folder}/{name}.asked"\nprintf %s "$SSDCTL_DATA__STORE" >"{folder}/store"\n'


def run_script(text: str, folder: Path, **variables: str) -> dict[str, list[str]]:
    """Run a script with stand-ins for the programs that it starts; return their arguments."""
    for name in ("python", "mpirun", "srun", "scontrol"):
        (folder / name).write_text(STUB.format(folder=folder, name=name))
        (folder / name).chmod(0o755)
    text = text.replace(shlex.quote(sys.executable), str(folder / "python"))
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **variables}
    where: Any = {"env": environment, "cwd": folder, "input": text.encode(), "timeout": 60}
    done = subprocess.run(["/bin/bash"], capture_output=True, **where)
    assert done.returncode == 0, done.stderr
    assert not (folder / "x").exists(), "text of the user was run"
    return {p.stem: p.read_bytes().decode().split("\0")[:-1] for p in folder.glob("*.asked")}


@budgets(15, 1500)
def test_a_written_script_runs_the_planned_words(examples: int) -> None:
    def check(plan: Any, launch: Launch, store: str) -> None:
        words = [*launch.words, "--write=deep/job.sh", *launch.dashes]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSDCTL_DATA__STORE", store)  # the script sets it
            result = run_cli("launch", *words)
        if launch.nodes > 1:  # the first host is missing
            assert (result.code, "--hostfile" in result.err or "HOST" in result.err) == (2, True)
            return
        assert result.code == 0, result.err
        script = Path("deep/job.sh")
        assert os.access(script, os.X_OK)
        assert list(script.parent.iterdir()) == [script]
        with tempfile.TemporaryDirectory() as name:
            asked = run_script(script.read_text(), Path(name))
            assert Path(name, "store").read_text() == store
        words = asked.get("mpirun") or asked["python"]
        if launch.launcher == "mpirun":
            assert "MASTER_PORT=" in words  # chosen when the script runs, here by the stand-in
        expected = plan["argv"][1:]
        port = re.compile("MASTER_PORT=.*")  # a free one each time
        assert [port.sub("", w) for w in words] == [
            port.sub("", str(w).replace(sys.executable, w2) if w == sys.executable else w)
            for w, w2 in zip(expected, words, strict=True)
        ]

    check_plans(check, examples, "torchrun", "mpirun", store=st.sampled_from(HOSTILE))


def directives(script: str) -> dict[str, str]:
    """Return the options in the lines that sbatch reads, which end at the first command."""
    head = script.partition("\nset -u\n")[0].splitlines()[1:]
    assert all(line.startswith("#") for line in head), head
    (*_, options) = zip(*(shlex.split(line) for line in head if "#SBATCH" in line), strict=True)
    pairs = [option.replace(r"\\", "\\").partition("=") for option in options]
    return {name.removeprefix("--"): value for name, _, value in pairs}


def check_slurm(plan: Any, launch: Launch) -> None:
    options = directives(plan["script"])
    ranks, cores = launch.ranks_per_node, launch.cores or len(os.sched_getaffinity(0))
    assert int(options["ntasks"]) == launch.count
    is_given = any(json.dumps([COMMENT]) in word for word in launch.words)
    assert options.get("comment") == (COMMENT.partition("=")[2] if is_given else None)
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) == launch.count
    assert int(options["cpus-per-task"]) in range(1, max(1, cores // ranks) + 1)
    if (gres := options.get("gres")) is not None:
        assert int(gres.rpartition(":")[2]) == ranks
    with tempfile.TemporaryDirectory() as name:
        variables = {"SLURM_JOB_NODELIST": "a", "SLURM_RESTART_COUNT": str(launch.count % 2)}
        asked = run_script(plan["script"], Path(name), SLURM_JOB_ID="1", **variables)
        words = asked["srun"]
    # A restart keeps a checkpoint that is named: the run's own ones come first.
    is_named = any(word.endswith("resume=a") for word in launch.wished)
    resumes = not launch.rest and not is_named
    assert plan["script"].count("+=(--resume=auto)") == 2 * resumes
    if launch.count % 2 and resumes:
        assert words.pop() == "--resume=auto"
    program = words.index(str(Path(name) / "python"))
    assert words[program + 1 : program + 3] == ["-m", "ssdctl"]
    check_command(words[program + 3 :], launch)
    given_options = [w for w in words[:program] if w.startswith("--export-file=")]
    assert all(f"srun_options={json.dumps([o])}" in " ".join(launch.words) for o in given_options)


# What sbatch says of a job that the small cluster of the tests cannot run.
TOO_LARGE = ("node configuration is not available", "Memory specification", "Requested node count",
             "More processors requested", "Node count specification", "Invalid generic resource",
             "CPU count per node can not be satisfied")  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("slurm_daemons")
def test_sbatch_takes_its_script() -> None:
    def check(plan: Any, launch: Launch) -> None:
        argv, text = ["sbatch", "--test-only"], plan["script"]
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or any(t in done.stderr for t in TOO_LARGE), done.stderr

    check_plans(check, 150, "slurm")


def unescaped(words: list[str]) -> list[str]:
    """Return what a container gets: $$ is $, and $(NAME) is a variable's value."""
    assert not any(re.search(r"\$\(", word.replace("$$", "")) for word in words), words
    return [word.replace("$$", "$") for word in words]


def check_kubernetes(plan: Any, launch: Launch) -> None:
    manifest = checked(plan["manifest"])
    pods = containers(manifest)
    job = manifest["items"][-1] if manifest["kind"] == "List" else manifest
    spec, devices = job["spec"], pods.get("worker") or pods["main"]
    replicas = spec["mpiReplicaSpecs"]["Worker"]["replicas"] if "worker" in pods else (
        spec.get("completions", 1)
    )  # fmt: skip
    assert replicas == launch.nodes
    assert "worker" in pods or spec.get("parallelism", 1) == replicas  # the pods wait for all
    assert spec.get("slotsPerWorker", launch.ranks_per_node) == launch.ranks_per_node
    mounts = [mount["mountPath"] for mount in devices["volumeMounts"]]
    assert ("/dev/shm" in mounts) == (launch.count > 1)  # runtimes give 64 MB
    amounts = devices["resources"].get("limits", {})
    expected = "Job" if launch.nodes == 1 else "MPIJob" if launch.plural == "hpus" else "List"
    assert manifest["kind"] == expected
    resource = DEVICE_TYPES[DEVICES[launch.plural]].kubernetes_resource
    assert [t["key"] for t in templates(manifest)[-1]["spec"].get("tolerations", [])] == (
        [resource] if resource else []
    )
    if resource is not None:
        assert int(amounts[resource]) * replicas == launch.count
    program = unescaped((pods.get("launcher") or pods["main"])["command"])
    environment = {e["name"]: unescaped([e["value"]])[0] for e in devices["env"]}
    assert environment["NAME"] == launch.env
    if "launcher" in pods:  # mpirun passes on variables only by name
        assert "--export-env=NAME" in program
    if manifest["kind"] == "List":
        name = job["metadata"]["name"]
        assert f"--rdzv-endpoint={name}-0.{name}:29400" in program
    has_file = any(word.startswith("--config=") for word in launch.words)
    assert resolve(environment=environment).evaluate.limit == (3 if has_file else None)
    check_pod_command(program[program.index("ssdctl") + 1 :], launch)


def check_pod_command(words: list[str], launch: Launch) -> None:
    """The command of a pod runs the user's words, for several ranks by a launch in the pod."""
    if launch.count == 1:
        check_command(words, launch)
        return
    at = words.index("--") if "--" in words and launch.rest else len(words)
    Path("hosts").write_text("".join(f"h{n} slots=8\n" for n in range(launch.nodes)))
    words = [w.replace("/etc/mpi/hostfile", "hosts") for w in words[:at]] + words[at:]
    inner = run_cli(*words[:at], "--dry-run", "--json", *words[at:])
    assert inner.code == 0, (words, inner.err)
    plan = json.loads(inner.out)
    if "--launcher=mpirun" in words:
        check_mpirun(plan, launch._replace(cores=launch.cores or 10**6))
    else:
        argv = [word for word in plan["argv"] if word != "--tpu"]
        read = get_args_parser().parse_args(argv[argv.index("-m") + 2 :])
        check_command([w.replace("$$", "$") for w in read.training_script_args], launch)


def check_manifest(plan: Any, launch: Launch) -> None:
    """Kubernetes and the pods read the manifest, shown as JSON, as YAML and in a file."""
    text = run_cli("launch", *launch.words, "--dry-run", *launch.dashes).out
    name = re.compile("ssdctl-[0-9a-f]{6}")  # another one each time
    for token in yaml.scan(text):  # readers of YAML 1.1 and 1.2 guess numbers and dates
        if isinstance(token, yaml.ScalarToken) and token.plain and not token.value.isdigit():
            assert re.fullmatch(r"[A-Za-z][\w./-]*", token.value)
    manifest = json.loads(name.sub("mine", json.dumps(plan["manifest"])))
    assert yaml.safe_load(name.sub("mine", text)) == manifest
    result = run_cli("launch", *launch.words, "--write=job.yaml", *launch.dashes)
    assert result.code == (0 if launch.rest else 2), result  # the folder of a run is missing
    if launch.rest:
        assert name.sub("mine", Path("job.yaml").read_text()) == name.sub("mine", text)
        assert not os.access("job.yaml", os.X_OK)
    check_kubernetes(plan, launch)


@pytest.mark.parametrize(
    ("launcher", "check"),
    [
        ("torchrun", check_torchrun),
        ("mpirun", check_mpirun),
        ("slurm", check_slurm),
        ("kubernetes", check_manifest),
    ],
)
@budgets(40, 4000)
def test_the_launcher_runs_the_users_words_on_all_ranks(
    launcher: str, check: Callable[..., None], examples: int
) -> None:
    check_plans(check, examples, launcher)
