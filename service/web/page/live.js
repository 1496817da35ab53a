// The load of the service, from two reads of /metrics.

import { send } from "./api.js";

const EVERY = 2000; // milliseconds
const WINDOW = 21_000; // milliseconds: includes the tenth read before the last

/** Sum the samples in Prometheus' text format by name, and a histogram's by bound. */
export function parse(text) {
  const sums = { buckets: new Map(), model: "" };
  for (const line of text.split("\n")) {
    const found = /^(\w+)(\{.*\})? (\S+)/.exec(line);
    if (!found) continue;
    const [, name, labels = "", value] = found;
    if (name === "vit_model_info") sums.model += labels;
    else if (name === "vit_request_duration_seconds_bucket") {
      if (!labels.includes('endpoint="/classify"')) continue;
      const bound = /le="([^"]+)"/.exec(labels)[1];
      sums.buckets.set(bound === "+Inf" ? Infinity : Number(bound), Number(value));
    } else sums[name] = (sums[name] ?? 0) + Number(value);
  }
  return sums;
}

/** Return the four figures between two reads, `seconds` apart; null if nothing happened. */
export function between(earlier, later, seconds) {
  const change = (name) => (later[name] ?? 0) - (earlier[name] ?? 0);
  const batches = change("vit_batch_size_count");
  const counts = [...later.buckets].map(([bound, count]) => [bound, count - (earlier.buckets.get(bound) ?? 0)]).sort(([a], [b]) => a - b);
  return { rate: change("vit_images_total") / seconds, batch: batches > 0 ? change("vit_batch_size_sum") / batches : null,
    queue: later.vit_queue_depth ?? 0, p50: median(counts) };
}

/** Return the median in seconds of cumulative counts by upper bound, interpolated like histogram_quantile. */
function median(counts) {
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let [below, before] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= total / 2) return bound === Infinity ? below : below + ((bound - below) * (total / 2 - before)) / (count - before);
    [below, before] = [bound, count];
  }
  return null;
}

/**
 * Show the load every two seconds. `compare()` runs if the models may differ from the page's; it returns whether the page
 * could compare them. The first look runs it, too: it may be later than the page's list of models.
 */
export function watchLoad(compare) {
  const looks = [];
  let compared = null; // the models in /metrics at the last comparison
  const show = (id, text) => { document.getElementById(`live-${id}`).textContent = text; };
  async function look() {
    if (document.hidden) return;
    try {
      const sums = parse(await send("GET", "metrics", { type: "text" }));
      const model = sums.model || compared; // a service without a ready model lists none
      const isRestarted = sums.vit_images_total < looks.at(-1)?.sums.vit_images_total;
      if (isRestarted || model !== compared) {
        if (isRestarted || compared) looks.length = 0;
        if (await compare()) compared = model;
      }
      looks.push({ at: performance.now(), sums });
    } catch (error) {
      looks.length = 0;
      for (const id of ["rate", "batch", "queue", "p50"]) show(id, "–");
      document.querySelector("footer").classList.remove("empty");
      show("note", error.code === "no_answer" ? "the service does not answer" : "the service does not expose its metrics to this page");
      return;
    }
    while (looks[0].at < looks.at(-1).at - WINDOW) looks.shift();
    show("note", "over the last 20 seconds");
    const [first, last] = [looks[0], looks.at(-1)];
    if (first === last) return;
    const { rate, batch, queue, p50 } = between(first.sums, last.sums, (last.at - first.at) / 1000);
    if (batch !== null) document.querySelector("footer").classList.remove("empty");
    show("rate", rate < 10 ? rate.toFixed(1) : Math.round(rate));
    show("batch", batch === null ? "–" : batch.toFixed(1));
    show("queue", queue);
    show("p50", p50 === null ? "–" : `${Number((1000 * p50).toPrecision(2))} ms`);
  }
  look();
  setInterval(look, EVERY);
}
