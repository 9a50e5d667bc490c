"""Make docs/images/ from a demo folder: `make_images.py DEMO WORK OUT`.

scripts/screenshots calls it.

The terminal is an SVG by rich, the report a screenshot by headless Chromium, the detections are
the demo's sheet, drawn by `ssdctl predict`. The hero image shows all three, in light and dark.
"""

from __future__ import annotations

import html
import io
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

MAX_BYTES = 300_000
COLUMNS = 84
LIGHT_TERMINAL = TerminalTheme(
    (255, 255, 255),
    (36, 41, 47),
    [(36, 41, 47), (180, 35, 24), (17, 99, 41), (122, 80, 0), (9, 79, 176), (110, 55, 170),
     (20, 108, 120), (87, 96, 106)],
)  # fmt: skip
DARK_TERMINAL = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    [(110, 118, 129), (255, 123, 114), (126, 231, 135), (242, 204, 96), (121, 192, 255),
     (210, 168, 255), (118, 227, 234), (177, 186, 196)],
)  # fmt: skip
COMMAND = ["evaluate", "run", "--device", "cpu"]
HERO = """<!doctype html><meta charset="utf-8"><style>
* {{ box-sizing: border-box }}
body {{ margin: 0; width: 1600px; height: 800px; overflow: hidden; background: {back};
  font-family: sans-serif }}
figure {{ position: absolute; margin: 0; border-radius: 12px; overflow: hidden;
  border: 1px solid {line}; box-shadow: 0 12px 36px {shadow}; background: {paper} }}
img {{ display: block; width: 100% }}
</style><body>
<figure style="left:24px;top:24px;width:560px">{sheet}</figure>
<figure style="left:610px;top:24px;width:966px;height:752px">{report}</figure>
<figure style="left:24px;top:470px;width:700px">{terminal}</figure>
"""


def main() -> None:
    demo, work, out = (Path(argument).absolute() for argument in sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    sheet = demo / "detections.png"
    with Image.open(sheet) as image:
        image.convert("RGB").save(out / "detections.jpg", quality=88, optimize=True)
    page = work / "report.html"
    run_ssdctl(demo, "report", "run", "--out", str(page), "--quiet")
    output = terminal_output(demo, COMMAND)
    for name, terminal in (("light", LIGHT_TERMINAL), ("dark", DARK_TERMINAL)):
        svg = out / f"terminal-{name}.svg"
        svg.write_text(terminal_svg(output, terminal), encoding="utf-8")
        report = work / f"report-{name}.png"
        screenshot(page, report, work, width=1200, height=1100, is_dark=name == "dark")
        save_small(report, out / f"report-{name}.webp")
        hero = work / "hero.html"
        hero.write_text(hero_page(sheet, report, svg, is_dark=name == "dark"), encoding="utf-8")
        screenshot(hero, work / "hero.png", work, width=1600, height=800, is_dark=name == "dark")
        save_small(work / "hero.png", out / f"hero-{name}.webp")
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>8,} bytes  {path.name}")


def run_ssdctl(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "ssdctl", *arguments], cwd=folder, check=True)


def terminal_output(folder: Path, command: list[str]) -> str:
    """Return what a command writes to a terminal, with its escape codes."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ssdctl", *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=subprocess.DEVNULL,
    )
    os.close(child)
    parts = []
    try:
        while part := os.read(parent, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    if process.wait():
        raise SystemExit(f"ssdctl {' '.join(command)} failed")
    return b"".join(parts).decode().replace("\r\n", "\n")


def terminal_svg(output: str, theme: TerminalTheme) -> str:
    """Return a terminal window as SVG that requests no font from another host."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ ssdctl {' '.join(COMMAND[:2])}", style="bold"))
    console.print(Text.from_ansi(output))
    text = console.export_svg(title="ssdctl", theme=theme)
    text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.S)
    return text.replace("Fira Code", "DejaVu Sans Mono").replace("font-variant: east-asian", "")


def hero_page(sheet: Path, report: Path, terminal: Path, *, is_dark: bool) -> str:
    colors = (
        {"back": "#0d1117", "paper": "#161b22", "line": "#30363d", "shadow": "#000c"}
        if is_dark
        else {"back": "#f6f8fa", "paper": "#fff", "line": "#d0d7de", "shadow": "#0003"}
    )
    parts = {
        name: f'<img src="{html.escape(path.as_uri())}">'
        for name, path in (("sheet", sheet), ("report", report), ("terminal", terminal))
    }
    return HERO.format(**colors, **parts)


def screenshot(
    page: Path, target: Path, work: Path, *, width: int, height: int, is_dark: bool
) -> None:
    """Save a page as a PNG, as Chromium shows it with a light or dark theme."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is missing: apt-get install chromium")
    subprocess.run(
        [
            browser,
            *["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"],
            *["--disable-sync", "--disable-background-networking", "--disable-component-update"],
            "--allow-file-access-from-files",
            "--hide-scrollbars",
            "--virtual-time-budget=5000",
            f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
            f"--user-data-dir={work / 'browser'}",
            f"--window-size={width},{height}",
            f"--screenshot={target}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


def save_small(source: Path, target: Path) -> None:
    """Save an image as WebP, with the best quality that gives at most MAX_BYTES."""
    with Image.open(source) as opened:
        image = opened.convert("RGB")
    for quality in range(92, 40, -4):
        image.save(target, quality=quality, method=6)
        if target.stat().st_size <= MAX_BYTES:
            return
    raise SystemExit(f"{target} has more than {MAX_BYTES:,} bytes")


if __name__ == "__main__":
    main()
