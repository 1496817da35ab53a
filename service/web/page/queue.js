// The pictures that are to be classified, a few at a time; busy answers are tried again, cancelled ones are not.

const AT_ONCE = 4;
const TRIES = 4;
const BUSY = ["queue_full", "receiving_full", "engine_unavailable", "draining"];

export class Queue {
  /** `onChange(picture)` runs after each step of a picture. */
  constructor(onChange) {
    this.onChange = onChange;
    this.options = {};
    this.waiting = [];
    this.running = new Set();
    this.round = []; // the pictures that the progress bar counts
    this.controller = new AbortController();
  }

  get busy() { return this.waiting.length + this.running.size > 0; }

  get progress() {
    return this.round.reduce((sum, picture) => sum + (isDone(picture) ? 1 : 0.9 * picture.progress), 0) / Math.max(1, this.round.length);
  }

  get done() { return this.round.filter(isDone).length; }

  add(pictures) {
    if (!this.busy) this.round = [];
    for (const picture of pictures) {
      picture.state = "waiting";
      picture.progress = 0;
      this.waiting.push(picture);
      this.round.push(picture);
      this.onChange(picture);
    }
    this.pump();
  }

  cancel() {
    this.controller.abort();
    this.controller = new AbortController();
    for (const picture of this.waiting.splice(0)) this.finish(picture, "cancelled");
  }

  pump() {
    while (this.running.size < AT_ONCE && this.waiting.length) {
      const picture = this.waiting.shift();
      this.running.add(picture);
      this.run(picture);
    }
  }

  async run(picture) {
    const { signal } = this.controller;
    picture.state = "sending";
    picture.error = null;
    this.onChange(picture);
    try {
      await this.classify(picture, signal);
      this.end(picture, "answered");
    } catch (error) {
      picture.error = error;
      this.end(picture, error.name === "AbortError" ? "cancelled" : "failed");
    }
  }

  async classify(picture, signal) {
    const onProgress = (share) => {
      picture.progress = share;
      this.onChange(picture);
    };
    for (let left = TRIES - 1; ; left -= 1) {
      try {
        return await picture.classify({ ...this.options, signal, onProgress });
      } catch (error) {
        if (left === 0 || !BUSY.includes(error.code)) throw error;
        await pause(1000 * Math.min(error.retryAfter, 10), signal);
      }
    }
  }

  end(picture, state) {
    this.running.delete(picture);
    this.finish(picture, state);
    this.pump();
  }

  finish(picture, state) {
    picture.state = state;
    this.onChange(picture);
  }
}

const isDone = (picture) => !["waiting", "sending"].includes(picture.state);

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("cancelled", "AbortError"));
    }, { once: true });
  });
}
