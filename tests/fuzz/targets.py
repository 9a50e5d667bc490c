"""The parsers under test: for each one, inputs and what runs it (runner.py)."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import socket
import socketserver
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Result, run_cli
from data.formats import exports
from download.zips import zipped
from fuzz.mutations import mutated_bytes, mutated_json, mutated_tree
from fuzz.runner import COMMAND_EVERY, Target, as_command, file_target
from hypothesis import strategies as st

from ssdctl.data.shapes import generate

BOX = {"image_id": 1, "category_id": 1, "bbox": [1.0, 2.0, 30.0, 40.0], "score": 0.5}


def _prepare(root: Path, store: Path) -> Callable[[], Result]:
    return lambda: run_cli(
        *("prepare", "--data", root, "--store", store, "--no-pack", "--force", "--jobs", 1)
    )


def _read_any(root: Path) -> None:
    """Read the annotations of a dataset of any format, up to the check of the images."""
    from ssdctl.data.annotations import AUTOMATIC
    from ssdctl.data.check import check
    from ssdctl.data.dataset import read_dataset

    for part in read_dataset(root, AUTOMATIC).values():
        check(part)


# Annotations


@contextmanager
def coco(folder: Path) -> Iterator[Target]:
    """Annotation files of COCO's layout, and of two labeling tools."""
    root = folder / "data"
    generate(root, num_train=2, num_val=1, seed=0)
    path = root / "annotations/instances_train2017.json"
    exports.cvat_coco(folder / "cvat")
    other = json.loads((folder / "cvat/annotations/instances_default.json").read_bytes())
    samples = [json.loads(path.read_bytes()), other]
    command = _prepare(root, folder / "store")
    yield file_target(path, mutated_json(samples), lambda: _read_any(root), command)


def _exported(
    make: Callable[[Path], Path], name: str, tokens: tuple[bytes, ...]
) -> Callable[[Path], AbstractContextManager[Target]]:
    """Return the target of one file of a dataset in another layout."""

    @contextmanager
    def target(folder: Path) -> Iterator[Target]:
        root = folder / "data"
        root.mkdir()
        made = make(root)
        path = min(root.glob(name))
        inputs = mutated_bytes([path.read_bytes()], tokens)
        yield file_target(path, inputs, lambda: _read_any(made), _prepare(made, folder / "store"))

    return target


ENTITY = b'<!DOCTYPE a [<!ENTITY b "cccccccccc"><!ENTITY d "&b;&b;">]>'
XML = (ENTITY, b"&d;", b"<object>", b"</annotation>", b"<![CDATA[", b"<a>" * 2000, b"<?xml ?>")


def with_dataset_toml(root: Path) -> Path:
    generate(root, num_train=2, num_val=1, seed=0)
    (root / "dataset.toml").write_text(
        '[train]\nimages = "train2017"\nannotations = "annotations/instances_train2017.json"\n'
        '[val]\nimages = "val2017"\nannotations = "annotations/instances_val2017.json"\n'
    )
    return root


@contextmanager
def results(folder: Path) -> Iterator[Target]:
    """Detections in COCO's results format."""
    from ssdctl.evaluation.evaluate import read_detections

    root = folder / "data"
    generate(root, num_train=1, num_val=2, seed=0)
    inputs = mutated_json([[BOX, {**BOX, "image_id": 2, "score": 0.25}]])
    path = folder / "detections.json"
    command = ("evaluate", path, "--data", root)
    yield file_target(path, inputs, lambda: read_detections(path), lambda: run_cli(*command))


@contextmanager
def store(folder: Path) -> Iterator[Target]:
    """The files that `prepare` leaves in a dataset folder: its report, and an index in Arrow."""
    from ssdctl.config import PrepareConfig
    from ssdctl.data.annotations import AUTOMATIC
    from ssdctl.data.index import read_annotations
    from ssdctl.data.prepare import _unchanged_outcome, prepare
    from ssdctl.data.store import open_split

    root, prepared = folder / "data", folder / "data" / "prepared"
    generate(root, num_train=2, num_val=1, seed=0)
    prepare(root, prepared)
    paths = [prepared / "report.json", *prepared.glob("*train*.arrow")]
    whole = {path: path.read_bytes() for path in paths}
    inputs = [st.tuples(st.just(path), mutated_bytes([content])) for path, content in whole.items()]
    report = json.loads(whole[paths[0]])
    inputs.append(st.tuples(st.just(paths[0]), mutated_json([report])))

    def read() -> None:
        _unchanged_outcome(root, prepared, PrepareConfig(), AUTOMATIC)
        split = open_split(root, prepared, "train")
        read_annotations(split.index_file)
        for row in range(len(split.image_ids)):
            split.read(row)

    def run(damaged: tuple[Path, bytes]) -> Result:
        for path, content in whole.items():
            path.write_bytes(damaged[1] if path == damaged[0] else content)
        return as_command(read)

    yield Target(st.one_of(*inputs), run)


# Checkpoints


def _build(path: Path) -> tuple[Any, Any, Any]:
    """Read a checkpoint and build its network, with an optimizer."""
    from ssdctl.checkpoint.file import load_checkpoint, load_network
    from ssdctl.config import resolve
    from ssdctl.device import open_device
    from ssdctl.training.optimizer import build_optimizer

    checkpoint = load_checkpoint(path)
    model = load_network(checkpoint)
    config = resolve(environment={}).config.train
    return checkpoint, model, build_optimizer(model, config, open_device("cpu"))


def _load(path: Path) -> None:
    """Read a checkpoint, build its network, resume from it and train a step."""
    import torch

    from ssdctl.training.state import restore

    checkpoint, model, optimizer = _build(path)
    if checkpoint.third_party is None:
        restore(model, optimizer, checkpoint)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


def _payload(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint, with the optimizer's state; it is also `first.pt`."""
    import torch
    from checkpoint.test_hostile import payload

    content = payload()
    torch.save(content, folder / "first.pt")
    return {**content, "optimizer": _build(folder / "first.pt")[2].state_dict()}


@contextmanager
def checkpoint(folder: Path) -> Iterator[Target]:
    """Files that torch.save wrote, of contents with other values."""
    import torch
    from checkpoint.test_hostile import payload

    from ssdctl.checkpoint.third_party import to_third_party

    ours = _payload(folder)
    ours["config"]["train.optimizer"] = "sgd"
    state = to_third_party(payload(4)["model"], "nvidia")
    theirs = {"model": state, "epoch": 3, "iteration": 40, "label_map": dict(enumerate("abcd"))}
    tensors = [
        torch.zeros(0),
        torch.zeros(7),
        torch.zeros(()),
        torch.zeros(1).expand(10**12),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch.full((3,), float("nan")),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(12, dtype=torch.int64),
        torch.nn.Parameter(torch.zeros(12)),
    ]
    path = folder / "x.pt"

    def run(content: Any) -> Result:
        torch.save(content, path)
        return as_command(lambda: _load(path))

    yield Target(mutated_tree([ours, theirs], tensors), run)


@contextmanager
def checkpoint_bytes(folder: Path) -> Iterator[Target]:
    """Damaged pickles in a zip with correct CRCs, and damaged zips."""
    _payload(folder)
    with zipfile.ZipFile(folder / "first.pt") as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    whole = (folder / "first.pt").read_bytes()
    name = next(n for n in content if n.endswith("data.pkl"))
    path = folder / "x.pt"

    def run(damaged: bytes) -> Result:
        if damaged.startswith(b"PK"):
            path.write_bytes(damaged)
        else:
            with zipfile.ZipFile(path, "w") as archive:
                for entry, data in content.items():
                    archive.writestr(entry, damaged if entry == name else data)
        return as_command(lambda: _load(path))

    codes = (
        *(
            b"cos\nsystem\n",
            b"R",
            b"(",
            b"\x93",
            b"\x8a\xff",
            b"ctorch\nzeros\n",
            b"\x80\x05",
            b".",
        ),
    )
    pickles = mutated_bytes([content[name]], codes)
    yield Target(st.one_of(pickles, pickles, mutated_bytes([whole], (b"PK\1\2", b"PK\5\6"))), run)


@contextmanager
def safetensors(folder: Path) -> Iterator[Target]:
    """Files of `export --format safetensors`: the header in JSON, the metadata, the tensors."""
    pytest.importorskip("safetensors")
    import torch
    from checkpoint.test_hostile import payload

    from ssdctl.checkpoint.file import load_checkpoint, load_network
    from ssdctl.exporting.formats import export

    torch.save(payload(), folder / "first.pt")
    path = folder / "x.safetensors"
    export(load_checkpoint(folder / "first.pt"), "safetensors", path)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    words = (b'"dtype":"F64"', b'"shape":[', b'"data_offsets":[0,', b"__metadata__", b"},", b":[]")

    def joined(header: bytes) -> bytes:
        """Return a file whose length of the header is correct, so that the header is parsed."""
        return len(header).to_bytes(8, "little") + header + whole[end:]

    inputs = mutated_bytes([whole[8:end]], words).map(joined)
    yield file_target(path, inputs, lambda: load_network(load_checkpoint(path)))


@contextmanager
def onnx(folder: Path) -> Iterator[Target]:
    """A small graph with the description of an exported network."""
    package = pytest.importorskip("onnx")
    from inference.test_onnx_detector import FACTS, GRAPH

    from ssdctl.checkpoint.exported import read_onnx

    model = package.parser.parse_model(GRAPH.replace("BATCH", "batch"))
    package.helper.set_model_props(model, FACTS.as_metadata())
    path = folder / "x.onnx"
    words = (b"\x0a\x80\x80\x80\x80\x08", b"location", b"../../etc/passwd", b"\x70\x01", b"TRT")
    inputs = mutated_bytes([model.SerializeToString()], words)
    yield file_target(path, inputs, lambda: read_onnx(path))


# Config


@contextmanager
def config(folder: Path) -> Iterator[Target]:
    from ssdctl.config import resolve

    path = folder / "c.toml"
    run_cli("config", "init", folder / "template.toml")
    text = (folder / "template.toml").read_bytes().replace(b"\n# ", b"\n")
    short = (
        b'[train]\npreset = "stable-r34"\nlr = 0.1\nepochs = 2\nwarmup = "3ep"\ndecay_epochs = [1, 2]\n'
        b'[data]\nroot = "data"\n[evaluate]\nnms_iou = 0.5\n[kubernetes]\nenv = ["A=b"]\n'
    )
    words = (
        b"[train]",
        b"train.lr = 1\n",
        b'"""',
        b"[[x]]",
        b"inf",
        b"1979-05-27",
        b"# ",
        b"bs = 2\n",
    )
    inputs = mutated_bytes([short, text], words)
    yield file_target(
        path,
        inputs,
        lambda: resolve(file=str(path), environment={}),
        lambda: run_cli("config", "validate", path),
    )


@contextmanager
def assignments(folder: Path) -> Iterator[Target]:
    """`--set KEY=VALUE`."""
    from ssdctl.config import resolve
    from ssdctl.config.resolve import parse_assignment

    samples = [b"train.lr=0.1", b"data.root=/data", b"kubernetes.env=A=b,C=d", b"train.warmup=3ep"]
    tokens = (b"train.", b"=", b",", b"evaluate.limit=", b"ep", b"st")

    numbers = itertools.count()

    def run(content: bytes) -> Result:
        text = content.decode("utf-8", "surrogateescape")
        if next(numbers) % COMMAND_EVERY == 0:
            return run_cli("config", "show", "--set", text)
        return as_command(lambda: resolve(overrides=[parse_assignment(text)], environment={}))

    yield Target(mutated_bytes(samples, tokens), run)


# Downloads


@contextmanager
def archive(folder: Path) -> Iterator[Target]:
    from ssdctl.download.archive import unpack
    from ssdctl.download.fetch import no_progress

    whole = zipped(
        {"a/1.jpg": bytes(700), "a/2.jpg": bytes(range(256)), "b.json": b"{}", "e/": b""}
    )
    path = folder / "a.zip"
    dest = folder / "data"

    def unpack_it() -> None:
        entries = unpack(path, dest, progress=no_progress)
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
    yield Target(mutated_bytes([whole], tokens), run)


@contextmanager
def manifest(folder: Path) -> Iterator[Target]:
    from ssdctl.download.pinned_files import read_manifest

    text = (
        b'[[file]]\nname = "a.zip"\nurl = "https://host/a.zip"\nbytes = 100\n'
        b'sha256 = "' + b"0" * 64 + b'"\nunpack = true\n'
    )
    tokens = (
        *(b"[[file]]\n", b"name = 7\n", b"http://", b"file:///", b"unpack = 1\n", b"bytes = -1\n"),
    )
    path = folder / "manifest.toml"
    command = ("download", "--dest", folder / "dest", "--manifest", path, "--dry-run")
    inputs = mutated_bytes([text], tokens)
    yield file_target(path, inputs, lambda: read_manifest(path), lambda: run_cli(*command))


class _Answer(socketserver.BaseRequestHandler):
    """Send the server's `reply` to a client and close the connection."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.settimeout(1)
            self.request.recv(65536)
            self.request.sendall(self.server.reply)  # type: ignore[attr-defined]
            self.request.shutdown(socket.SHUT_WR)
            while self.request.recv(65536):  # an RST would lose the reply
                pass


@contextmanager
def http(folder: Path) -> Iterator[Target]:
    """A server's status line, headers and body, byte by byte."""
    from ssdctl.download.fetch import fetch
    from ssdctl.download.http import RetryPolicy
    from ssdctl.download.pinned_files import PinnedFile

    body = bytes(range(256)) * 2
    digest = hashlib.sha256(body).hexdigest()
    policy = RetryPolicy(
        connect_s=1, read_s=0.2, stall_s=0.5, retries=1, connect_retries=1, backoff_s=0.0,
        longest_wait_s=0.01, restarts=1,
    )  # fmt: skip
    common = b'ETag: "1"\r\nContent-Type: application/octet-stream\r\nConnection: close\r\n'
    samples = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 512\r\n" + common + b"\r\n" + body,
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-511/512\r\nContent-Length: 512\r\n"
        + common + b"\r\n" + body,
        b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n" + common + b"\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /b\r\nContent-Length: 0\r\n" + common + b"\r\n",
        b"HTTP/1.1 416 No\r\nContent-Range: bytes */512\r\nContent-Length: 0\r\n" + common + b"\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + common + b"\r\n200\r\n" + body
        + b"\r\n0\r\n\r\n",
    ]  # fmt: skip
    tokens = (
        *(b"Retry-After: ", b"Content-Range: bytes ", b"Location: http://", b"\r\n\r\n", b"\r\n"),
        *(b"Content-Encoding: gzip\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: "),
        *(b"Fri, 31 Dec 9999 23:59:59 GMT", b"HTTP/1.1 100 Continue\r\n\r\n", b"://[", b"\x80"),
    )
    with socketserver.TCPServer(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/a.bin"

        def run(content: bytes) -> Result:
            server.reply = content  # type: ignore[attr-defined]
            target = folder / "a.bin"
            for size in (len(body), None):
                pin = PinnedFile("a.bin", url, digest, size)
                result = as_command(
                    lambda pin=pin: fetch(pin, folder, connections=2, retry_policy=policy)
                )
                for path in folder.glob("a.bin*"):
                    path.unlink()
                if result.code:
                    break
            assert not target.exists()
            return result

        yield Target(mutated_bytes(samples, tokens), run)
        server.shutdown()


# Run folders


@contextmanager
def metrics(folder: Path) -> Iterator[Target]:
    """metrics.jsonl, read by a resume and by the reader of reports."""
    from reporting.test_damaged_runs import make_run

    from ssdctl.runs.metrics import MetricsFile, read_metrics
    from ssdctl.runs.reader import read_run

    run_folder = make_run(folder / "run")
    path = run_folder / "metrics.jsonl"

    def read() -> None:
        run = read_run(run_folder)
        records, _ = read_metrics(path)
        assert run.best is None or run.best["AP"] is not None
        assert isinstance(run.class_ap, dict)
        assert all(isinstance(name, str) for _, name, _ in run.shown_events)
        MetricsFile(path, start_step=2)
        kept, num_skipped = read_metrics(path)  # rewritten
        assert num_skipped == 0
        assert kept == [r for r in records if r["step"] <= 2]

    tokens = (b'"kind"', b"eval", b'"step":', b'"AP": ', b"NaN", b"\n{}\n", b"null", b"true")
    yield file_target(path, mutated_bytes([path.read_bytes()], tokens), read)


@contextmanager
def report(folder: Path) -> Iterator[Target]:
    """A page of a run folder with one file damaged."""
    from reporting.test_damaged_runs import make_run

    run_folder = make_run(folder / "run")
    root = folder / "data"
    generate(root, num_train=1, num_val=2, seed=0)
    (folder / "d.json").write_text(json.dumps([BOX]))
    done = run_cli("evaluate", folder / "d.json", "--data", root, "--report", run_folder)
    assert done.code == 0, done.err
    names = ("metrics.jsonl", "environment.json", "evaluation.json", "config.toml")
    whole = {name: (run_folder / name).read_bytes() for name in names}
    lines = [json.loads(line) for line in whole["metrics.jsonl"].splitlines()]

    def as_lines(value: Any) -> bytes:
        records = value if isinstance(value, list) else [value]
        return b"\n".join(json.dumps(record).encode() for record in records)

    inputs = st.one_of(
        st.tuples(st.just("metrics.jsonl"), mutated_tree([lines]).map(as_lines)),
        *(st.tuples(st.just(name), mutated_json([json.loads(whole[name])])) for name in names[1:3]),
        st.tuples(st.just("config.toml"), mutated_bytes([whole["config.toml"]])),
    )

    def run(damaged: tuple[str, bytes]) -> Result:
        for name, content in whole.items():
            (run_folder / name).write_bytes(damaged[1] if name == damaged[0] else content)
        return run_cli("report", run_folder)

    yield Target(inputs, run)


# launch


@contextmanager
def host_file(folder: Path) -> Iterator[Target]:
    from ssdctl.launch.mpirun import read_hosts

    path = folder / "hosts"
    text = b"# two nodes\nnode-1 slots=8\nnode-2 slots=8 max_slots=8\n10.0.0.3\n[fe80::1]\n"
    tokens = (b"--mca", b"$(id)", b";", b" slots=", b"`", b"%", b"node-1\n", b"\x00", b"\xc2\xa0")
    command = ("launch", "--cpus", 4, "--nodes", 2, "--hostfile", path, "--dry-run")

    def run() -> Result:
        first = run_cli(*command, "--launcher", "mpirun")
        return first if first.code else run_cli(*command, "--launcher", "torchrun")

    inputs = mutated_bytes([text], tokens)
    yield file_target(path, inputs, lambda: read_hosts(path), run)


TARGETS: dict[str, Callable[[Path], AbstractContextManager[Target]]] = {
    "annotations: coco": coco,
    "annotations: voc": _exported(exports.voc_lists, "Annotations/*.xml", XML),
    "annotations: voc list": _exported(exports.voc_lists, "ImageSets/Main/train.txt", (b" -1",)),
    "annotations: cvat": _exported(
        exports.cvat_xml, "annotations.xml", (*XML, b"<box ", b"<track ")
    ),
    "annotations: darknet": _exported(exports.darknet, "data/parts.data", (b"names = ", b"=")),
    "annotations: tf-csv": _exported(exports.tf_csv, "data/train_labels.csv", (b",", b'"', b"nan")),
    "annotations: kitti": _exported(exports.kitti, "training/label_2/*.txt", (b" nan", b" -1")),
    "annotations: yolo": _exported(exports.roboflow_yolo, "train/labels/*.txt", (b"0 ", b" 0.5")),
    "annotations: data.yaml": _exported(
        exports.roboflow_yolo,
        "data.yaml",
        (b"&a [*a]", b"!!python/object:os.system", b"<<: ", b": "),
    ),
    "annotations: open images": _exported(
        exports.open_images, "*train*.csv", (b",", b"/m/0bolt", b'"')
    ),
    "annotations: dataset.toml": _exported(
        with_dataset_toml,
        "dataset.toml",
        (b"[made]", b"[test]", b"images = 1\n", b'"../.."', b"annotations = []\n", b"[[a]]"),
    ),
    "annotations: results": results,
    "store": store,
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
