"use strict";
// A number as the tables write it: "71.8 ± 0.9 (2 of 3)", "−1.20", "< 0.001", "[−1, 2]", "1e-05"; null for other text.
const numberOf = (text) => {
  const found = text.replace(/−/g, "-").match(/^[\s\[<>]*([+-]?\d[\d.]*(?:e[+-]?\d+)?)/);
  return found ? parseFloat(found[1]) : null;
};

for (const table of document.querySelectorAll("table")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => {
        const text = row.cells[column].textContent.trim();
        return { row, text, number: numberOf(text) };
      });
      const numeric = rows.some((one) => one.number !== null) && rows.every((one) => one.number !== null || /^[-−]?$/.test(one.text));
      rows.sort((a, b) => {
        if (!numeric) return (ascending ? 1 : -1) * a.text.localeCompare(b.text);
        if (a.number === null || b.number === null) return (a.number === null) - (b.number === null); // what is missing stays last
        return (ascending ? 1 : -1) * (a.number - b.number);
      });
      body.append(...rows.map((one) => one.row));
    });
  });
}

const dialog = document.querySelector("dialog");
const large = dialog.querySelector("img");
let width = 100;
const zoom = (to, x, y) => {
  const before = width;
  width = Math.min(1600, Math.max(100, to));
  const factor = width / before;
  large.style.width = `${width}%`;
  dialog.scrollLeft = (dialog.scrollLeft + x) * factor - x;
  dialog.scrollTop = (dialog.scrollTop + y) * factor - y;
};
for (const button of document.querySelectorAll("figure button")) {
  button.addEventListener("click", () => {
    const image = button.querySelector("img");
    large.src = image.src;
    large.alt = image.alt;
    dialog.showModal();
    zoom(100, 0, 0);
  });
}
dialog.addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = dialog.getBoundingClientRect();
  zoom(width * Math.exp(-event.deltaY / 500), event.clientX - box.left, event.clientY - box.top);
}, { passive: false });
dialog.addEventListener("keydown", (event) => {
  const factor = { "+": 1.25, "=": 1.25, "-": 0.8 }[event.key];
  if (factor) zoom(width * factor, dialog.clientWidth / 2, dialog.clientHeight / 2);
});
let moved = false;
large.addEventListener("pointerdown", (event) => {
  event.preventDefault();
  moved = false;
  large.setPointerCapture(event.pointerId);
});
large.addEventListener("pointermove", (event) => {
  if (!large.hasPointerCapture(event.pointerId)) return;
  moved ||= Math.abs(event.movementX) + Math.abs(event.movementY) > 0;
  dialog.scrollLeft -= event.movementX;
  dialog.scrollTop -= event.movementY;
});
dialog.addEventListener("click", () => {
  if (!moved) dialog.close(); // a click, and not the end of a move
  moved = false;
});
