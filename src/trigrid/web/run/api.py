"""The endpoints of a run: GET alone, one for each question."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from trigrid.web.run.view import CURSOR, RunView

PATTERN = f"^({CURSOR.pattern})?$"


def run_router(run: RunView) -> APIRouter:
    """The questions of `run`, below /api/run."""
    router = APIRouter(prefix="/api/run", tags=["run"])

    @router.get("")
    def facts() -> dict[str, Any]:
        """What the run is, and its plan (`trigrid.plan/1`)."""
        return run.facts()

    @router.get("/progress")
    def progress(
        since: Annotated[str, Query(pattern=PATTERN, description="The `cursor` of an earlier answer.")] = "",
    ) -> dict[str, Any]:
        """How it goes: the steps recorded since an earlier answer, how it stands, its events."""
        return run.progress(since)

    @router.get("/goodput")
    def goodput() -> dict[str, Any]:
        """Where its time went (`trigrid.report/1`), and what is to be expected."""
        return run.goodput()

    @router.get("/compare")
    def compare() -> dict[str, Any]:
        """Memory and time of its pipeline stages by category, planned and measured."""
        return run.compare()

    @router.get("/timeline")
    def timeline() -> dict[str, Any]:
        """The step that it recorded beside the planned one."""
        return run.timeline()

    return router
