// The model behind the page; the only place that compares an answer with its model.

import { send } from "./api.js";
import { FUSED } from "./picture.js";

const SHOWN = 12; // labels that the first view names

export class Service {
  /** `name`: in requests, undefined for the only model; `place`: 0 for the first model, 1 for the second. */
  constructor(model, name, place = 0) {
    Object.assign(this, { model, name, place });
    this.asksLabels = Boolean(model.templates) && model.classes === 0; // it compares pictures with the user's labels
    // With the user's labels there is relevance too, which a model without classes does not list.
    this.methods = this.asksLabels && model.attention_methods.length ? [FUSED, ...model.attention_methods] : model.attention_methods;
    this.labels = [];
    this.asked = undefined; // the labels in the form of a request
  }

  /** Request the description of the model. Its labels follow later, because the first answer does not need them. */
  static async reach(name, place) { return new Service(await send("GET", "model", { query: { model: name, prepare_maps: true } }), name, place); }

  async fetchLabels() {
    const { model, labels } = await send("GET", "labels", { query: { model: this.name } });
    if (model === this.model.name) this.labels = labels;
  }

  get classes() { return this.asksLabels ? this.labels.length : this.model.classes; }

  /** Return the longer side, in pixels, of the pictures after the model's resize. */
  get side() {
    const { interpolation, resize_size: size } = this.model.preprocessing;
    return ["nearest", "box"].includes(interpolation) ? Infinity : Math.max(...size); // these filters take whole pixels
  }

  /** Return whether this model gave an answer of /classify. */
  gave(answer) { return answer.model === this.model.name; }

  /** Return whether another description is of the same model. */
  equals({ model }) {
    return ["name", "source", "revision", "content", "architecture", "classes", "device"].every((name) => model[name] === this.model[name]);
  }

  get title() {
    const { name, device, dtype, input_size: [rows, columns] } = this.model;
    const classes = this.asksLabels ? "any words" : `${this.model.classes} classes`;
    return `${name} on ${device}, ${dtype}, input ${rows}×${columns}, ${classes}`;
  }

  /** Return a sentence about the classes of the model. */
  get knowledge() {
    if (this.asksLabels) return "This model compares your picture with labels of your own.";
    if (!this.model.classes) return "This model gives features for programs, without classes.";
    if (!this.labels.length) return "\u00a0";
    const step = Math.max(1, this.labels.length / SHOWN);
    const some = Array.from({ length: Math.min(SHOWN, this.labels.length) }, (_, at) => this.labels[Math.floor(at * step)].split(",")[0]);
    const all = some.length === this.labels.length;
    return all ? `This model knows: ${some.join(", ")}.` : `This model knows ${this.labels.length.toLocaleString("en")} classes: ${some.join(", ")}, …`;
  }
}
