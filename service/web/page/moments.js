// Moments at which scripts of extensions act: `models` with the `ModelChoice`, `answer` with the shown answer, or undefined.

const listeners = { models: [], answer: [] };
const last = {};

/** Call the listener at each such moment, and now for the last one. */
export function on(moment, listener) {
  listeners[moment].push(listener);
  if (moment in last) listener(last[moment]);
}

export function tellExtensions(moment, value) {
  last[moment] = value;
  for (const listener of listeners[moment]) listener(value);
}
