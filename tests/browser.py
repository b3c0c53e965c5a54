"""Pages laid out by a browser, in frames of the widths of a screen and of a phone.

``measure.js`` beside this file says what is where. .ci/run installs a browser and sets
ANYCHIP_TEST_BROWSER=required; elsewhere tests are skipped where there is none.
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

WIDTHS = (1280, 390)
SCHEMES = {"dark": 0, "light": 1}
"""Values of blink's preferredColorScheme."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        problem = f"there is no browser here (looked for {', '.join(BROWSERS)})"
        if os.environ.get("ANYCHIP_TEST_BROWSER") == "required":
            pytest.fail(f"{problem}; apt-get install chromium")
        pytest.skip(problem)
    return found


def laid_out(page: str, scheme: str, folder: Path) -> list[dict[str, Any]]:
    """What ``measure.js`` says of the page in each width."""
    script = Path(__file__).with_name("measure.js").read_text(encoding="utf-8")
    frames = "".join(
        f'<iframe width="{width}" height="800" srcdoc="{html.escape(page)}"></iframe>'
        for width in WIDTHS
    )
    outer = folder / "outer.html"
    outer.write_text(f'<pre id="answers"></pre><script>{script}</script>{frames}', "utf-8")
    done = subprocess.run(
        [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--window-size=1400,2000",
            "--virtual-time-budget=20000", "--dump-dom", outer.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="answers">(\[.*?\])</pre>', done.stdout, re.DOTALL)
    assert found, f"no answer from the browser: {done.stderr[-2000:]}"
    answers: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return answers


def check_legible(answers: list[dict[str, Any]], scheme: str) -> None:
    """Nothing is cut off, pale, small or empty, in any width."""
    assert [answer["width"] for answer in answers] == list(WIDTHS)
    for answer in answers:
        assert answer["outside"] == []
        assert answer["spilling"] == []
        assert answer["scroll_width"] <= answer["width"]
        assert answer["pale"] == [], "contrast below 4.5"
        assert answer["small"] == [], "letters below 9 px"
        assert answer["empty"] == []
        light = sum(map(int, re.findall(r"\d+", answer["background"])[:3])) > 3 * 128
        assert light == (scheme == "light")
