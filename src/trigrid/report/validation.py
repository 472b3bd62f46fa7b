"""Plans beside measurements, for people and as JSON."""

from __future__ import annotations

from collections import Counter

from trigrid.plan.validate import Report
from trigrid.report.console import table

SCHEMA = "trigrid.validate/1"
MOST_REASONS = 8


def validation_text(report: Report) -> str:
    """Errors by family and by source, then why rows were left out."""
    rows = [
        [
            summary.kind,
            summary.group,
            str(summary.rows),
            *(f"{value:.1%}" for value in (summary.median, summary.mean, summary.p90)),
            f"{summary.bias:+.1%}",
            f"{summary.within_10:.0%}",
        ]
        for summary in report.summary
    ]
    used = sum(row.used for row in report.rows)
    lines = [f"{used} of {len(report.rows)} rows are scored"]
    if rows:
        header = ["of", "group", "rows", "median", "mean", "p90", "bias", "within 10 %"]
        lines += ["", *(line.rstrip() for line in table(header, rows).splitlines())]
    reasons = Counter(reason for row in report.rows if not row.used for reason in row.skipped_because.split("; "))
    if reasons:
        lines += ["", "not scored, because"]
        lines += [f"  {count:4}  {reason}" for reason, count in reasons.most_common(MOST_REASONS)]
    return "\n".join(lines)


def validation_json(report: Report) -> dict[str, object]:
    """Every row as it was planned, and the errors of each group."""
    return {
        "schema": SCHEMA,
        "rows": [
            {
                "id": row.id,
                "source": row.source,
                "model": row.model,
                "family": row.family,
                "used": row.used,
                "used_for_time": row.time_used,
                "used_for_memory": row.memory_used,
                "skipped_because": row.skipped_because,
                "predicted_step_s": row.predicted_step_s,
                "measured_step_s": row.measured_step_s,
                "predicted_memory_bytes": row.predicted_memory_bytes,
                "measured_memory_bytes": row.measured_memory_bytes,
                "meter": row.meter,
                "assumptions": list(row.assumptions),
            }
            for row in report.rows
        ],
        "summary": [
            {
                "kind": summary.kind,
                "group": summary.group,
                "rows": summary.rows,
                "median": summary.median,
                "mean": summary.mean,
                "p90": summary.p90,
                "bias": summary.bias,
                "within_10": summary.within_10,
            }
            for summary in report.summary
        ],
    }
