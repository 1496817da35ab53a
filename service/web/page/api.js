// Requests to the service. URLs are relative to the page, because a proxy may serve it under a prefix.

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

const TRIES = 4;
const BUSY = [429, 502, 503];

// The codes for answers that come from a proxy, not from the service.
const BY_STATUS = { 401: "unauthorized", 408: "request_timeout", 413: "upload_too_large", 429: "queue_full", 502: "engine_unavailable",
  503: "engine_unavailable", 504: "deadline_exceeded" };

let key = ""; // only in memory: a reload of the page forgets it
let askForKey = null;

export const setKey = (value) => { key = value; };
export const keyIsUsed = () => key !== "";
export const onUnauthorized = (listener) => { askForKey = listener; };

/** Send one request; resolves with the answer's body, rejects with an ApiError, or an AbortError when cancelled. */
export function send(method, path, { query = {}, file = null, type = "json", signal, onProgress } = {}) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest(); // unlike fetch, it reports the progress of an upload
    const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
    const search = new URLSearchParams(given).toString();
    request.open(method, new URL(search ? `${path}?${search}` : path, document.baseURI));
    request.responseType = "blob";
    const fail = (code, detail = "") => reject(new ApiError({ code, status: 0, detail }));
    try { if (key) request.setRequestHeader("Authorization", `Bearer ${key}`); } catch { // the key has invalid characters
      askForKey?.();
      return fail("unauthorized");
    }
    const abort = () => { request.abort(); reject(signal.reason); };
    request.onerror = async () => fail(file && !(await isReadable(file)) ? "unreadable" : "no_answer");
    request.onload = async () => {
      signal?.removeEventListener("abort", abort);
      const blob = request.response;
      if (request.status < 400) {
        try { return resolve(type === "blob" ? blob : type === "text" ? await blob.text() : JSON.parse(await blob.text())); } catch {
          return fail("other", "the answer is not JSON");
        }
      }
      const { status } = request;
      let problem = { code: BY_STATUS[status] ?? "other", detail: `${status} ${request.statusText}` };
      if (blob.type.startsWith("application/problem+json")) problem = JSON.parse(await blob.text());
      problem = { ...problem, status };
      if (problem.code === "not_found" && query.id) problem.code = "picture_gone";
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

const isReadable = (file) => file.stream().getReader().read().then(() => true, () => false);

/** Like `send`, but repeat the request when the service is busy, after its Retry-After; call `onBusy()` before. */
export async function sendPatiently(method, path, options) {
  for (let left = TRIES - 1; ; left -= 1) {
    try {
      return await send(method, path, options);
    } catch (error) {
      if (left === 0 || !BUSY.includes(error.status)) throw error;
      options.onBusy?.();
      await pause(1000 * Math.min(error.retryAfter, 10), options.signal);
    }
  }
}

const pause = (milliseconds, signal) => new Promise((resolve, reject) => {
  setTimeout(resolve, milliseconds);
  signal.addEventListener("abort", () => reject(signal.reason));
});
