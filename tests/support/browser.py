"""A page as a browser shows it: Chromium without a window looks at it in a frame of any width."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LIGHT, DARK = 1, 0  # as Blink counts them

HERE = Path(__file__).parent
EARLY = f"<script>{(HERE / 'early.js').read_text()}</script>"

LATE = f"<script>{(HERE / 'late.js').read_text()}</script>"


def flags(profile: Path) -> list[str]:
    assert CHROMIUM is not None
    return [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--disable-dev-shm-usage", "--allow-file-access-from-files", "--hide-scrollbars",
    ]  # fmt: skip


def look(page: Path, width: int, scheme: int, folder: Path, axe: str = "") -> Any:
    """What a page is like at a width: overflow, overlaps, messages, requests, colours, cells."""
    text = page.read_text(encoding="utf-8")
    text = text.replace("<head>", f"<head>{EARLY}", 1)
    extra = f"<script>{axe}</script>" if axe else ""
    text = text.replace("</body></html>", f"{extra}{LATE}</body></html>")
    inner, outer = folder / "inner.html", folder / "outer.html"
    inner.write_text(text, encoding="utf-8")
    outer.write_text(
        "<!doctype html><pre id=found></pre><script>onmessage = (e) => "
        "{ document.getElementById('found').textContent = e.data; };</script>"
        f'<iframe src="inner.html" style="border:0;width:{width}px;height:9000px"></iframe>'
    )
    done = subprocess.run(
        [*flags(folder / "profile"), "--virtual-time-budget=20000", "--dump-dom",
         f"--blink-settings=preferredColorScheme={scheme}", outer.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told and told[1], done.stderr[-2000:]
    return json.loads(html.unescape(told[1]))
