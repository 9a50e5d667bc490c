// Let the keyboard scroll code and tables that are wider than their column.
addEventListener("load", () => setTimeout(() => {
  for (const area of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) area.tabIndex = 0;
}));
