// The ways by which pictures come to the page: dropped, pasted, chosen, photographed, or an example.

const byId = (id) => document.getElementById(id);

export function takePictures(onFiles) {
  const give = (files) => files.length && onFiles([...files]);

  for (const [button, input] of [["choose", "files"], ["photograph", "camera"]]) {
    byId(button).addEventListener("click", () => byId(input).click());
    byId(input).addEventListener("change", (event) => {
      give(event.target.files);
      event.target.value = ""; // so that the same file can be chosen again
    });
  }

  byId("photograph").hidden = navigator.maxTouchPoints === 0; // where there is no camera at hand, `capture` only chooses files

  document.addEventListener("paste", (event) => {
    if (event.target.matches?.("input[type=password]")) return;
    give(event.clipboardData.files);
  });

  const dragging = (on) => document.body.classList.toggle("dragging", on);
  document.addEventListener("dragover", (event) => {
    event.preventDefault(); // else the browser would leave the page for the picture
    dragging(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget === null && dragging(false));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    dragging(false);
    give(event.dataTransfer.files);
  });

  for (const button of document.querySelectorAll(".example")) {
    button.addEventListener("click", async () => {
      const { file } = button.dataset;
      const answer = await fetch(button.querySelector("img").src);
      give([new File([await answer.blob()], file, { type: "image/jpeg" })]);
    });
  }
}
