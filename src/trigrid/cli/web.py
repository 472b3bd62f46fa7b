"""`trigrid web`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trigrid.cli.app import Quiet, app, examples
from trigrid.errors import Problem, Refused

PORT = 8330


@app.command(
    help_epilogue=examples(
        "trigrid web",
        "trigrid web --port 9000 --no-browser",
        "trigrid web runs/20260101-120000-llama3-8b",
        "trigrid web --export site",
    )
)
def web(
    run_dir: Annotated[Path | None, Parameter(help="A run's folder, to be shown as well while it goes on.")] = None,
    *,
    port: Annotated[int, Parameter(help="TCP port to listen on; 0: any that is free.")] = PORT,
    host: Annotated[
        str, Parameter(help="Address to listen on; any but this machine's own lets others in, without a password.")
    ] = "127.0.0.1",
    browser: Annotated[bool, Parameter(help="Open the page in a browser.")] = True,
    export: Annotated[
        Path | None, Parameter(help="Write the page as a folder of files that needs no server, and end.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Open the planner as a page, on which every dial of a training can be turned.

    It is served on this machine until Ctrl-C. A run's folder is read, and never written.
    """
    from trigrid.report.console import Console

    console = Console(quiet)
    if export is not None:
        from trigrid.web.export import export_site

        if run_dir is not None:
            raise Refused([Problem("export", export, "a run's folder cannot be shown without a server: leave one out")])
        export_site(export, console.say)
        return
    from trigrid.web.serve import listen, serve

    run = None
    if run_dir is not None:
        from trigrid.web.run.view import RunView

        run = RunView(run_dir)
    with listen(host, port) as listening:
        if (exposed := listening.exposed) and not quiet:
            console.warn(exposed)
        print(listening.url, flush=True)
        console.say("Ctrl-C ends it")
        serve(listening, run, open_browser=browser)
