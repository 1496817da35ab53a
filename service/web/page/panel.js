// One map over the picture, with its choices and the share of the patch that is pointed at.

import { explain, isFinal } from "./errors.js";
import { dimOutside, drawHeat, drawRamp, multiple, percent, readMap } from "./heatmap.js";

const NAMES = { relevance: "Relevance for the class", cls: "Attention of one layer", rollout: "Rollout through all layers",
  gae: "Generic attention explainability" };
const WITHOUT_CLASS = ["cls", "rollout"];
const WHOLE = { x: 0, y: 0, width: 1, height: 1 };

export class MapPanel {
  /** `element`: its figure; `service`: {model, labels, methods}; `onChange` runs after a map is shown. */
  constructor(element, service, onChange) {
    this.service = service;
    this.onChange = onChange;
    this.element = element;
    this.find = (selector) => this.element.querySelector(selector);
    this.choice = { method: service.methods[0], class: null, layer: null, head: "mean" };
    this.picture = null;
    this.document = null; // the map's JSON
    this.map = null; // its values as `readMap` returns them
    this.smooth = true;
    this.patch = null; // index of the one pointed at
    this.failed = false; // another try may do better
    this.classChosen = false; // by hand: another answer of the same picture does not change it
    const { layers, heads } = service.model;
    fill(this.find(".method"), service.methods.map((name) => [name, NAMES[name] ?? name]));
    fill(this.find(".layer"), Array.from({ length: layers }, (_, index) => [index, index === layers - 1 ? `${index} (last)` : index]));
    fill(this.find(".head"), [["mean", "mean"], ["max", "max"], ...Array.from({ length: heads }, (_, index) => [index, index])]);
    this.find(".layer").value = layers - 1;
    for (const name of ["method", "class", "layer", "head"]) {
      this.find(`.${name}`).addEventListener("change", (event) => this.choose({ [name]: event.target.value }));
    }
    const stack = this.find(".stack");
    stack.addEventListener("pointermove", (event) => this.point(this.patchAt(event)));
    stack.addEventListener("pointerdown", (event) => this.point(this.patchAt(event)));
    stack.addEventListener("pointerleave", () => this.point(null));
    stack.addEventListener("focus", () => this.map && this.patch === null && stack.matches(":focus-visible") && this.point(this.map.strongest));
    stack.addEventListener("blur", () => this.point(null));
    stack.addEventListener("keydown", (event) => this.step(event));
    drawRamp(this.find(".ramp"));
    this.showControls();
  }

  get classSpecific() { return !WITHOUT_CLASS.includes(this.choice.method); }

  /** The query of the map on screen, without what the service assumes by itself. */
  get query() {
    const { method } = this.choice;
    if (this.classSpecific) return { method, class: this.choice.class };
    if (method !== "cls") return { method };
    return { method, layer: this.choice.layer ?? this.service.model.layers - 1, head: this.choice.head };
  }

  choose(change) {
    this.choice = { ...this.choice, ...change };
    if (change.class !== undefined) this.classChosen = true;
    if (change.class !== undefined && !this.classSpecific) [this.choice.method] = this.service.methods;
    this.showControls();
    return this.refresh();
  }

  show(picture, classIndex) {
    if (picture !== this.picture) this.classChosen = false;
    this.picture = picture;
    if (!this.classChosen) this.choice.class = classIndex;
    this.map = this.document = null;
    this.fillClasses();
    this.showControls();
    return this.refresh();
  }

  fillClasses() {
    const select = this.find(".class");
    const answers = this.picture?.answer?.predictions ?? [];
    const group = (label, options) => {
      const element = document.createElement("optgroup");
      element.label = label;
      fill(element, options);
      return element;
    };
    if (!answers.length) return select.replaceChildren();
    const all = this.service.labels.map((label, index) => [index, `${label} (${index})`]);
    const named = new Set(answers.map(({ index }) => index));
    select.replaceChildren(group("Answers", answers.map(({ label, index, score }) => [index, `${label}: ${percent(score)}`])),
      group("Other classes", all.filter(([index]) => !named.has(index))));
  }

  showControls() {
    this.find(".method").value = this.choice.method;
    if (this.choice.class !== null) this.find(".class").value = this.choice.class;
    this.find(".for-class").hidden = !this.classSpecific;
    for (const label of this.element.querySelectorAll(".for-layer")) label.hidden = this.choice.method !== "cls";
    for (const select of this.element.querySelectorAll("select")) select.disabled = !this.picture?.answer;
  }

  /** Ask for the map of the choice and draw it, unless another was chosen meanwhile. */
  async refresh() {
    const { picture } = this;
    const wanted = (this.wanted = {});
    const note = this.find(".map-note");
    if (!picture?.answer) {
      this.document = this.map = null;
      note.textContent = "\u00a0";
      this.draw();
      this.onChange();
      return;
    }
    this.element.setAttribute("aria-busy", "true");
    this.find(".readout").textContent = "Waiting for the map";
    this.failed = false;
    try {
      const found = await picture.map(this.query);
      if (wanted !== this.wanted) return;
      this.document = found;
      this.map = readMap(found);
      note.textContent = picture.photo === null ? "Drawn over what the model saw of the picture" : "\u00a0";
    } catch (error) {
      if (wanted !== this.wanted) return;
      this.failed = !isFinal(error);
      this.document = this.map = null;
      const { lines, own } = explain(error, picture.file);
      note.textContent = [...lines, own].join(" ");
    } finally {
      if (wanted === this.wanted) this.element.removeAttribute("aria-busy");
    }
    this.draw();
    this.onChange();
  }

  /** The picture under the map, and the part of it that the map covers. */
  get ground() {
    const { picture, document: found } = this;
    if (!found) return { base: null, region: WHOLE };
    if (!picture.photo) return { base: picture.seen, region: WHOLE };
    const [width, height] = picture.size;
    const { x, y, width: across, height: down } = found.region;
    return { base: picture.photo, region: { x: x / width, y: y / height, width: across / width, height: down / height } };
  }

  draw() {
    const { base, region } = this.ground;
    const heat = this.find(".heat");
    paint(this.find(".stack"), this.find(".base"), base);
    [heat.width, heat.height] = [this.find(".base").width, this.find(".base").height];
    this.point(null);
    this.find(".high").textContent = this.map ? multiple(this.map.full) : "–";
    if (!this.map) return;
    dimOutside(this.find(".base"), region);
    drawHeat(heat, this.map, region, this.smooth);
    this.find(".stack").setAttribute("aria-label", `Map, patch by patch: arrow keys move. Strongest: ${this.describe(this.map.strongest)}`);
  }

  patchAt(event) {
    if (!this.map) return null;
    const { region } = this.ground;
    const box = this.find(".stack").getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width - region.x) / region.width;
    const y = ((event.clientY - box.top) / box.height - region.y) / region.height;
    if (x < 0 || y < 0 || x >= 1 || y >= 1) return null;
    return Math.floor(y * this.map.rows) * this.map.columns + Math.floor(x * this.map.columns);
  }

  step(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!this.map || !(event.key in moves)) return;
    event.preventDefault();
    const { rows, columns } = this.map;
    const patch = this.patch ?? this.map.strongest;
    const [down, right] = moves[event.key];
    const row = Math.max(0, Math.min(rows - 1, Math.floor(patch / columns) + down));
    this.point(row * columns + Math.max(0, Math.min(columns - 1, (patch % columns) + right)));
  }

  describe(patch) {
    const { columns, shares, times } = this.map;
    return `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}: ${percent(shares[patch])}, ${multiple(times[patch])} the even share`;
  }

  point(patch) {
    this.patch = patch;
    const mark = this.find(".patch");
    mark.hidden = patch === null;
    const evidence = this.document?.evidence_in_words;
    const strongest = () => `${evidence ? `Evidence: ${evidence}. ` : ""}Strongest: ${this.describe(this.map.strongest)}`;
    const readout = patch === null ? (this.map ? strongest() : "\u00a0") : this.describe(patch);
    this.find(".readout").textContent = readout.charAt(0).toUpperCase() + readout.slice(1);
    if (patch === null) return;
    const { region } = this.ground;
    const { rows, columns } = this.map;
    Object.assign(mark.style, {
      left: `${100 * (region.x + (region.width * (patch % columns)) / columns)}%`,
      top: `${100 * (region.y + (region.height * Math.floor(patch / columns)) / rows)}%`,
      width: `${(100 * region.width) / columns}%`,
      height: `${(100 * region.height) / rows}%`,
    });
  }

  /** What the map shows, in a few words. */
  get title() {
    const { method, class: index, layer, head } = this.query;
    const name = NAMES[method] ?? method;
    if (index !== undefined) return `${name}: ${this.service.labels[index] ?? index}`;
    return layer === undefined ? name : `${name}: layer ${layer}, head ${head}`;
  }
}

export function fill(select, options) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
}

/** Paint a picture into a figure whose frame has its size already. */
export function paint(stack, canvas, picture) {
  const [width, height] = picture ? [picture.width, picture.height] : [1, 1];
  [canvas.width, canvas.height] = [width, height];
  stack.style.aspectRatio = `${width} / ${height}`;
  stack.classList.toggle("tall", height > width);
  stack.classList.toggle("empty", !picture);
  if (picture) canvas.getContext("2d").drawImage(picture, 0, 0);
}
