// One picture on the page: its file, how it looks, the answer, and the maps that were asked for.

import { sendPatiently } from "./api.js";
import { shrink } from "./shrink.js";

const SIDES = [640, 1536]; // the longer side of what is kept for drawing: small pictures are enlarged, as their maps are not small

export const FUSED = "relevance"; // comes with the classes

let lastNumber = 0;
let decoding = Promise.resolve(); // one at a time: a photo takes 50 MB and more until it is drawn small

export class Picture {
  /** `onAsking()` runs when a request for a map begins or ends. */
  constructor(file, onAsking) {
    this.file = file;
    this.sent = { file, pixel: [1, 1] }; // perhaps smaller, and the size of its pixels in the original
    this.onAsking = onAsking;
    this.number = ++lastNumber;
    this.name = file.name || `picture ${this.number}`;
    this.state = "waiting"; // then "sending" or "busy", and "answered", "failed" or "cancelled"
    this.progress = 0;
    this.answer = null;
    this.error = null;
    this.photo = null; // a canvas with the upright picture
    this.size = null; // [width, height] of the upright original
    this.seen = null; // what the model saw, a canvas
    this.maps = new Map();
    this.asking = 0; // requests for maps under way
    this.controller = new AbortController();
  }

  get isUnderWay() { return ["waiting", "sending", "busy"].includes(this.state); }

  /** End every request of this picture. */
  cancel() {
    this.controller.abort();
    this.controller = new AbortController();
  }

  /** Forget all that a model said: another is there. */
  forget() {
    this.cancel();
    this.answer = this.error = null;
    this.maps.clear();
    this.state = "waiting";
  }

  /** Decode the picture where the browser can. Exif orientation is applied, as by the service. */
  decode() { return (this.decoded = decoding = decoding.then(() => this.decodeNow())); }

  async decodeNow() {
    try {
      const bitmap = await createImageBitmap(this.file, { imageOrientation: "from-image" });
      this.size = [bitmap.width, bitmap.height];
      this.photo = drawn(bitmap);
    } catch {
      this.photo = null; // HEIC, TIFF: what the model saw is shown instead, when the service could read it
    }
  }

  /** Choose what is sent: the file, or less of it for a model that resizes pictures to `side` pixels. */
  async prepare(side) {
    const asItIs = { file: this.file, pixel: [1, 1] };
    await (side && this.decoded);
    const sent = side && this.photo ? decoding.then(() => shrink(this.file, this.size, side)).catch(() => asItIs) : asItIs;
    if (sent !== asItIs) decoding = sent;
    this.sent = await sent;
  }

  /** What the service says of what was sent, said of the original. */
  ofOriginal(found) {
    const { region } = found;
    const [across, down] = this.sent.pixel;
    return { ...found, region: { x: region.x * across, y: region.y * down, width: region.width * across, height: region.height * down } };
  }

  async classify({ topK, map, labels, side, ...listeners }) {
    const { signal } = this.controller;
    await this.prepare(side);
    const answer = await sendPatiently("POST", "classify", { query: { top_k: topK, attention: map, labels }, file: this.sent.file, signal, ...listeners });
    signal.throwIfAborted();
    if (answer.attention) answer.attention = this.ofOriginal(answer.attention);
    this.answer = answer;
    const { id, attention, predictions: [first] } = answer;
    if (map) this.maps.set(keyOf({ method: map, class: first.index }), { ...attention, id });
    await this.decoded;
    if (map && this.photo === null) await this.see();
  }

  /** The map of a choice {method, class, layer, head, labels}, asked for once. */
  map(choice) {
    const name = keyOf(choice);
    if (!this.maps.has(name)) {
      const asked = this.attention({ ...choice, format: "json" }, "json").then((found) => this.ofOriginal(found));
      this.maps.set(name, asked);
      asked.catch(() => this.maps.delete(name));
    }
    return this.maps.get(name);
  }

  /** Draw what the model saw into `seen`: maps lie over this where the browser cannot show the picture. */
  async see() {
    if (this.seen) return;
    const png = await this.attention({ method: "cls", format: "png", alpha: 0, size: 1024 }, "blob");
    const bitmap = await createImageBitmap(png);
    this.seen = drawn(bitmap);
  }

  /** GET /attention of the kept picture; POST it again where it is not kept any more. */
  async attention(query, type) {
    const { signal } = this.controller;
    this.asking += 1;
    this.onAsking();
    try {
      if (this.answer?.id) {
        try {
          return await sendPatiently("GET", "attention", { query: { ...query, id: this.answer.id }, type, signal });
        } catch (error) {
          if (error.code !== "not_found") throw error;
          this.answer.id = null;
        }
      }
      return await sendPatiently("POST", "attention", { query, file: this.sent.file, type, signal });
    } finally {
      this.asking -= 1;
      this.onAsking();
    }
  }
}

const keyOf = (choice) => ["method", "class", "layer", "head"].map((name) => choice[name] ?? "").join("|");

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
