// The page: its parts, and what is on screen.

import { keyIsUsed, onUnauthorized, setKey } from "./api.js";
import { curlCalls } from "./curl.js";
import { NOT_FETCHED, explain, isFinal } from "./errors.js";
import { percent } from "./heatmap.js";
import { takePictures } from "./intake.js";
import { PictureList, stateOf } from "./list.js";
import { watchLoad } from "./live.js";
import { MapPanel, fill } from "./panel.js";
import { FUSED, Picture } from "./picture.js";
import { Queue } from "./queue.js";
import { savePng, saveJson } from "./save.js";
import { Service } from "./service.js";
import { Teaching } from "./teach.js";

const byId = (id) => document.getElementById(id);
const make = (tag, attributes) => Object.assign(document.createElement(tag), attributes);
const TOP_K = [1, 3, 5, 10, 20, 50];

const emptyMap = document.querySelector("figure.map").cloneNode(true);
let shown = null; // the picture on screen
let latest = []; // the pictures that came last
let picked = false; // the shown one was chosen by the user, and not by the page
let service = null;
let reached = false; // the service has answered, whatever it said
let keyTried = false;
let panels = [];
let changes = 0; // of the model, since an answer was one of the model that the page knows
const teaching = new Teaching();
const queue = new Queue(pictureChanged);
const list = new PictureList(byId("pictures"), byId("many"), pick, (picture) => remove([picture]));

async function start() {
  try {
    service = await Service.reach();
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
  byId("model").textContent = service.title;
  byId("words").hidden = !service.asksLabels;
  if (service.asksLabels) takeLabels();
  else service.fetchLabels().then(showKnowledge, () => {}); // without them the page lacks a sentence and the search
  showKnowledge();
  teaching.reach().catch(() => {}); // without it the page has no tab for it
  fillTopK();
  panels = [];
  setPanels();
  if (shown) show(shown);
  queue.add(list.pictures.filter((picture) => picture.state === "waiting" || (picture.state === "failed" && mayBeTried(picture))));
  arrange();
}

function showKnowledge() { byId("knows").textContent = byId("knows").title = service.knowledge; }

/** The words of the box are the classes of a model of texts. */
function takeLabels() {
  service.labels = [...new Set(byId("labels").value.split(",").map((label) => label.trim()).filter(Boolean))];
  service.asked = JSON.stringify(service.labels);
}

function fillTopK() {
  const classes = service.classes || 1;
  const allowed = TOP_K.filter((count) => count < classes).concat(classes <= 50 ? classes : []);
  fill(byId("top-k"), allowed.map((count) => [count, count === classes ? `all ${count}` : count]));
  byId("top-k").value = Math.min(5, classes);
  setOptions();
}

function setOptions() {
  queue.options = { topK: Number(byId("top-k").value), map: service.methods.find((name) => name === FUSED), labels: service.asked };
}

/** Another model is behind the page: what the old one said is dropped, and the pictures are given to the new one. */
function renew() {
  if (!service) return; // it is being asked for
  service = null;
  changes += 1;
  byId("notice").textContent = "The model changed: the pictures are classified anew.";
  queue.reset();
  for (const picture of list.pictures) {
    picture.forget();
    list.update(picture);
  }
  if (shown) show(shown);
  setTimeout(start, Math.min(10_000, 1000 * (changes - 1))); // two that take turns behind one address are not asked forever
}

/** The service may have begun anew: ask which model it has. */
async function checkModel() {
  if (!service) return;
  const known = service;
  const now = await Service.reach().catch(() => null);
  if (now && known === service && !known.equals(now)) renew();
}

function addPanel() {
  const panel = new MapPanel(emptyMap.cloneNode(true), service, { onChange: mapsChanged, onOther: renew });
  panel.look.smooth = byId("smooth").checked;
  panel.find(".heat").style.opacity = byId("opacity").value / 100;
  panels.push(panel);
  byId("figures").replaceChildren(...panels.map(({ element }) => element));
  return panel;
}

/** One panel, or two where maps are compared. A model without maps has one that shows the picture. */
function setPanels() {
  const count = service.methods.length ? 1 + byId("compare").checked : 1;
  while (panels.length > count) panels.pop().element.remove();
  while (panels.length < count) {
    const panel = addPanel();
    panel.choice = { ...panels[0].choice };
    if (panels.length > 1 && !panel.classSpecific) panel.choice.head = panel.choice.head === "max" ? "mean" : "max";
    panel.find(".layer").value = panel.choice.layer ?? service.model.layers - 1;
    panel.find(".head").value = panel.choice.head;
    if (shown) panel.show(shown, classOf(panels.length - 1));
  }
  byId("figures").classList.toggle("two", count > 1);
  mapsChanged();
}

// Pictures.

function addFiles(files) {
  byId("error").hidden = true;
  byId("notice").textContent = "";
  const added = files.map((file) => new Picture(file, showProgress));
  list.add(added);
  for (const picture of added) {
    list.update(picture);
    picture.decode().then(() => pictureChanged(picture));
  }
  latest = added;
  picked = false;
  show(added[0]);
  if (service) queue.add(added);
}

function remove(removed) {
  const place = list.pictures.indexOf(shown);
  list.remove(removed);
  for (const picture of removed) picture.cancel();
  queue.remove(removed);
  if (removed.includes(shown)) {
    shown = null;
    const next = list.pictures[Math.min(place, list.pictures.length - 1)];
    if (next) show(next);
    else byId("choose").focus();
  }
  showProgress();
}

const isUnanswered = ({ state }) => ["failed", "cancelled"].includes(state);
const hasNothing = (picture) => isUnanswered(picture) && !picture.answer;
const mayBeTried = (picture) => isUnanswered(picture) && !isFinal(picture.error);

/** Show the parts of the page that have something in them: a key that is needed comes alone. */
function arrange() {
  const locked = !byId("key-form").hidden;
  const { pictures } = list;
  byId("intake").hidden = document.querySelector("footer").hidden = locked || !reached;
  byId("progress-line").hidden = !pictures.length;
  byId("answer").hidden = locked || !shown;
  byId("where").hidden = byId("answer").hidden || (hasNothing(shown) && !shown.photo);
  byId("more").hidden = byId("where").hidden || !service?.methods.length || hasNothing(shown);
  document.body.classList.toggle("narrow", locked || byId("where").hidden);
  document.body.classList.toggle("begun", pictures.length > 0);
  document.body.classList.toggle("many", list.isTable);
}

function pictureChanged(picture) {
  if (!list.pictures.includes(picture)) return showProgress();
  if (picture.state === "answered" && picture.answer) {
    if (service && !service.gave(picture.answer)) return renew();
    changes = 0;
  }
  list.update(picture);
  showProgress();
  if (picture === shown) showPicture();
  // The first of them that is answered is shown, unless the user looks at another.
  else if (picture.state === "answered" && !picked && hasNothing(shown) && latest.includes(picture)) show(picture);
  return undefined;
}

function showProgress() {
  const { round, busy } = queue;
  byId("progress").value = round.length ? queue.progress : 0;
  byId("cancel").disabled = !busy && !list.pictures.some(({ asking }) => asking);
  byId("again").disabled = !service || busy || !(list.pictures.some(mayBeTried) || panels.some((panel) => panel.failed));
  const hasFailed = ({ state }) => state === "failed";
  const isUnreadable = (picture) => hasFailed(picture) && isFinal(picture.error);
  const rest = [[isUnreadable, "cannot be read"], [(picture) => hasFailed(picture) && !isUnreadable(picture), "failed"],
    [({ state }) => state === "cancelled", "cancelled"]].map(([accepts, end]) => [queue.count(accepts), end]);
  const ends = rest.map(([count, end]) => (count ? `, ${count} ${end}` : "")).join("");
  const answered = queue.count(({ state }) => state === "answered");
  const text = round.length ? `${answered} of ${round.length} answered${ends}` : service ? "" : "Waiting for the service";
  if (byId("progress-text").textContent !== text) byId("progress-text").textContent = text;
  arrange();
}

function pick(picture) {
  picked = true;
  show(picture);
}

function show(picture) {
  shown = picture;
  list.show(picture);
  picture.shownState = null;
  showPicture();
  arrange();
}

function showPicture() {
  const state = `${shown.state} ${shown.photo !== null} ${shown.seen !== null}`;
  if (shown.shownState === state) return; // progress alone
  shown.shownState = state;
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
  byId("bars").hidden = byId("top-k-row").hidden = byId("hint").hidden = hasNothing(shown) || !service;
  byId("hint").hidden ||= !service?.methods.includes(FUSED);
  byId("timing").hidden = state === "failed" && !answer;
  byId("fits").hidden = answer?.set_size === undefined;
  byId("fits").textContent = byId("fits").title = answer ? fitting(answer) : "";
  byId("bars").classList.toggle("waiting", shown.isUnderWay);
  byId("bars").replaceChildren(...(answer?.predictions ?? []).map(bar));
  byId("timing").textContent = answer ? `${Math.round(answer.timings_ms.total)} ms in the service, ${Math.round(answer.timings_ms.inference)} ms of it in the model, batch of ${answer.batch_size}` : `${shown.name}: ${stateOf(shown)}`;
  teaching.offer(answer);
  const [first] = answer?.predictions ?? [];
  byId("headline").textContent = byId("headline").title = headline(first, answer);
  byId("said").textContent = first ? `${shown.name}: ${headline(first, answer)}` : "";
  if (state === "failed") tell(byId("error"), error, shown.file);
}

function headline(first, answer) {
  if (!first) return shown.isUnderWay ? "Looking …" : "No answer";
  return `${answer.abstained ? "Not sure: " : ""}${first.label}, ${percent(first.score)}`;
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
    panels[0]?.find(".stage").scrollIntoView({ block: "nearest" }); // further up on a phone
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
  const drawn = panels.filter((panel) => panel.map);
  const full = drawn.length > 1 ? Math.max(...drawn.map((panel) => panel.map.full)) : null; // two maps share a scale
  setLook({ full });
  byId("save-png").disabled = byId("save-json").disabled = !shown || !drawn.length;
  if (shown) byId("curl-text").textContent = curlCalls({ name: shown.name, ...queue.options, maps: panels.map((panel) => ({ ...panel.query, ...drawingOptions() })) });
}

function setLook(change) {
  for (const panel of panels) {
    const before = panel.look;
    panel.look = { ...before, ...change };
    if (before.full !== panel.look.full || before.smooth !== panel.look.smooth) panel.draw();
  }
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
  setLook({ smooth: event.target.checked });
  mapsChanged();
});
byId("compare").addEventListener("change", setPanels);
byId("top-k").addEventListener("change", () => {
  setOptions();
  const again = list.pictures.filter(({ state }) => state === "answered");
  if (again.length) queue.add(again);
});
byId("use-labels").addEventListener("click", () => {
  takeLabels();
  fillTopK();
  queue.reset();
  for (const picture of list.pictures) picture.forget();
  queue.add(list.pictures);
});
byId("cancel").addEventListener("click", () => {
  queue.cancel();
  for (const picture of list.pictures) picture.cancel(); // its maps
});
byId("again").addEventListener("click", () => {
  queue.add(list.pictures.filter(mayBeTried));
  for (const panel of panels) if (panel.failed) panel.refresh();
});
byId("remove").addEventListener("click", () => remove([shown]));
byId("clear").addEventListener("click", () => remove([...list.pictures]));
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

takePictures(addFiles, () => { byId("notice").textContent = NOT_FETCHED; });
start();
watchLoad(checkModel);
