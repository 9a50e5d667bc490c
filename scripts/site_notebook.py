"""Run the notebook and add it with its outputs to the site (a hook of mkdocs, see mkdocs.yml).

It takes about a minute on two idle cores. With SSDCTL_DOCS_NOTEBOOK=0 the page has no outputs.
"""

from __future__ import annotations

import base64
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


def on_files(files: Any, *, config: Any) -> None:
    """Add the page and its images."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if os.environ.get("SSDCTL_DOCS_NOTEBOOK") != "0":
        from nbclient import NotebookClient

        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=600, resources=resources).execute()
    text, images = rendered(notebook)
    files.append(File.generated(config, "notebook.md", content=text))
    for name, content in images.items():
        files.append(File.generated(config, f"images/{name}", content=content))


def rendered(notebook: Any) -> tuple[str, dict[str, bytes]]:
    """Return the notebook as Markdown, and its images by name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"notebook-{len(images) + 1}.png"
                images[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above](images/{name})")
            elif output.get("name") != "stderr":  # has the progress bars
                block = f"```text\n{data.get('text/plain') or output.text}\n```"
                parts.append(f'<div class="nb-output" markdown>\n\n{block}\n\n</div>')
    return "\n\n".join(parts) + "\n", images
