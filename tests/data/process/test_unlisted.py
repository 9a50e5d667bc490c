"""A folder that cannot be listed is refused in every format, and never taken for an empty one."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from data.formats import exports
from data.generator.writers import LAYOUTS

import ssdctl
from ssdctl.data.annotations import AUTOMATIC
from ssdctl.data.dataset import read_dataset, resolve_images
from ssdctl.errors import SsdctlError
from ssdctl.inference.sources import find_sources


def check(root: Path) -> None:
    for number, layout in enumerate(LAYOUTS):
        data = exports.generated(root / str(number), layout, 3)
        whole = str(resolve_images(read_dataset(data, AUTOMATIC)))
        folders = sorted(p for p in (root / str(number)).rglob("*") if p.is_dir())
        for folder, mode in itertools.product(folders, (0, 0o311)):
            folder.chmod(mode)
            try:
                found = str(resolve_images(read_dataset(data, AUTOMATIC)))
            except (SsdctlError, PermissionError):
                found = whole
                with pytest.raises(SsdctlError):
                    ssdctl.prepare(data, store=root / "store", force=True)
            if folder != data and data in folder.parents:
                with pytest.raises(SsdctlError, match=f"listing .*{folder.name}"):
                    find_sources([str(data)], recursive=True)
            folder.chmod(0o755)
            assert found == whole, f"{layout}: without {folder} it has {found}"


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="root lists any folder")
def test_no_format_takes_it_for_an_empty_one(tmp_path: Path) -> None:
    user = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", "--"]
    code = "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
    code += "from data.process.test_unlisted import check; check(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parents[2])]
    command = [*user, *command] if os.geteuid() == 0 else command
    subprocess.run(command, check=True)
