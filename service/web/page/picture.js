// One picture on the page: its file, how it looks, the answer, and the maps that were asked for.

import { send } from "./api.js";

const LARGEST_SIDE = 2048; // of what is kept for drawing

let lastNumber = 0;

export class Picture {
  constructor(file) {
    this.file = file;
    this.number = ++lastNumber;
    this.name = file.name || `picture ${this.number}`;
    this.state = "waiting"; // then "sending", and "answered", "failed" or "cancelled"
    this.progress = 0;
    this.answer = null;
    this.error = null;
    this.photo = null; // a canvas with the upright picture
    this.size = null; // [width, height] of the upright original
    this.seen = null; // what the model saw, a canvas
    this.maps = new Map();
  }

  /** Decode the picture where the browser can. Exif orientation is applied, as by the service. */
  async decode() {
    try {
      const bitmap = await createImageBitmap(this.file, { imageOrientation: "from-image" });
      this.size = [bitmap.width, bitmap.height];
      this.photo = drawn(bitmap);
    } catch {
      this.photo = null; // HEIC, TIFF: what the model saw is shown instead, when the service could read it
    }
  }

  async classify({ topK, fused, signal, onProgress }) {
    this.answer = await send("POST", "classify", { query: { top_k: topK, attention: fused }, file: this.file, signal, onProgress });
    const found = this.answer.attention;
    const [first] = this.answer.predictions;
    if (fused && found) this.maps.set(keyOf({ method: fused, class: first.index }), { ...found, id: this.answer.id, method: fused });
    if (this.photo === null) await this.see();
  }

  /** The map of a choice {method, class, layer, head}, asked for once. */
  map(choice) {
    const name = keyOf(choice);
    if (!this.maps.has(name)) {
      const asked = this.attention({ ...choice, format: "json" }, "json");
      this.maps.set(name, asked);
      asked.catch(() => this.maps.delete(name));
    }
    return this.maps.get(name);
  }

  /** Draw what the model saw into `seen`: where a map says nothing of its place in the original, it lies over this. */
  async see() {
    if (this.seen) return;
    const png = await this.attention({ method: "cls", format: "png", alpha: 0, size: 1024 }, "blob");
    const bitmap = await createImageBitmap(png);
    this.seen = drawn(bitmap);
  }

  /** GET /attention of the kept picture; POST it again where it is not kept any more. */
  async attention(query, type) {
    if (this.answer?.id) {
      try {
        return await send("GET", "attention", { query: { ...query, id: this.answer.id }, type });
      } catch (error) {
        if (error.code !== "not_found") throw error;
        this.answer.id = null;
      }
    }
    return send("POST", "attention", { query, file: this.file, type });
  }
}

const keyOf = (choice) => ["method", "class", "layer", "head"].map((name) => choice[name] ?? "").join("|");

function drawn(bitmap) {
  const scale = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas;
}
