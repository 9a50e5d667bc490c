"""Python imports this module when it starts if `tests/conftest.py` has put its folder on PYTHONPATH."""

import narrow_ssd300

narrow_ssd300.install()
