"""TensorBoard's page of a run as a person sees it, in a real browser without a window.

    apt-get install --no-install-recommends chromium chromium-driver        # 130 MB; without it this test is skipped
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import TrainConfig
from common.distributed import single_process
from tests.helpers import write_shards
from train_single import train

SECONDS = 60
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
             "--disable-dev-shm-usage", "--window-size=1500,5000"]  # tall: cards out of sight load nothing
LOOK = """
function* nodes(node) {
    for (const child of node.childNodes) {
        yield child;
        if (child.shadowRoot) yield* nodes(child.shadowRoot);
        if (!["STYLE", "SCRIPT"].includes(child.nodeName)) yield* nodes(child);
    }
}
const all = [...nodes(document.body)];
return {text: all.filter(node => node.nodeType == 3).map(node => node.data).join(" "),
        images: all.filter(node => node.nodeName == "IMG" && node.naturalWidth > 100).map(node => node.src),
        charts: all.filter(node => node.nodeName == "CANVAS" || node.nodeName == "svg").length};
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")), reason="chromium and chromedriver are not here")]


@contextmanager
def server(line: list[str], pattern: str) -> Iterator[str]:
    """Start a program that says where it listens, which `pattern` finds; and end it with all that it has started."""
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        said = ""
        for text in process.stdout or ():
            said += text
            if found := re.search(pattern, text):
                yield found[1]
                return
        raise AssertionError(said)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def call(url: str, values: dict[str, Any] | None = None, method: str = "POST") -> Any:
    """One command of the WebDriver protocol."""
    data, headers = json.dumps(values or {}).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)["value"]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has validated twice and kept its trace."""
    folder = tmp_path_factory.mktemp("browser")
    shards, val = write_shards(folder / "train", (8, 4)), write_shards(folder / "val", (5,), num_classes=2)
    config = TrainConfig(
        shard_path=(str(shards),), val_path=(str(val),), arch="tiny", image_size=32, batch_size=4, device="cpu",
        num_workers=0, n_epochs=2, trace=("save",), report_s=0.0, output=str(folder / "run"))
    device = torch.device("cpu")
    with single_process(device) as world:
        train(config, world, [device])
    return folder / "run"


def test_the_page_shows_numbers_pictures_and_the_trace(output: Path) -> None:
    line = [sys.executable, "-m", "tensorboard.main", "--logdir", str(output), "--host", "127.0.0.1", "--port", "0"]
    with ExitStack() as stack:
        page = stack.enter_context(server(line, r"(http://127\.0\.0\.1:\d+/)"))
        port = stack.enter_context(server(["chromedriver", "--port=0"], r"started successfully on port (\d+)"))
        options = {"alwaysMatch": {"goog:chromeOptions": {"args": ARGUMENTS}}}
        session = call(f"http://127.0.0.1:{port}/session", {"capabilities": options})["sessionId"]
        browser = f"http://127.0.0.1:{port}/session/{session}"
        images = look(browser, page, "images", ["start/first batch", "val/confusion", "train/trace", "step 6"], 3)
        scalars = look(browser, page, "scalars", ["train/loss", "train/data_wait", "train/lr", "val/top1", "val/loss"])
        call(browser, method="DELETE")
    assert len(set(images["images"])) == 3 and scalars["charts"] > 6


def look(browser: str, page: str, tab: str, wanted: list[str], num_images: int = 0) -> dict[str, Any]:
    """Open a tab of the page and wait until it shows all that is wanted; fails with the text that it shows."""
    call(f"{browser}/url", {"url": "about:blank"})
    call(f"{browser}/url", {"url": f"{page}#{tab}&tagFilter=."})  # of the groups of tags only two are open at first
    deadline = time.monotonic() + SECONDS / 2
    while True:
        seen = call(f"{browser}/execute/sync", {"script": LOOK, "args": []})
        text = " ".join(seen["text"].split())
        if all(words in text for words in wanted) and len(set(seen["images"])) >= num_images:
            return seen
        assert time.monotonic() < deadline, f"{len(set(seen['images']))} images in {text}"
        time.sleep(0.5)
