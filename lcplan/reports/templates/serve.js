"use strict";
// Reads the controls, asks the API of this machine, and shows its answer. Text goes in as text, never as markup.

const form = document.getElementById("controls");
const result = document.getElementById("result");
const byId = (id) => document.getElementById(id);
const GIB = 2 ** 30;
const BESIDE_PX = 265; // of a bar: its name and its number

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function size(bytes) {
  if (bytes >= GIB / 10 || bytes === 0) {
    return (bytes / GIB).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) + " GiB";
  }
  return (bytes / 2 ** 20).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 }) + " MiB";
}

function phaseWords(phase) {
  const layer = /^backward\[(\d+)\]\.(.*)$/.exec(phase);
  if (layer) return "layer " + layer[1] + ": " + (layer[2] === "mlp" ? "MLP" : layer[2].replaceAll("_", " "));
  return phase.replace(/^backward\./, "").replace(".", ": ").replaceAll("_", " ");
}

// Sliders of GPUs: a place is an index into the values that are possible

function divisors(number) {
  return Array.from({ length: number }, (_, index) => index + 1).filter((size) => number % size === 0);
}

function settle(input, values) {
  const wanted = Number(input.dataset.value);
  input.max = values.length - 1;
  input.value = values.findLastIndex((value) => value <= wanted);
  input.dataset.value = values[input.value];
  byId(input.name + "-text").value = input.dataset.value;
}

function settleAll() {
  settle(form.elements.num_gpus, SETTINGS.gpus);
  const parts = divisors(Number(form.elements.num_gpus.dataset.value));
  for (const input of form.querySelectorAll("[data-part]")) settle(input, parts);
}

function moved(input) {
  const parts = divisors(Number(form.elements.num_gpus.dataset.value));
  input.dataset.value = ("part" in input.dataset ? parts : SETTINGS.gpus)[input.value];
}

function nearestLength(tokens) {
  let best = 0;
  SETTINGS.lengths.forEach((length, index) => {
    if (Math.abs(Math.log(length / tokens)) < Math.abs(Math.log(SETTINGS.lengths[best] / tokens))) best = index;
  });
  return best;
}

function tokensOf(text) {
  const match = /^\s*([\d_]+(?:\.\d+)?)\s*([A-Za-z]*)\s*$/.exec(text);
  const units = { "": 1, k: 1e3, m: 1e6, ki: 2 ** 10, mi: 2 ** 20 };
  const unit = match && units[match[2].toLowerCase()];
  return unit ? Number(match[1].replaceAll("_", "")) * unit : 0;
}

function query() {
  const fields = new URLSearchParams();
  for (const input of form.elements) {
    if (!input.name) continue;
    let value = input.value.trim();
    if (input.type === "checkbox") value = input.checked ? "true" : "false";
    else if ("value" in input.dataset) value = input.dataset.value;
    if (value !== "") fields.set(input.name, value);
  }
  return fields;
}

// What the API says

function show(view) {
  const report = view.report;
  byId("problem").hidden = true;
  result.classList.remove("stale");
  byId("verdict").textContent = report.fits ? "FITS" : "DOES NOT FIT";
  byId("verdict").className = "verdict " + (report.fits ? "yes" : "no");
  const [said, advice] = view.answer.slice(view.answer.indexOf(": ") + 2).split(" Try: ");
  byId("words").textContent = said;
  byId("try").hidden = advice === undefined;
  byId("try").lastElementChild.textContent = advice || "";
  byId("gauge").className = "gauge" + (report.fits ? "" : " no");
  byId("filled").style.width = Math.min(100, (100 * report.device_peak_bytes) / report.gpu.usable_bytes) + "%";
  byId("time").textContent = view.time;
  byId("warnings").replaceChildren(
    ...report.warnings.map((w) => element("div", "Warning [" + w.code + "]: " + w.message + " " + w.fix, "warning")),
  );
  byId("command").textContent = view.command;
  byId("json").href = "/api/estimate?" + query();
  byId("assumptions").replaceChildren(...report.assumptions.map((text) => element("li", text)));
  byId("not-modelled").replaceChildren(...report.not_modelled.map((text) => element("li", text)));
  document.title = (report.fits ? "Fits: " : "Does not fit: ") + report.model.id;
  drawTimeline(view.timeline);
  listItems(report);
}

function complain(problem) {
  const box = byId("problem");
  box.textContent = "error [" + problem.code + "]: " + problem.message;
  box.hidden = false;
  result.classList.add("stale");
}

function segment(bytes, whole, group) {
  const style = SETTINGS.groups[group];
  const share = (100 * bytes) / whole;
  const room = (share / 100) * (byId("timeline").clientWidth - BESIDE_PX);
  const part = element("div", room > 6.5 * style.title.length + 6 ? style.title : "");
  part.style.width = share + "%";
  part.style.background = style.colour;
  part.style.color = dark(style.colour) ? "#fff" : "#111";
  part.title = style.title + ": " + size(bytes);
  return part;
}

function dark(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue < 140;
}

function bar(name, parts, total, limit, className) {
  const row = element("div", undefined, "bar " + className);
  const stack = element("div", undefined, "stack");
  stack.append(...parts);
  if (limit !== null) {
    const mark = element("div", undefined, "limit");
    mark.style.left = "calc(" + limit + "% - 3px)";
    stack.append(mark);
  }
  const label = element("div", name, "name");
  label.title = name;
  row.append(label, stack, element("div", total, "size"));
  return row;
}

function drawTimeline(picture) {
  const totals = picture.instants.map((instant) => instant.sizes.reduce((sum, part) => sum + part, 0));
  const whole = Math.max(picture.usable_bytes, totals[picture.peak] + picture.on_top_bytes, picture.pinned_bytes);
  const limit = (100 * picture.usable_bytes) / whole;
  const rows = [];
  picture.instants.forEach((instant, index) => {
    if (instant.after_others) rows.push(element("div", "layers between", "between"));
    const parts = instant.sizes.map((bytes, at) => segment(bytes, whole, picture.groups[at])).filter((p) => p.style.width !== "0%");
    if (index === picture.peak) {
      const rest = segment(picture.on_top_bytes, whole, "other");
      rest.title = "outside tensors (CUDA, NCCL, allocator): " + size(picture.on_top_bytes);
      parts.push(rest);
    }
    rows.push(bar(phaseWords(instant.phase), parts, size(totals[index]), limit, index === picture.peak ? "peak" : ""));
  });
  const host = element("div", "");
  host.style.width = (100 * picture.pinned_bytes) / whole + "%";
  host.style.background = "#ccc";
  rows.push(bar("host, pinned", [host], size(picture.pinned_bytes), null, ""));
  byId("timeline").replaceChildren(...rows);
  byId("key").replaceChildren(
    ...picture.groups.map((group) => {
      const item = element("li");
      const swatch = element("span");
      swatch.style.background = SETTINGS.groups[group].colour;
      item.append(swatch, SETTINGS.groups[group].title);
      return item;
    }),
  );
  byId("note").textContent =
    "Dashed: the " + size(picture.usable_bytes) + " that a process can use of " + picture.gpu +
    ". The white end of the peak's bar is what lies outside tensors: CUDA, NCCL, the allocator's slack.";
}

function listItems(report) {
  const here = report.items.filter(
    (item) => item.device === "gpu" && (item.phases.includes(report.peak_phase) || item.phases.includes("device")),
  );
  here.sort((a, b) => b.num_bytes - a.num_bytes);
  byId("peak-caption").textContent = phaseWords(report.peak_phase) + ": " + size(report.device_peak_bytes) + " on the device";
  byId("items").replaceChildren(
    ...here.map((item) => {
      const row = element("tr");
      const name = element("th", item.key);
      name.scope = "row";
      const formula = element("td");
      formula.append(element("code", item.formula));
      row.append(name, element("td", item.num_bytes.toLocaleString("en"), "num"), element("td", size(item.num_bytes), "num"), formula);
      return row;
    }),
  );
}

// One question at a time; an older answer never overtakes a newer one

let asked = 0;

async function recalculate() {
  const mine = ++asked;
  try {
    const response = await fetch("/api/view?" + query());
    const answer = await response.json();
    if (mine !== asked) return;
    if (response.ok) show(answer);
    else complain(answer.error);
  } catch (error) {
    if (mine === asked) complain({ code: "no-server", message: "lcplan serve does not answer; is it still running?" });
  }
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", (event) => {
  const slider = byId("length-slider");
  const length = form.elements.max_length;
  if (event.target === slider) length.value = SETTINGS.lengths[slider.value];
  else if (event.target === length && tokensOf(length.value)) slider.value = nearestLength(tokensOf(length.value));
  if ("value" in event.target.dataset) {
    moved(event.target);
    settleAll();
  }
  recalculate();
});

settleAll();
byId("length-slider").value = nearestLength(tokensOf(form.elements.max_length.value));
recalculate();
