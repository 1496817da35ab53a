// The service's HTTP interface. Every address is relative to the page: a proxy may put the service under a prefix.

import { plainWords } from "./errors.js";

export class ApiError extends Error {
  constructor(problem, retryAfter) {
    super(plainWords(problem));
    this.code = problem.code;
    this.status = problem.status;
    this.detail = problem.detail;
    this.requestId = problem.request_id;
    this.retryAfter = retryAfter;
  }
}

let key = ""; // in memory only: a reload forgets it
let askForKey = null;

export const setKey = (value) => { key = value; };
export const keyIsUsed = () => key !== "";
export const onUnauthorized = (listener) => { askForKey = listener; };

/** Send one request; resolves with {body, headers}, rejects with an ApiError, or an AbortError when cancelled. */
export function send(method, path, { query = {}, file = null, type = "json", signal, onProgress } = {}) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest(); // unlike fetch it tells how much of an upload is through
    const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
    const search = new URLSearchParams(given).toString();
    request.open(method, new URL(search ? `${path}?${search}` : path, document.baseURI));
    if (key) request.setRequestHeader("Authorization", `Bearer ${key}`);
    request.responseType = "blob";
    const fail = (code) => reject(new ApiError({ code, status: 0, detail: "" }));
    const abort = () => { request.abort(); reject(new DOMException("cancelled", "AbortError")); };
    request.onerror = () => fail("no_answer");
    request.ontimeout = request.onerror;
    request.onload = async () => {
      signal?.removeEventListener("abort", abort);
      const blob = request.response;
      if (request.status < 400) {
        const body = type === "blob" ? blob : type === "text" ? await blob.text() : JSON.parse(await blob.text());
        return resolve(body);
      }
      const text = await blob.text();
      let problem;
      try { problem = JSON.parse(text); } catch { problem = { detail: text.slice(0, 200) }; }
      problem = { code: "other", ...problem, status: request.status };
      if (request.status === 401) askForKey?.();
      return reject(new ApiError(problem, Number(request.getResponseHeader("Retry-After")) || 1));
    };
    if (onProgress) request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    if (signal?.aborted) return abort();
    signal?.addEventListener("abort", abort, { once: true });
    if (file === null) return request.send();
    const form = new FormData();
    form.append("file", file, file.name || "picture");
    return request.send(form);
  });
}

/** What this server offers, from its own description: methods, whether they take a class, what classify attends with. */
export async function discover() {
  const { paths } = await send("GET", "openapi.json");
  const parameters = (path, method) =>
    Object.fromEntries((paths[path]?.[method]?.parameters ?? []).map((found) => [found.name, found.schema ?? {}]));
  const attention = parameters("/attention", "get");
  const classify = JSON.stringify(parameters("/classify", "post").attention ?? {});
  const methods = attention.method?.enum ?? ["cls"];
  const first = methods.includes("relevance") ? "relevance" : attention.method?.default ?? methods[0];
  const drawing = Object.keys(parameters("/attention", "post"));
  return { methods, first, drawing, takesClass: "class" in attention, fused: classify.includes('"relevance"') ? "relevance" : null };
}
