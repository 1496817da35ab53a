// One picture on the page: its file, its drawing, its answers, and its requested maps.

import { sendPatiently } from "./api.js";
import { answersOf } from "./models.js";
import { shrink } from "./shrink.js";

const SIDES = [640, 1536]; // limits of the longer side for drawing: small pictures are enlarged to fit their maps

export const FUSED = "relevance"; // the method of maps that come with the classes

let lastNumber = 0;
let decoding = Promise.resolve(); // one at a time, because an undrawn photo takes 50 MB or more

export class Picture {
  /** `onAsking()` runs when a request for a map begins or ends. */
  constructor(file, onAsking) {
    this.file = file;
    this.sent = { file, pixel: [1, 1] }; // the file to send, maybe shrunk, and the size of its pixels in the original
    this.onAsking = onAsking;
    this.number = ++lastNumber;
    this.name = file.name || `picture ${this.number}`;
    this.state = "waiting"; // then "sending" or "busy", and "answered", "failed" or "cancelled"
    this.progress = 0;
    this.answers = []; // of one or two models; {error} if one of two refused
    this.error = null;
    this.photo = null; // a canvas with the upright picture
    this.size = null; // [width, height] of the upright original
    this.seen = []; // a canvas for each model with the part that it saw
    this.maps = new Map();
    this.asking = 0; // number of requests for maps that have no answer yet
    this.controller = new AbortController();
  }

  get isUnderWay() { return ["waiting", "sending", "busy"].includes(this.state); }

  /** The answer of the first or the second model, or null. */
  answerBy(place) { return this.answers[place]?.error ? null : this.answers[place] ?? null; }

  get answer() { return this.answerBy(0); }

  get look() { return this.photo ?? this.seen.find(Boolean) ?? null; }

  /** End every request of this picture. */
  cancel() {
    this.controller.abort();
    this.controller = new AbortController();
  }

  /** Forget all answers, because the model has changed. */
  forget() {
    this.cancel();
    this.error = null;
    this.answers = [];
    this.seen = [];
    this.maps.clear();
    this.state = "waiting";
  }

  /** Decode the picture if the browser can, with its EXIF orientation, like the service. */
  decode() { return (this.decoded = decoding = decoding.then(() => this.decodeNow())); }

  async decodeNow() {
    try {
      const bitmap = await createImageBitmap(this.file, { imageOrientation: "from-image" });
      this.size = [bitmap.width, bitmap.height];
      this.photo = drawn(bitmap);
    } catch {
      this.photo = null; // HEIC, TIFF: the page shows the part that the model saw, if the service can read it
    }
  }

  /** Choose what to send: the file, or a smaller one for models that resize pictures to `side` pixels. */
  async prepare(side) {
    const asItIs = { file: this.file, pixel: [1, 1] };
    await (side && this.decoded);
    const sent = side && this.photo ? decoding.then(() => shrink(this.file, this.size, side)).catch(() => asItIs) : asItIs;
    if (sent !== asItIs) decoding = sent;
    this.sent = await sent;
  }

  /** Convert the region of a map from the sent picture to the original. */
  ofOriginal(found) {
    const { region } = found;
    const [across, down] = this.sent.pixel;
    return { ...found, region: { x: region.x * across, y: region.y * down, width: region.width * across, height: region.height * down } };
  }

  async classify({ topK, map, services, side, ...listeners }) {
    const { signal } = this.controller;
    await this.prepare(side);
    const ask = (query) => sendPatiently("POST", "classify", { query, file: this.sent.file, signal, ...listeners });
    const answers = await answersOf(services, { top_k: topK, attention: map }, ask);
    signal.throwIfAborted();
    for (const answer of answers) if (answer.attention) answer.attention = this.ofOriginal(answer.attention);
    this.answers = answers;
    const answered = services.filter(({ place }) => this.answerBy(place));
    for (const { name, place } of map ? answered : []) {
      const { id, attention, predictions: [first] } = answers[place];
      if (first) this.maps.set(keyOf({ model: name, method: map, class: first.index }), { ...attention, id }); // a classifier may abstain
    }
    await this.decoded;
    if (this.photo === null) await Promise.all(answered.map((service) => service.methods.includes(FUSED) && this.see(service)));
    if (answers[0].error) throw answers[0].error;
  }

  /** Return the map of a choice {model, method, class, layer, head, labels}; request it only once. */
  map(choice) {
    const name = keyOf(choice);
    if (!this.maps.has(name)) {
      const asked = this.attention({ ...choice, format: "json" }, "json").then((found) => this.ofOriginal(found));
      this.maps.set(name, asked);
      asked.catch(() => this.maps.delete(name));
    }
    return this.maps.get(name);
  }

  /** Draw the part that a model saw into `seen`, for browsers that cannot show the picture. */
  async see({ name, place }) {
    if (this.seen[place]) return;
    const png = await this.attention({ model: name, method: "cls", format: "png", alpha: 0, size: 1024 }, "blob");
    const bitmap = await createImageBitmap(png);
    this.seen[place] = drawn(bitmap);
  }

  /** GET /attention for the kept picture, or POST it again if the service no longer keeps it. */
  async attention(query, type) {
    const { signal } = this.controller;
    this.asking += 1;
    this.onAsking();
    try {
      const answer = this.answers.find(({ model }) => model === query.model) ?? this.answers[0];
      if (answer?.id) {
        try {
          return await sendPatiently("GET", "attention", { query: { ...query, id: answer.id }, type, signal });
        } catch (error) {
          if (error.code !== "picture_gone") throw error;
          answer.id = null;
        }
      }
      return await sendPatiently("POST", "attention", { query, file: this.sent.file, type, signal });
    } finally {
      this.asking -= 1;
      this.onAsking();
    }
  }
}

const keyOf = (choice) => ["model", "method", "class", "layer", "head"].map((name) => choice[name] ?? "").join("|");

function drawn(bitmap) {
  const longer = Math.max(bitmap.width, bitmap.height);
  const scale = Math.max(SIDES[0], Math.min(SIDES[1], longer)) / longer;
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas;
}
