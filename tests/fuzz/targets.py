"""The parsers under test: for each one, mutated inputs and a function that gives it one.

Most inputs go to the parser inside the boundary that turns errors into exit codes
(`exit_after`), one in `COMMAND_EVERY` through the whole command.
"""

import contextlib
import hashlib
import io
import itertools
import json
import shutil
import socket
import socketserver
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint.test_hostile import payload
from conftest import Result, run_cli
from data.formats import exports
from download.zips import zipped
from fuzz.mutations import mutated_bytes, mutated_json, mutated_tree
from hypothesis import strategies as st
from reporting.test_damaged_runs import make_run

from ssdctl.checkpoint.exported import read_onnx
from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.checkpoint.third_party import to_third_party
from ssdctl.cli.command import exit_after
from ssdctl.cli.console import Console
from ssdctl.config import PrepareConfig, resolve
from ssdctl.config.resolve import parse_assignment
from ssdctl.data.annotations import AUTOMATIC
from ssdctl.data.check import check
from ssdctl.data.dataset import read_dataset
from ssdctl.data.index import read_annotations
from ssdctl.data.prepare import _unchanged_outcome, prepare
from ssdctl.data.shapes import generate
from ssdctl.data.store import open_split
from ssdctl.device import open_device
from ssdctl.download.dataset import unpack
from ssdctl.download.fetch import fetch, no_progress
from ssdctl.download.http import RetryPolicy
from ssdctl.download.pinned_files import PinnedFile, read_manifest
from ssdctl.evaluation.coco_ap import read_detections
from ssdctl.exporting import export_weights
from ssdctl.launch.engines.mpirun import read_hosts
from ssdctl.model.ssd300 import SSD300, load_network
from ssdctl.runs.metrics import MetricsFile, read_metrics
from ssdctl.runs.run import Run
from ssdctl.training.optimizer import build_optimizer
from ssdctl.training.state import restore

COMMAND_EVERY = 100
BOX = {"image_id": 1, "category_id": 1, "bbox": [1.0, 2.0, 30.0, 40.0], "score": 0.5}


class Target(NamedTuple):
    inputs: st.SearchStrategy[Any]
    run: Callable[[Any], Result]


MakeTarget = Callable[[Path], Iterator[Target]]  # in an empty folder; yields one


def as_command(work: Callable[[], object]) -> Result:
    """Run `work` inside the boundary of a command. An unexpected exception is a bug."""
    err = io.StringIO()
    code = 0
    with redirect_stderr(err):
        try:
            console = Console()
            with console.show_log():
                try:
                    work()
                except Exception as error:
                    exit_after(error, console)
        except SystemExit as end:
            code = int(end.code or 0)
    return Result(code, "", err.getvalue())


def file_target(
    path: Path, inputs: st.SearchStrategy[bytes], parse: Callable[[], object], *command: object
) -> Target:
    """Write each input to `path`, then parse it, sometimes by the whole command."""
    numbers = itertools.count()

    def write_and_run(content: bytes) -> Result:
        path.write_bytes(content)
        if command and next(numbers) % COMMAND_EVERY == 0:
            return run_cli(*command)
        return as_command(parse)

    return Target(inputs, write_and_run)


def small_shapes(root: Path) -> Path:
    generate(root, num_train=2, num_val=2, seed=0)
    return root


def dataset_target(root: Path, path: Path, inputs: st.SearchStrategy[bytes]) -> Target:
    """Read a dataset of any format with one file mutated, up to the check of the images."""

    def read() -> None:
        for split in read_dataset(root, AUTOMATIC).values():
            check(split)

    options = ("--store", "store", "--no-pack", "--force", "--jobs", 1)
    return file_target(path, inputs, read, "prepare", "--data", root, *options)


def exported(
    make: Callable[[Path], Path], name: str, *tokens: bytes, has_values: bool = False
) -> MakeTarget:
    """Return the target of one file of a dataset; with other bytes, or other values in JSON."""

    def target(folder: Path) -> Iterator[Target]:
        root = folder / "data"
        made = make(root)
        path = min(root.glob(name))
        content = path.read_bytes()
        values = mutated_json([json.loads(content)]) if has_values else None
        inputs = mutated_bytes([content], tokens) if values is None else values
        yield dataset_target(made, path, inputs)

    return target


ENTITY = b'<!DOCTYPE a [<!ENTITY b "cccccccccc"><!ENTITY d "&b;&b;">]>'
XML = (ENTITY, b"&d;", b"<object>", b"</annotation>", b"<![CDATA[", b"<a>" * 2000, b"<?xml ?>")


def results(folder: Path) -> Iterator[Target]:
    root, path = small_shapes(folder / "data"), folder / "detections.json"
    inputs = mutated_json([[BOX, {**BOX, "image_id": 2, "score": 0.25}]])
    command = ("evaluate", path, "--data", root)
    yield file_target(path, inputs, lambda: read_detections(path), *command)


def prepared_store(folder: Path) -> Iterator[Target]:
    """The files that `prepare` leaves in a dataset folder: its report, and an index in Arrow."""
    root, prepared = small_shapes(folder / "data"), folder / "data" / "prepared"
    prepare(root, prepared)
    report = prepared / "report.json"
    files = [report, *prepared.glob("*train*.arrow")]

    def read() -> None:
        _unchanged_outcome(root, prepared, PrepareConfig(), AUTOMATIC)
        split = open_split(root, prepared, "train")
        read_annotations(split.index_file)
        for row in range(len(split.image_ids)):
            split.read(row)

    trees = {report: mutated_json([json.loads(report.read_bytes())])}
    yield damaged_file_target(files, trees, lambda: as_command(read))


def damaged_file_target(
    files: list[Path], trees: dict[Path, st.SearchStrategy[bytes]], run: Callable[[], Result]
) -> Target:
    """Run with one of several files damaged: its bytes, or what `trees` has for it."""
    whole = {path: path.read_bytes() for path in files}
    inputs = [(path, mutated_bytes([content])) for path, content in whole.items()]
    inputs += trees.items()

    def damage_and_run(damaged: tuple[Path, bytes]) -> Result:
        for path, content in whole.items():
            path.write_bytes(damaged[1] if path == damaged[0] else content)
        return run()

    return Target(st.one_of(st.tuples(st.just(path), i) for path, i in inputs), damage_and_run)


def build(path: Path) -> tuple[Any, Any, Any]:
    read = load_checkpoint(path)
    model = load_network(read)
    config = resolve(environment={}).train
    return read, model, build_optimizer(model, config, open_device("cpu"))


def load(path: Path) -> None:
    """Read a checkpoint, build its network, resume from it and train a step."""
    read, model, optimizer = build(path)
    if read.third_party is None:
        restore(model, optimizer, read)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


def checkpoint(folder: Path) -> Iterator[Target]:
    """Files that torch.save wrote, of contents with other values."""
    path = folder / "x.pt"
    torch.save(payload(), path)
    ours = {**payload(), "optimizer": build(path)[2].state_dict()}
    ours["config"]["train.optimizer"] = "sgd"
    state = to_third_party(SSD300("tiny", 4, "none").state_dict(), "nvidia")
    theirs = {"model": state, "epoch": 3, "iteration": 40, "label_map": dict(enumerate("abcd"))}
    tensors = [
        *(torch.zeros(size) for size in (0, 7, ())),
        *(torch.zeros(3, dtype=dtype) for dtype in (torch.complex64, torch.bool)),
        torch.zeros(1).expand(10**12),
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch.full((3,), float("nan")),
        torch.zeros(12, dtype=torch.int64),
        torch.nn.Parameter(torch.zeros(12)),
    ]

    def run(content: Any) -> Result:
        torch.save(content, path)
        return as_command(lambda: load(path))

    yield Target(mutated_tree([ours, theirs], tensors), run)


def checkpoint_bytes(folder: Path) -> Iterator[Target]:
    """Damaged pickles in a zip with correct CRCs, and damaged zips."""
    path = folder / "x.pt"
    torch.save(payload(), path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(n for n in content if n.endswith("data.pkl"))

    def run(damaged: bytes) -> Result:
        if damaged.startswith(b"PK"):
            path.write_bytes(damaged)
        else:
            with zipfile.ZipFile(path, "w") as archive:
                for entry, data in content.items():
                    archive.writestr(entry, damaged if entry == name else data)
        return as_command(lambda: load(path))

    codes = (b"cos\nsystem\n", b"R", b"(", b"\x93", b"\x8a\xff", b"ctorch\nzeros\n", b"\x80\x05")
    pickles = mutated_bytes([content[name]], (*codes, b"."))
    yield Target(st.one_of(pickles, pickles, mutated_bytes([whole], (b"PK\1\2", b"PK\5\6"))), run)


def safetensors(folder: Path) -> Iterator[Target]:
    """Files of `export --format safetensors`: the header in JSON, the metadata, the tensors."""
    pytest.importorskip("safetensors")
    torch.save(payload(), folder / "first.pt")
    path = folder / "x.safetensors"
    export_weights(load_checkpoint(folder / "first.pt"), "safetensors", path)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    words = (b'"dtype":"F64"', b'"shape":[', b'"data_offsets":[0,', b"__metadata__", b"},", b":[]")

    def joined(header: bytes) -> bytes:
        """Return a file whose length of the header is correct, so that the header is parsed."""
        return len(header).to_bytes(8, "little") + header + whole[end:]

    inputs = mutated_bytes([whole[8:end]], words).map(joined)
    yield file_target(path, inputs, lambda: load_network(load_checkpoint(path)))


def onnx(folder: Path) -> Iterator[Target]:
    """A small graph with the description of an exported network."""
    package = pytest.importorskip("onnx")
    from inference.test_onnx_detector import FACTS, GRAPH

    model = package.parser.parse_model(GRAPH.replace("BATCH", "batch"))
    package.helper.set_model_props(model, FACTS.as_metadata())
    path = folder / "x.onnx"
    words = (b"\x0a\x80\x80\x80\x80\x08", b"location", b"../../etc/passwd", b"\x70\x01", b"TRT")
    inputs = mutated_bytes([model.SerializeToString()], words)
    yield file_target(path, inputs, lambda: read_onnx(path))


def config(folder: Path) -> Iterator[Target]:
    path = folder / "c.toml"
    run_cli("config", "init", path)
    text = path.read_bytes().replace(b"\n# ", b"\n")
    short = (
        b'[train]\npreset = "stable-r34"\nlr = 0.1\nepochs = 2\nwarmup = "3ep"\ndecay_epochs = [1, 2]\n'
        b'[data]\nroot = "data"\n[evaluate]\nnms_iou = 0.5\n[kubernetes]\nenv = ["A=b"]\n'
    )
    words = (b"[train]", b"train.lr = 1\n", b'"""', b"[[x]]", b"inf", b"1979-05-27", b"# ")
    inputs = mutated_bytes([short, text], (*words, b"bs = 2\n"))
    command = ("config", "validate", path)
    yield file_target(path, inputs, lambda: resolve(file=str(path), environment={}), *command)


def assignments(_: Path) -> Iterator[Target]:
    samples = [b"train.lr=0.1", b"data.root=/data", b"kubernetes.env=A=b,C=d", b"train.warmup=3ep"]
    tokens = (b"train.", b"=", b",", b"evaluate.limit=", b"ep", b"st")
    numbers = itertools.count()

    def run(content: bytes) -> Result:
        text = content.decode("utf-8", "surrogateescape")
        if next(numbers) % COMMAND_EVERY == 0:
            return run_cli("config", "show", "--set", text)
        return as_command(lambda: resolve(overrides=[parse_assignment(text)], environment={}))

    yield Target(mutated_bytes(samples, tokens), run)


def archive(folder: Path) -> Iterator[Target]:
    files = {"a/1.jpg": bytes(700), "a/2.jpg": bytes(range(256)), "b.json": b"{}", "e/": b""}
    path, dest = folder / "a.zip", folder / "data"

    def unpack_it() -> None:
        entries = unpack(path, dest, dest / ".unpacking", progress=no_progress)
        files = {p.relative_to(dest).as_posix(): p for p in dest.rglob("*") if not p.is_dir()}
        found = {name: (p.stat().st_size, zlib.crc32(p.read_bytes())) for name, p in files.items()}
        assert {entry.path: (entry.size, entry.crc) for entry in entries} == found

    def run(content: bytes) -> Result:
        path.write_bytes(content)
        result = as_command(unpack_it)
        assert {p.name for p in folder.iterdir()} <= {"a.zip", "data"}
        shutil.rmtree(dest, ignore_errors=True)
        return result

    tokens = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"\xff\xff\xff\xff", b"\1\0\x10\0")
    yield Target(mutated_bytes([zipped(files)], tokens), run)


def manifest(folder: Path) -> Iterator[Target]:
    text = (
        b'[[file]]\nname = "a.zip"\nurl = "https://host/a.zip"\nbytes = 100\n'
        b'sha256 = "' + b"0" * 64 + b'"\nunpack = true\n'
    )
    tokens = (b"[[file]]\n", b"name = 7\n", b"http://", b"file:///", b"unpack = 1\n")
    path = folder / "manifest.toml"
    command = ("download", "--dest", folder / "dest", "--manifest", path, "--dry-run")
    inputs = mutated_bytes([text], (*tokens, b"bytes = -1\n"))
    yield file_target(path, inputs, lambda: read_manifest(path), *command)


class Answer(socketserver.BaseRequestHandler):
    """Send the server's `reply` to a client and close the connection."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.settimeout(1)
            self.request.recv(65536)
            self.request.sendall(self.server.reply)  # type: ignore[attr-defined]
            self.request.shutdown(socket.SHUT_WR)
            while self.request.recv(65536):  # an RST would lose the reply
                pass


def reply(status: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    common = (b'ETag: "1"', b"Content-Type: application/octet-stream", b"Connection: close")
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, *common, b"", body])


def http(folder: Path) -> Iterator[Target]:
    body = bytes(range(256)) * 2
    digest = hashlib.sha256(body).hexdigest()
    policy = RetryPolicy(
        connect_s=1, read_s=0.2, stall_s=0.5, retries=1, connect_retries=1, backoff_s=0.0,
        longest_wait_s=0.01, restarts=1,
    )  # fmt: skip
    whole, empty = b"Content-Length: 512", b"Content-Length: 0"
    chunks = b"200\r\n" + body + b"\r\n0\r\n\r\n"
    samples = [
        reply(b"200 OK", whole, body=body),
        reply(b"206 Partial Content", b"Content-Range: bytes 0-511/512", whole, body=body),
        reply(b"503 Busy", b"Retry-After: 1", empty),
        reply(b"302 Found", b"Location: /b", empty),
        reply(b"416 No", b"Content-Range: bytes */512", empty),
        reply(b"200 OK", b"Transfer-Encoding: chunked", body=chunks),
    ]
    tokens = (
        *(b"Retry-After: ", b"Content-Range: bytes ", b"Location: http://", b"\r\n\r\n", b"\r\n"),
        *(b"Content-Encoding: gzip\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: "),
        *(b"Fri, 31 Dec 9999 23:59:59 GMT", b"HTTP/1.1 100 Continue\r\n\r\n", b"://[", b"\x80"),
    )
    with socketserver.TCPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/a.bin"

        def run(content: bytes) -> Result:
            server.reply = content  # type: ignore[attr-defined]
            for size in (len(body), None):
                pin = PinnedFile("a.bin", url, digest, size)
                result = as_command(
                    lambda pin=pin: fetch(pin, folder, connections=2, retry_policy=policy)
                )
                for path in folder.glob("a.bin*"):
                    path.unlink()
                if result.code:
                    break
            return result

        yield Target(mutated_bytes(samples, tokens), run)
        server.shutdown()


def metrics(folder: Path) -> Iterator[Target]:
    """metrics.jsonl, read by a resume and by the reader of reports."""
    run_folder = make_run(folder / "run")
    path = run_folder / "metrics.jsonl"

    def read() -> None:
        run, (records, problems) = Run(run_folder), read_metrics(path)
        if not problems:
            assert run.best_metrics is None or run.best_metrics["AP"] is not None
            assert isinstance(run.class_ap, dict)
        MetricsFile(path, start_step=2)
        assert Run(run_folder).metrics == [r for r in records if r["step"] <= 2]  # rewritten

    tokens = (b'"kind"', b"eval", b'"step":', b'"AP": ', b"NaN", b"\n{}\n", b"null", b"true")
    yield file_target(path, mutated_bytes([path.read_bytes()], tokens), read)


def report(folder: Path) -> Iterator[Target]:
    """A page of a run folder with one file damaged."""
    run, root = make_run(folder / "run"), small_shapes(folder / "data")
    (folder / "d.json").write_text(json.dumps([BOX]))
    run_cli("evaluate", folder / "d.json", "--data", root, "--report", folder / "page").expect(0)
    shutil.copy(folder / "page/evaluation.json", run)
    names = ("metrics.jsonl", "environment.json", "evaluation.json", "config.toml")
    lines, *documents, settings = [run / name for name in names]
    records = [json.loads(line) for line in lines.read_bytes().splitlines()]

    def as_lines(value: Any) -> bytes:
        values = value if isinstance(value, list) else [value]
        return b"\n".join(json.dumps(value).encode() for value in values)

    trees = {path: mutated_json([json.loads(path.read_bytes())]) for path in documents}
    trees[lines] = mutated_tree([records]).map(as_lines)
    files = [lines, *documents, settings]
    yield damaged_file_target(files, trees, lambda: run_cli("report", run))


def host_file(folder: Path) -> Iterator[Target]:
    path = folder / "hosts"
    text = b"# two nodes\nnode-1 slots=8\nnode-2 slots=8 max_slots=8\n10.0.0.3\n[fe80::1]\n"
    tokens = (b"--mca", b"$(id)", b";", b" slots=", b"`", b"%", b"node-1\n", b"\x00", b"\xc2\xa0")
    command = ("launch", "--cpus", 4, "--nodes", 2, "--hostfile", path, "--dry-run")
    inputs = mutated_bytes([text], tokens)
    yield file_target(path, inputs, lambda: read_hosts(path), *command, "--launcher", "mpirun")


CSV = (b",", b'"', b"nan")
JSON = (b"null", b"NaN", b"[]")
YAML = (b"&a [*a]", b"!!python/object:os.system", b"<<: ", b": ")
TOML = (b"[test]", b"images = 1\n", b'"../.."', b"annotations = []\n", b"[[a]]")
TARGETS: dict[str, MakeTarget] = {
    "annotations: coco": exported(exports.flat_coco, "result.json", has_values=True),
    "annotations: voc": exported(exports.voc_lists, "Annotations/*.xml", *XML),
    "annotations: voc list": exported(exports.voc_lists, "ImageSets/Main/train.txt", b" -1"),
    "annotations: cvat": exported(exports.cvat_xml, "annotations.xml", *XML, b"<box ", b"<track "),
    "annotations: darknet": exported(exports.darknet, "obj.data", b"names = ", b"="),
    "annotations: tf-csv": exported(exports.tf_csv, "data/train_labels.csv", *CSV),
    "annotations: retinanet-csv": exported(exports.retinanet_csv, "train.csv", *CSV, b",,,,,"),
    "annotations: via-json": exported(exports.via_json, "train/*.json", *JSON, b'"name"'),
    "annotations: labelme-json": exported(exports.labelme_json, "labels/train/0.json", *JSON),
    "annotations: createml-json": exported(exports.createml_json, "train/*.json", *JSON, b"-1e999"),
    "annotations: kitti": exported(exports.kitti, "training/label_2/*.txt", b" nan", b" -1"),
    "annotations: yolo": exported(exports.roboflow_yolo, "train/labels/*.txt", b"0 ", b" 0.5"),
    "annotations: data.yaml": exported(exports.roboflow_yolo, "data.yaml", *YAML),
    "annotations: open images": exported(exports.open_images, "*train*.csv", *CSV, b"/m/0bolt"),
    "annotations: dataset.toml": exported(exports.coco_toml, "dataset.toml", *TOML),
    "annotations: results": results,
    "store": prepared_store,
    "checkpoint": checkpoint,
    "checkpoint: bytes": checkpoint_bytes,
    "safetensors": safetensors,
    "onnx": onnx,
    "config": config,
    "config: --set": assignments,
    "archive": archive,
    "manifest": manifest,
    "http": http,
    "metrics": metrics,
    "report": report,
    "host file": host_file,
}
