"""`trigrid web --export`: a site that any web server can give, with the answers of this Python, and no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from helpers.web import need_npm, serving
from playwright.sync_api import Page, expect

from trigrid.errors import Refused
from trigrid.web import export
from trigrid.web.export import MARK, export_site
from trigrid.web.npm import PYODIDE, unpacked
from trigrid.web.questions import answer

STATES: tuple[dict[str, Any], ...] = (
    {"model": "llama3-70b", "gpus": 64, "values": {"parallel.tp": 8, "parallel.pp": 4, "batch.global_batch": 70}},
    {"params": "300B", "gpus": 1024, "values": {"parallel.tp": 8, "parallel.pp": 16, "parallel.zero": 1}},
)
ASK = "async ([name, body]) => (await import('./transport.js')).send(name, body)"


def quietly(folder: Path) -> Path:
    export_site(folder, lambda said: None)
    return folder


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Where two answers differ; numbers count by twelve digits, since from Python 3.12 on `sum` rounds once, not at
    each term."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from differences(one.get(key), other.get(key), f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{place}[{number}]")
    elif isinstance(one, int | float) and isinstance(other, int | float):
        if one != pytest.approx(other, rel=1e-12):
            yield f"{place}: {one!r}, {other!r}"
    elif one != other:
        yield f"{place}: {one!r:.100}, {other!r:.100}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export two folders below what is served."""
    need_npm()
    return quietly(tmp_path_factory.mktemp("served") / "below" / "planner")


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where a plain file server gives it, under a path of its own."""
    root = site.parents[1]
    with serving("0", "--bind", "127.0.0.1", "--directory", root, module=("http.server",)) as server:
        yield f"{server}/below/planner/"


def asked(server: str, question: str, body: object) -> Any:
    """The answer of the server's endpoint."""
    content = {"Content-Type": "application/json"}
    request = Request(f"{server}/api/{question}", json.dumps(body).encode(), content)
    with urlopen(request, timeout=60) as response:
        return json.load(response)


def test_answers_are_those_of_the_server(address: str, server: str, open_page: Callable[..., Page]) -> None:
    """In a browser that reaches nothing but the file server."""
    page = open_page(f"{address}#model=llama3-70b&gpus=64&tp=8&pp=4")
    page.set_default_timeout(120_000)
    expect(page.locator("[data-figure=dp] strong")).to_have_text("2", timeout=120_000)
    for state in STATES:
        for question in ("plan", "timeline"):
            body = {"state": state}
            found = page.evaluate(ASK, [question, body])
            assert list(differences(found["answer"], asked(server, question, body))) == []
    wrong = {"state": STATES[0], "figure": "no-such-figure"}
    refused = page.evaluate(ASK, ["explain", wrong])
    with pytest.raises(Refused) as refusal:
        answer("explain", wrong)
    assert [problem["reason"] for problem in refused["problems"]] == [p.reason for p in refusal.value.problems]


RACE = """async ([slow, quick]) => {
    const { send } = await import("./transport.js");
    const stop = new AbortController();
    let searched = false;
    const search = send("best", slow, stop.signal).then(() => { searched = true; }, (error) => error.name);
    const { answer } = await send("plan", quick);
    const before = !searched;
    stop.abort();
    return [answer.verdict, before, await search, (await send("trace", quick)).answer.name];
}"""


def test_a_search_holds_up_nothing(address: str, open_page: Callable[..., Page]) -> None:
    """A dial is answered beside it; when nobody wants it any more, it ends and the next slow question is answered."""
    page = open_page(f"{address}#model=llama3-8b&gpus=8")
    page.set_default_timeout(180_000)
    large = {"model": "llama3-405b", "gpus": 16_384, "values": {"batch.global_batch": 2048}}
    small = {"model": "llama3-8b", "gpus": 8}
    verdict, before, ended, name = page.evaluate(RACE, [{"state": large}, {"state": small}])
    assert verdict == answer("plan", {"state": small})["verdict"]
    assert (before, ended) == (True, "AbortError")
    assert name.endswith(".json")


def test_an_export_replaces_only_an_export(site: Path, tmp_path: Path) -> None:
    folder = quietly(tmp_path / "site")
    (folder / "index.html").write_text("mine now")
    with pytest.raises(Refused, match=r"not as it was written: index\.html; give a folder that is empty"):
        quietly(folder)
    (folder / "index.html").write_bytes((site / "index.html").read_bytes())
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(Refused, match=r"not as it was written: notes\.txt"):
        quietly(folder)
    (folder / "notes.txt").unlink()
    (folder / "style.css").unlink()
    (folder / "style.css").symlink_to(site / "style.css")
    with pytest.raises(Refused, match=r"not as it was written: style\.css"):
        quietly(folder)
    (folder / "style.css").unlink()
    assert quietly(folder) == folder
    assert {file.name for file in folder.iterdir()} == {file.name for file in site.iterdir()}
    assert [file.name for file in tmp_path.iterdir()] == ["site"]


def test_what_is_a_persons_own_is_left_alone(site: Path, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("mine")
    with pytest.raises(Refused, match=f"has files and is no export of this command .no {MARK}."):
        quietly(tmp_path)
    with pytest.raises(Refused, match=r"own\.txt: is no folder"):
        quietly(tmp_path / "own.txt")
    (tmp_path / "empty").mkdir()
    assert (quietly(tmp_path / "empty") / "index.html").exists()
    assert (tmp_path / "own.txt").read_text() == "mine"


def test_an_export_that_fails_leaves_the_one_before(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quietly(tmp_path / "site")
    before = {file.name: file.stat().st_ino for file in folder.iterdir()}
    written = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.name == "trigrid.zip":
            raise OSError(28, "No space left on device")
        return written(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(Refused, match="cannot be written: No space left on device"):
        quietly(folder)
    assert {file.name: file.stat().st_ino for file in folder.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["site"]


def test_sizes_and_progress_are_told(tmp_path: Path) -> None:
    need_npm()
    said: list[str] = []
    export_site(tmp_path / "site", said.append)
    assert said[0] == f"{PYODIDE.called}: Python for the browser"
    (total,) = [line for line in said if " files" in line]
    size = sum(file.stat().st_size for file in (tmp_path / "site").rglob("*") if file.is_file() and file.name != MARK)
    assert total.split()[:2] == [f"{size / 1e6:.2f}", "MB"]
    assert "python -m http.server --directory" in said[-1]


def test_the_browsers_python_is_new_enough() -> None:
    need_npm()
    lock = json.loads((unpacked(PYODIDE) / "pyodide-lock.json").read_text())
    assert tuple(map(int, lock["info"]["python"].split(".")[:2])) >= (3, 11)


def test_the_chart_library_goes_along_with_its_licence(site: Path) -> None:
    assert "Chart.js v4" in (site / "lib" / "Chart.bundle.js").read_text()[:100]
    assert "MIT" in (site / "lib" / "LICENSE-chart.js.txt").read_text()


def test_the_site_tells_its_policy(site: Path) -> None:
    """A file server sends no header, so the page says itself that nothing comes from elsewhere."""
    index = (site / "index.html").read_text()
    assert f'<meta http-equiv="Content-Security-Policy" content="{export.POLICY}">' in index
    assert index.index("Content-Security-Policy") < index.index("<script")
