"""Checks of a page in Chromium: what Lighthouse and WCAG 2.2 AA ask of one. Knows no page of Backhaul.

``problems`` opens the page's own state at several widths and in both themes, and presses Tab through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

PHONE_WIDTH = 390
_HEIGHT = 900
_MAX_TABS = 400

# What all checks share. Each finding is a line: what is wrong, and the start of the element.
_SHARED = r"""
const CONTROLS = "a[href], button, input:not([type=hidden]), select, textarea, summary, [role=button], [role=checkbox]";
const FOCUSABLE = `${CONTROLS}, [tabindex]:not([tabindex="-1"])`;
const found = [];
const report = (what, element) => found.push(`${what}: ${(element.outerHTML ?? String(element)).slice(0, 160)}`);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const shown = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0;
const byIds = (ids) => ids.split(/\s+/).map((id) => document.getElementById(id)?.textContent ?? "").join(" ").trim();
const nameOf = (element) =>
  element.getAttribute("aria-label")?.trim() || byIds(element.getAttribute("aria-labelledby") ?? "") ||
  element.getAttribute("alt")?.trim() || [...(element.labels ?? [])].map((each) => each.textContent).join(" ").trim() ||
  (element.localName === "svg" ? element.querySelector(":scope > title")?.textContent.trim() : "") ||
  (element.matches("input, select, textarea, img, svg") ? "" : element.textContent.trim()) ||
  element.getAttribute("title")?.trim() || "";
"""

_STRUCTURE = """() => {
  if (!/^[a-z]{2,3}(-|$)/i.test(document.documentElement.lang)) report("no lang", document.documentElement.cloneNode());
  if (!document.title.trim()) report("no title", document.head);
  const viewport = document.querySelector("meta[name=viewport]")?.content ?? "";
  if (!viewport.includes("width=device-width")) report("no viewport for phones", document.head);
  if (/user-scalable\\s*=\\s*(no|0)|maximum-scale/.test(viewport)) report("zoom is forbidden", document.head);
  if (all("main, [role=main]").filter(shown).length !== 1) report("not one main landmark", document.body.cloneNode());
  const levels = all("h1, h2, h3, h4, h5, h6").filter(shown);
  if (levels.filter((each) => each.localName === "h1").length !== 1) report("not one h1", document.body.cloneNode());
  levels.forEach((each, at) => {
    const before = at ? Number(levels[at - 1].localName[1]) : 0;
    if (Number(each.localName[1]) > before + 1) report("a level of headings is left out before", each);
    if (!each.textContent.trim()) report("an empty heading", each);
  });
  const ids = all("[id]").map((each) => each.id);
  for (const each of all("[id]")) if (ids.filter((id) => id === each.id).length > 1) report("an id twice", each);
  for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"])
    for (const each of all(`[${name}]`))
      if (each.getAttribute(name).split(/\\s+/).some((id) => !ids.includes(id))) report(`${name} leads nowhere`, each);
  for (const each of all("ul > :not(li), ol > :not(li)")) report("in a list, and no li", each);
  for (const each of all("li")) if (!each.parentElement.matches("ul, ol, menu")) report("a li outside a list", each);
  for (const each of all("[aria-hidden=true]"))
    if (all(FOCUSABLE, each).filter(shown).length) report("hidden from readers, with the focus inside", each);
  return found;
}"""

_NAMES = """() => {
  for (const each of all(`img, svg:not([aria-hidden=true]), canvas:not([aria-hidden=true]), [role=img]`)) {
    if (each.closest("[aria-hidden=true]") || !shown(each) || each.parentElement.closest("svg")) continue;
    if (each.localName === "img" && each.getAttribute("alt") === "") continue; // for the eye only
    if (!nameOf(each)) report("a picture without a text", each);
  }
  for (const each of all(FOCUSABLE).filter(shown)) if (!nameOf(each)) report("a control without a name", each);
  for (const each of all("section, aside, nav, [role=region], [role=group]").filter(shown))
    if (!each.getAttribute("aria-label") && !byIds(each.getAttribute("aria-labelledby") ?? ""))
      report("a region without a name", each);
  return found;
}"""

_CONTRAST = """() => {
  const parse = (color) => color.match(/[0-9.]+/g).map(Number);
  const over = (top, ground) => {
    const alpha = top[3] ?? 1;
    return [0, 1, 2].map((n) => top[n] * alpha + ground[n] * (1 - alpha));
  };
  const light = (color) => {
    const [r, g, b] = color.map((part) => part / 255)
      .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    if (!element) return getComputedStyle(document.documentElement).colorScheme.includes("dark") &&
      matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
    const color = parse(getComputedStyle(element).backgroundColor);
    return (color[3] ?? 1) === 1 ? color.slice(0, 3) : over(color, ground(element.parentElement));
  };
  // A text in a picture is on the shape that is drawn below it.
  const under = (text) => {
    const box = text.getBoundingClientRect();
    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
    const below = [];
    for (const each of all("rect, circle, ellipse", text.ownerSVGElement)) {
      const shape = each.getBoundingClientRect();
      const inside = shape.left <= x && x <= shape.right && shape.top <= y && y <= shape.bottom;
      if (inside && each.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING) below.push(each);
    }
    const filled = below.reverse().find((each) => getComputedStyle(each).fill !== "none");
    return filled ? parse(getComputedStyle(filled).fill) : ground(text.ownerSVGElement);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !shown(node)) continue;
    if (node.closest("script, noscript, style, title, :disabled")) continue;
    const style = getComputedStyle(node);
    const below = node.closest("svg") ? under(node.closest("text")) : ground(node);
    let opacity = 1;
    for (let each = node; each; each = each.parentElement) opacity *= Number(getComputedStyle(each).opacity);
    const color = parse(node.closest("svg") ? style.fill : style.color);
    color[3] = (color[3] ?? 1) * opacity;
    const [one, other] = [light(over(color, below)), light(below)];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (contrast < (large ? 3 : 4.5)) report(`contrast ${contrast.toFixed(2)}`, node);
  }
  return found;
}"""

# A target is 24 by 24, or a circle of that size around its middle meets no other target (WCAG 2.2, 2.5.8). A link
# inside a sentence is exempt.
_TARGETS = """() => {
  const sentence = (each) => each.localName === "a" && getComputedStyle(each).display === "inline" &&
    each.parentElement.textContent.trim() !== each.textContent.trim();
  const targets = all(CONTROLS).filter((each) => shown(each) && !each.disabled && !sentence(each));
  const boxes = new Map(targets.map((each) => [each, each.getBoundingClientRect()]));
  const small = (box) => box.width < 23.9 || box.height < 23.9;
  for (const [each, box] of boxes) {
    if (!small(box) || box.right <= 0) continue;
    const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    for (const [other, near] of boxes) {
      if (other === each || other.contains(each) || each.contains(other)) continue;
      const dx = Math.max(near.left - x, 0, x - near.right);
      const dy = Math.max(near.top - y, 0, y - near.bottom);
      const middles = Math.hypot((near.left + near.right) / 2 - x, (near.top + near.bottom) / 2 - y);
      if (Math.hypot(dx, dy) < 12 || (small(near) && middles < 24)) {
        report(`a target of ${Math.round(box.width)} by ${Math.round(box.height)} close to another`, each);
        break;
      }
    }
  }
  return found;
}"""

_WIDTH = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return found;
  report(`${document.documentElement.scrollWidth} pixels wide, of ${width}`, document.title);
  const beyond = all("body *").filter((each) => shown(each) && each.getBoundingClientRect().right > width + 1);
  for (const each of beyond.slice(0, 8)) report("reaches beyond", each);
  return found;
}"""

# What a mouse can do, a keyboard can: what scrolls or can be clicked takes the focus, or contains what does.
_MOUSE_ONLY = """() => {
  const reached = (each) => each.closest(FOCUSABLE) || each.querySelector(FOCUSABLE);
  for (const each of all("body *").filter(shown)) {
    const style = getComputedStyle(each);
    const scrolls = /auto|scroll/.test(style.overflowX) && each.scrollWidth > each.clientWidth + 1 ||
      /auto|scroll/.test(style.overflowY) && each.scrollHeight > each.clientHeight + 1;
    if (scrolls && !each.matches(FOCUSABLE) && !each.querySelector(FOCUSABLE)) report("only a mouse scrolls", each);
    const clicked = style.cursor === "pointer" && getComputedStyle(each.parentElement).cursor !== "pointer";
    if (clicked && !reached(each)) report("only a mouse clicks", each);
  }
  for (const each of all("[tabindex]")) if (each.tabIndex > 0) report("changes the order of Tab", each);
  return found;
}"""

_TO_REACH = """() => {
  window.toReach = all(FOCUSABLE).filter((each) => shown(each) && !each.disabled && each.tabIndex >= 0);
  document.activeElement?.blur();
  getSelection().removeAllRanges();
  return window.toReach.length;
}"""

_FOCUSED = """() => {
  const each = document.activeElement;
  if (!each || each === document.body) return null;
  const style = getComputedStyle(each);
  const seen = (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0) || style.boxShadow !== "none";
  if (!seen) report("the focus cannot be seen", each);
  return { at: window.toReach.indexOf(each), found };
}"""


def problems(page: Page) -> list[str]:
    """All that is wrong with the page as it is now. The page is then as before, but for the focus and the theme."""
    size = page.viewport_size
    found = []
    for width in (1280, PHONE_WIDTH):
        page.set_viewport_size({"width": width, "height": _HEIGHT})
        for check in (_STRUCTURE, _NAMES, _TARGETS, _WIDTH, _MOUSE_ONLY):
            found += [f"at {width}: {each}" for each in _look(page, check)]
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            found += [f"at {width}, {scheme}: {each}" for each in _look(page, _CONTRAST)]
        found += [f"at {width}: {each}" for each in _unreached(page)]
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    if size is not None:
        page.set_viewport_size(size)
    return list(dict.fromkeys(found))


def _look(page: Page, check: str) -> list[str]:
    found: list[str] = page.evaluate(_with_shared(check))
    return found


def _with_shared(check: str) -> str:
    return f"() => {{ {_SHARED} return ({check})(); }}"


def _unreached(page: Page) -> list[str]:
    """Presses Tab until the focus was everywhere. Returns what it has not reached, and where it was not seen."""
    left = set(range(page.evaluate(_with_shared(_TO_REACH))))
    count, found = len(left), []
    for _ in range(min(_MAX_TABS, 2 * count + 2)):
        page.keyboard.press("Tab")
        focused = page.evaluate(_with_shared(_FOCUSED))
        if focused is not None:
            left.discard(focused["at"])
            found += focused["found"]
        if not left:
            break
    return found + page.evaluate(
        "left => left.map((at) => `Tab does not reach: ${toReach[at].outerHTML}`)", sorted(left)
    )
