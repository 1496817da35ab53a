// A picture under its map: the controls, the meaning of the colours, and the share of the patch under the pointer.

import { explain, isFinal } from "./errors.js";
import { dimOutside, drawHeat, drawRamp, multiple, percent, readMap } from "./heatmap.js";

// {title, ofClass} of each explanation method by name; `ofClass`: its map is of one class.
const METHODS = Object.fromEntries([...document.querySelectorAll("#methods option")].map(({ value, textContent: title, dataset }) => [value, { title, ofClass: "ofClass" in dataset }]));
const WHOLE = { x: 0, y: 0, width: 1, height: 1 };
const LITTLE = 0.2; // below this evidence the caption says that there is little evidence
const FOUND = 20; // classes that a search lists

let lastPanel = 0;

export class MapPanel {
  /** `element`: figure; `title`: model, if there are two; `onChange` runs after a new map, `onOther` if another model made it. */
  constructor(element, service, { title, onChange, onOther }) {
    this.service = service;
    this.title = title;
    this.onChange = onChange;
    this.onOther = onOther;
    this.element = element;
    this.find = (selector) => this.element.querySelector(selector);
    Object.assign(this.find(".of-model"), { textContent: title, hidden: !title });
    if (title) element.setAttribute("aria-label", `Map of ${title}`);
    this.choice = { method: service.methods[0], class: null, layer: null, head: "mean" };
    this.picture = null;
    this.document = null; // the map's JSON
    this.map = null; // its values as `readMap` returns them
    this.look = { smooth: true, full: null }; // `full` may come from another panel, because two maps share a scale
    this.patch = null; // index of the patch under the pointer
    this.held = false; // only the photo is shown
    this.failed = false; // a retry may help
    this.classChosen = false; // by the user: another answer to the same picture does not change it
    const { layers, heads } = service.model;
    fill(this.find(".method"), service.methods.map((name) => [name, METHODS[name].title]));
    fill(this.find(".layer"), Array.from({ length: layers }, (_, index) => [index, index === layers - 1 ? `${index} (last)` : index]));
    fill(this.find(".head"), [["mean", "mean"], ["max", "max"], ...Array.from({ length: heads }, (_, index) => [index, index])]);
    this.find(".layer").value = layers - 1;
    for (const name of ["method", "layer", "head"]) {
      this.find(`.${name}`).addEventListener("change", (event) => this.choose({ [name]: event.target.value }));
    }
    this.searchClasses();
    this.listen();
    drawRamp(this.find(".ramp"));
    for (const part of this.element.querySelectorAll(".of-map")) part.hidden = !service.methods.length;
    this.showControls();
  }

  listen() {
    const stack = this.find(".stack");
    stack.addEventListener("pointermove", (event) => this.point(this.patchAt(event)));
    stack.addEventListener("pointerdown", (event) => this.point(this.patchAt(event)));
    stack.addEventListener("pointerleave", () => this.point(null));
    stack.addEventListener("focus", () => this.map && this.patch === null && stack.matches(":focus-visible") && this.point(this.map.strongest));
    stack.addEventListener("blur", () => this.point(null));
    stack.addEventListener("keydown", (event) => this.step(event));
    const hold = this.find(".hold");
    const holdWhile = (begin, ends, isMeant = () => true) => {
      hold.addEventListener(begin, (event) => isMeant(event) && this.hold(true));
      for (const end of ends) hold.addEventListener(end, () => this.hold(false));
    };
    holdWhile("pointerdown", ["pointerup", "pointerleave", "pointercancel"]);
    holdWhile("keydown", ["keyup", "blur"], ({ key }) => key === " " || key === "Enter");
    hold.addEventListener("contextmenu", (event) => event.preventDefault()); // a long touch would open it
  }

  /** Let the user search a class by name, because a list of a thousand is too long. */
  searchClasses() {
    const [input, list] = [this.find(".class"), this.find("datalist")];
    list.id = `classes-${++lastPanel}`;
    input.setAttribute("list", list.id);
    input.addEventListener("focus", () => input.select());
    input.addEventListener("input", () => {
      const index = this.indexOf(input.value);
      if (index !== null) this.choose({ class: index });
      else fill(list, this.search(input.value));
    });
    input.addEventListener("change", () => {
      const [first] = this.search(input.value);
      if (this.indexOf(input.value) === null && first) this.choose({ class: this.indexOf(first[0]) });
      this.showControls();
    });
  }

  get answer() { return this.picture?.answerBy(this.service.place); }

  nameOf(index) { return `${this.labelOf(index)} (${index})`; }

  labelOf(index) { return this.knownLabel(index) ?? `class ${index}`; }

  knownLabel(index) {
    const answered = this.answer?.predictions.find((prediction) => prediction.index === Number(index));
    return answered?.label ?? this.service.labels[index];
  }

  indexOf(text) {
    const index = Number(/\((\d+)\)$/.exec(text)?.[1] ?? NaN);
    return index < this.service.classes && this.nameOf(index) === text ? index : null;
  }

  search(text) {
    const wanted = text.trim().toLowerCase();
    const found = this.service.labels.map((label, index) => [label.toLowerCase().indexOf(wanted), index]).filter(([place]) => place >= 0);
    return found.sort(([one], [other]) => one - other).slice(0, FOUND).map(([, index]) => [this.nameOf(index), ""]);
  }

  get classSpecific() { return this.service.methods.length > 0 && METHODS[this.choice.method].ofClass; }

  /** Return the query of the map on screen, without the service's defaults. */
  get query() {
    const { method } = this.choice;
    const { asked: labels, name: model } = this.service;
    if (this.classSpecific) return { model, method, class: this.choice.class, ...(labels && { labels }) };
    if (method !== "cls") return { model, method };
    return { model, method, layer: this.choice.layer ?? this.service.model.layers - 1, head: this.choice.head };
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
    this.showControls();
    return this.refresh();
  }

  showControls() {
    this.find(".method").value = this.choice.method ?? "";
    const isKnown = this.choice.class !== null && this.answer;
    this.find(".class").value = isKnown ? this.nameOf(this.choice.class) : "";
    this.find(".for-class").hidden = !this.classSpecific;
    for (const label of this.element.querySelectorAll(".for-layer")) label.hidden = this.choice.method !== "cls";
    this.element.classList.toggle("idle", !this.answer);
  }

  /** Request the chosen map and draw it, unless the user has chosen another one since. */
  async refresh() {
    const { picture, service } = this;
    const wanted = (this.wanted = {});
    const note = this.find(".map-note");
    this.failed = false;
    note.textContent = "";
    const isAsked = this.answer && service.methods.length;
    this.element.toggleAttribute("aria-busy", false);
    if (isAsked || picture?.isUnderWay) this.element.setAttribute("aria-busy", "true");
    if (!isAsked) {
      this.document = this.map = null;
      this.draw();
      return this.onChange();
    }
    this.find(".readout").textContent = "Waiting for the map";
    try {
      const found = await picture.map(this.query);
      if (wanted !== this.wanted) return undefined;
      if (found.label && found.label !== (this.knownLabel(found.class) ?? found.label)) return this.onOther();
      this.document = found;
      this.map = readMap(found);
      const { width, height } = this.ground.region;
      if (picture.photo === null) note.textContent = "Drawn over the part of the picture that the model saw";
      else if (width * height < 0.99) note.textContent = "Darkened: parts that the model did not see";
    } catch (error) {
      if (wanted !== this.wanted) return undefined;
      if (error.code === "unknown_model") return this.onOther();
      this.failed = !isFinal(error);
      this.document = this.map = null;
      const { lines, own } = explain(error, picture.file);
      note.textContent = [...lines, own].join(" ");
    } finally {
      if (wanted === this.wanted) this.element.removeAttribute("aria-busy");
    }
    this.draw();
    return this.onChange();
  }

  /** Return the picture under the map, and the region of it that the map covers. */
  get ground() {
    const { picture, document: found } = this;
    if (!picture?.photo) return { base: picture?.seen[this.service.place] ?? null, region: WHOLE };
    if (!found) return { base: picture.photo, region: WHOLE };
    const [width, height] = picture.size;
    const { x, y, width: across, height: down } = found.region;
    return { base: picture.photo, region: { x: x / width, y: y / height, width: across / width, height: down / height } };
  }

  hold(held) {
    if (held === this.held) return;
    this.held = held;
    this.draw();
  }

  draw() {
    const { base, region } = this.ground;
    const [heat, stack] = [this.find(".heat"), this.find(".stack")];
    paint(stack, this.find(".base"), base);
    [heat.width, heat.height] = [this.find(".base").width, this.find(".base").height];
    this.point(null);
    const full = this.look.full ?? this.map?.full;
    this.find(".high").textContent = this.map ? `${multiple(full)} as much` : "–";
    this.element.classList.toggle("mapless", !this.map);
    stack.setAttribute("aria-label", this.picture?.name ?? "No picture yet");
    if (!this.map) return;
    this.find(".ramp").style.opacity = this.map.strength; // the same opacity as in the map
    stack.setAttribute("aria-label", `${this.picture.name}. Map of patches: arrow keys move. Strongest: ${this.describe(this.map.strongest)}`);
    if (this.held) return;
    dimOutside(this.find(".base"), region);
    drawHeat(heat, this.map, region, { smooth: this.look.smooth, full });
    const stage = this.find(".stage"); // scroll a long picture to the part that the model saw
    stage.scrollTo({ left: (region.x + region.width / 2) * stack.clientWidth - stage.clientWidth / 2,
      top: (region.y + region.height / 2) * stack.clientHeight - stage.clientHeight / 2, behavior: "instant" });
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
    return `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}: ${percent(shares[patch])}, ${multiple(times[patch])} the average`;
  }

  /** Return the meaning of the colours. The best class always has evidence. */
  get meaning() {
    if (!this.map) return "\u00a0";
    if (!this.classSpecific) return "Coloured: where the model looked, for any class";
    const label = this.labelOf(this.choice.class);
    const isBest = Number(this.choice.class) === this.answer.predictions[0]?.index;
    return !isBest && this.map.strength < LITTLE ? `Little evidence for ${label}` : `Coloured: evidence for ${label}`;
  }

  point(patch) {
    this.patch = patch;
    const mark = this.find(".patch");
    mark.hidden = patch === null;
    const readout = patch === null ? this.meaning : this.describe(patch);
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

  /** Return the caption of a saved drawing: the class with its score, and the method. */
  get caption() {
    const { method, layer, head } = this.query;
    const name = [METHODS[method].title, this.title].filter(Boolean).join(", by ");
    if (!this.classSpecific) return [this.picture.name, layer === undefined ? name : `${name}: layer ${layer}, head ${head}`];
    const { score, evidence } = this.document;
    const known = [[score, percent(score ?? 0)], [evidence, `evidence ${Number((evidence ?? 0).toFixed(2))}`]];
    return [[this.labelOf(this.choice.class), ...known.filter(([value]) => value !== undefined).map(([, text]) => text)].join(", "), name];
  }
}

export function fill(list, options) {
  list.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
}

/** Paint a picture into a figure. */
function paint(stack, canvas, picture) {
  const [width, height] = picture ? [picture.width, picture.height] : [1, 1];
  [canvas.width, canvas.height] = [width, height];
  stack.style.setProperty("--ratio", width / height);
  stack.classList.toggle("empty", !picture);
  if (picture) canvas.getContext("2d").drawImage(picture, 0, 0);
}
