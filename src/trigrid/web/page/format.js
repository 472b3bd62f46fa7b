// How figures are written: the unit decides, never the place where they stand.

const GIB = 2 ** 30;
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 12,345 */
export const count = (n) => whole.format(n);

/** Three significant digits, without exponents for everyday sizes. */
export function short(x) {
  if (x === 0 || !Number.isFinite(x)) return String(x);
  const size = Math.abs(x);
  if (size >= 1000) return count(x);
  if (size < 1e-3) return x.toExponential(1);
  return Number(x.toPrecision(3)).toString();
}

/** GiB to a tenth; large ones in TiB. */
export function gib(bytes) {
  const size = bytes / GIB;
  if (Math.abs(size) >= 10240) return `${(size / 1024).toFixed(1)} TiB`;
  return `${Math.abs(size) >= 1000 ? count(size) : size.toFixed(1)} GiB`;
}

/** The bare number of GiB, for columns whose head names the unit. */
export const inGib = (bytes) => (bytes / GIB).toFixed(bytes && Math.abs(bytes) < 0.05 * GIB ? 2 : 1);

/** GB or TB in powers of ten, as published totals of model state are written. */
export function gb(bytes) {
  const size = bytes / 1e9;
  return size >= 10000 ? `${short(size / 1000)} TB` : `${size >= 100 ? count(size) : short(size)} GB`;
}

export function seconds(s) {
  const size = Math.abs(s);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${short(s * 1e6)} µs`;
  if (size < 1) return `${short(s * 1e3)} ms`;
  if (size < 600) return `${s.toPrecision(3)} s`;
  if (size < 2 * 3600) return `${short(s / 60)} min`;
  if (size < 2 * 86400) return `${short(s / 3600)} h`;
  if (size < 1000 * 86400) return `${short(s / 86400)} days`;
  return `${(s / 86400 / 365.25).toPrecision(2)} years`;
}

/** 345.6K, 12.3M, 405B, 15T */
export function big(n) {
  const size = Math.abs(n);
  for (const [limit, sign] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]]) {
    if (size >= limit) return short(n / (sign === "K" ? 1e3 : limit)) + sign;
  }
  return size >= 1000 ? count(n) : short(n);
}

/** A share as per cent, to a tenth. */
export const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** A change with its sign. */
export const change = (share) => `${share > 0 ? "+" : share < 0 ? "−" : "±"}${(Math.abs(share) * 100).toFixed(1)} %`;

/** GB/s for NVLink, Gb/s for NICs and what is above them. */
export const bandwidth = ({ name, bandwidth_Bps }) => (name === "NVLINK" ? `${short(bandwidth_Bps / 1e9)} GB/s` : `${short((bandwidth_Bps * 8) / 1e9)} Gb/s`);

/** A value with its unit, as figures carry it. */
export function figure({ value, unit }) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (unit === "bytes") return gib(value);
  if (unit === "s") return seconds(value);
  if (unit === "tokens/s") return `${big(value)} tokens/s`;
  if (unit.startsWith("of ") || unit.startsWith("idle ")) return unit === "of all units" ? big(value) : percent(value);
  return `${short(value)} ${unit}`.trim();
}

/** Words with a capital and a full stop. */
export const sentence = (words) => `${words[0].toUpperCase()}${words.slice(1)}${/[.!?]$/.test(words) ? "" : "."}`;

/** What an input of a formula is: numbers short, tables as pairs. */
export function anything(value) {
  if (typeof value === "number") return Number.isInteger(value) ? count(value) : short(value);
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value)) return value.map(anything).join(", ");
  if (typeof value === "object") return Object.entries(value).map(([k, v]) => `${k} ${anything(v)}`).join(", ");
  return String(value);
}
