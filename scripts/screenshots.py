"""Take the pictures of docs/page.md: each view of a made run, light and dark.

The run is made by `tests/made_run.py` from a seed, so that the pictures change only when the page does.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from made_run import MadeRun  # noqa: E402

TARGET = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1280, 860
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CURVES = (
    *("reward/mean", "eval/score", "train/entropy"),
    *("response_tokens/mean", "time/rollout_s", "train/clip_fraction"),
)


def places(url: str) -> dict[str, str]:
    """Name of the picture -> place."""
    run = "run/shop-agent"

    def first(query: str) -> str:
        with urllib.request.urlopen(f"{url}/api/runs/shop-agent/search?limit=1&q={query}") as reply:
            return json.load(reply)["episodes"][0]["uuid"]

    episode = first("calculator+reward%3D1+step%3D12+outcome%3Atrained")
    failed = first("status%3Afailed+type%3Atrain")
    return {
        "run": run,
        "curves": f"{run}/curves?with=shop-agent-2&m={','.join(CURVES)}",
        "config": f"{run}/config?with=shop-agent-2",
        "steps": f"{run}/steps",
        "step": f"{run}/steps/12",
        "evaluations": f"{run}/evaluations",
        "sample": f"{run}/samples/3",
        "episodes": f"{run}/episodes",
        "episode": f"episode/{episode}",
        "episode-failed": f"episode/{failed}",
        "alignment": f"{run}/alignment",
        "fleet": f"{run}/fleet",
        "try": f"{run}/try",
        "runs": "",
    }


def main() -> None:
    browser_path = next(
        found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))
    )
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        MadeRun(Path(folder) / "shop-agent").write()
        MadeRun(Path(folder) / "shop-agent-2", seed=2, steps=24).write()
        command = [sys.executable, "-m", "tinkerscript", "view", folder, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
            assert view.stdout is not None
            url = view.stdout.readline().strip().rstrip("/")
            try:
                take(url, browser_path)
            finally:
                view.terminate()


def take(url: str, browser_path: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)
            page = context.new_page()
            for name, place in places(url).items():
                page.goto(f"{url}/#/{place}")
                page.locator("main .card, main .banner").first.wait_for()
                expect(page.locator("[aria-busy=true]")).to_have_count(0)
                page.evaluate(
                    "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
                )
                save(page.screenshot(), TARGET / f"{name}-{theme}.png")
            context.close()
        browser.close()


def save(picture: bytes, path: Path) -> None:
    """With a palette, in a third of the size."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
