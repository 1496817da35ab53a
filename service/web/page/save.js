// Save the results on screen as files.

export function savePng(picture, panels, opacity) {
  const drawn = panels.filter((panel) => panel.map);
  const gap = 16;
  const bases = drawn.map((panel) => panel.find(".base"));
  const heights = bases.map((base) => base.height);
  const sheet = document.createElement("canvas");
  sheet.width = bases.reduce((sum, base) => sum + base.width, gap * (bases.length - 1));
  sheet.height = Math.max(...heights) + 60;
  const context = sheet.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, sheet.width, sheet.height);
  let left = 0;
  drawn.forEach((panel, index) => {
    context.globalAlpha = 1;
    context.drawImage(bases[index], left, 0);
    context.globalAlpha = opacity;
    context.drawImage(panel.find(".heat"), left, 0);
    context.globalAlpha = 1;
    context.fillStyle = "#000";
    context.font = "16px system-ui, sans-serif";
    panel.caption.forEach((line, at) => context.fillText(line, left + 4, sheet.height - 36 + 24 * at, bases[index].width - 8));
    left += bases[index].width + gap;
  });
  sheet.toBlob((blob) => download(blob, `${stem(picture)}-map.png`), "image/png");
}

export function saveJson(picture, panels) {
  const content = { file: picture.name, classification: picture.answer, beside: picture.answers[1], maps: panels.map((panel) => panel.document).filter(Boolean) };
  download(new Blob([JSON.stringify(content, null, 1)], { type: "application/json" }), `${stem(picture)}.json`);
}

const stem = (picture) => picture.name.replace(/\.[^.]*$/, "");

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
