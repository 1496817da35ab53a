// Draw a map like the service. If r is a patch's share divided by the even share, colour and opacity follow
// log r / log(max(4, the largest r)): patches at or below the even share stay clear. The opacity fades with the evidence.

const FULL_AT_LEAST = 4;

// Every 17th colour of turbo (Anton Mikhailov, Google, Apache-2.0).
const TURBO = "30123b4043a64670e83e9bfe21c4e11ae4b646f78387fe4db9f534e1dc37f9ba38fd8c27ef5a11d63405ae18017a0402";
const STOPS = TURBO.match(/.{6}/g).map((colour) => colour.match(/../g).map((part) => parseInt(part, 16)));

const TABLE = Uint8ClampedArray.from({ length: 256 * 4 }, (_, at) => {
  const value = Math.floor(at / 4) / 255;
  if (at % 4 === 3) return 255 * value;
  const place = value * (STOPS.length - 1);
  const lower = Math.min(STOPS.length - 2, Math.floor(place));
  return STOPS[lower][at % 4] + (place - lower) * (STOPS[lower + 1][at % 4] - STOPS[lower][at % 4]);
});

/** Read a map. `full`: the multiple of the even share with the strongest colour; `strength`: opacity by evidence. */
export function readMap({ values, evidence }) {
  const rows = values.length;
  const columns = values[0].length;
  const flat = values.flat();
  const total = flat.reduce((sum, value) => sum + value, 0) || 1;
  const shares = flat.map((value) => value / total);
  const times = shares.map((share) => share * flat.length);
  const most = times.reduce((best, value) => Math.max(best, value), 0);
  return { rows, columns, shares, times, strongest: times.indexOf(most), full: Math.max(FULL_AT_LEAST, most), strength: evidence ?? 1 };
}

/** Draw the map into a canvas of the picture's size, over `region` in shares of its sides; `full`: see `readMap`. */
export function drawHeat(canvas, map, region, { smooth, full }) {
  const across = Math.min(512, Math.max(map.columns * 8, Math.round(canvas.width * region.width)));
  const down = Math.min(512, Math.max(map.rows * 8, Math.round(canvas.height * region.height)));
  const image = new ImageData(across, down);
  const level = map.times.map((value) => Math.log(Math.max(1, Math.min(full, value))) / Math.log(full));
  const [fromColumns, fromRows] = [taps(across, map.columns, smooth), taps(down, map.rows, smooth)];
  const wide = new Float32Array(across * map.rows);
  for (let row = 0; row < map.rows; row += 1) {
    fromColumns.forEach((weights, x) => {
      for (const [column, weight] of weights) wide[row * across + x] += weight * level[row * map.columns + column];
    });
  }
  fromRows.forEach((weights, y) => {
    for (let x = 0; x < across; x += 1) {
      let value = 0;
      for (const [row, weight] of weights) value += weight * wide[row * across + x];
      const colour = Math.round(255 * Math.max(0, Math.min(1, value))) * 4;
      const at = (y * across + x) * 4;
      image.data.set(TABLE.subarray(colour, colour + 3), at);
      image.data[at + 3] = TABLE[colour + 3] * map.strength;
    }
  });
  const small = document.createElement("canvas");
  small.width = across;
  small.height = down;
  small.getContext("2d").putImageData(image, 0, 0);
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = smooth;
  const [x, y] = [region.x * canvas.width, region.y * canvas.height];
  context.drawImage(small, x, y, region.width * canvas.width, region.height * canvas.height);
}

/** Return the weights of patches for each pixel: cubic convolution (Keys 1981, a = -0.5), like Pillow's BICUBIC. */
function taps(pixels, patches, smooth) {
  return Array.from({ length: pixels }, (_, pixel) => {
    const place = ((pixel + 0.5) * patches) / pixels;
    if (!smooth) return [[Math.floor(place), 1]];
    const first = Math.floor(place - 0.5) - 1;
    const near = [0, 1, 2, 3].map((step) => first + step).filter((patch) => patch >= 0 && patch < patches);
    const weights = near.map((patch) => [patch, cubic(Math.abs(place - 0.5 - patch))]);
    const total = weights.reduce((sum, [, weight]) => sum + weight, 0);
    return weights.map(([patch, weight]) => [patch, weight / total]);
  });
}

const cubic = (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0);

/** Darken the parts of the picture that the model did not see. */
export function dimOutside(canvas, region) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.fillStyle = "rgb(0 0 0 / 65%)";
  const path = new Path2D();
  path.rect(0, 0, width, height);
  path.rect(region.x * width, region.y * height, region.width * width, region.height * height);
  context.fill(path, "evenodd");
}

export function drawRamp(canvas) {
  const context = canvas.getContext("2d");
  const image = new ImageData(canvas.width, 1);
  for (let x = 0; x < canvas.width; x += 1) {
    const colour = Math.round((255 * x) / (canvas.width - 1)) * 4;
    image.data.set(TABLE.subarray(colour, colour + 4), x * 4);
  }
  context.putImageData(image, 0, 0);
}

export const percent = (share, digits = 3) => {
  const value = 100 * share;
  return `${value >= 99.95 && value < 100 ? ">99.9" : value !== 0 && value < 0.01 ? "<0.01" : Number(value.toPrecision(digits))} %`;
};
export const multiple = (value) => `${Number(value.toPrecision(2))}×`;
