"""The boxes of a page's texts: what is cut, what is printed over, and what lines run through."""

from __future__ import annotations

from playwright.sync_api import Page

_FAULTS = r"""() => {
    const LINES = "svg .target, svg .mark-l, svg .flag, .plot .grid-l";
    const isSeen = (each) => each.checkVisibility({ visibilityProperty: true })
        && !each.closest(".sr, .toast, title");
    const name = (text) => text.data.trim().slice(0, 60);
    const isScroller = (style) => /auto|scroll/.test(style.overflowX + style.overflowY);
    const inside = (each) => {
        const { left, top } = each.getBoundingClientRect();
        const [x, y] = [left + each.clientLeft, top + each.clientTop];
        return { left: x, top: y, right: x + each.clientWidth, bottom: y + each.clientHeight };
    };
    const window_ = { left: 0, right: innerWidth, top: -1e9, bottom: 1e9 };
    const shared = (a, b) => ({
        left: Math.max(a.left, b.left), right: Math.min(a.right, b.right),
        top: Math.max(a.top, b.top), bottom: Math.min(a.bottom, b.bottom),
    });
    const isOver = (a, b, dx, dy) => {
        const both = shared(a, b);
        return both.right - both.left > dx && both.bottom - both.top > dy;
    };
    const found = [], texts = [];
    /** What shows of a box; a box that clips without scrolling cuts what is outside. */
    const shown = (text, box) => {
        const root = document.documentElement;
        for (let each = text.parentElement; each !== root; each = each.parentElement) {
            const style = getComputedStyle(each);
            const isPage = each === document.body;
            if (!isPage && style.overflow === "visible") continue;
            const isDrawing = each.tagName === "svg";
            const drawn = isDrawing && each.getBoundingClientRect();
            const bounds = isPage ? window_ : drawn || inside(each);
            if (!isPage && isScroller(style)) {
                box = shared(box, bounds);
                continue;
            }
            const outside = Math.max(bounds.left - box.left, box.right - bounds.right);
            if (outside > 1 || (!isDrawing && box.bottom - bounds.bottom > 2)) {
                found.push(`cut: ${name(text)}`);
            }
        }
        return box;
    };
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode;
        if (!text.data.trim() || !isSeen(text.parentElement)) continue;
        const range = document.createRange();
        range.selectNodeContents(text);
        for (const { left, right, top, bottom } of range.getClientRects()) {
            if (right > left) texts.push({ text, box: shown(text, { left, right, top, bottom }) });
        }
    }
    texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
        if (a.text !== b.text && isOver(a.box, b.box, 1, 4)) {
            found.push(`printed over: ${name(a.text)} | ${name(b.text)}`);
        }
    }));
    for (const line of document.querySelectorAll(LINES)) {
        const { left, right, top, bottom } = line.getBoundingClientRect();
        const box = { left: left - 0.5, right: right + 0.5, top: top - 0.5, bottom: bottom + 0.5 };
        for (const { text, box: other } of texts) {
            const isAfter = line.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING;
            const isPlated = isAfter && text.parentElement.matches(".wf :is(text:not(.in), tspan)");
            if (!isPlated && line.ownerSVGElement.contains(text) && isOver(box, other, 0, 0)) {
                found.push(`struck through: ${name(text)}`);
            }
        }
    }
    return [...new Set(found)];
}"""


def faults(page: Page) -> list[str]:
    """Texts that are cut off, printed over each other, or struck through by a line of a chart.
    A text that the reader can scroll to is not cut; one with a plate or a halo is above a line."""
    found: list[str] = page.evaluate(_FAULTS)
    return found
