// The model behind the page, and which answers are its own: the one place that knows the model of an answer.

import { send } from "./api.js";
import { FUSED } from "./picture.js";

const SHOWN = 12; // labels that the first view names

export class Service {
  /** `name`: as requests have it, undefined for the only model; `place`: 1 for one that answers beside another. */
  constructor(model, name, place = 0) {
    Object.assign(this, { model, name, place });
    this.asksLabels = Boolean(model.templates) && model.classes === 0; // it compares pictures with words that are given
    // Labels that are given have relevance too, which a model without any does not name.
    this.methods = this.asksLabels && model.attention_methods.length ? [FUSED, ...model.attention_methods] : model.attention_methods;
    this.labels = [];
    this.asked = undefined; // the labels as a request has them
  }

  /** Ask which model answers now. Its labels come later: a thousand of them are not needed for the first answer. */
  static async reach(name, place) { return new Service(await send("GET", "model", { query: { model: name, prepare_maps: true } }), name, place); }

  async fetchLabels() {
    const { model, labels } = await send("GET", "labels", { query: { model: this.name } });
    if (model === this.model.name) this.labels = labels;
  }

  get classes() { return this.asksLabels ? this.labels.length : this.model.classes; }

  /** The longer side in pixels of what it resizes pictures to. */
  get side() { return Math.max(...this.model.preprocessing.resize_size); }

  /** Whether an answer of /classify is this model's. */
  gave(answer) { return answer.model === this.model.name; }

  /** Whether another description is of this very model. */
  equals({ model }) {
    return ["name", "source", "revision", "content", "architecture", "classes", "device"].every((name) => model[name] === this.model[name]);
  }

  get title() {
    const { name, device, dtype, input_size: [rows, columns] } = this.model;
    const classes = this.asksLabels ? "any words" : `${this.model.classes} classes`;
    return `${name} on ${device}, ${dtype}, input ${rows}×${columns}, ${classes}`;
  }

  /** What it knows, in a sentence. */
  get knowledge() {
    if (this.asksLabels) return "This one compares your picture with words of your own.";
    if (!this.model.classes) return "This one has no classes: it gives features, for programs.";
    if (!this.labels.length) return "\u00a0";
    const step = Math.max(1, this.labels.length / SHOWN);
    const some = Array.from({ length: Math.min(SHOWN, this.labels.length) }, (_, at) => this.labels[Math.floor(at * step)].split(",")[0]);
    const all = some.length === this.labels.length;
    return all ? `This one knows: ${some.join(", ")}.` : `This one knows ${this.labels.length.toLocaleString("en")} classes: ${some.join(", ")}, …`;
  }
}
