// The curl commands that reproduce the results on screen.

import { keyIsUsed } from "./api.js";
import { queriesOf } from "./models.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curlCalls({ name, topK, map, services, maps }) {
  const call = (path, query, target = "") => {
    const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
    const search = new URLSearchParams(given).toString();
    const url = new URL(search ? `${path}?${search}` : path, document.baseURI).href;
    const key = keyIsUsed() ? '-H "Authorization: Bearer $VIT_API_KEY" ' : "";
    return `curl ${target}${key}-F ${quoted(`file=@${formEscaped(name)}`)} ${quoted(url)}`;
  };
  return [...queriesOf(services, { top_k: topK, attention: map }).map((query) => call("classify", query)),
    ...maps.map((query, index) => call("attention", query, `-o map${maps.length > 1 ? index + 1 : ""}.png `))].join("\n");
}

// For curl, a comma or semicolon ends a file's name unless the name is in double quotes.
const formEscaped = (name) => (/[,;"\\]/.test(name) ? `"${name.replace(/["\\]/g, "\\$&")}"` : name);
