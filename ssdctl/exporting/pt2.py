"""Export by torch.export: a `.pt2` file that PyTorch loads without ssdctl.

program = torch.export.load("ssd.pt2").module()
boxes, scores = program(images)
"""

from __future__ import annotations

import io

import msgspec
import torch

from ssdctl.checkpoint.reader import Checkpoint
from ssdctl.exporting.deployed import (
    Comparison,
    Deployed,
    ExportOptions,
    Pictures,
    Reference,
    example,
)
from ssdctl.exporting.onnx import description

METADATA = "ssdctl.json"
MAX_BATCH = 65_536


def pt2_program(
    checkpoint: Checkpoint, pictures: Pictures, options: ExportOptions
) -> tuple[bytes, Comparison]:
    """Return the network as a `.pt2` file; compared with PyTorch after it is loaded again.

    The description of the detector is the extra file `ssdctl.json`.

    Args:
        checkpoint: Ours or a third-party one.
        pictures: (P, 300, 300, 3) RGB, to compare on; at least 2.
        options: `nms` is none or raw.

    Raises:
        IntegrityError: The outputs differ.
    """
    # torch 2.6 refuses a batch without a limit.
    dynamic = None if options.batch else {"images": {0: torch.export.Dim("batch", max=MAX_BATCH)}}
    with torch.inference_mode(False), torch.no_grad():
        program = torch.export.export(
            Deployed(checkpoint, options), (example(options),), dynamic_shapes=dynamic
        )
    file = io.BytesIO()
    metadata = msgspec.json.encode(description(checkpoint, options)).decode()
    torch.export.save(program, file, extra_files={METADATA: metadata})
    file.seek(0)
    loaded = torch.export.load(file).module()
    reference = Reference(checkpoint, pictures, options, "torch.export")
    comparison = reference.check_outputs(
        lambda part: [output.numpy() for output in loaded(torch.from_numpy(part))]
    )
    return file.getvalue(), comparison
