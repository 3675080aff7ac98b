"""A real Chromium, driven by selenium, for pages that dex writes; without one, its tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-prefers-reduced-motion",  # no scrolling under way when a test looks
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A window of 1280 × 900 pixels, in the light theme. It can open files alone: no test needs a network."""
    driver = start(tmp_path_factory.mktemp("chromium"))
    yield driver
    driver.quit()


def start(profile: Path) -> Any:
    """A driver. Skips the test, and says why, where there is no Chromium or nothing that drives it."""
    binary = next((found for name in NAMES if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"none of {', '.join(NAMES)} is on PATH")
    chromedriver = shutil.which("chromedriver")
    if chromedriver is None:
        pytest.skip("chromedriver is not on PATH")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(chromedriver, env={**os.environ, "HOME": str(profile)})
    driver = webdriver.Chrome(options=options, service=service)
    emulate(driver)
    return driver


def emulate(driver: Any, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
    """A screen of this size, and what the system prefers; from the next page on, or at once."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def complaints(driver: Any) -> list[str]:
    """Errors of the page and its console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
