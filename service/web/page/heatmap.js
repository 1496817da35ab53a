// Drawing of a map, as the service does. With r a patch's share over the even share, colour and opacity
// follow log r / log(max(4, the largest r before it faded)): patches at or below the even share stay clear.

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

/** Read a map. `full`: the multiple of the even share at which the colour is full. */
export function readMap({ values, evidence }) {
  const rows = values.length;
  const columns = values[0].length;
  const flat = values.flat();
  const total = flat.reduce((sum, value) => sum + value, 0) || 1;
  const shares = flat.map((value) => value / total);
  const times = shares.map((share) => share * flat.length);
  const most = times.reduce((best, value) => Math.max(best, value), 0);
  const whole = evidence ? Math.min(flat.length, 1 + (most - 1) / evidence) : most;
  return { rows, columns, shares, times, strongest: times.indexOf(most), full: Math.max(FULL_AT_LEAST, whole) };
}

/** Draw the map into a canvas of the picture's size, over `region` in shares of its sides. */
export function drawHeat(canvas, map, region, smooth) {
  const across = Math.min(512, Math.max(map.columns * 8, Math.round(canvas.width * region.width)));
  const down = Math.min(512, Math.max(map.rows * 8, Math.round(canvas.height * region.height)));
  const image = new ImageData(across, down);
  const level = map.times.map((value) => Math.log(Math.max(1, value)) / Math.log(map.full));
  const at = (row, column) => level[row * map.columns + column];
  for (let y = 0; y < down; y += 1) {
    const [top, bottom, below] = between(y, down, map.rows, smooth);
    for (let x = 0; x < across; x += 1) {
      const [left, right, beyond] = between(x, across, map.columns, smooth);
      const upper = at(top, left) * (1 - beyond) + at(top, right) * beyond;
      const lower = at(bottom, left) * (1 - beyond) + at(bottom, right) * beyond;
      const colour = Math.round(255 * (upper * (1 - below) + lower * below)) * 4;
      image.data.set(TABLE.subarray(colour, colour + 4), (y * across + x) * 4);
    }
  }
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

/** Linear interpolation between patches' centres: [one, the next, weight of the next]. */
function between(pixel, pixels, patches, smooth) {
  const place = ((pixel + 0.5) * patches) / pixels;
  if (!smooth) return [Math.floor(place), Math.floor(place), 0];
  const centred = Math.max(0, Math.min(patches - 1, place - 0.5));
  const one = Math.floor(centred);
  return [one, Math.min(patches - 1, one + 1), centred - one];
}

/** Dim what the model did not see. */
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
