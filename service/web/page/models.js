// Which models answer where the service has several: one is chosen, perhaps a second one beside it, and each has its say.

import { ApiError, send } from "./api.js";

const STATES = { loading: "is being loaded", unloaded: "is loaded when asked", failed: "failed" };

export class ModelChoice {
  /** `row`: the element with the lists of the first and of the second model; `onChange()` runs when the user chose. */
  constructor(row, onChange) {
    Object.assign(this, { row, listed: [], names: [undefined], shown: "" }); // undefined: the only model that there is
    this.lists = [...row.querySelectorAll("select")];
    row.addEventListener("change", () => {
      this.names = [...new Set(this.lists.map(({ value }) => value))].filter(Boolean);
      this.show();
      onChange();
    });
  }

  isIn(state, name) { return this.listed.some((each) => each.state === state && (name ? each.name === name : each.default)); }

  /** Ask which models there are. The default one replaces a first one that is gone or failed; returns the names of such. */
  async ask() {
    this.listed = await send("GET", "models");
    const isThere = (name) => this.listed.some((each) => each.name === name && each.state !== "failed");
    const { name: standard } = this.listed.find((each) => each.default);
    const [first, second] = this.names;
    const gone = this.names.filter((name) => name && !isThere(name) && !(name === standard && this.isIn("failed", name)));
    const names = new Set([isThere(first) ? first : standard, ...(isThere(second) ? [second] : [])]);
    this.names = this.listed.length > 1 ? [...names] : [undefined];
    this.show();
    return gone;
  }

  show() {
    this.row.hidden = this.listed.length < 2;
    const [first, second = ""] = this.names;
    const options = this.listed.map(({ name, state, reason }) => [name, STATES[state] ? `${name} (${STATES[state]})` : name, state === "failed", reason]);
    const shown = JSON.stringify([options, first, second]);
    if (shown === this.shown) return; // else a list that is open would close
    this.shown = shown;
    const others = [["", "none"], ...options.filter(([name]) => name !== first)];
    [[options, first], [others, second]].forEach(([entries, value], at) => {
      this.lists[at].replaceChildren(...entries.map(([name, text, disabled, title = ""]) => Object.assign(new Option(text, name), { disabled, title })));
      this.lists[at].value = value;
    });
  }
}

/** The queries of /classify: one for all models, unless there are two and one compares words that are given. */
export function queriesOf(services, query) {
  const [{ name, asked }, second] = services;
  if (!second) return [{ ...query, model: name, labels: asked }];
  if (!asked && !second.asked) return [{ ...query, model: `${name},${second.name}` }];
  return services.map((each) => ({ ...query, top_k: Math.max(1, Math.min(query.top_k, each.classes)), model: each.name, labels: each.asked }));
}

/** What each model says, as `ask(query)` brings it: of one its answer, of two an answer or {error} each. */
export async function answersOf(services, query, ask) {
  const [asked, other] = queriesOf(services, query);
  if (services.length === 1) return [await ask(asked)];
  if (other) return Promise.all([asked, other].map((each) => ask(each).catch((error) => ({ error }))));
  const { models, ...common } = await ask(asked);
  return services.map(({ name }) => (models[name].error ? { error: new ApiError(models[name].error, 1) } : { ...common, ...models[name] }));
}
