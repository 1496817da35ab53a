// The pictures on the page: up to three as thumbnails, more in a table with sorting, a filter, and one tab stop.

import { explain } from "./errors.js";
import { percent } from "./heatmap.js";
import { download } from "./save.js";

const AS_THUMBNAILS = 3;
const STATES = { waiting: "waiting", sending: "is being classified", busy: "waiting, because the service is busy", answered: "answered", failed: "failed", cancelled: "cancelled" };
const MARKS = { waiting: "…", sending: "…", busy: "busy", answered: "", failed: "failed", cancelled: "stopped" };

export const stateOf = ({ state }) => STATES[state];

/** Return a picture's values for the columns of the table. */
function facts({ number, name, answer, state, error, file }) {
  const [first] = answer?.predictions ?? [];
  const note = state === "failed" ? explain(error, file).lines[0] : state !== "answered" ? STATES[state] : answer.abstained ? "not sure" : "";
  return { number, name, label: first?.label ?? "", score: first?.score ?? null, note };
}

export class PictureList {
  /** `strip`, `many`: the elements; `onShow(picture)` and `onRemove(picture)` run on the user's request. */
  constructor(strip, many, onShow, onRemove) {
    Object.assign(this, { strip, many, onShow, onRemove });
    this.pictures = [];
    this.shown = null;
    this.order = { by: "number", down: false };
    this.body = many.querySelector("tbody");
    this.filter = many.querySelector("#filter");
    this.filter.addEventListener("input", () => this.arrange());
    for (const button of many.querySelectorAll("th button")) {
      button.addEventListener("click", () => {
        const { by } = button.dataset;
        this.order = { by, down: by === this.order.by ? !this.order.down : by === "score" };
        this.arrange();
      });
    }
    this.body.addEventListener("keydown", (event) => this.step(event));
    many.querySelector("#save-csv").addEventListener("click", () => this.saveCsv());
  }

  get isTable() { return this.pictures.length > AS_THUMBNAILS; }

  add(pictures) {
    for (const picture of pictures) {
      const thumbnail = document.createElement("canvas");
      const button = Object.assign(document.createElement("button"), { type: "button" });
      const mark = Object.assign(document.createElement("span"), { className: "mark" });
      button.append(thumbnail, mark);
      const item = document.createElement("li");
      item.append(button);
      const row = document.createElement("tr");
      for (let column = 0; column < 4; column += 1) row.append(document.createElement("td"));
      row.firstChild.append(document.createElement("canvas"), document.createElement("span"));
      for (const element of [button, row]) element.addEventListener("click", () => this.onShow(picture));
      this.pictures.push(Object.assign(picture, { item, button, row }));
    }
    this.arrange();
  }

  remove(removed) {
    this.pictures = this.pictures.filter((picture) => !removed.includes(picture));
    this.arrange();
  }

  show(picture) {
    this.shown = picture;
    this.mark();
  }

  /** Update the thumbnail and the row of a picture. */
  update(picture) {
    const { button, row } = picture;
    if (!row) return;
    const { look } = picture;
    if (look && picture.thumbnailOf !== look) {
      const side = Math.min(look.width, look.height);
      for (const canvas of [button.firstChild, row.querySelector("canvas")]) {
        [canvas.width, canvas.height] = [128, 128];
        canvas.getContext("2d").drawImage(look, (look.width - side) / 2, (look.height - side) / 2, side, side, 0, 0, 128, 128);
      }
      picture.thumbnailOf = look;
    }
    const { name, label, score, note } = facts(picture);
    button.setAttribute("aria-label", `${name}: ${picture.state === "answered" ? label : STATES[picture.state]}`);
    button.querySelector(".mark").textContent = MARKS[picture.state];
    const [first, ...rest] = row.cells;
    first.lastChild.textContent = first.title = name;
    [label, score === null ? "" : percent(score), note].forEach((text, at) => {
      rest[at].textContent = rest[at].title = text;
    });
    row.classList.toggle("failed", picture.state === "failed");
    if (this.isTable && this.order.by !== "number") this.arrange();
  }

  get rows() {
    const wanted = this.filter.value.trim().toLowerCase();
    const { by, down } = this.order;
    const known = this.pictures.map((picture) => ({ picture, ...facts(picture) }));
    const found = known.filter(({ name, label, note }) => `${name} ${label} ${note}`.toLowerCase().includes(wanted));
    const compare = (one, other) => (typeof one === "string" ? one.localeCompare(other) : (one ?? -1) - (other ?? -1));
    return found.sort((one, other) => (down ? -1 : 1) * compare(one[by], other[by]) || one.number - other.number).map(({ picture }) => picture);
  }

  arrange() {
    const { isTable, order } = this;
    this.strip.hidden = isTable || !this.pictures.length;
    this.many.hidden = !isTable;
    this.strip.replaceChildren(...(isTable ? [] : this.pictures.map(({ item }) => item)));
    const rows = isTable ? this.rows.map(({ row }) => row) : [];
    const kept = [...this.body.rows];
    if (rows.length !== kept.length || rows.some((row, at) => row !== kept[at])) { // otherwise the focus would be lost
      const focused = document.activeElement;
      this.body.replaceChildren(...rows);
      if (rows.includes(focused)) focused.focus();
    }
    for (const button of this.many.querySelectorAll("th button")) {
      const sorted = button.dataset.by === order.by ? (order.down ? "descending" : "ascending") : "none";
      button.closest("th").setAttribute("aria-sort", sorted);
    }
    this.mark();
  }

  /** Mark the shown picture, and scroll to it. */
  mark() {
    for (const picture of this.pictures) {
      const isShown = picture === this.shown;
      picture.button.setAttribute("aria-current", isShown);
      picture.row.setAttribute("aria-selected", isShown);
      picture.row.tabIndex = isShown ? 0 : -1;
    }
    const row = this.shown?.row;
    if (this.isTable && !row?.isConnected && this.body.rows.length) this.body.rows[0].tabIndex = 0;
    const box = this.body.closest(".scroll");
    if (!row?.isConnected || !box.clientHeight) return;
    const [top, bottom] = [row.offsetTop - box.querySelector("thead").offsetHeight, row.offsetTop + row.offsetHeight];
    if (top < box.scrollTop) box.scrollTop = top;
    else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight;
  }

  step(event) {
    const rows = [...this.body.rows];
    const at = rows.indexOf(event.target.closest("tr"));
    const pictureOf = (row) => this.pictures.find((picture) => picture.row === row);
    if (event.key === "Delete") {
      const next = pictureOf(rows[at + 1] ?? rows[at - 1]);
      this.onRemove(pictureOf(rows[at]));
      if (next) this.onShow(next);
      return next?.row.focus();
    }
    const places = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 10, PageUp: at - 10, Home: 0, End: rows.length - 1 };
    if (!(event.key in places)) return undefined;
    event.preventDefault();
    const row = rows[Math.max(0, Math.min(rows.length - 1, places[event.key]))];
    this.onShow(pictureOf(row));
    return row.focus({ preventScroll: true });
  }

  saveCsv() {
    const inert = (text) => text.replace(/^[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/, "'$&"); // a spreadsheet would run a formula
    const quoted = (value) => (/[",\n\r]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
    const lines = this.rows.map((picture) => {
      const { name, label, score, note } = facts(picture);
      const abstained = picture.answer?.abstained ? "true" : "";
      return [inert(name), inert(label), score ?? "", abstained, abstained ? "" : inert(note)].map((value) => quoted(String(value))).join(",");
    });
    const text = ["file,label,score,abstained,error", ...lines, ""].join("\r\n");
    download(new Blob([text], { type: "text/csv" }), "pictures.csv");
  }
}
