"""`ssdctl push`: publish a model on the Hugging Face Hub."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ssdctl.cli.command import Call, command
from ssdctl.errors import UsageError


@command(
    "push",
    panel="Results",
    settings="download.mirror",
    examples=[
        "ssdctl push runs/coco-resnet34 hf://org/name --license apache-2.0",
        "ssdctl push best.pt hf://org/name --license apache-2.0 --private",
        "ssdctl push runs/coco-resnet34 hf://org/name --out card   # upload nothing",
    ],
)
def push(
    call: Call,
    checkpoint: Annotated[
        str, Argument(metavar="CKPT|RUN", help="Run folder (its best checkpoint) or checkpoint")
    ],
    target: Annotated[
        str,
        Argument(metavar="hf://ORG/NAME", help="Model repository; created if it does not exist"),
    ],
    license_id: Annotated[
        str, Option("--license", metavar="ID", help="License of the weights, e.g. apache-2.0")
    ] = "other",
    data_license: Annotated[
        str | None, Option(metavar="TEXT", help="License of the dataset")
    ] = None,
    samples: Annotated[
        int, Option(min=0, max=50, metavar="N", help="Number of sample images with detections")
    ] = 4,
    private: Annotated[bool, Option("--private", help="Create a private repository")] = False,
    message: Annotated[
        str, Option(metavar="TEXT", help="Commit message")
    ] = "Upload an SSD300 trained with ssdctl",
    out: Annotated[
        str | None, Option(metavar="DIR", help="Write the files to DIR without uploading")
    ] = None,
) -> None:
    """Publish a model on the Hugging Face Hub.

    The weights, a model card and sample images are uploaded. Log in with HF_TOKEN or
    `hf auth login`; HF_ENDPOINT selects another server.
    """
    from ssdctl.download.hub import hub_package, is_reference, parse_reference

    if not is_reference(target):
        raise UsageError(f"{target}: not a model repository", hint="expected hf://org/name")
    reference = parse_reference(target)
    if out is None:
        hub_package()
    from ssdctl.checkpoint.file import load_checkpoint, load_network
    from ssdctl.exporting.hub import upload_folder, write_model_folder
    from ssdctl.inference.model_source import locate_checkpoint

    content = load_checkpoint(locate_checkpoint(checkpoint, mirror=call.config.download.mirror))
    load_network(content)
    with tempfile.TemporaryDirectory(prefix="ssdctl-push-") as temporary:
        folder = Path(temporary if out is None else out)
        names = write_model_folder(
            content,
            folder,
            repo=reference.repo,
            license_id=license_id,
            data_license=data_license,
            samples=samples,
        )
        if license_id == "other":
            call.console.warning("no --license: the card says `other`")
        result = {"files": names, "repository": reference.repo, "url": None, "folder": out}
        if out is not None:
            call.console.result(result, f"{len(names)} files in {folder}")
            again = shlex.join(["ssdctl", "push", checkpoint, target])
            call.console.closing([("wrote", f"{folder} (nothing was uploaded)")], [again])
            return
        url = upload_folder(reference, folder, names, is_private=private, message=message)
        call.console.result({**result, "url": url}, f"{len(names)} files: {url}")
        call.console.closing([], [f"ssdctl predict {target} photo.jpg"])
