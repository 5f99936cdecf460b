// The page of `autofit web`: asks the server, shows the answer as it comes, keeps the question in the link.
"use strict";

const field = (id) => document.getElementById(id);
const FIELDS = ["text", "config", "card", "tokens", "count", "sharing", "trainer"];
const status = field("status"), said = field("said"), answer = field("answer"), cards = field("cards"), start = field("start");
let changes = [], cardsBefore = [], asking = null, verdict = null, rows = [], generated = "";

// -- pieces -----------------------------------------------------------------------------------------------------------

function element(tag, inside = [], attributes = {}) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const part of [inside].flat()) if (part !== null && part !== "") made.append(part);
  return made;
}

function drawn(tag, attributes, words) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (words !== undefined) made.textContent = words;
  return made;
}

const gb = (bytes) => bytes === null || bytes === undefined ? "-"
  : bytes >= 1e8 ? `${(bytes / 1e9).toFixed(bytes >= 1e11 ? 0 : 1)} GB` : `${(bytes / 1e6).toFixed(0)} MB`;
// A capital for a plain word; the name of a key, a file or a program stays as it is.
const sentence = (text) => `${/^(?!verl\b)[a-z]+(?=[ ,:;]|$)/.test(text) ? text[0].toUpperCase() : text[0]}${text.slice(1)}.`;
const prose = (text) => text.split("`").map((part, place) => place % 2 ? element("code", part) : part);
// Options break between words: a browser also breaks within `--dtype`, behind its hyphens.
const options = (words) => element("code", words.split(" ").flatMap((word, place) => [place ? " " : "", element("span", word)]));
const usd = (value) => value === null ? "-" : `$${value.toFixed(2)}`;

function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const whole = Math.round(value), minutes = Math.floor(whole / 60);
  const two = (number) => String(number).padStart(2, "0");
  return minutes < 60 ? `${minutes}m${two(whole % 60)}s` : `${Math.floor(minutes / 60)}h${two(minutes % 60)}m`;
}

function say(words, kind = "", aloud = words) {
  status.replaceChildren(...prose(words));
  status.className = kind;
  if (aloud !== said.textContent) said.textContent = aloud.replaceAll("`", "");
}

// -- the recipe of a model and a training -----------------------------------------------------------------------------

function recipe(model, method) {
  const [trainer, how] = method.split("-");
  const lines = [`model_name_or_path: ${model}`, "dtype: bfloat16"];
  if (trainer === "grpo") {
    lines.push("per_device_train_batch_size: 8", "gradient_accumulation_steps: 4", "num_generations: 8",
      "max_completion_length: 1024", "reward_funcs: [think_format_reward]");
  } else {
    lines.push("per_device_train_batch_size: 4", "gradient_accumulation_steps: 4", "max_length: 2048");
    lines.push({sft: "packing: false", dpo: "beta: 0.1", reward: "center_rewards_coefficient: 0.01"}[trainer]);
    if (trainer === "dpo") lines.push("precompute_ref_log_probs: false");
  }
  if (how !== "full") lines.push("use_peft: true", "lora_r: 16", "lora_alpha: 32");
  if (trainer === "reward" && how === "lora") lines.push("lora_task_type: SEQ_CLS");  // PEFT takes it for a language model without
  if (how === "qlora") lines.push("load_in_4bit: true");
  return lines.join("\n") + "\n";
}

function write() {
  const text = field("text"), model = field("model").value.trim() || field("model").placeholder;
  if (text.value.trim() !== "" && text.value !== generated) {  // the user's own: only its model is changed
    const own = text.value.replace(/^model_name_or_path:.*$/m, `model_name_or_path: ${model}`);
    if (field("model").value.trim() && own !== text.value) text.value = own;
    else say("The recipe below stays as it is: change it there, or empty it to begin with a model.", "wrong");
    return;
  }
  text.value = generated = recipe(model, field("method").value);
  field("trainer").value = "";
  changes = [];
}

function example(chosen) {
  for (const id of ["count", "sharing", "config", "trainer"]) field(id).value = "";
  field("text").value = generated = chosen.text;
  field("model").value = chosen.text.match(/^model_name_or_path: (.*)$/m)[1];
  field("method").value = chosen.method;
  field("card").value = chosen.card;
  field("tokens").value = chosen.tokens;
  changes = [];
  ask("check");
}

// -- the link ---------------------------------------------------------------------------------------------------------

function packed() {
  const state = {};
  for (const id of FIELDS) if (field(id).value) state[id] = field(id).value;
  if (changes.length) state.changes = changes;
  const bytes = new TextEncoder().encode(JSON.stringify(state));
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""))
    .replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
  return JSON.parse(new TextDecoder().decode(bytes));
}

function fromLink() {
  if (!location.hash.startsWith("#q=")) return;
  try {
    const state = unpacked(location.hash.slice(3));
    for (const id of FIELDS) field(id).value = typeof state[id] === "string" ? state[id] : "";
    if (!field("card").value) field("card").selectedIndex = 0;
    changes = [state.changes ?? []].flat().filter((set) => set && typeof set === "object");
    field("more").open = ["config", "tokens", "count", "sharing"].some((id) => field(id).value);
    if (field("text").value) ask("check");
  } catch {
    say("The link is not whole: its recipe cannot be read.", "wrong");
  }
}

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {  // a frame may not
    const shown = field("link-text");
    shown.hidden = false;
    shown.value = text;
    shown.select();
  }
  setTimeout(() => { button.textContent = before; }, 2000);
}

// -- asking -----------------------------------------------------------------------------------------------------------

async function ask(kind) {
  if (asking) asking.abort();
  const mine = asking = new AbortController();
  if (!field("text").value.trim()) write();
  history.replaceState(null, "", `#q=${packed()}`);
  start.hidden = true;
  if (kind === "check") { answer.hidden = true; verdict = null; cards.hidden = true; notes = []; }
  else { cards.hidden = true; rows = []; }
  say("Asking ...", "busy");
  const question = {
    kind, text: field("text").value, config: field("config").value, card: field("card").value, sharing: field("sharing").value,
    trainer: field("trainer").value,
    count: field("count").value ? Number(field("count").value) : null,
    tokens: field("tokens").value ? Number(field("tokens").value) : null, changes: merged(),
  };
  if (innerWidth < 720) field("result").scrollIntoView({block: "start"});
  try {
    const response = await fetch("answer", {
      method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(question), signal: mine.signal,
    });
    await lines(response, (line) => { if (asking === mine) hear(line); });
    if (asking === mine && status.className === "busy") say("The answer broke off. Ask again.", "wrong");
  } catch (error) {
    if (asking === mine && error.name !== "AbortError") say("The server does not answer.", "wrong");
  }
}

async function lines(response, hear) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    rest += decoder.decode(value, {stream: !done});
    const parts = rest.split("\n");
    rest = parts.pop();
    if (done && rest) parts.push(rest);
    for (const part of parts) if (part.trim()) hear(JSON.parse(part));
    if (done) return;
  }
}

let notes = [];

function hear(line) {
  if (line.is === "waiting") say(`Waiting: ${line.place} before this one ...`, "busy");
  else if (line.is === "started") say("Simulating the training ...", "busy");
  else if (line.is === "note") { if (!notes.includes(line.text)) notes.push(line.text); showNotes(); }
  else if (line.is === "trying") { const box = document.getElementById("tried"); if (box) box.textContent = line.text; }
  else if (line.is === "verdict") { verdict = line; showVerdict(); say("Looking for changes ...", "busy", spoken(line)); }
  else if (line.is === "advice") { showAdvice(line); }
  else if (line.is === "card") { rows.push(line); showCards(); if (rows.length === 1 && !answer.hidden) cards.scrollIntoView(); say(`Comparing: ${rows.length} cards ...`, "busy"); }
  else if (line.is === "explained") showExplained(line);
  else if (line.is === "choose") showChoice(line);
  else if (line.is === "error") say(sentence(line.text), "wrong");
  else if (line.is === "done" && status.className !== "wrong") say("", "", done());
}

function showChoice(line) {
  say(line.text, "wrong");
  status.append(...line.trainers.flatMap((name) => [" ", element("button", name, {type: "button",
    onclick: () => { field("trainer").value = name; again(); }})]));
}

function done() {
  if (rows.length && !cards.hidden) return `${rows.length} cards compared.`;
  const count = document.querySelectorAll("#advice .changes code").length;
  return verdict ? `${spoken(verdict)} ${count === 1 ? "1 change" : `${count} changes`} to apply.` : "Done.";
}

function spoken(line) {
  const misfit = line.verdict === "does not fit", bytes = misfit ? line.least_bytes : line.shown_bytes;
  const figure = bytes === null ? "" : `: ${gb(bytes)} ${misfit ? `needed, of ${gb(line.capacity_bytes)}` : `of ${gb(line.capacity_bytes)} ${line.shown_as}`}`;
  return `${line.verdict[0].toUpperCase()}${line.verdict.slice(1)}${figure}. ${line.batch}`;
}

const TIERS = "Neutral: the gradient is the same up to rounding. Approximate: it is nearly the same. Recipe: what is trained changes.";
const WANTED = {"fits": "What makes it faster", "tight": "What leaves more room", "does not fit": "What makes it fit"};

// -- the verdict ------------------------------------------------------------------------------------------------------

function showVerdict() {
  const of = verdict, kind = {"fits": "", "tight": " may", "does not fit": " no"}[of.verdict];
  const many = of.count > 1 ? `${of.count} x ` : "";
  const figures = [
    of.verdict === "does not fit" ? [gb(of.least_bytes), of.count > 1 ? "needed on each card" : `needed, of ${gb(of.capacity_bytes)}`] : [gb(of.shown_bytes), `of ${gb(of.capacity_bytes)} ${of.shown_as}`],
    [seconds(of.step_s), of.step_s_90 ? `a step (${seconds(of.step_s_90[0])} to ${seconds(of.step_s_90[1])})` : "a step"],
  ];
  if (of.rollout_s) figures.push([seconds(of.rollout_s), "of it generating"]);
  answer.replaceChildren(
    element("h2", [element("span", of.verdict, {class: `verdict${kind}`}), ` ${many}${of.card_name}`]),
    element("p", of.verdict === "does not fit" ? `It runs out of memory: ${of.why}.` : sentence(of.why)),
    ...of.warnings.map((text) => element("p", prose(sentence(text)), {class: of.verdict === "fits" ? "soft" : "bad"})),
    element("div", figures.filter(([figure]) => figure !== "-").map(([figure, what]) => element("div", [element("b", figure), element("span", what)], {class: "tile"})), {class: "tiles"}),
    applied(),
    element("figure", [], {id: "picture"}),
    element("div", [], {id: "advice"}),
    element("h3", "Effective batch"), element("p", `${of.batch} No change that is proposed here alters it.`),
    figuresTable(),
    element("details", [element("summary", changes.length ? "The recipe with these changes" : "The recipe as it was read"), element("pre", element("code", of.yaml)),
      element("button", "Copy", {type: "button", onclick: (event) => copy(of.yaml, event.target)})]),
    element("details", [element("summary", "What was simulated"), facts(of.facts)]),
    element("ul", [], {id: "notes", class: "notes"}),
  );
  answer.hidden = false;
  field("advice").append(element("h3", WANTED[of.verdict]), element("p", [], {id: "tried", class: "soft small"}));
  showNotes();
  picture();
}

const facts = (pairs) => element("table", pairs.map(([name, text]) => element("tr", [element("th", name, {scope: "row"}), element("td", text)])), {class: "facts"});

function showNotes() {
  const list = document.getElementById("notes");
  if (list) list.replaceChildren(...notes.map((text) => element("li", prose(sentence(text)))));
}

function applied() {  // one alone would change the batch: what was applied together is undone together, the last first
  const items = changes.map((set, place) => {
    const words = Object.entries(set).map(([key, value]) => `${key}: ${plain(value)}`).concat(cardsBefore[place] ? `${field("card").value} in place of ${cardsBefore[place]}` : []).join(", ");
    const undo = element("button", "Undo", {type: "button", "aria-label": `Undo ${words}`, onclick: takeBack});
    return element("li", [element("code", words), " ", place === changes.length - 1 ? undo : ""]);
  });
  return items.length ? element("div", [element("p", "Changed:", {class: "small soft"}), element("ul", items, {class: "applied"})]) : "";
}

const plain = (value) => value === null ? "removed" : typeof value === "object" ? JSON.stringify(value) : String(value);

function again() {
  ask("check");
  field("result").focus({preventScroll: innerWidth >= 720});
}

function apply(set, before = "") {
  changes.push(set);
  cardsBefore[changes.length - 1] = before;  // the card, where the change came with another one
  again();
}

function take(card, set = {}) {
  const before = field("card").value;
  field("card").value = card;
  if (Object.keys(set).length) apply(set, before);
  else again();
}

function takeBack() {
  changes.pop();
  field("card").value = cardsBefore[changes.length] || field("card").value;
  again();
}

const merged = () => changes.reduce((all, set) => ({...all, ...set, ...(all.env && set.env ? {env: {...all.env, ...set.env}} : {})}), {});

function showAdvice(advice) {
  const box = field("advice"), mends = advice.mends.map(change), faster = advice.faster.map(change), parts = [];
  if (verdict.verdict !== "fits") parts.push(element("h3", WANTED[verdict.verdict]));
  if (mends.length) parts.push(element("ul", mends, {class: "changes"}));
  else if (verdict.verdict !== "fits") {
    parts.push(element("p", advice.ended_early ? "Nothing was found in the time of this page." : "No change that was tried makes it fit with room to spare."));
    if (advice.closest) parts.push(element("p", "The closest:"), element("ul", [change(advice.closest)], {class: "changes"}));
  }
  if (faster.length) parts.push(element("h3", WANTED.fits), element("ul", faster, {class: "changes"}));
  if (advice.card) {
    const other = advice.card, words = other.smaller ? "A smaller card would do" : "As it is, it runs on";
    parts.push(element("ul", element("li", [
      element("p", `${words}: ${other.full_name}, ${gb(other.used_bytes)} of ${gb(other.capacity_bytes)}${other.step_s ? `, ${seconds(other.step_s)} a step` : ""}`),
      element("button", "Use it", {type: "button", "aria-label": `Use it: ${other.name}`, onclick: () => take(other.name)}),
    ]), {class: "changes"}));
  }
  if (!parts.length) parts.push(element("p", "Nothing that was tried is faster.", {class: "soft"}));
  if (advice.ended_early && (mends.length || faster.length)) parts.push(element("p", "Not every change was tried in the time of this page.", {class: "soft small"}));
  if (mends.length || faster.length || advice.closest) parts.push(element("p", TIERS, {class: "soft small"}));
  box.replaceChildren(...parts);
}

function change(one) {
  const facts = one.fits ? [gb(one.used_bytes)] : [`does not fit${one.used_bytes ? `: it needs ${gb(one.used_bytes)}` : ""}`];
  if (one.step_s) facts.push(`${seconds(one.step_s)} a step`);
  if (one.speedup && (one.speedup > 1.005 || one.speedup < 0.995)) facts.push(`${one.speedup.toFixed(2)}x as fast`);
  if (one.tight) facts.push("little to spare");
  return element("li", [
    element("div", [
      element("p", [element("span", one.tier, {class: "tag"}), " ", options(one.words)]),
      element("p", facts.join(", ")),
      ...one.reasons.map((text) => element("p", text, {class: "small soft"})),
    ]),
    element("button", "Apply", {type: "button", "aria-label": `Apply ${one.words} and check again`, onclick: () => apply(one.set)}),
  ]);
}

// -- the picture ------------------------------------------------------------------------------------------------------

const COLOURS = {"CUDA context": "context", weights: "weights", gradients: "gradients", optimizer: "optimizer", activations: "activations",
  logits: "logits", "KV cache": "kv", temporaries: "temporaries", workspace: "workspace"};
const FREE = "free in the allocator's cache";
const colour = (name) => `f-${COLOURS[name] || "other"}`;

function parts(phase) {
  return [["CUDA context", verdict.context_bytes], ...Object.entries(phase.categories)].filter(([, bytes]) => bytes > 0);
}

function picture() {
  const figure = document.getElementById("picture");
  if (!verdict || !figure || !verdict.phases.length) return;
  const phases = verdict.phases, limit = verdict.capacity_bytes, left = 40, top = 22;
  const width = Math.max(280, figure.clientWidth), room = (width - left) / phases.length;
  const slanted = phases.some((phase) => phase.name.length * 6.5 > room), bottom = slanted ? 72 : 22;
  const height = Math.min(300, Math.max(210, innerHeight * 0.45)) + bottom - 22;
  const most = 1.06 * Math.max(limit, ...phases.map((phase) => phase.bytes + phase.cached_bytes));
  const y = (bytes) => top + (height - top - bottom) * (1 - bytes / most);
  const peak = phases.reduce((a, b) => a.bytes >= b.bytes ? a : b);
  const svg = drawn("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label":
    `Memory by phase on ${verdict.card_name}, whose limit is ${gb(limit)}. ${phases.map((p) => `${p.name} ${gb(p.bytes)}`).join(", ")}. The peak is ${peak.name}. The figures are in a table below.`});
  gridded(svg, {most, y, left, width});
  svg.append(drawn("text", {x: left - 6, y: 12, "text-anchor": "end"}, "GB"));
  const wide = Math.min(120, room * 0.82), seen = new Map();
  phases.forEach((phase, place) => {
    const x = left + room * place + (room - wide) / 2;
    let below = 0;
    for (const [name, bytes] of parts(phase)) {
      seen.set(name, Math.max(seen.get(name) || 0, bytes));
      const block = drawn("rect", {class: colour(name), x, y: y(below + bytes), width: wide, height: Math.max(0, y(below) - y(below + bytes))});
      block.append(drawn("title", {}, `${phase.name}: ${name} ${gb(bytes)}`));
      svg.append(block);
      const tall = y(below) - y(below + bytes);
      if (tall >= 14 && wide >= name.length * 6.2) svg.append(drawn("text", {class: "inside", x: x + wide / 2, y: y(below + bytes / 2) + 4, "text-anchor": "middle"}, name));
      below += bytes;
    }
    if (phase.cached_bytes > most / 200) {
      svg.append(drawn("rect", {class: "f-cached", x, y: y(below + phase.cached_bytes), width: wide, height: y(below) - y(below + phase.cached_bytes)}));
      seen.set(FREE, Math.max(seen.get(FREE) || 0, phase.cached_bytes));
    }
    const middle = x + wide / 2, low = height - bottom + 14;
    svg.append(drawn("text", slanted ? {x: middle + 4, y: low, "text-anchor": "end", transform: `rotate(-40 ${middle + 4} ${low})`}
      : {x: middle, y: height - 6, "text-anchor": "middle"}, phase.name));
  });
  svg.append(drawn("line", {class: "limit", x1: left, x2: width, y1: y(limit), y2: y(limit)}),
    drawn("line", {class: "limit", x1: left, x2: left + 26, y1: 8, y2: 8}),  // above the tallest bar: nothing lies under the words
    drawn("text", {class: "limit-words", x: left + 33, y: 12}, `${verdict.card} has ${gb(limit)}`));
  const shown = [...seen].filter(([, bytes]) => bytes > limit / 200), small = seen.size - shown.length;
  const legend = shown.map(([name, bytes]) => element("li", [
    element("i", [], {class: name === FREE ? "f-cached" : colour(name)}), `${name} ${gb(bytes)}`]));
  if (small) legend.push(element("li", `${small} more, below ${gb(limit / 200)}`));
  const over = verdict.course ? [course({most, limit, left, width}), element("figcaption", "The same over one step, in the order of its allocations.")] : [];
  figure.replaceChildren(svg, element("ul", legend, {class: "legend", "aria-label": "Largest bytes of each category"}),
    element("figcaption", `Memory at the peak of each phase of a step; the largest is ${peak.name}.${verdict.verdict === "does not fit" && peak.bytes < limit
      ? " Bars are what tensors hold; the next tensor found no free piece that is large enough." : ""}`), ...over);
}

function gridded(svg, {most, y, left, width}) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200].find((gigabytes) => most / 1e9 / gigabytes <= 6) || 500;
  for (let at = 0; at * 1e9 <= most; at += step) {
    svg.append(drawn("line", {class: "axis", x1: left, x2: width, y1: y(at * 1e9), y2: y(at * 1e9)}),
      drawn("text", {x: left - 6, y: y(at * 1e9) + 4, "text-anchor": "end"}, at));
  }
}

function course({most, limit, left, width}) {
  const {live, phases} = verdict.course, places = Object.values(live)[0].length, top = 6, bottom = 36, height = 200;
  const x = (place) => left + (width - left) * place / places, y = (bytes) => top + (height - top - bottom) * (1 - bytes / most);
  const line = (bytes) => bytes.map((value, place) => `H${x(place).toFixed(1)}V${y(value).toFixed(1)}`).join("") + `H${width}`;
  const back = (bytes) => [...bytes.entries()].reverse().map(([place, value]) => `V${y(value).toFixed(1)}H${x(place).toFixed(1)}`).join("");
  const parts = phases.reduce((all, [name, first, s]) => {
    const before = all.at(-1);
    return before && before.name === name ? [...all.slice(0, -1), {...before, s: before.s + s}] : [...all, {name, first, s}];
  }, []);
  const svg = drawn("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label":
    `Memory over one step, by category: ${parts.map((part) => `${part.name} ${seconds(part.s)}`).join(", ")}.`});
  gridded(svg, {most, y, left, width});
  let below = Array(places).fill(0);
  for (const [name, bytes] of [["CUDA context", Array(places).fill(verdict.context_bytes)],
    ...Object.entries(live).map(([name, mib]) => [name, mib.map((value) => value * 2 ** 20)])]) {
    const above = below.map((value, place) => value + bytes[place]);
    const area = drawn("path", {class: colour(name), d: `M${left} ${y(above[0]).toFixed(1)}${line(above)}${back(below)}Z`});
    area.append(drawn("title", {}, name));
    svg.append(area);
    below = above;
  }
  parts.forEach(({name, first, s}, place) => {
    const end = place + 1 < parts.length ? parts[place + 1].first : places, middle = x((first + end) / 2);
    if (first) svg.append(drawn("line", {class: "between", x1: x(first), x2: x(first), y1: top, y2: height - bottom}));
    if (x(end) - x(first) < name.length * 6.5 + 4) return;
    svg.append(drawn("text", {x: middle, y: height - 20, "text-anchor": "middle"}, name),
      drawn("text", {x: middle, y: height - 4, "text-anchor": "middle"}, seconds(s)));
  });
  svg.append(drawn("line", {class: "limit", x1: left, x2: width, y1: y(limit), y2: y(limit)}));
  return svg;
}

function figuresTable() {
  const names = [...new Set(verdict.phases.flatMap((phase) => parts(phase).map(([name]) => name)))];
  const head = element("tr", ["phase", "in all", ...names].map((name) => element("th", name, {scope: "col"})));
  const body = verdict.phases.map((phase) => {
    const bytes = Object.fromEntries(parts(phase));
    return element("tr", [element("th", phase.name, {scope: "row"}), ...[phase.bytes, ...names.map((name) => bytes[name])].map((n) => element("td", gb(n), {class: "number"}))]);
  });
  return element("details", [element("summary", "The figures as a table"),
    element("div", element("table", [element("thead", head), element("tbody", body)]), {class: "wide", tabindex: "0", role: "region", "aria-label": "Bytes by phase and category"})]);
}

// -- the cards --------------------------------------------------------------------------------------------------------

function showCards() {
  const fitting = rows.filter((row) => row.verdict === "fits"), best = (of) => fitting.filter((row) => row[of] !== null)
    .reduce((a, b) => a === null || b[of] < a[of] ? b : a, null);
  const cheapest = best("usd_per_1000_steps"), fastest = best("step_s");
  const head = ["card", "memory", "a step", "$ an hour", "$ for 1,000 steps"];
  const body = [...rows].sort((a, b) => a.capacity_bytes - b.capacity_bytes).flatMap((row) => {
    const marks = [row === cheapest ? "cheapest" : "", row === fastest ? "fastest" : ""].filter(Boolean);
    const words = row.words ? `${row.words}${row.tier ? ` (${row.tier})` : ""}` : row.reason, kind = row === cheapest ? "winner" : null;
    const use = row.card === field("card").value ? "" : element("button", "Use", {type: "button", "aria-label": `Use ${row.card}`,
      class: "use", onclick: () => take(row.card, row.set)});
    const figures = element("tr", [
      element("th", [`${row.count > 1 ? `${row.count} x ` : ""}${row.card} `, use, ...marks.flatMap((mark) => [" ", element("span", mark, {class: "tag"})])], {scope: "row"}),
      element("td", [element("span", row.verdict, {class: row.verdict === "fits" ? "good" : "bad"}), element("br"), row.used_bytes === null ? "" : `${(row.used_bytes / 1e9).toFixed(1)} of ${gb(row.capacity_bytes)}`]),
      element("td", `${row.over ? "over " : ""}${seconds(row.step_s)}`, {class: "number"}),
      element("td", usd(row.usd_per_hour), {class: "number", title: row.price}),
      element("td", usd(row.usd_per_1000_steps), {class: "number"}),
    ], {class: kind});
    return words ? [figures, element("tr", element("td", words, {colspan: "5", class: "small soft"}), {class: `with ${kind || ""}`})] : [figures];
  });
  const table = element("table", [element("caption", "Each card with the recipe as it is, or with the mildest change that fits. Prices are public lists, dated below."),
    element("thead", element("tr", head.map((name) => element("th", name, {scope: "col"})))), element("tbody", body)]);
  const priced = rows.filter((row) => row.price).map((row) => element("li", `${row.card}: ${usd(row.usd_per_hour)} an hour, ${row.price}`));
  const sources = element("details", [element("summary", "Where the prices are from"), element("ul", priced, {class: "notes"})]);
  cards.replaceChildren(element("h2", "Cards"), element("div", table, {class: "wide", tabindex: "0", role: "region", "aria-label": "Cards"}), priced.length ? sources : "");
  cards.hidden = false;
}

// -- another tool's file ----------------------------------------------------------------------------------------------

function showExplained(found) {
  answer.replaceChildren(element("h2", `A file of ${found.tool}`),
    element("p", `It cannot be simulated: ${found.why}.`), element("p", "What it says by the tool's own rules:"), facts(found.facts),
    ...found.wrong.map((text) => element("p", text, {class: "bad"})),
    found.unread.length ? element("p", `Not certain from the file: ${found.unread.join(", ")}.`) : "");
  answer.hidden = false;
}

// -- beginning --------------------------------------------------------------------------------------------------------

field("ask").addEventListener("submit", (event) => { event.preventDefault(); ask("check"); });
field("tokens").addEventListener("invalid", () => { field("more").open = true; });  // a browser says nothing of a field that is folded away
field("compare").addEventListener("click", () => ask("cards"));
field("link").addEventListener("click", (event) => {
  history.replaceState(null, "", `#q=${packed()}`);
  copy(location.href, event.target);
});
field("text").addEventListener("input", () => { field("trainer").value = ""; changes = []; });
field("model").addEventListener("change", write);
field("method").addEventListener("change", write);
for (const button of document.querySelectorAll("[data-text]")) button.addEventListener("click", () => example(button.dataset));
field("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); field("ask").requestSubmit(); }
});
addEventListener("hashchange", fromLink);
new ResizeObserver(picture).observe(field("result"));
fromLink();
