// The page: its parts, and what is on screen.

import { keyIsUsed, onUnauthorized, send, setKey } from "./api.js";
import { curlCalls } from "./curl.js";
import { explain, isFinal } from "./errors.js";
import { percent } from "./heatmap.js";
import { takePictures } from "./intake.js";
import { watchLoad } from "./live.js";
import { MapPanel, fill, paint } from "./panel.js";
import { FUSED, Picture } from "./picture.js";
import { Queue } from "./queue.js";
import { savePng, saveJson } from "./save.js";

const byId = (id) => document.getElementById(id);
const make = (tag, attributes) => Object.assign(document.createElement(tag), attributes);
const TOP_K = [1, 3, 5, 10, 20, 50];

const pictures = [];
const emptyMap = document.querySelector("figure.map").cloneNode(true);
let shown = null; // the picture on screen
let service = null;
let reached = false; // the service has answered, whatever it said
let keyTried = false;
let panels = [];
const queue = new Queue(pictureChanged);

async function start() {
  try {
    const [model, { labels }] = await Promise.all([send("GET", "model"), send("GET", "labels")]);
    service = { model, labels, methods: model.attention_methods };
  } catch (error) {
    if (error.code === "unauthorized") return; // the key comes first
    reached = true;
    tell(byId("unready"), error, new File([], ""));
    showProgress();
    setTimeout(start, 1000 * Math.min(error.retryAfter ?? 2, 10)); // a model that loads, a service that starts again
    return;
  }
  reached = true;
  byId("unready").hidden = byId("key-form").hidden = true;
  const { model } = service;
  byId("model").textContent = `${model.name} on ${model.device}, ${model.dtype}, input ${model.input_size[0]}×${model.input_size[1]}, ${model.classes} classes`;
  const classes = model.classes || 1;
  const allowed = TOP_K.filter((count) => count < classes).concat(classes <= 50 ? classes : []);
  fill(byId("top-k"), allowed.map((count) => [count, count === classes ? `all ${count}` : count]));
  byId("top-k").value = Math.min(5, classes);
  setOptions();
  panels = [];
  setPanels();
  if (shown) show(shown);
  queue.add(pictures.filter((picture) => picture.state === "waiting" || (picture.state === "failed" && mayBeTried(picture))));
  arrange();
}

function setOptions() {
  queue.options = { topK: Number(byId("top-k").value), map: service.methods.find((name) => name === FUSED) };
}

function addPanel() {
  const panel = new MapPanel(emptyMap.cloneNode(true), service, mapsChanged);
  panel.smooth = byId("smooth").checked;
  panel.find(".heat").style.opacity = byId("opacity").value / 100;
  panels.push(panel);
  byId("figures").replaceChildren(byId("figures").firstElementChild, ...panels.map(({ element }) => element));
  return panel;
}

/** One panel, or two where maps are compared. */
function setPanels() {
  const count = service.methods.length && 1 + byId("compare").checked;
  while (panels.length > count) panels.pop().element.remove();
  while (panels.length < count) {
    const panel = addPanel();
    panel.choice = { ...panels[0].choice };
    if (panels.length > 1 && !panel.classSpecific) panel.choice.head = panel.choice.head === "max" ? "mean" : "max";
    panel.find(".layer").value = panel.choice.layer ?? service.model.layers - 1;
    panel.find(".head").value = panel.choice.head;
    if (shown) panel.show(shown, classOf(panels.length - 1));
  }
  mapsChanged();
}

// Pictures.

function addFiles(files) {
  byId("error").hidden = true;
  const added = files.map((file) => new Picture(file, showProgress));
  pictures.push(...added);
  for (const picture of added) {
    byId("pictures").append(thumbnail(picture));
    picture.decode().then(() => pictureChanged(picture));
  }
  show(added[0]);
  if (service) queue.add(added);
}

const isUnanswered = ({ state }) => ["failed", "cancelled"].includes(state);
const hasNothing = (picture) => isUnanswered(picture) && !picture.answer;
const mayBeTried = (picture) => isUnanswered(picture) && !isFinal(picture.error);

/** Show the parts of the page that have something in them: a key that is needed comes alone. */
function arrange() {
  const locked = !byId("key-form").hidden;
  byId("intake").hidden = document.querySelector("footer").hidden = locked || !reached;
  byId("progress-line").hidden = byId("pictures").hidden = !pictures.length;
  byId("answer").hidden = locked || !service || !shown;
  byId("where").hidden = byId("answer").hidden || !panels.length || hasNothing(shown);
  document.body.classList.toggle("narrow", locked || !service || pictures.every(hasNothing));
}

function thumbnail(picture) {
  const item = make("li");
  const button = make("button", { type: "button" });
  button.append(make("canvas"), make("span", { className: "mark" }));
  button.addEventListener("click", () => show(picture));
  item.append(button);
  picture.button = button;
  return item;
}

const STATES = { waiting: "waits", sending: "is being classified", busy: "waits, as the service is busy", answered: "answered", failed: "failed", cancelled: "cancelled" };
const MARKS = { waiting: "…", sending: "…", busy: "busy", answered: "", failed: "failed", cancelled: "stopped" };

function pictureChanged(picture) {
  const canvas = picture.button.querySelector("canvas");
  const look = picture.photo ?? picture.seen;
  if (look && picture.thumbnailOf !== look) {
    const side = Math.min(look.width, look.height);
    [canvas.width, canvas.height] = [128, 128];
    canvas.getContext("2d").drawImage(look, (look.width - side) / 2, (look.height - side) / 2, side, side, 0, 0, 128, 128);
    picture.thumbnailOf = look;
  }
  const first = picture.answer?.predictions[0].label;
  picture.button.setAttribute("aria-label", `${picture.name}: ${picture.state === "answered" ? first : STATES[picture.state]}`);
  picture.button.querySelector(".mark").textContent = MARKS[picture.state];
  showProgress();
  if (picture === shown) showPicture();
}

function showProgress() {
  const { round, done, busy } = queue;
  byId("progress").value = round.length ? queue.progress : 0;
  byId("cancel").disabled = !busy && !pictures.some(({ asking }) => asking);
  byId("again").disabled = !service || busy || !(pictures.some(mayBeTried) || panels.some((panel) => panel.failed));
  const ended = ["cancelled", "failed"].map((end) => [round.filter(({ state }) => state === end).length, end]);
  const rest = ended.map(([count, end]) => (count ? `, ${count} ${end}` : "")).join("");
  const text = round.length ? `${done} of ${round.length} done${rest}` : "Waiting for the service";
  if (byId("progress-text").textContent !== text) byId("progress-text").textContent = text;
  arrange();
}

function show(picture) {
  shown = picture;
  for (const { button } of pictures) button?.setAttribute("aria-current", button === picture.button);
  picture.shownState = null;
  showPicture();
}

function showPicture() {
  const state = `${shown.state} ${shown.photo !== null} ${shown.seen !== null}`;
  if (shown.shownState === state) return; // progress alone
  shown.shownState = state;
  const stack = document.querySelector(".photo .stack");
  paint(stack, stack.querySelector("canvas"), shown.photo ?? shown.seen);
  stack.querySelector("canvas").setAttribute("aria-label", shown.name);
  byId("photo-caption").textContent = shown.photo || !shown.answer ? shown.name : `${shown.name}, as the model saw it: this browser cannot show the file itself`;
  showAnswer();
  panels.forEach((panel, index) => panel.show(shown, classOf(index)));
}

/** The class whose map a panel shows first: the first answer, and beside it the second, or the first beside the second. */
function classOf(panel) {
  const [first, second] = (shown.answer?.predictions ?? []).map(({ index }) => index);
  return (panel && second !== Number(panels[0].choice.class) ? second : first) ?? first ?? null;
}

function showAnswer() {
  const { answer, error, state } = shown;
  byId("error").hidden = true;
  byId("bars").hidden = hasNothing(shown);
  byId("top-k-row").hidden = hasNothing(shown);
  byId("timing").hidden = state === "failed" && !answer;
  byId("fits").hidden = answer?.set_size === undefined;
  byId("fits").textContent = byId("fits").title = answer ? fitting(answer) : "";
  byId("bars").replaceChildren(...(answer?.predictions ?? []).map(bar));
  byId("timing").textContent = answer ? `${Math.round(answer.timings_ms.total)} ms in the service, ${Math.round(answer.timings_ms.inference)} ms of it in the model, batch of ${answer.batch_size}` : `${shown.name}: ${STATES[state]}`;
  if (state === "failed") tell(byId("error"), error, shown.file);
}

/** Which labels hold the right one, of a calibrated model. */
function fitting({ set, set_size: size }) {
  if (!size) return "None of its labels fits.";
  return `${size === 1 ? "One of its labels fits" : `${size} of its labels fit`}${set ? `: ${set.join("; ")}` : ""}.`;
}

function bar({ label, index, score }) {
  const row = make("button", { type: "button", className: "answer", title: label });
  const part = (className, textContent = "") => make("span", { className, textContent });
  const fillPart = part("fill");
  fillPart.style.width = `${100 * score}%`;
  row.append(fillPart, part("label", label), part("score", percent(score)));
  row.dataset.index = index;
  row.addEventListener("click", () => {
    panels[0]?.choose({ class: index });
    panels[0]?.find(".stage").scrollIntoView({ block: "nearest" }); // further down on a phone
  });
  const item = make("li");
  item.append(row);
  return item;
}

function tell(box, error, file) {
  const { lines, own } = explain(error, file);
  box.replaceChildren(make("strong", { textContent: file.name && `${file.name}: ` }), lines.join(" "), make("small", { textContent: own }));
  box.hidden = false;
}

// Maps.

function mapsChanged() {
  if (!service) return;
  const chosen = panels.filter((panel) => panel.classSpecific).map((panel) => Number(panel.choice.class));
  for (const row of document.querySelectorAll(".answer")) row.setAttribute("aria-pressed", chosen.includes(Number(row.dataset.index)));
  showProgress();
  const ready = shown !== null && panels.some((panel) => panel.map);
  byId("save-png").disabled = byId("save-json").disabled = !ready;
  if (shown) byId("curl-text").textContent = curlCalls({ name: shown.name, ...queue.options, maps: panels.map((panel) => ({ ...panel.query, ...drawingOptions() })) });
}

/** What the service's PNG takes to look as the maps on screen. */
function drawingOptions() {
  return { alpha: byId("opacity").value / 100, view: "photo", smooth: byId("smooth").checked ? undefined : false };
}

byId("opacity").addEventListener("input", (event) => {
  for (const panel of panels) panel.find(".heat").style.opacity = event.target.value / 100;
  mapsChanged();
});
byId("smooth").addEventListener("change", (event) => {
  for (const panel of panels) {
    panel.smooth = event.target.checked;
    panel.draw();
  }
  mapsChanged();
});
byId("compare").addEventListener("change", setPanels);
byId("top-k").addEventListener("change", () => {
  setOptions();
  const again = pictures.filter(({ state }) => state === "answered");
  if (again.length) queue.add(again);
});
byId("cancel").addEventListener("click", () => {
  queue.cancel();
  for (const picture of pictures) picture.cancel(); // its maps
});
byId("again").addEventListener("click", () => {
  queue.add(pictures.filter(mayBeTried));
  for (const panel of panels) if (panel.failed) panel.refresh();
});
byId("save-png").addEventListener("click", () => savePng(shown, panels, byId("opacity").value / 100));
byId("save-json").addEventListener("click", () => saveJson(shown, panels));
byId("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(byId("curl-text").textContent);
    byId("copied").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(byId("curl-text")); // without https the browser gives no clipboard
    byId("copied").textContent = "Selected: press Ctrl+C";
  }
});

onUnauthorized(() => {
  const form = byId("key-form");
  if (keyTried || form.hidden) {
    if (keyIsUsed()) byId("key-note").textContent = "The service does not know this key.";
    setTimeout(() => byId("key").select()); // when the form is there
  }
  keyTried = form.hidden = false;
  arrange();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key-note").textContent = "";
  keyTried = true;
  start();
});

takePictures(addFiles);
start();
watchLoad();
