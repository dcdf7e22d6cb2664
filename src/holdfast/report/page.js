"use strict";
// Values under the pointer, legend entries that hide their lines, hints at wide tables. Everything is drawn already.
(() => {
  const tip = document.getElementById("tip");
  const big = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const show = (v) => Math.abs(v) >= 10000 ? big.format(v) : String(Number(v.toPrecision(5)));

  function place(x, y) {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - box.width - 16 : x + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(y + 12, innerHeight - box.height - 4)) + "px";
  }
  function text(parent, tag, content, className) {
    const element = parent.appendChild(document.createElement(tag));
    if (content) element.textContent = content;
    if (className) element.className = className;
    return element;
  }
  function nearest(values, x) {
    let low = 0, high = values.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (values[mid] < x) low = mid; else high = mid; }
    return Math.abs(values[low] - x) <= Math.abs(values[high] - x) ? low : high;
  }

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const hidden = new Set();

    for (const button of figure.querySelectorAll("[data-toggle]")) {
      button.addEventListener("click", () => {
        const name = button.dataset.toggle, off = !hidden.delete(name);
        if (off) hidden.add(name);
        button.setAttribute("aria-pressed", String(!off));
        for (const group of figure.querySelectorAll("g[data-line]"))
          if (group.dataset.line === name) group.classList.toggle("off", off);
      });
    }
    if ("scatter" in figure.dataset) continue;

    for (const svg of figure.querySelectorAll("svg.chart")) {
      const left = Number(svg.dataset.left), right = Number(svg.dataset.right);
      const [low, high] = JSON.parse(svg.dataset.x);
      const cursor = svg.querySelector(".cursor");
      const places = [...new Set(data.panels.flatMap((p) => p.lines.flatMap((l) => l.x)))].sort((a, b) => a - b);
      let at = -1;

      function read(index, clientX, clientY) {
        at = index;
        const x = places[index];
        const px = left + (x - low) / ((high - low) || 1) * (right - left);
        cursor.setAttribute("x1", px); cursor.setAttribute("x2", px);
        cursor.setAttribute("visibility", "visible");
        tip.replaceChildren();
        text(tip, "b", show(x) + " " + data.x);
        for (const panel of data.panels) for (const line of panel.lines) {
          if (hidden.has(line.name) || !line.x.length) continue;
          const i = nearest(line.x, x);
          // A line is told where it has a value near by: not a validation of long ago.
          if (Math.abs(line.x[i] - x) > (high - low) * 0.04) continue;
          const row = text(tip, "div");
          const name = text(row, "span", "", "c" + line.color);
          text(name, "i"); name.append(line.name);
          text(row, "span", show(line.y[i]));
        }
        place(clientX, clientY);
      }
      function away() { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); }

      svg.addEventListener("pointermove", (event) => {
        const box = svg.getBoundingClientRect();
        const px = (event.clientX - box.left) / box.width * Number(svg.dataset.width);
        if (!places.length || px < left - 8 || px > right + 8) return away();
        read(nearest(places, low + (px - left) / (right - left) * (high - low)), event.clientX, event.clientY);
      });
      svg.addEventListener("pointerleave", away);
      svg.addEventListener("blur", away);
      svg.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step || !places.length) return;
        event.preventDefault();
        const index = Math.min(Math.max(at + step, 0), places.length - 1);
        const box = svg.getBoundingClientRect();
        read(index, box.left + box.width * (left + (places[index] - low) / ((high - low) || 1) * (right - left))
          / Number(svg.dataset.width), box.top + 20);
      });
    }
  }

  // Tables that are wider than the screen say so and can be scrolled by keys too.
  function measure(box) {
    const room = box.scrollWidth - box.clientWidth, wide = room > 1;
    box.classList.toggle("wide", wide);
    box.classList.toggle("more", room - box.scrollLeft > 1);
    if (wide) box.tabIndex = 0; else box.removeAttribute("tabindex");
  }
  const sizes = new ResizeObserver((entries) => { for (const entry of entries) measure(entry.target); });
  for (const box of document.querySelectorAll(".scroll")) {
    sizes.observe(box);
    box.addEventListener("scroll", () => measure(box), { passive: true });
  }

  function told(event) {
    const target = event.target.closest ? event.target.closest("[data-tip]") : null;
    if (!target) return;
    const box = target.getBoundingClientRect();
    tip.textContent = target.dataset.tip;
    place(event.clientX || box.right, event.clientY || box.top);
  }
  document.addEventListener("pointerover", told);
  document.addEventListener("focusin", told);
  document.addEventListener("pointerout", (event) => { if (event.target.closest?.("[data-tip]")) tip.hidden = true; });
  document.addEventListener("focusout", () => { tip.hidden = true; });
})();
