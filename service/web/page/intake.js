// Ways to add pictures to the page: drop, paste, choose, photograph, or click an example.

const byId = (id) => document.getElementById(id);

/** Call `onFiles(files)` for added pictures, and `onAddress()` for a URL. */
export function takePictures(onFiles, onAddress) {
  const give = (files) => files.length && onFiles([...files]);
  const giveData = (data) => {
    if (!data.files.length && /^\s*(https?|file|data):/i.test(data.getData("text/uri-list") || data.getData("text/plain"))) onAddress();
    give(data.files);
  };

  for (const [button, input] of [["choose", "files"], ["photograph", "camera"]]) {
    byId(button).addEventListener("click", () => byId(input).click());
    byId(input).addEventListener("change", (event) => {
      give(event.target.files);
      event.target.value = ""; // so that the same file can be chosen again
    });
  }

  byId("photograph").hidden = navigator.maxTouchPoints === 0; // without a camera, `capture` only chooses files

  document.addEventListener("paste", (event) => {
    if (event.target.matches?.("input")) return;
    giveData(event.clipboardData);
  });

  const dragging = (on) => document.body.classList.toggle("dragging", on);
  document.addEventListener("dragover", (event) => {
    event.preventDefault(); // otherwise the browser would open the picture instead of the page
    dragging(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget === null && dragging(false));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    dragging(false);
    giveData(event.dataTransfer);
  });

  for (const button of document.querySelectorAll(".example")) {
    button.addEventListener("click", async () => {
      const { file } = button.dataset;
      const answer = await fetch(button.querySelector("img").src);
      give([new File([await answer.blob()], file, { type: "image/jpeg" })]);
    });
  }
}
