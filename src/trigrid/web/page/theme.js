// Runs before the first paint, so that a chosen theme does not flash. Without a choice the system's preference holds.
try {
  const chosen = localStorage.getItem("trigrid.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be forbidden: the system's preference holds.
}
