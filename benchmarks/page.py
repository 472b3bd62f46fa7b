"""The page in headless Chromium: from a key press to the updated document, first paint, and many users at once.

    python benchmarks/page.py

Key press: arrow keys on dials of Llama-3 405B on 1,024 GPUs with 16 pipeline ranks and 128 microbatches, each to a
layout that was not asked for before; from the press, as the browser dates it, to the change of the document, and to the
frame that shows it. CPU: of the server's processes and of the page's main thread, per press: what remains of it on a
busy machine. First paint: of visitors with an empty cache. Users: each asks for plans, one after the other.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.web import FLAGS, browser_path, serving

STATE = "model=llama3-405b&gpus=1024&gpu=h100&tp=8&pp=16&zero=1&micro-batch=1&seq=8192&global-batch=1024"
MICROBATCHES = 128
SWEEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ArrowUp", ()),
    ("ArrowDown", ("ArrowLeft",)),
    ("ArrowUp", ("ArrowRight", "ArrowRight")),
    ("ArrowDown", ("ArrowRight",)),
)
"""Through the values of the sequence, for each ZeRO stage, which the keys after it lead to."""
VISITORS = 5
USERS, QUESTIONS_EACH, THINK_S = 50, 20, 0.2
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
WATCH = """() => {
    const answer = document.getElementById("answer");
    window.presses = [];
    let pressed = null;
    addEventListener("keydown", (event) => { pressed = event.timeStamp; }, true);
    new MutationObserver(() => {
        if (pressed === null) return;
        const press = { changed: performance.now() - pressed };
        const begun = pressed;
        pressed = null;
        // The frame after this one begins when this one has been painted.
        requestAnimationFrame(() => requestAnimationFrame(() => {
            press.shown = performance.now() - begun;
            window.presses.push(press);
        }));
    }).observe(answer, { attributes: true, attributeFilter: ["data-turn"] });
}"""


def spread(values: list[float], unit: str = "ms") -> str:
    """Median, 95th of a hundred, most, and of how many."""
    p95 = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    return f"median {median(values):6.1f}, p95 {p95:6.1f}, most {max(values):6.1f} {unit} ({len(values)})"


def cpu_s(pids: list[int]) -> float:
    """CPU seconds that these processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """The process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def servers() -> list[int]:
    """The processes of the server that this one started."""
    return [pid for pid in family(os.getpid())[1:] if "trigrid" in Path(f"/proc/{pid}/cmdline").read_text()]


class MainThread:
    """CPU seconds of a page's main thread, from here on."""

    def __init__(self, page: Page):
        self.session = page.context.new_cdp_session(page)
        self.session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.begun_s = self.now_s()

    def now_s(self) -> float:
        metrics = self.session.send("Performance.getMetrics")["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    @property
    def spent_s(self) -> float:
        return self.now_s() - self.begun_s


def press(page: Page, key: str) -> None:
    """Press a key and wait until its answer is shown."""
    before = page.evaluate("window.presses.length")
    page.keyboard.press(key)
    page.wait_for_function("before => window.presses.length > before", arg=before, timeout=60_000, polling=5)


def legal_steps(server: str) -> tuple[int, int]:
    """Values of the sequence's dial above the one that is shown, and of the whole dial."""
    state = ask(server, "link", {"query": STATE})["state"]
    control = next(c for c in ask(server, "plan", {"state": state})["controls"] if c["key"] == "batch.sequence")
    legal = [choice["value"] for choice in control["values"] if choice["legal"]]
    return sum(value > control["value"] for value in legal), len(legal)


def key_presses(browser: Browser, server: str) -> None:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(f"{server}#{STATE}")
    page.wait_for_selector("#answer[data-turn]")
    page.wait_for_load_state("networkidle")
    shown = page.locator("[data-figure=microbatches] strong").inner_text()
    assert shown == str(MICROBATCHES), f"{shown} microbatches, not {MICROBATCHES}"
    page.evaluate(WATCH)
    server_s, thread = cpu_s(servers()), MainThread(page)
    sequence = page.locator("[data-key='batch.sequence'] input.entry")
    zero = page.locator("[data-key='parallel.zero'] input:checked")
    above, values = legal_steps(server)
    for way, to_stage in SWEEPS:
        zero.focus()
        for key in to_stage:
            press(page, key)
        sequence.focus()
        for _ in range(values - 1 if to_stage else above):
            press(page, way)
    found = page.evaluate("window.presses")
    print("key press to the updated document: ", spread([one["changed"] for one in found]))
    print("key press to the frame that shows it:", spread([one["shown"] for one in found]))
    server_ms, page_ms = 1e3 * (cpu_s(servers()) - server_s) / len(found), 1e3 * thread.spent_s / len(found)
    print(f"CPU per press: server {server_ms:.1f} ms, page {page_ms:.1f} ms, deeper panels at rest included")
    page.context.close()


def first_paint(browser: Browser, server: str) -> None:
    painted, answered = [], []
    for _ in range(VISITORS):
        page = browser.new_context().new_page()
        page.goto(server)
        page.wait_for_selector("#answer[data-turn]")
        answered.append(float(page.evaluate("performance.now()")))
        painted.append(float(page.evaluate(PAINTED)))
        page.context.close()
    print("first paint:                        ", spread(painted))
    print("first answer, at most:              ", spread(answered))


def post(address: str, question: str, body: object) -> tuple[int, bytes]:
    """Status and content of the answer to a question."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    try:
        connection.request("POST", f"/api/{question}", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def ask(address: str, question: str, body: object) -> Any:
    status, content = post(address, question, body)
    assert status == 200, content
    return json.loads(content)


def many_users(server: str) -> None:
    def user(number: int) -> list[tuple[int, float]]:
        found = []
        for turn in range(QUESTIONS_EACH):
            values: dict[str, Any] = {"parallel.tp": 8, "parallel.pp": 16, "batch.global_batch": 1024 + 8 * number}
            state = {"model": "llama3-405b", "gpus": 1024, "values": values | {"batch.sequence": 1024 * (turn + 1)}}
            begun = time.perf_counter()
            status, _ = post(server, "plan", {"state": state})
            found.append((status, time.perf_counter() - begun))
            time.sleep(THINK_S)
        return found

    begun = time.perf_counter()
    with ThreadPoolExecutor(USERS) as pool:
        answers = [answer for mine in pool.map(user, range(USERS)) for answer in mine]
    took_s = time.perf_counter() - begun
    errors = sum(status != 200 for status, _ in answers)
    rate = len(answers) / took_s
    print(
        f"{USERS} users, {len(answers)} plans: {errors} errors, {rate:.0f}/s; ", spread([1e3 * s for _, s in answers])
    )
    assert not errors


def main() -> None:
    load = os.getloadavg()[0]
    version = subprocess.run([browser_path(), "--version"], capture_output=True, text=True).stdout.strip()
    print(f"{version}; load of this machine before: {load:.1f} on {os.cpu_count()} cores")
    with serving() as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), headless=True, args=list(FLAGS))
        first_paint(browser, server)
        key_presses(browser, server)
        browser.close()
        many_users(server)


if __name__ == "__main__":
    main()
