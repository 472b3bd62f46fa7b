// Round numbers for axes.

/** 1, 2 or 5 times a power of ten, at least `size`. */
export function niceStep(size) {
  const power = 10 ** Math.floor(Math.log10(size));
  return [1, 2, 5, 10].find((n) => n * power >= size * 0.999) * power;
}

/** The marks of an axis from `from` to `to`, about `wanted` of them. */
export function marks(from, to, wanted) {
  if (!(to > from)) return [from];
  const step = niceStep((to - from) / wanted);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}
