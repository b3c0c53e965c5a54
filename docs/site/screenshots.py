"""The pictures in docs of pages: `make screenshots` makes the pages, and a browser draws them.

Each page comes from the commands that its document names; only lengths and sizes of the runs are
chosen here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
TOY = ROOT / "examples" / "third_party_backend"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, SHOWN_WIDTH = 1280, 960
HELD_OUT = ("eval.fraction=0.05", "eval.every=20")
RUNS = {
    "with_rates": ("run.steps=120", "parallel.rates=rates.json", *HELD_OUT),
    "short": ("run.steps=60", "model.width=64", "optimizer.lr=0.001", *HELD_OUT),
    "narrow": ("run.steps=60", "model.width=96", "data.batch_size=8"),
}


def anychip(folder: Path, *words: str, path: str = "") -> None:
    """Runs a command in a folder; of a backend that is not installed, with the path to it."""
    environment = {**os.environ, "PYTHONPATH": path} if path else dict(os.environ)
    subprocess.run(
        [sys.executable, "-m", "anychip", *words], cwd=folder, env=environment, check=True
    )


def page_of_runs(folder: Path) -> Path:
    """Three runs of other sizes, of which one knows its device's rates."""
    anychip(folder, "bench", "device", "--backend", "cpu", "--json", "rates.json")
    for name, settings in RUNS.items():
        anychip(folder, "train", "--backend", "cpu", "--out", name, *settings)
    anychip(folder, "report", *RUNS, "-o", "compared.html")
    return folder / "compared.html"


def page_of_the_suite(folder: Path) -> Path:
    """Of the example of a third party."""
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", folder / "toy", TOY], check=True)
    anychip(
        folder, "conformance", "--backend", "toy", "--html", "report.html", path=str(folder / "toy")
    )
    return folder / "report.html"


def draw(page: Path, height: int, picture: Path) -> None:
    """The page's beginning, as high as it is said, scaled down."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(
            f"there is no browser here (looked for {', '.join(BROWSERS)}): apt install chromium"
        )
    whole = page.with_suffix(".png")
    subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={page.parent / 'profile'}", f"--window-size={WIDTH},{height}",
            f"--screenshot={whole}", page.as_uri(),
        ],
        check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with Image.open(whole) as image:
        size = (SHOWN_WIDTH, height * SHOWN_WIDTH // WIDTH)
        smaller = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        # A quarter of the bytes. The other methods give up the colours of few pixels: lines. This
        # one gives large areas a hue that they do not have, if not for k-means.
        few = smaller.quantize(256, Image.Quantize.MAXCOVERAGE, 3, dither=Image.Dither.NONE)
        few.save(picture, optimize=True)
    print(f"drawn: {picture.relative_to(ROOT)}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        draw(page_of_runs(Path(name)), 2000, ROOT / "docs" / "run-report.png")
        draw(page_of_the_suite(Path(name)), 4000, ROOT / "docs" / "conformance-report.png")


if __name__ == "__main__":
    main()
