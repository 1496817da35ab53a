// Shrink large pictures before they are sent, no further than the service's decoder would scale them.

const QUALITY = 0.95;

/** Return the file to send, and the [width, height] of its pixels in pixels of the original.
 * `[width, height]`: upright size of `file`; `side`: longer side after the service's resize, of which twice is kept. */
export async function shrink(file, [width, height], side) {
  const asItIs = { file, pixel: [1, 1] };
  const scale = [8, 4, 2].find((each) => Math.min(width, height) >= 2 * each * side);
  if (!scale || !["image/jpeg", "image/png"].includes(file.type)) return asItIs;
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image", colorSpaceConversion: "none" }); // like the service
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.ceil(width / scale), Math.ceil(height / scale)];
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  // A canvas loses the colours of transparent pixels, which the service reads.
  const isOpaque = () => context.getImageData(0, 0, canvas.width, canvas.height).data.every((value, at) => at % 4 < 3 || value === 255);
  if (file.type === "image/png" && !isOpaque()) return asItIs;
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, file.type, QUALITY));
  if (!blob || blob.size >= file.size) return asItIs;
  return { file: new File([blob], file.name, { type: file.type }), pixel: [width / canvas.width, height / canvas.height] };
}
