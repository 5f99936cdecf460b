// What the theme leaves out for a keyboard and a screen reader: names of its landmarks, and tables that keys can scroll.
document$.subscribe(() => setTimeout(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((one) => { one.tabIndex = 0; });
  document.querySelectorAll(".md-code__nav").forEach((one, place) => { one.setAttribute("aria-label", `Code ${place + 1}`); });
}));
