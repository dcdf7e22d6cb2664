"""Make the README's picture: the upper part of a run's report, as a browser shows it.

python tools/readme_picture.py RUN [--out docs/images/report.png]

Needs Chromium (Debian: chromium) and writes a PNG with few colours, small enough for a repository.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from holdfast.execution.files import write_atomically
from holdfast.report import open_run
from holdfast.report.page import render

WIDTH, COLOURS, MOST_BYTES = 1000, 128, 300_000
KEPT = ("curriculum", "forgetting", "matrix")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip


def trimmed(page: str) -> str:
    """A report with its head and a few sections alone, without what folds out."""
    parts = re.findall(r'(<(section|figure) id="(\w+)".*?</\2>)', page, re.S)
    for whole, _, name in parts:
        if name not in KEPT:
            page = page.replace(whole, "")
    return re.sub(r"<(details|figcaption)>.*?</\1>", "", page, flags=re.S)


def screenshot(page: str, browser: str, height: int) -> Image.Image:
    """The page as a browser of the given height shows it."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "page.html", Path(folder) / "page.png"
        source.write_text(page, encoding="utf-8")
        size = f"--window-size={WIDTH},{height}"
        command = [
            browser,
            *FLAGS,
            f"--user-data-dir={folder}/profile",
            size,
            f"--screenshot={target}",
            source.as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return Image.open(io.BytesIO(target.read_bytes())).convert("RGB")


def without_margin(image: Image.Image) -> Image.Image:
    """The picture without what is empty at its bottom."""
    ground = Image.new("RGB", image.size, image.getpixel((2, image.height - 2)))
    from PIL import ImageChops

    box = ImageChops.difference(image, ground).getbbox()
    return image.crop((0, 0, image.width, min(image.height, (box[3] if box else image.height) + 16)))


def main() -> None:
    """Read the arguments and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "images" / "report.png"
    )
    arguments = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("chromium is not installed (apt install chromium)")
    image = without_margin(screenshot(trimmed(render(open_run(arguments.run))), browser, 4000))
    buffer = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    if len(buffer.getvalue()) > MOST_BYTES:
        sys.exit(f"the picture has {len(buffer.getvalue()):,} bytes, more than {MOST_BYTES:,}")
    write_atomically(arguments.out, buffer.getvalue())
    print(f"{arguments.out}: {image.width} x {image.height}, {len(buffer.getvalue()):,} bytes")


if __name__ == "__main__":
    main()
