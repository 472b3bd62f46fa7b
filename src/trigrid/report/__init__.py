"""What a person reads, and what is told to other programs.

console.py   lines, warnings and progress on standard error
metrics.py   the figures of a run: its facts, each step, its end
log.py       a run told as it goes: console, metrics.jsonl, trackers, loss curve
events.py    events.jsonl: what happened to a run; lines.py: files of one object a line
history.py   the steps before a run went on
status.py    how a run stands now; failures.py: what ranks that failed have left
doctor.py    what `trigrid doctor` has found, as a table and as JSON
lives.py     a run cut at its starts; goodput.py: where its time went; prospect.py: what to
             expect; goodput_text.py: both as text
samples.py   samples.jsonl: what some steps took and held; measured.py: a run's own figures
compare.py   a run beside its plan; gaps.py: the largest gap in words; compare_text.py: both as text;
             timelines.py: a recorded step beside the planned one
trackers.py  TensorBoard, W&B, MLflow, Prometheus
curve.py     the loss curve as text and as SVG
host.py      what the operating system says of this process
"""
