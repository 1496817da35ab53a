// The pictures that are to be classified, a few at a time.

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
    for (const picture of this.waiting.splice(0)) this.finish(picture, "cancelled");
    for (const picture of this.running) picture.cancel();
  }

  pump() {
    while (this.running.size < AT_ONCE && this.waiting.length) {
      const picture = this.waiting.shift();
      this.running.add(picture);
      this.run(picture);
    }
  }

  async run(picture) {
    const change = (found) => {
      Object.assign(picture, found);
      this.onChange(picture);
    };
    change({ state: "sending", error: null });
    const onProgress = (progress) => change({ state: "sending", progress });
    const onBusy = () => change({ state: "busy" });
    try {
      await picture.classify({ ...this.options, onProgress, onBusy });
      this.end(picture, "answered");
    } catch (error) {
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

const isDone = (picture) => !["waiting", "sending", "busy"].includes(picture.state);
