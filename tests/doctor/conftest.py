from pathlib import Path

import pytest
from doctor.machines import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "machine", monkeypatch)
