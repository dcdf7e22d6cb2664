"""Make the README's pictures: the upper part of a run's report, or of a comparison, as a browser shows it.

python tools/readme_picture.py RUN                 # docs/images/report.png
python tools/readme_picture.py RUN OTHER [...]     # docs/images/comparison.png

--out puts the picture elsewhere. Needs Chromium (Debian: chromium) and writes a PNG with few colours, small enough for
a repository.
"""

import argparse
import dataclasses
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from holdfast.execution.files import write_atomically
from holdfast.report import compare, open_run
from holdfast.report.drawing.figures import figure
from holdfast.report.page import render
from holdfast.report.pictures.comparison import overlaid

WIDTH, COLOURS, MOST_BYTES = 1000, 128, 300_000
REPORT_PARTS = ("curriculum", "forgetting", "matrix")
COMPARISON_PARTS = ("outcomes", "curves_bits_per_byte")
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip


def trimmed(page: str, kept: tuple[str, ...]) -> str:
    """A page with its head and a few sections alone, without what folds out."""
    parts = re.findall(r'(<(section|figure) id="(\w+)".*?</\2>)', page, re.S)
    for whole, _, name in parts:
        if name not in kept:
            page = page.replace(whole, "")
    return re.sub(r"<(details|figcaption)\b[^>]*>.*?</\1>", "", page, flags=re.S)


def comparison(runs: list[Path]) -> str:
    """The page of a comparison whose first picture has the first two tasks alone, so that it fits a screen."""
    found = compare.compare(runs)
    text = compare.render(found)
    curves = overlaid(found.groups, "bits_per_byte")
    if curves is not None:
        text = text.replace(figure(curves), figure(dataclasses.replace(curves, panels=curves.panels[:2])))
    return text


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
    parser.add_argument("runs", type=Path, nargs="+", help="one run for its report, several to compare them")
    parser.add_argument("--out", type=Path, help="where the picture goes")
    arguments = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("chromium is not installed (apt install chromium)")
    if len(arguments.runs) == 1:
        name, page = "report.png", trimmed(render(open_run(arguments.runs[0])), REPORT_PARTS)
    else:
        name, page = "comparison.png", trimmed(comparison(arguments.runs), COMPARISON_PARTS)
    out = arguments.out or IMAGES / name
    image = without_margin(screenshot(page, browser, 4000))
    buffer = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    if len(buffer.getvalue()) > MOST_BYTES:
        sys.exit(f"the picture has {len(buffer.getvalue()):,} bytes, more than {MOST_BYTES:,}")
    write_atomically(out, buffer.getvalue())
    print(f"{out}: {image.width} x {image.height}, {len(buffer.getvalue()):,} bytes")


if __name__ == "__main__":
    main()
