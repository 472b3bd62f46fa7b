// How a question reaches Python: the server's endpoints. A site without a server has another file in this one's place.

/** Which of many open pages asks: a newer slow question of one page ends its older one. */
const PAGE = Math.random().toString(36).slice(2);

/**
 * @param {string} name @param {object} body @param {AbortSignal} signal
 * @returns {Promise<{answer: any} | {problems: object[]}>}
 */
export async function send(name, body, signal) {
  const response = await fetch(`api/${name}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Page": PAGE },
    body: JSON.stringify(body),
    signal,
  });
  const text = await response.text();
  if (response.ok) return { answer: JSON.parse(text) };
  return { problems: problemsOf(text) ?? [{ key: "", value: null, reason: `the server answers ${response.status}: ${text.slice(0, 200)}` }] };
}

function problemsOf(text) {
  try {
    return JSON.parse(text).problems;
  } catch {
    return undefined;
  }
}
