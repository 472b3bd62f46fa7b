"""Packages of npm are the pinned ones, or none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.web import AXE, need_npm

from trigrid.errors import Refused
from trigrid.web.npm import unpacked


def test_a_package_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_npm()
    folder = unpacked(AXE, tmp_path)
    assert (folder / "axe.min.js").stat().st_size > 100_000
    monkeypatch.setenv("PATH", "")
    assert unpacked(AXE, tmp_path) == folder
    assert list(tmp_path.iterdir()) == [folder]


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    need_npm()
    with pytest.raises(Refused, match="what npm fetched is another file: sha512-FHfa"):
        unpacked(replace(AXE, integrity="sha512-AAAA"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_npm_says_is_told(tmp_path: Path) -> None:
    need_npm()
    with pytest.raises(Refused, match=r"axe-core@0\.0\.0-none: npm pack failed: npm"):
        unpacked(replace(AXE, version="0.0.0-none"), tmp_path)


def test_without_npm_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Refused, match=r"axe-core@4\.14\.1: has to be fetched with npm, .* apt-get install npm"):
        unpacked(AXE, tmp_path)
