// The choice of a model, and optionally of a second one, if the service has several.

import { ApiError, send } from "./api.js";

const STATES = { loading: "loading", unloaded: "loaded on demand", failed: "failed" };

export class ModelChoice {
  /** `row`: the element with the lists of the first and second model; `onChange()` runs after the user's choice. */
  constructor(row, onChange) {
    Object.assign(this, { row, listed: [], names: [undefined], shown: "" }); // undefined: the only model
    this.lists = [...row.querySelectorAll("select")];
    row.addEventListener("change", () => {
      this.names = [...new Set(this.lists.map(({ value }) => value))].filter(Boolean);
      this.show();
      onChange();
    });
  }

  isIn(state, name) { return this.listed.some((each) => each.state === state && (name ? each.name === name : each.default)); }

  /** List the models. The default replaces a first model that is removed or failed; return the names of those. */
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
    if (shown === this.shown) return; // otherwise an open list would close
    this.shown = shown;
    const others = [["", "none"], ...options.filter(([name]) => name !== first)];
    [[options, first], [others, second]].forEach(([entries, value], at) => {
      this.lists[at].replaceChildren(...entries.map(([name, text, disabled, title = ""]) => Object.assign(new Option(text, name), { disabled, title })));
      this.lists[at].value = value;
    });
  }
}

/** Return the queries of /classify: one for all models, or one each if one of two models takes labels. */
export function queriesOf(services, query) {
  const [{ name, asked }, second] = services;
  if (!second) return [{ ...query, model: name, labels: asked }];
  if (!asked && !second.asked) return [{ ...query, model: `${name},${second.name}` }];
  return services.map((each) => ({ ...query, top_k: Math.max(1, Math.min(query.top_k, each.classes)), model: each.name, labels: each.asked }));
}

/** Return the models' answers from `ask(query)`; with two models each is an answer or {error}. */
export async function answersOf(services, query, ask) {
  const [asked, other] = queriesOf(services, query);
  if (services.length === 1) return [await ask(asked)];
  if (other) return Promise.all([asked, other].map((each) => ask(each).catch((error) => ({ error }))));
  const { models, ...common } = await ask(asked);
  return services.map(({ name }) => (models[name].error ? { error: new ApiError(models[name].error, 1) } : { ...common, ...models[name] }));
}
