// Classify the pictures, a few at a time.

const AT_ONCE = 4;

export class Queue {
  /** `onChange(picture)` runs after each step of a picture. */
  constructor(onChange) {
    this.onChange = onChange;
    this.options = {};
    this.waiting = [];
    this.running = new Set();
    this.round = []; // the pictures that the progress bar counts
  }

  get busy() { return this.waiting.length + this.running.size > 0; }

  get progress() {
    return this.round.reduce((sum, picture) => sum + (isDone(picture) ? 1 : 0.9 * picture.progress), 0) / Math.max(1, this.round.length);
  }

  /** Count the pictures of the round that `accepts` accepts. */
  count(accepts) { return this.round.filter(accepts).length; }

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
    for (const picture of this.waiting.splice(0)) this.finish(picture, "cancelled");
    for (const picture of this.running) picture.cancel();
  }

  /** Drop all pictures, and ignore the results of running requests. */
  reset() {
    this.waiting = [];
    this.round = [];
    this.running = new Set();
  }

  /** Remove pictures from the queue. */
  remove(pictures) {
    for (const name of ["waiting", "round"]) this[name] = this[name].filter((picture) => !pictures.includes(picture));
    for (const picture of pictures) {
      if (this.running.delete(picture)) this.pump();
      this.onChange(picture);
    }
  }

  pump() {
    while (this.running.size < AT_ONCE && this.waiting.length) {
      const picture = this.waiting.shift();
      this.running.add(picture);
      this.run(picture);
    }
  }

  async run(picture) {
    const { running } = this;
    const isHeard = () => running === this.running && running.has(picture);
    const change = (found) => {
      if (!isHeard()) return;
      Object.assign(picture, found);
      this.onChange(picture);
    };
    change({ state: "sending", error: null });
    const onProgress = (progress) => change({ state: "sending", progress });
    const onBusy = () => change({ state: "busy" });
    try {
      await picture.classify({ ...this.options, onProgress, onBusy });
      if (isHeard()) this.end(picture, "answered");
    } catch (error) {
      if (!isHeard()) return;
      picture.error = error;
      this.end(picture, error.name === "AbortError" ? "cancelled" : "failed");
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

const isDone = (picture) => !picture.isUnderWay;
