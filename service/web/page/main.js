// The page: its parts and its state.

import { keyIsUsed, onUnauthorized, setKey } from "./api.js";
import { curlCalls } from "./curl.js";
import { NOT_FETCHED, explain, isFinal } from "./errors.js";
import { percent } from "./heatmap.js";
import { takePictures } from "./intake.js";
import { PictureList, stateOf } from "./list.js";
import { watchLoad } from "./live.js";
import { ModelChoice } from "./models.js";
import { tellExtensions } from "./moments.js";
import { MapPanel, fill } from "./panel.js";
import { FUSED, Picture } from "./picture.js";
import { Queue } from "./queue.js";
import { savePng, saveJson } from "./save.js";
import { Service } from "./service.js";

const byId = (id) => document.getElementById(id);
const make = (tag, attributes) => Object.assign(document.createElement(tag), attributes);
const TOP_K = [1, 3, 5, 10, 20, 50];
const PAUSE = 250; // milliseconds: a user who steps through the list with arrow keys requests only the last model

const sides = [...document.querySelectorAll(".side")]; // the answers of the first and of the second model
const emptyMap = document.querySelector("figure.map").cloneNode(true);
let shown = null; // the picture on screen
let latest = []; // the pictures that were added last
let picked = false; // the user, not the page, has chosen the shown picture
let service = null; // the first model, null while its description is requested
let services = []; // the first and the second model
let starting = null; // the last start
let timer = 0;
let reached = false; // the service has answered, with any answer
let keyTried = false;
let panels = [];
let changes = 0; // of the model, since the last answer of a known model
const choice = new ModelChoice(byId("choice"), choose);
const queue = new Queue(pictureChanged);
const list = new PictureList(byId("pictures"), byId("many"), pick, (picture) => remove([picture]));

function startIn(wait) {
  starting = null; // ignore the results of the previous start
  clearTimeout(timer);
  timer = setTimeout(start, wait);
}

async function start() {
  const begun = (starting = {});
  try {
    const [gone] = await choice.ask();
    if (gone) tellChange(gone);
    const found = await Promise.all(choice.names.map(Service.reach));
    if (begun !== starting) return;
    [services, service] = [found, found[0]];
  } catch (error) {
    if (begun !== starting) return;
    if (error.code === "unauthorized") return; // the key comes first
    reached = true;
    tell(byId("unready"), error, new File([], ""));
    showProgress();
    startIn(1000 * Math.min(error.retryAfter ?? 2, 10)); // the model is loading, or the service restarts
    return;
  }
  reached = true;
  byId("unready").hidden = byId("key-form").hidden = true;
  byId("model").textContent = services.map(({ title }) => title).join("; ");
  byId("words").hidden = !services.some(({ asksLabels }) => asksLabels);
  takeLabels();
  for (const each of services) if (!each.asksLabels) each.fetchLabels().then(showKnowledge, () => {}); // without labels the page lacks a sentence and the search
  showKnowledge();
  tellExtensions("models", choice);
  fillTopK();
  panels = [];
  setPanels();
  if (shown) show(shown);
  queue.add(list.pictures.filter((picture) => picture.state === "waiting" || (picture.state === "failed" && mayBeTried(picture))));
  arrange();
}

function showKnowledge() { byId("knows").textContent = byId("knows").title = service?.knowledge ?? ""; }

/** Use the labels in the text box as the classes of models with a text tower. */
function takeLabels() {
  const labels = [...new Set(byId("labels").value.split(",").map((label) => label.trim()).filter(Boolean))];
  for (const each of services) if (each.asksLabels) Object.assign(each, { labels, asked: JSON.stringify(labels) });
}

function fillTopK() {
  const classes = Math.max(1, ...services.map((each) => each.classes));
  const allowed = TOP_K.filter((count) => count < classes).concat(classes <= 50 ? classes : []);
  fill(byId("top-k"), allowed.map((count) => [count, count === classes ? `all ${count}` : count]));
  byId("top-k").value = Math.min(5, classes);
  setOptions();
}

function setOptions() {
  queue.options = { topK: Number(byId("top-k").value), map: services.every(({ methods }) => methods.includes(FUSED)) ? FUSED : undefined, services,
    side: byId("small").checked ? Math.max(...services.map((each) => each.side)) : 0 };
}

/** After a change of the model, drop its answers and classify the pictures with the new model. */
function renew(gone) {
  if (!service) return; // its description is already requested
  changes += 1;
  tellChange(gone);
  beginAnew(Math.min(10_000, 1000 * (changes - 1))); // longer each time, because two models may alternate behind one address
}

function tellChange(gone) {
  byId("notice").textContent = `${gone ? `${gone} no longer answers` : "The model has changed"}: the pictures are classified again.`;
}

/** Start again with the models that the user has chosen. */
function choose() {
  byId("notice").textContent = "";
  beginAnew(PAUSE);
}

function beginAnew(wait) {
  [services, service] = [[], null];
  queue.reset();
  for (const picture of list.pictures) {
    picture.forget();
    list.update(picture);
  }
  if (shown) show(shown);
  startIn(wait);
}

/** Check whether the service still has the shown models; return false if this is not known, or the page's are not yet. */
async function checkModel() {
  if (!service) return false;
  const known = services;
  try {
    const [gone] = await choice.ask();
    const ready = known.filter(({ name }) => choice.isIn("ready", name)); // a request for an unloaded model would load it again
    const same = gone ? [false] : await Promise.all(ready.map(async (each) => each.equals(await Service.reach(each.name))));
    if (known === services && same.includes(false)) renew(gone);
    return true;
  } catch {
    return false; // the next request for a picture shows the error
  }
}

function addPanel(of) {
  const title = services.length > 1 ? of.model.name : "";
  const panel = new MapPanel(emptyMap.cloneNode(true), of, { title, onChange: mapsChanged, onOther: () => renew() });
  panel.look.smooth = byId("smooth").checked;
  panel.find(".heat").style.opacity = byId("opacity").value / 100;
  panels.push(panel);
  byId("figures").replaceChildren(...panels.map(({ element }) => element));
  return panel;
}

/** Show one panel, or two to compare maps or models. Without maps, the panel shows only the picture. */
function setPanels() {
  const isPair = services.length > 1;
  const count = isPair ? 2 : service.methods.length ? 1 + byId("compare").checked : 1;
  byId("compare").parentElement.hidden = isPair;
  document.body.classList.toggle("beside", isPair);
  while (panels.length > count) panels.pop().element.remove();
  while (panels.length < count) {
    const panel = addPanel(services[panels.length] ?? service);
    if (!isPair) panel.choice = { ...panels[0].choice };
    if (!isPair && panels.length > 1 && !panel.classSpecific) panel.choice.head = panel.choice.head === "max" ? "mean" : "max";
    panel.find(".layer").value = panel.choice.layer ?? panel.service.model.layers - 1;
    panel.find(".head").value = panel.choice.head;
    if (shown) panel.show(shown, classOf(panel));
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
const hasNothing = (picture) => isUnanswered(picture) && !picture.answer && !picture.answerBy(1);
const refusals = ({ error, answers: [, second] }) => [error, second?.error].filter(Boolean);
const mayBeTried = (picture) => (isUnanswered(picture) ? !isFinal(picture.error) : !picture.isUnderWay && refusals(picture).some((error) => !isFinal(error)));

/** Show the parts of the page that have content; while a key is missing, only its form. */
function arrange() {
  const locked = !byId("key-form").hidden;
  const { pictures } = list;
  byId("intake").hidden = document.querySelector("footer").hidden = locked || !reached;
  byId("progress-line").hidden = !pictures.length;
  byId("answer").hidden = locked || !shown;
  byId("where").hidden = byId("answer").hidden || (hasNothing(shown) && !shown.photo);
  byId("more").hidden = byId("where").hidden || !services.some(({ methods }) => methods.length) || hasNothing(shown);
  document.body.classList.toggle("narrow", locked || byId("where").hidden);
  document.body.classList.toggle("begun", pictures.length > 0);
  document.body.classList.toggle("many", list.isTable);
}

function pictureChanged(picture) {
  if (!list.pictures.includes(picture)) return showProgress();
  if (service && refusals(picture).some(({ code }) => code === "unknown_model")) return renew();
  if (picture.state === "answered" && picture.answer) {
    if (services.some((each) => picture.answerBy(each.place) && !each.gave(picture.answerBy(each.place)))) return renew();
    changes = 0;
  }
  list.update(picture);
  showProgress();
  if (picture === shown) showPicture();
  // Show the first answered picture unless the user has chosen another one.
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
  const state = `${shown.state} ${shown.photo !== null} ${shown.look !== null}`;
  if (shown.shownState === state) return; // only the progress has changed
  shown.shownState = state;
  byId("photo-caption").textContent = shown.photo || !shown.answer ? shown.name : `${shown.name}, as the model saw it: this browser cannot show the file itself`;
  showAnswer();
  for (const panel of panels) panel.show(shown, classOf(panel));
}

/** Return the class whose map a panel shows first: the best class, or the second best in a second panel. */
function classOf(panel) {
  const [first, second] = (shown.answerBy(panel.service.place)?.predictions ?? []).map(({ index }) => index);
  const isSecond = panel !== panels[0] && services.length === 1;
  return (isSecond && second !== Number(panels[0].choice.class) ? second : first) ?? first ?? null;
}

function showAnswer() {
  const { answer, error, state } = shown;
  byId("error").hidden = true;
  byId("sides").hidden = byId("top-k-row").hidden = byId("hint").hidden = hasNothing(shown) || !service;
  byId("hint").hidden ||= !services.some(({ methods }) => methods.includes(FUSED));
  byId("timing").hidden = state === "failed" && !answer;
  sides.forEach(showSide);
  byId("timing").textContent = answer ? `${Math.round(answer.timings_ms.total)} ms in the service, ${Math.round(answer.timings_ms.inference)} ms of it in the model, batch of ${answer.batch_size}` : `${shown.name}: ${stateOf(shown)}`;
  tellExtensions("answer", answer);
  const told = services.filter(({ place }) => shown.answerBy(place)?.predictions.length).map(headline).join("; ");
  byId("headline").textContent = byId("headline").title = told || (shown.isUnderWay ? "Looking …" : answer?.abstained ? "Unlike all known classes" : "No answer");
  byId("said").textContent = told && `${shown.name}: ${told}`;
  if (state === "failed") tell(byId("error"), error, shown.file);
}

/** Show the answers of one model, or the reason why they are missing. */
function showSide(side, place) {
  const find = (selector) => side.querySelector(selector);
  const answer = shown.answerBy(place);
  const refusal = place ? shown.answers[place]?.error : null; // the error of the first model is the picture's error
  side.hidden = place > 0 && services.length < 2;
  Object.assign(find(".of-model"), { hidden: services.length < 2, textContent: services[place]?.model.name ?? "" });
  find(".fits").hidden = answer?.set_size === undefined;
  find(".fits").textContent = find(".fits").title = answer ? fitting(answer) : "";
  find(".bars").classList.toggle("waiting", shown.isUnderWay);
  find(".bars").replaceChildren(...(answer?.predictions ?? []).map((prediction) => bar(prediction, place)));
  find(".bars").setAttribute("aria-label", `Classes by score${services.length > 1 ? `, ${services[place].model.name}` : ""}`);
  find(".refusal").hidden = !refusal;
  if (refusal) tell(find(".refusal"), refusal, shown.file);
}

function headline({ place, model }) {
  const answer = shown.answerBy(place);
  const { predictions: [first] } = answer;
  const isPair = services.length > 1; // with two models, use only the first name of a class to save room
  return `${isPair ? `${model.name}: ` : ""}${answer.abstained ? "Not sure: " : ""}${isPair ? first.label.split(",")[0] : first.label}, ${percent(first.score)}`;
}

/** Return a sentence about the label set of a calibrated model. */
function fitting({ set, set_size: size }) {
  if (!size) return "None of its labels fits.";
  return `${size === 1 ? "One label fits" : `${size} labels fit`}${set ? `: ${set.join("; ")}` : ""}.`;
}

function bar({ label, index, score }, place) {
  const row = make("button", { type: "button", className: "answer", title: label });
  const part = (className, textContent = "") => make("span", { className, textContent });
  const fillPart = part("fill");
  fillPart.style.width = `${100 * score}%`;
  row.append(fillPart, part("label", label), part("score", percent(score)));
  row.dataset.index = index;
  row.addEventListener("click", () => {
    const panel = panels.find(({ service: of }) => of.place === place);
    panel?.choose({ class: index });
    panel?.find(".stage").scrollIntoView({ block: "nearest" }); // above the visible part on a phone
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
  sides.forEach((side, place) => {
    const chosen = panels.filter((panel) => panel.service.place === place && panel.classSpecific).map((panel) => Number(panel.choice.class));
    for (const row of side.querySelectorAll(".answer")) row.setAttribute("aria-pressed", chosen.includes(Number(row.dataset.index)));
  });
  showProgress();
  const drawn = panels.filter((panel) => panel.map);
  const full = drawn.length > 1 ? Math.max(...drawn.map((panel) => panel.map.full)) : null; // two maps share one scale
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

/** Return the parameters of a PNG that looks like the maps on screen. */
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
byId("small").addEventListener("change", () => service && setOptions());
byId("use-labels").addEventListener("click", () => {
  takeLabels();
  fillTopK();
  queue.reset();
  for (const picture of list.pictures) picture.forget();
  queue.add(list.pictures);
});
byId("cancel").addEventListener("click", () => {
  queue.cancel();
  for (const picture of list.pictures) picture.cancel(); // the requests for maps
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
    getSelection().selectAllChildren(byId("curl-text")); // browsers offer the clipboard only over HTTPS
    byId("copied").textContent = "Selected: press Ctrl+C";
  }
});

onUnauthorized(() => {
  const form = byId("key-form");
  if (keyTried || form.hidden) {
    if (keyIsUsed()) byId("key-note").textContent = "The service does not know this key.";
    setTimeout(() => byId("key").select()); // after the form is shown
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
