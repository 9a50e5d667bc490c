#!/usr/bin/env bash
# Test and measure one Gaudi card in at most 45 minutes; on_device.py says what it does.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/on_device.py" hpu "$@"
