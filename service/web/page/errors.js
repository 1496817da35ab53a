// Errors of the service in words for people who do not know its API.

const WORDS = {
  no_answer: "The service does not answer. Is it running, and are you still connected?",
  unreadable: "This file cannot be read: it is a folder, or it was changed or moved.",
  unauthorized: "The service requires an API key, or does not know this one.",
  upload_too_large: "This file is larger than the service accepts.",
  image_too_large: "This picture has more pixels than the service accepts. Scale it down first.",
  image_too_costly: "This picture needs too much time or memory to open. Save it as JPEG or PNG first.",
  invalid_image: "This picture is damaged or incomplete: it cannot be opened.",
  invalid_parameter: "The service does not support this option.",
  inference_failed: "The model failed on this picture.",
  queue_full: "The service has too much work. Try again in a moment.",
  receiving_full: "The service is receiving too much data. Try again in a moment.",
  unknown_model: "The service no longer has this model.",
  model_loading: "The model is being loaded. Try again in a moment.",
  model_failed: "This model could not be loaded. The operator of the service finds the reason in the list of models.",
  models_full: "The memory is full of other models in use. Try again in a moment.",
  engine_unavailable: "The model is not ready yet. Try again in a moment.",
  draining: "The service is stopping. Try again in a moment.",
  deadline_exceeded: "The service was too busy to answer in time. Try again.",
  request_timeout: "The picture did not arrive in time. Is the connection slow?",
  not_found: "The service does not have this.",
  picture_gone: "The service no longer keeps this picture.",
};

/** The message after a user pastes or drops a URL. */
export const NOT_FETCHED = "This is a URL, not a picture. The page does not load pictures from other sites: save or copy the picture itself, and add it here.";

/** Return whether a retry cannot help, because the file itself is the problem. */
export const isFinal = (error) => /^unreadable|^unsupported|^invalid|_too_large$/.test(error?.code);

export const plainWords = (problem) => WORDS[problem.code] ?? "The service could not answer.";

const HEIC = /\.(heic|heif)$/i;
export const isHeic = (file) => HEIC.test(file.name) || /^image\/hei[cf]/.test(file.type);

/** Return the reason for a refused file as a sentence, without advice about curl. */
function told(detail) {
  if (detail.startsWith("not ")) return `This file is ${detail}.`;
  return /\bcurl\b|^the body is/.test(detail) ? "This file is not a picture." : `${detail[0].toUpperCase()}${detail.slice(1)}.`;
}

/** Return the message about a failed picture: a sentence, a remedy, and the detail from the service. */
export function explain(error, file) {
  if (error.name === "AbortError") return { lines: ["Cancelled."], own: "" };
  const lines = [error.message];
  const request = error.requestId && `request ${error.requestId}`;
  if (error.code !== "unsupported_media_type") return { lines, own: [error.detail, request].filter(Boolean).join("; ") };
  lines[0] = told(error.detail);
  if (isHeic(file)) {
    lines[0] = "This is a HEIC picture, the format of iPhones, and this service does not support it.";
    lines.push("Save it as JPEG (on an iPhone: Settings, Camera, Formats, Most Compatible), or ask the operator of the service to add support for HEIC.");
  }
  return { lines, own: request ?? "" };
}
