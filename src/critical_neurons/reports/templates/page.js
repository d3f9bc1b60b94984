"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const units = find("units");
  if (units) {
    const list = units.querySelector(".strips");
    const rows = [...list.children];
    const keys = {
      removed: (row) => -row.dataset.removed,
      mean: (row) => +row.dataset.mean,
      units: (row) => -row.dataset.units,
    };
    find("layers-sorted").addEventListener("change", (event) => {
      const key = keys[event.target.value] || ((row) => +row.dataset.strip);
      list.append(...rows.slice().sort((a, b) => key(a) - key(b)));
    });
    find("units-sorted").addEventListener("change", (event) => {
      list.classList.toggle("sorted", event.target.value === "by-score");
    });

    // The page has one copy of its data, in the download link.
    const bytes = Uint8Array.from(atob(find("data").href.split(",")[1]), (each) => each.charCodeAt(0));
    const strips = JSON.parse(new TextDecoder().decode(bytes)).strips;
    const orders = new Map();
    const order = (strip) => {
      if (!orders.has(strip)) {
        const places = strip.scores.map((_, place) => place);
        orders.set(strip, places.sort((a, b) => strip.scores[b] - strip.scores[a]));
      }
      return orders.get(strip);
    };
    list.addEventListener("pointermove", (event) => {
      const svg = event.target.closest("svg");
      if (!svg) return;
      const strip = strips[svg.closest(".strip").dataset.strip];
      const box = svg.getBoundingClientRect();
      const count = (strip.scores || strip.stays).length;
      const at = Math.min(count - 1, Math.max(0, Math.floor((count * (event.clientX - box.left)) / box.width)));
      const place = svg.classList.contains("by-score") && strip.scores ? order(strip)[at] : at;
      const score = strip.scores ? `, score ${strip.scores[place].toFixed(3)}` : "";
      const fate = strip.stays ? (strip.stays[place] ? ", stays" : ", removed") : "";
      find("unit").textContent = `${strip.layers[0]}, unit ${place * strip.stride}${score}${fate}`;
    });
  }
  const shown = find("changes-shown");
  if (shown) {
    shown.addEventListener("change", () => {
      for (const each of document.querySelectorAll(".changes > li")) {
        each.hidden = shown.value !== "" && each.dataset.fate !== shown.value;
      }
    });
  }
  window.addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details")) each.open = true;
  });
})();
