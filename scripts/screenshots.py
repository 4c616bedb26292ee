"""Take the pictures of docs/page.md: each view of a made run, light and dark.

The run is made by `tests/made_run.py` from a seed, so that the pictures change only when the page does. Fleet
needs processes at work, so its picture is of a short run of the demo.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from made_run import MadeRun  # noqa: E402
from tinkerscript.page.annotation import Annotation, write_annotation  # noqa: E402

TARGET = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1280, 860
DEMO = ROOT / "examples" / "arithmetic.yaml"
LIVE = (
    f"--set=task.name={ROOT / 'examples' / 'arithmetic.py'}@arithmetic",
    "--set=training.steps=200",
    "--set=evaluation.episodes=100",
    "--set=interchange_server.interchange_server_port=0",
)
"""Settings of the demo with which it starts soon and goes on for long."""

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CURVES = (
    *("reward/mean", "eval/score", "train/entropy"),
    *("response_tokens/mean", "time/rollout_s", "train/clip_fraction"),
)


def places(url: str) -> dict[str, str]:
    """Name of the picture -> place."""
    run = "run/shop-agent"

    def first(query: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{url}/api/runs/shop-agent/search?limit=1&q={query}") as reply:
            return json.load(reply)["episodes"][0]

    episode = first("calculator+reward%3D1+step%3D12+outcome%3Atrained")
    failed = first("status%3Afailed+type%3Atrain")
    return {
        "run": run,
        "curves": f"{run}/curves?with=shop-agent-2&m={','.join(CURVES)}",
        "config": f"{run}/config?with=shop-agent-2",
        "steps": f"{run}/steps",
        "step": f"{run}/steps/12",
        "evaluations": f"{run}/evaluations",
        "sample": f"{run}/samples/{episode['sample']}",
        "episodes": f"{run}/episodes",
        "episode": f"episode/{episode['uuid']}",
        "episode-failed": f"episode/{failed['uuid']}",
        "alignment": f"{run}/alignment",
        "runs": "",
    }


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = next(found for name in BROWSERS if (found := shutil.which(name)))
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        made, live = Path(folder) / "made", Path(folder) / "live"
        first = MadeRun(made / "shop-agent").write()
        write_annotation(first, Annotation(note="lr too high after step 20?", tags=["baseline", "seed 1"]))
        MadeRun(made / "shop-agent-2", seed=2, steps=24).write()
        with command(made, "view", ".", "--port", "0") as url:
            for theme in THEMES:
                take(browser, url, places(url), theme)
        live.mkdir()
        with command(live, "train", str(DEMO), *LIVE) as url:
            for theme in THEMES:
                take_live(browser, url, theme)
        browser.close()


@contextmanager
def command(folder: Path, *arguments: str) -> Generator[str]:
    """The URL of the page of a command that runs while the block does."""
    argv = [sys.executable, "-m", "tinkerscript", *arguments]
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = (re.search(r"http://\S+", line) for line in process.stdout)
        url = next(match[0] for match in found if match).rstrip("/")
        reader = threading.Thread(target=process.stdout.read, daemon=True)  # So that it never waits for us.
        reader.start()
        try:
            yield url
        finally:
            process.terminate()
            process.wait()
            reader.join()


@contextmanager
def tab(browser: Browser, theme: Theme) -> Generator[Page]:
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)
    context.set_default_timeout(120_000)
    yield context.new_page()
    context.close()


def take(browser: Browser, url: str, where: dict[str, str], theme: Theme) -> None:
    with tab(browser, theme) as page:
        for name, place in where.items():
            page.goto(f"{url}/#/{place}")
            shoot(page, name, theme)


def take_live(browser: Browser, url: str, theme: Theme) -> None:
    with tab(browser, theme) as page:
        page.goto(url)
        expect(page.get_by_text(re.compile(r"^[3-9]\d* of \d+ steps|^[1-9]\d+ of \d+ steps"))).to_be_visible(
            timeout=120_000
        )
        page.get_by_role("link", name="Fleet").click()
        running = page.get_by_role("region", name="Running episodes").locator("tbody tr")
        expect(running.nth(8)).to_be_visible(timeout=60_000)
        shoot(page, "fleet", theme)


def shoot(page: Page, name: str, theme: Theme) -> None:
    page.locator("main .card, main .banner").first.wait_for()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    page.mouse.move(0, HEIGHT - 1)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    save(page.screenshot(), TARGET / f"{name}-{theme}.png")


def save(picture: bytes, path: Path) -> None:
    """In a third of the size: the 256 most frequent colors, which those of the grounds are among, and for the
    rest the nearest of them."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    frequent = sorted(image.getcolors(WIDTH * HEIGHT) or [], reverse=True)[:256]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, color in frequent for part in color])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
