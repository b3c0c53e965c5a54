// Runs in the page of browser.py: measures a document in a frame, after layout.
function rgb(text) {
  const parts = text.match(/[\d.]+/g).map(Number);
  return { r: parts[0], g: parts[1], b: parts[2], a: parts.length > 3 ? parts[3] : 1 };
}
function luminance(color) {
  const [r, g, b] = [color.r, color.g, color.b].map((value) => {
    const part = value / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function backgroundOf(element, view) {
  for (let at = element; at; at = at.parentElement) {
    const color = rgb(view.getComputedStyle(at).backgroundColor);
    if (color.a === 1) return color;
  }
  return { r: 255, g: 255, b: 255, a: 1 };
}
// WCAG 2.2, "contrast ratio".
function contrast(element, view) {
  const style = view.getComputedStyle(element);
  const ink = rgb(element instanceof view.SVGElement ? style.fill : style.color);
  if (ink.a === 0) return 21;
  const lights = [luminance(ink), luminance(backgroundOf(element, view))].sort((a, b) => b - a);
  return (lights[0] + 0.05) / (lights[1] + 0.05);
}
function nameOf(element) {
  return element.tagName.toLowerCase() + "." + (element.getAttribute("class") || "") + ": " +
    element.textContent.trim().slice(0, 40);
}
// More than a box has room for. Letters of a picture have no box to spill from but the picture's.
function spills(element, view) {
  if (!(element instanceof view.SVGElement))
    return element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1;
  if (element.tagName !== "text") return false;
  const letters = element.getBoundingClientRect();
  const picture = element.ownerSVGElement.getBoundingClientRect();
  return letters.left < picture.left - 0.5 || letters.right > picture.right + 0.5 ||
    letters.top < picture.top - 0.5 || letters.bottom > picture.bottom + 0.5;
}
function measure(frame) {
  const view = frame.contentWindow, found = frame.contentDocument, width = view.innerWidth;
  const all = [...found.body.querySelectorAll("*")];
  const texts = all.filter((element) => [...element.childNodes].some(
    (node) => node.nodeType === 3 && node.textContent.trim()));
  const shown = texts.filter((element) => element.getBoundingClientRect().width > 0);
  return {
    width: width,
    scroll_width: found.documentElement.scrollWidth,
    outside: all.filter((e) => e.getBoundingClientRect().right > width + 0.5).map(nameOf),
    pale: shown.filter((e) => contrast(e, view) < 4.5).map(
      (e) => nameOf(e) + " " + contrast(e, view).toFixed(2)),
    small: shown.filter((e) => parseFloat(view.getComputedStyle(e).fontSize) *
      (e.ownerSVGElement ? e.ownerSVGElement.getBoundingClientRect().width /
        e.ownerSVGElement.viewBox.baseVal.width : 1) < 9).map(nameOf),
    spilling: all.filter((e) => spills(e, view)).map(
      (e) => `${nameOf(e)}: ${e.scrollWidth} in ${e.clientWidth} of ${width}`),
    background: view.getComputedStyle(found.body).backgroundColor,
    sections: [...found.querySelectorAll("section")].map((e) => e.id),
    empty: [...found.querySelectorAll("section")].filter(
      (e) => e.getBoundingClientRect().height < 60).map((e) => e.id),
    charts: [...found.querySelectorAll("svg")].map((e) => e.getBoundingClientRect().height),
    shown: shown.length,
  };
}
window.addEventListener("load", () => {
  const answers = [...document.querySelectorAll("iframe")].map(measure);
  document.getElementById("answers").textContent = JSON.stringify(answers);
});
