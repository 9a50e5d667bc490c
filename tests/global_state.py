"""The state of a process that belongs to its program, before and after calls of the library.

`live` runs lines of Python in a fork, and reports their results and what each of them changed.
"""

import contextlib
import dataclasses
import decimal
import faulthandler
import gc
import hashlib
import importlib
import inspect
import json
import locale
import logging
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import PIL.ImageFile
import torch
from faults import score_in_this_process
from torch import distributed as dist

import ssdctl

# Packages that change the process when they are imported.
IMPORTED = ("matplotlib.font_manager", "requests", "torch.distributed", "torch.utils.tensorboard")
IMPORTED_FOR_COMPILING = ("torch._dynamo", "torch._inductor.compile_fx")
WAIT_S = 3.0  # for threads that end by themselves
SETUP = """
import gc, os, signal, threading, time, warnings
from itertools import islice
import numpy as np, torch, ssdctl
TINY = dict(backbone="tiny", backbone_weights="none", batch_size=2, warmup="1st", workers=1, lr=0.0025,
            optimizer="adamw", precision="fp32", device="cpu", preset="stable-r34", progress=False)
OBJECT = [torch.zeros(3, 90, 120)], [{"boxes": torch.tensor([[9.0, 9, 60, 50]]), "labels": torch.tensor([1])}]
class Broken(ssdctl.Observer):
    def on_step(self, step): 1 / 0
class Stopping(ssdctl.Observer):
    def __init__(self, *signals): self.signals = signals
    def on_step(self, step): [os.kill(os.getpid(), number) for number in self.signals]
"""
# Of the ranks of a group.
FOR_RANKS = """
import json, shutil
from pathlib import Path
rank, given, inside, kept = torch.distributed.get_rank(), {}, lambda trainer: None, {}
network = ssdctl.SSD300.from_checkpoint("run")
class At(ssdctl.Observer):
    def __init__(self, hook, act): setattr(self, f"on_{hook}", lambda *_: act())
def fail(error): raise error
def done(folder):
    if rank: return rank  # the folder may be the first rank's
    steps = [r["step"] for r in ssdctl.Run(folder).metrics if r["kind"] == "train"]
    assert len(steps) == len(set(steps))
    return torch.load(f"{folder}/checkpoints/last.pt", weights_only=True)["model"]
def configured(*, tile=None, **train): return ssdctl.configure(train=train, data={"tile": tile} if tile else {})
def spoil(name, how):
    path, kept[name] = Path(name), None
    if path.exists(): kept[name] = path.rename(f"{name}.kept")
    path.parent.mkdir(exist_ok=True)
    if how == "folder": path.mkdir()
    if how == "text": path.write_text("[")
    if how == "half" and kept[name] and kept[name].is_file():
        content = kept[name].read_bytes()
        path.write_bytes(content[:len(content) // 2])
def relabel(how):
    spoil("shapes", "gone")
    shutil.copytree("shapes.kept", "shapes")
    for path in Path("shapes/annotations").iterdir():
        content = json.loads(path.read_text())
        if how == "boxes": content["annotations"][0]["bbox"] = [0, 0, 20, 20]
        for entry in content["categories"] if how == "ids" else (): entry["id"] *= 2
        for entry in content["annotations"] if how == "ids" else (): entry["category_id"] *= 2
        path.write_text(json.dumps(content))
    ssdctl.prepare("shapes", progress=False)
def repair():
    for name, was in kept.items():
        path = Path(name)
        if path.is_dir(): shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if was: was.rename(name)
    kept.clear()
"""
frozen = 0  # objects that `live` left out of garbage collection
Line = tuple[str, ...]  # several ones run at the same time, in threads


def state() -> dict[str, Any]:
    """Return what a call of the library must leave as it is."""
    gc.collect()
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    umask = os.umask(0)
    os.umask(umask)
    root, mpl = logging.root, sys.modules.get("matplotlib")
    generator = np.random.get_state(legacy=True)
    return {
        "torch's generator": torch.get_rng_state().tolist(),
        "numpy's generator": (generator[1].tolist(), *generator[2:]),
        "random's generator": random.getstate(),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "signals": {n: signal.getsignal(n) for n in signal.valid_signals()},
        "wakeup": wakeup,
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "processes": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "files": _open_files(),
        "temporary files": sorted(Path(os.environ["TMPDIR"]).iterdir()),
        "torch": _torch_settings(),
        "numpy": (np.geterr(), np.get_printoptions()),
        "matplotlib": mpl and {**mpl.rcParams},  # with the backend
        "logging": (list(root.handlers), root.level, list(root.filters), root.manager.disable),
        "loggers": {
            n: _settings_of(x) for n, x in [*root.manager.loggerDict.items()] if "." not in n
        },
        "group": dist.is_initialized() and (dist.get_rank(), dist.get_world_size()),
        "place": (Path.cwd(), umask, locale.setlocale(locale.LC_ALL), os.sched_getaffinity(0)),
        "sys": (list(sys.path), list(sys.meta_path), list(sys.argv), sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, threading.excepthook, sys.displayhook, sys.gettrace()),
        "interpreter": (sys.getswitchinterval(), sys.getrecursionlimit()),
        "faulthandler": faulthandler.is_enabled(),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), is_frozen()),
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "others": (socket.getdefaulttimeout(), decimal.getcontext().prec),
        "Pillow": (PIL.Image.MAX_IMAGE_PIXELS, PIL.ImageFile.LOAD_TRUNCATED_IMAGES),
    }


def is_frozen() -> bool:
    """Return whether objects were left out of garbage collection since `live` did so."""
    return gc.get_freeze_count() > frozen


def _torch_settings() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    # Once the compiler is imported, torch itself notes this at an optimizer's first use.
    entry = "__dynamo_disable" if "torch._dynamo" in sys.modules else ""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "anomalies": torch.is_anomaly_enabled(),
        "printing": dataclasses.asdict(torch._tensor_str.PRINT_OPTS),
        "processes": torch.multiprocessing.get_start_method(allow_none=True),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "optimizer": {
            n: [a for a in dir(inspect.unwrap(f)) if a != entry]
            for n, f in vars(torch.optim.Optimizer).items()
            if inspect.isfunction(f)
        },
    }


def _settings_of(logger: Any) -> Any:
    if not isinstance(logger, logging.Logger):  # of a name that only others contain
        return 0, [], True, False
    return logger.level, list(logger.handlers), logger.propagate, logger.disabled


def _open_files() -> list[str]:
    """Return the open files of this folder, and pipes."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            path = str(link.readlink())
            if path.startswith((f"{Path.cwd()}/", "pipe:")):
                found.append(path)
    return sorted(found)


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in before.items():
        if value != after[name]:
            pair = value, after[name]
            if all(isinstance(v, dict) for v in pair):
                keys = {**pair[0], **pair[1]}
                pair = tuple({k: v.get(k) for k in keys if pair[0].get(k) != pair[1].get(k)} for v in pair)  # fmt: skip
            found[name] = " -> ".join(str(v)[:300] for v in pair)
    return found


def digest(value: Any) -> Any:
    """Return a value that is equal for equal results of calls."""
    if isinstance(value, torch.Tensor):
        return digest(value.detach().numpy())
    if isinstance(value, np.ndarray):
        return [value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, torch.nn.Module):
        return digest(dict(value.state_dict()))
    if isinstance(value, ssdctl.Result):
        return digest([value.boxes, value.scores, value.labels, list(value.names)])
    if isinstance(value, ssdctl.Run):
        last = torch.load(value.path / "checkpoints/last.pt", weights_only=True)
        return digest([last["model"], [r.get("loss", r.get("AP")) for r in value.metrics]])
    if isinstance(value, ssdctl.Evaluation):
        found = msgspec.to_builtins([value.calibration, value.samples])  # the AP may be 0
        return digest([value.metrics, value.about.detections, found])
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, dict):
        return {str(k): digest(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [digest(v) for v in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__


class Lived(msgspec.Struct):
    """What happened to a line: the digests of its results, and what it changed."""

    line: Line
    results: list[Any]
    changed: dict[str, str]


def live(lines: Sequence[Line], folder: Path, pipe: Any, group: tuple[int, int] | None) -> None:
    """Run lines in a folder, and send what happened; a line that begins with # only prepares."""
    score_in_this_process()
    own = folder / "tmp" / str(group and group[0])
    own.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(own)
    os.chdir(folder)
    if group is not None:
        rank, size = group
        store = dist.FileStore(str(folder.parent / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    compiles = any(word in str(lines) for word in ("deterministic", "meta", "profile"))
    for module in (*IMPORTED, *IMPORTED_FOR_COMPILING * compiles):
        importlib.import_module(module)
    names: dict[str, Any] = {}
    exec(SETUP + FOR_RANKS * (group is not None), names)
    gc.collect()
    gc.freeze()  # else collecting, twice for each line, takes half of the time
    global frozen
    frozen = gc.get_freeze_count()
    lived = []
    for line in lines:
        before = state()
        if len(line) == 1:
            results = [_run(line[0], names)]
        else:
            with ThreadPoolExecutor(len(line)) as pool:
                results = list(pool.map(lambda text: _run(text, names), line))
        names.pop("result", None)
        end = time.monotonic() + WAIT_S
        if "torch.rand" in str(lines):  # a thread of the program's own draws
            before.pop("torch's generator")
        while (changed := differences(before, state())) and time.monotonic() < end:
            time.sleep(0.05)
        lived.append(Lived(line, results, {} if line[0].startswith("#") else changed))
    pipe.send_bytes(msgspec.json.encode(lived))
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


def _run(text: str, shared: dict[str, Any]) -> Any:
    names = {**shared}
    try:
        exec(text, names)
        return json.loads(json.dumps(digest(names.pop("result", None))))
    except ssdctl.errors.SsdctlError as error:
        return re.sub(r"out-\d+", "OUT", digest(error).replace(str(Path.cwd()), "."))
    except (KeyboardInterrupt, ZeroDivisionError) as error:  # the lines' own
        return type(error).__name__
    except BaseException:
        return traceback.format_exc()
