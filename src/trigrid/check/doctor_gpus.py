"""What nvidia-smi says of this node's GPUs: clocks and what holds them back, memory errors, PCIe, NVLink."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from trigrid.report.doctor import Finding

FIELDS = (
    "index,name,driver_version,clocks.sm,clocks.max.sm,temperature.gpu,clocks_throttle_reasons.gpu_idle,"
    "clocks_throttle_reasons.hw_slowdown,clocks_throttle_reasons.sw_thermal_slowdown,"
    "ecc.errors.uncorrected.volatile.total,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "pcie.link.width.max"
)
"""As `nvidia-smi --help-query-gpu` names them; newer drivers take these names besides clocks_event_reasons."""
ANSWER_S = 15.0
SLOW_CLOCK = 0.6
"""Share of its highest clock below which a GPU that multiplies is held back by something."""
Gpu = Mapping[str, str]


class Smi:
    """nvidia-smi, asked while something else runs; `answer` waits for it."""

    def __init__(self, *arguments: str) -> None:
        program = shutil.which("nvidia-smi")
        self._process = (
            subprocess.Popen((program, *arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            if program
            else None
        )

    def answer(self) -> str | None:
        """What it said; None where it is missing, failed, or took too long."""
        if self._process is None:
            return None
        try:
            text, _ = self._process.communicate(timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return None
        return text if self._process.returncode == 0 else None


def ask_gpus() -> Smi:
    return Smi(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")


def ask_nvlink() -> Smi:
    return Smi("nvlink", "--status")


def read_gpus(text: str) -> list[Gpu]:
    """The lines of `nvidia-smi --query-gpu=FIELDS --format=csv,noheader,nounits`."""
    names = FIELDS.split(",")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def read_nvlink(text: str) -> dict[int, list[float | None]]:
    """GPU → GB/s of each of its links as `nvidia-smi nvlink --status` says, None for one that is down."""
    found: dict[int, list[float | None]] = {}
    links: list[float | None] = []
    for line in text.splitlines():
        if gpu := re.match(r"\s*GPU (\d+):", line):
            links = found.setdefault(int(gpu[1]), [])
        elif link := re.match(r"\s*Link \d+:\s*(?:([\d.]+) GB/s|(.*))", line):
            links.append(float(link[1]) if link[1] else None)
    return found


def judge_gpus(gpus: Sequence[Gpu], host: str) -> Iterator[Finding]:
    """Of GPUs while those with a rank multiplied; one that is idle has a low clock, and a link that rests."""
    for gpu in gpus:
        who = f"GPU {gpu['index']}"
        clock, most = _number(gpu, "clocks.sm"), _number(gpu, "clocks.max.sm")
        reasons = [name for name in ("hw_slowdown", "sw_thermal_slowdown") if _throttled(gpu, name)]
        idle = _throttled(gpu, "gpu_idle")
        if clock and most:
            slow = bool(reasons) or clock < SLOW_CLOCK * most
            degrees, held = gpu["temperature.gpu"], f", held back: {', '.join(reasons)}" if reasons else ""
            yield Finding(
                what=f"{who} clock",
                verdict="told" if idle else "wrong" if slow else "sound",
                measured=f"{clock:,.0f} MHz at {degrees} °C{', idle' if idle else held}",
                expected=f"near {most:,.0f} MHz",
                advice="" if idle else "look at its cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
                where=(host,),
                value=clock,
                usual=most,
                unit="MHz",
            )
        errors = _number(gpu, "ecc.errors.uncorrected.volatile.total")
        if errors:
            advice = "its memory is bad: take the node out, reset the GPU, and have it replaced if they come again"
            yield _wrong(f"{who} memory errors", f"{errors:,.0f} uncorrected", "none", advice, host)
        for what in ("width",) if idle else ("width", "gen"):
            now, best = _number(gpu, f"pcie.link.{what}.current"), _number(gpu, f"pcie.link.{what}.max")
            if now and best and now < best:
                advice = "reseat it, or look for a bad riser: copies to the host and NICs behind it are slower"
                yield _wrong(f"{who} PCIe {what}", f"{now:.0f}", f"{best:.0f}", advice, host)


def judge_nvlink(links: Mapping[int, Sequence[float | None]], host: str) -> Iterator[Finding]:
    if not any(links.values()):
        reason = "GPUs are not joined by NVLink"
        yield Finding(what="NVLink", verdict="not here", measured=reason, where=(host,))
        return
    most = max(map(len, links.values()))
    for gpu, there in links.items():
        up = sum(link is not None for link in there)
        total = sum(link or 0.0 for link in there)
        yield Finding(
            what=f"GPU {gpu} NVLink",
            verdict="sound" if up == most else "wrong",
            measured=f"{up} links, {total:,.0f} GB/s",
            expected=f"{most} links",
            advice="a link is down: nvidia-smi nvlink --errorcounters; restart the fabric manager, else mend it",
            where=(host,),
            value=float(up),
            usual=float(most),
            unit="links",
        )


def _throttled(gpu: Gpu, reason: str) -> bool:
    return gpu[f"clocks_throttle_reasons.{reason}"] == "Active"


def _number(gpu: Gpu, name: str) -> float | None:
    with suppress(ValueError):
        return float(gpu[name])
    return None


def _wrong(what: str, measured: str, expected: str, advice: str, host: str) -> Finding:
    return Finding(what=what, verdict="wrong", measured=measured, expected=expected, advice=advice, where=(host,))
