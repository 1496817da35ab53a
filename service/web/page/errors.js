// Refusals of the service in words for people who do not know its interface.

const WORDS = {
  no_answer: "The service does not answer. Is it running, and are you still connected?",
  unreadable: "This file cannot be read: it is a folder, or it was changed or moved meanwhile.",
  unauthorized: "The service wants an API key, or does not know this one.",
  upload_too_large: "This file is larger than the service accepts.",
  image_too_large: "This picture has more pixels than the service accepts. Scale it down first.",
  image_too_costly: "This picture takes the service too long, or too much memory. Save it as JPEG or PNG first.",
  invalid_image: "This picture is damaged or incomplete: it cannot be opened.",
  invalid_parameter: "The service does not offer this.",
  inference_failed: "The model failed on this picture.",
  queue_full: "The service has more work than it can take. Try again in a moment.",
  receiving_full: "The service is receiving more than it can take. Try again in a moment.",
  unknown_model: "The service does not have this model any more.",
  model_loading: "The model is being loaded. Try again in a moment.",
  model_failed: "This model could not be loaded. Whoever runs the service finds the reason in its list of models.",
  models_full: "There is no memory for this model while others are at work. Try again in a moment.",
  engine_unavailable: "The model is not ready yet. Try again in a moment.",
  draining: "The service is about to stop. Try again in a moment.",
  deadline_exceeded: "The service was too busy to answer in time. Try again.",
  request_timeout: "The picture did not arrive in time. Is the connection slow?",
  not_found: "The service does not have this.",
  picture_gone: "The service does not keep this picture any more.",
};

/** What to say to who pastes or drops an address. */
export const NOT_FETCHED = "This is an address, not a picture. The page fetches nothing from elsewhere: save the picture, or copy it itself, and give it here.";

/** Whether another try cannot mend it: it is the file's own fault. */
export const isFinal = (error) => /^unreadable|^unsupported|^invalid|_too_large$/.test(error?.code);

export const plainWords = (problem) => WORDS[problem.code] ?? "The service could not answer.";

const HEIC = /\.(heic|heif)$/i;
export const isHeic = (file) => HEIC.test(file.name) || /^image\/hei[cf]/.test(file.type);

/** A refusal of a file as a sentence. How to send a text by curl is no help here. */
function told(detail) {
  if (detail.startsWith("not ")) return `This file is ${detail}.`;
  return /\bcurl\b|^the body is/.test(detail) ? "This file is not a picture." : `${detail[0].toUpperCase()}${detail.slice(1)}.`;
}

/** What to tell about a picture that failed: a sentence, what helps, and the service's own words. */
export function explain(error, file) {
  if (error.name === "AbortError") return { lines: ["Cancelled."], own: "" };
  const lines = [error.message];
  const request = error.requestId && `request ${error.requestId}`;
  if (error.code !== "unsupported_media_type") return { lines, own: [error.detail, request].filter(Boolean).join("; ") };
  lines[0] = told(error.detail);
  if (isHeic(file)) {
    lines[0] = "This is a HEIC picture, as iPhones take them, and this service was installed without support for HEIC.";
    lines.push("Save it as JPEG (on an iPhone: Settings, Camera, Formats, Most Compatible), or ask whoever runs the service to add it.");
  }
  return { lines, own: request ?? "" };
}
