// The tab Teach: labels with their pictures, the accuracy of the head, and a picture to try it.

import { keyIsUsed, send, sendPatiently } from "../api.js";
import { explain } from "../errors.js";
import { percent } from "../heatmap.js";
import { on } from "../moments.js";

const AT_ONCE = 4;
const LOOK = 400; // milliseconds between two requests for the state of the head
const NAME = /^[A-Za-z0-9._-]{1,128}$/; // names of models that the service accepts
// Labels that the service accepts: without control characters, and not only invisible ones.
const LABEL = /^(?=.*[^\p{Cf}\p{Mn}\p{Zs}])[^\p{Cc}\u2028-\u202e\u2066-\u2069\ufffd]{1,256}$/u;
const BAD_LABEL = "A label has 1 to 256 printable characters.";
const LAST = "vitserve.classifier"; // key in the browser's storage for the name of the last classifier
const labelOf = (id) => byId(id).value.normalize("NFC").trim();
/** The form that labels have in common if they differ only by case or spaces. */
const folded = (label) => label.split(/\s+/).join(" ").toLowerCase();
const byId = (id) => document.getElementById(id);
const make = (tag, attributes) => Object.assign(document.createElement(tag), attributes);
const counted = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

class Teaching {
  constructor() {
    this.choice = null; // the `ModelChoice` of the page
    this.sent = new Map(); // files by number of their example, because the service does not keep them
    this.labels = new Map(); // {item, count, failed} by label of the head
    this.waiting = []; // {head, label, file} to send
    this.running = 0;
    this.done = this.total = 0;
    this.heads = [];
    byId("head-form").addEventListener("submit", (event) => { event.preventDefault(); this.open(); });
    byId("head-name").addEventListener("change", () => this.open());
    byId("label-form").addEventListener("submit", (event) => { event.preventDefault(); this.newLabel(); });
    byId("try-head").addEventListener("click", () => byId("try-file").click());
    byId("try-file").addEventListener("change", (event) => {
      if (event.target.files.length) this.try(event.target.files[0]);
      event.target.value = "";
    });
    byId("correct-form").addEventListener("submit", (event) => { event.preventDefault(); this.correct(); });
    for (const [id, on] of [["tab-try", false], ["tab-teach", true]]) byId(id).addEventListener("click", () => this.show(on));
  }

  /** Show the tab if the service can be taught. */
  async reach(choice) {
    this.choice = choice;
    const { enabled, heads, thumbnails } = await send("GET", "heads");
    this.heads = heads;
    this.keepsNames = thumbnails;
    if (!this.remembered && heads.includes(recall())) byId("head-name").value = recall();
    this.remembered = true;
    byId("tabs").hidden = !enabled;
    byId("head-names").replaceChildren(...heads.map((name) => new Option(name)));
    if (enabled) await this.open();
  }

  get name() { return byId("head-name").value.trim(); }

  /** Return the problem with the entered name, or an empty text. */
  get misnamed() {
    if (!NAME.test(this.name)) return "A classifier's name has 1 to 128 of the characters A-Z a-z 0-9 . _ -";
    return this.choice.listed.some(({ name, taught }) => name === this.name && !taught) ? `${this.name} is the name of a model: choose another one.` : "";
  }

  /** Return the model whose features a new head reads: the chosen one. */
  backboneOf(head) { return this.heads.includes(head) ? undefined : this.choice.names[0]; }

  /** Return the name of a file, if the service keeps it. */
  nameOf(file) { return this.keepsNames && LABEL.test(file.name) ? file.name : undefined; }

  show(on) {
    document.body.classList.toggle("teaching", on);
    byId("tab-teach").setAttribute("aria-pressed", on);
    byId("tab-try").setAttribute("aria-pressed", !on);
    byId("teach").hidden = !on;
  }

  /** Show the head of this name, which may be a new one. */
  async open() {
    this.labels.clear();
    byId("labels-list").replaceChildren();
    byId("suspects").replaceChildren();
    byId("suspects-title").hidden = byId("not-mended").hidden = true;
    const { misnamed } = this;
    byId("label-form").hidden = Boolean(misnamed);
    byId("head-name").setAttribute("aria-invalid", Boolean(misnamed));
    this.tell(misnamed || "At least two labels with two pictures each are needed; twenty work better.");
    byId("tried").textContent = "";
    byId("tryout").hidden = true;
    byId("head-curl").textContent = curl(this.name);
    if (!misnamed && this.remembered) remember(this.name);
    if (this.heads.includes(this.name)) await this.look();
  }

  newLabel() {
    const label = labelOf("new-label");
    byId("new-label").setAttribute("aria-invalid", !LABEL.test(label));
    if (!LABEL.test(label)) return this.tell(BAD_LABEL);
    const similar = [...this.labels.keys()].find((other) => folded(other) === folded(label));
    if (similar && similar !== label) return this.tell(`There is the label ${similar} already: add the pictures to it.`);
    return this.addLabel(label, true);
  }

  addLabel(label, byHand = false) {
    if (!label || this.labels.has(label)) return this.labels.get(label);
    const item = make("li");
    const count = make("span", { className: "note", textContent: "no pictures yet" });
    const input = make("input", { type: "file", accept: "image/*,.heic,.heif,.avif", multiple: true, hidden: true, ariaLabel: `Pictures of ${label}` });
    const camera = make("input", { type: "file", accept: "image/*", hidden: true, ariaLabel: `Photo of ${label}` });
    camera.setAttribute("capture", "environment");
    const buttons = make("span", { className: "row" });
    for (const [text, source, hidden] of [["Take a photo", camera, navigator.maxTouchPoints === 0], ["Add pictures", input, false]]) {
      const button = make("button", { type: "button", textContent: text, hidden, ariaLabel: `${text} of ${label}` });
      button.addEventListener("click", () => source.click());
      source.addEventListener("change", () => { this.add(label, [...source.files]); source.value = ""; });
      buttons.append(button, source);
    }
    const failed = make("ul", { className: "failed", ariaLabel: `Pictures of ${label} that were not taken` });
    item.append(make("strong", { textContent: label }), " ", count, buttons, failed);
    item.addEventListener("drop", (event) => {
      event.preventDefault();
      event.stopPropagation(); // the other tab must not receive it
      document.body.classList.remove("dragging");
      this.add(label, [...event.dataTransfer.files]);
    });
    byId("labels-list").append(item);
    this.labels.set(label, { item, count, failed });
    if (byHand) {
      byId("new-label").value = "";
      buttons.querySelector("button:not([hidden])").focus();
    }
    return this.labels.get(label);
  }

  add(label, files) {
    if (!this.running && !this.waiting.length) this.done = this.total = 0;
    this.waiting.push(...files.map((file) => ({ head: this.name, label, file })));
    this.total += files.length;
    this.pump();
  }

  pump() {
    while (this.running < AT_ONCE && this.waiting.length) {
      this.running += 1;
      this.give(this.waiting.shift()).finally(() => {
        this.running -= 1;
        this.done += 1;
        this.pump();
      });
    }
    byId("teach-progress").hidden = byId("teach-progress-text").hidden = !this.total;
    byId("teach-progress").value = this.total ? this.done / this.total : 0;
    byId("teach-progress-text").textContent = `${this.done} of ${counted(this.total, "picture")} sent`;
    if (this.total && this.done === this.total) this.look();
  }

  async give({ head, label, file }) {
    const part = this.addLabel(label);
    try {
      const { signal } = new AbortController();
      const { examples, numbers } = await sendPatiently("POST", `heads/${encodeURIComponent(head)}/examples`, { query: { label, backbone: this.backboneOf(head), file_name: this.nameOf(file) }, file, signal });
      if (!this.heads.includes(head)) this.heads.push(head);
      this.sent.set(`${head} ${numbers[0]}`, file);
      if (head === this.name) this.showCounts(examples);
    } catch (error) {
      part.failed.append(make("li", { textContent: why(error, file) }));
    }
  }

  showCounts(examples) {
    for (const label of Object.keys(examples)) this.addLabel(label);
    for (const [label, { count }] of this.labels) count.textContent = label in examples ? counted(examples[label], "picture") : "no pictures yet";
  }

  /** Poll the head until it is fitted to all its examples. */
  async look() {
    const head = this.name;
    const asked = (this.asked = {});
    for (;;) {
      let found;
      try { found = await send("GET", `heads/${encodeURIComponent(head)}`); } catch (error) { return this.tell(error.message); }
      if (asked !== this.asked || head !== this.name) return undefined;
      this.showCounts(found.examples);
      this.showKnown(found);
      if (found.up_to_date) return undefined;
      await new Promise((resolve) => { setTimeout(resolve, LOOK); });
    }
  }

  tell(text) { byId("known").textContent = text; }

  showKnown({ accuracy, fitted_to: count, needs_more: needs, suspects, confusion, reason, up_to_date: isDone }) {
    byId("tryout").hidden = !accuracy;
    if (!accuracy) return this.tell(isDone ? `Not yet: ${reason}.` : "Learning …");
    const range = `${percent(accuracy.low)} to ${percent(accuracy.high)}`;
    const lines = [`${percent(accuracy.value)} of ${counted(count, "picture")} right in cross-validation; expect ${range} for similar pictures.`];
    const [first] = confusion;
    if (first) lines.push(`The most frequent confusion is ${first.answered} instead of ${first.label}.`);
    if (needs.length) lines.push(`More pictures would help: ${needs.join(", ")}.`);
    if (reason) lines.push(`It does not answer: ${reason}.`);
    if (!isDone) lines.push("Learning again …");
    this.tell(lines.join(" "));
    byId("suspects-title").hidden = !suspects.length;
    byId("suspects").replaceChildren(...suspects.map((suspect) => this.suspect(suspect)));
    return undefined;
  }

  suspect({ number, label, likely }) {
    const head = this.name;
    const file = this.sent.get(`${head} ${number}`);
    const question = `${file ? file.name : `example ${number}`}: ${label}, or rather ${likely}?`;
    const text = make("span", { textContent: `${question} ` });
    const item = make("li");
    item.append(text);
    if (file) {
      const image = make("img", { src: URL.createObjectURL(file), alt: "", width: 48, height: 48, className: "suspect" });
      image.addEventListener("load", () => URL.revokeObjectURL(image.src), { once: true });
      item.prepend(image);
    }
    else this.recognise(number, item, text, `${label}, or rather ${likely}?`);
    const button = (name, method, query) => {
      const made = make("button", { type: "button", textContent: name, ariaLabel: `${name}: ${question}` });
      made.addEventListener("click", async () => {
        made.disabled = byId("not-mended").hidden = true;
        try {
          this.showCounts((await send(method, `heads/${encodeURIComponent(head)}/examples/${number}`, { query })).examples);
          await this.look();
        } catch (error) {
          byId("not-mended").textContent = `${error.message} ${error.detail ?? ""}`;
          made.disabled = byId("not-mended").hidden = false;
        }
      });
      item.append(made, " ");
    };
    button(`It is ${likely}`, "PUT", { label: likely });
    button("Remove", "DELETE");
    return item;
  }

  /** Show what the service knows about an example that another page sent: its thumbnail and name, or its date. */
  async recognise(number, item, text, question) {
    let found;
    try { found = await send("GET", `heads/${encodeURIComponent(this.name)}/examples/${number}`); } catch { return; }
    const sender = found.who ? ` by ${found.who}` : "";
    const name = found.file_name ?? `example ${number}, sent ${new Date(found.time).toLocaleString()}${sender}`;
    text.textContent = `${name}: ${question} `;
    if (found.thumbnail) item.prepend(make("img", { src: found.thumbnail, alt: "", width: 48, height: 48, className: "suspect" }));
  }

  async try(file) {
    const { signal } = new AbortController();
    const out = byId("tried");
    out.textContent = "Looking …";
    try {
      const { predictions, abstained } = await sendPatiently("POST", "classify", { query: { model: this.name }, file, signal });
      const labels = predictions.map(({ label, score }) => `${label} ${percent(score)}`).join(", ");
      out.textContent = abstained ? `${file.name}: unlike all its examples (nearest: ${labels}).`
        : `${file.name}: ${labels}`;
    } catch (error) {
      out.textContent = why(error, file);
    }
  }

  /** Offer to add the picture of an answer on the other tab under another label. */
  offer(answer) {
    this.answer = answer;
    byId("correct").hidden = byId("tabs").hidden || !answer?.id;
    byId("corrected").textContent = "";
  }

  async correct() {
    const label = labelOf("right-label");
    if (!this.answer?.id) return;
    if (!LABEL.test(label)) {
      byId("corrected").textContent = BAD_LABEL;
      return;
    }
    const head = this.name;
    if (this.misnamed) {
      byId("corrected").textContent = this.misnamed;
      return;
    }
    try {
      const { examples } = await send("POST", `heads/${encodeURIComponent(head)}/examples`, { query: { label, id: this.answer.id, backbone: this.backboneOf(head) } });
      if (!this.heads.includes(head)) this.heads.push(head);
      byId("corrected").textContent = `${head} has ${counted(examples[label], "picture")} of ${label} now.`;
      this.look();
    } catch (error) {
      byId("corrected").textContent = `${error.message} ${error.detail ?? ""}`;
    }
  }
}

/** Return the name of the classifier that was open last, if the browser has stored it. */
function recall() {
  try { return localStorage.getItem(LAST); } catch { return null; }
}

function remember(name) {
  try { localStorage.setItem(LAST, name); } catch { /* private windows may refuse */ }
}

function why(error, file) {
  const { lines, own } = explain(error, file);
  return `${file.name}: ${lines.join(" ")} ${own}`;
}

function curl(name) {
  const key = keyIsUsed() ? '-H "Authorization: Bearer $VIT_API_KEY" ' : "";
  return `curl ${key}-F file=@photo.jpg '${new URL(`classify?${new URLSearchParams({ model: name })}`, document.baseURI).href}'`;
}

const parts = document.createRange().createContextualFragment(await (await fetch(new URL("main.html", import.meta.url))).text());
byId("said").before(parts.querySelector("#tabs"));
byId("intake").after(parts.querySelector("#teach"));
byId("top-k-row").before(parts.querySelector("#correct"));
const teaching = new Teaching();
on("models", (choice) => teaching.reach(choice).catch(() => {})); // without an answer the tab stays hidden
on("answer", (answer) => teaching.offer(answer));
