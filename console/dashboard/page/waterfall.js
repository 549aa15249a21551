// The lanes of one request, and the line that reads the span under pointer or keyboard.

import { label, vline } from "./charts.js";
import { CHARACTER_PX, layOut } from "./lanes.js";
import { count, int, MS, ms, ms1, px } from "./numbers.js";
import { Card, Choice, clamped, html, Legend, stepping, useEffect, useShortcuts, useState, useWidth } from "./parts.js";

const PATTERNS = ["queue", "wait", "exposed", "lost", "gap"];
const LEGEND = [
	["soft-p", "queue"],
	["fill-p", "chunk"],
	["fill-n", "transfer, hidden"],
	["exposed", "transfer, not hidden"],
	["fill-d", "decode step"],
	["gap", "gap"],
];

/** The patterns of bars: their meaning never depends on colour alone. */
export function Patterns() {
	const stripes = (id, color, step, width) =>
		html`<pattern id=${id} width=${step} height=${step} patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
			<rect width=${step} height=${step} fill="var(--${color}-soft)" />
			<rect width=${width} height=${step} fill="var(--${color})" />
		</pattern>`;
	return html`<svg class="patterns" width="0" height="0" aria-hidden="true">
		${stripes("h-queue", "prefill", 6, 2)} ${stripes("h-wait", "decode", 6, 2)}
		${stripes("h-exposed", "warn", 6, 3)} ${stripes("h-lost", "bad", 7, 2)}
		<pattern id="h-gap" width="5" height="5" patternUnits="userSpaceOnUse">
			<rect width="5" height="5" fill="var(--surface)" /><circle cx="2.5" cy="2.5" r="1.1" fill="var(--warn)" />
		</pattern>
	</svg>`;
}

export function Waterfall({ trace, nowUs, targetMs }) {
	const [isWhole, setWhole] = useState(false);
	const [picked, setPicked] = useState(-1);
	const [ref, width] = useWidth();
	useEffect(() => setPicked(-1), [isWhole]);
	useShortcuts({ z: () => setWhole(!isWhole) });
	const layout = layOut(trace, nowUs, width, isWhole);
	const spans = layout.boxes.toSorted((a, b) => a.from - b.from);
	const ranges = [[false, "First tokens"], [true, "Whole request"]];
	const head = html`<${Choice} label="Range" options=${ranges} value=${isWhole} onChoose=${setWhole} />
		<${Legend} entries=${LEGEND} />`;
	return html`<${Card} title="Waterfall" head=${head}>
		<div class="wf" ref=${ref}>
			${width > 0 && html`<${Drawing} ...${{ ...layout, trace, targetMs, spans, picked, setPicked, width }} />`}
		</div>
		<div class="read" role="status">${reading(spans[picked])}</div>
	<//>`;
}

function reading(span) {
	if (!span) return html`Point at a span, or press <kbd>←</kbd> <kbd>→</kbd> in the chart, to read it here.`;
	const { name, rest, from, to } = span;
	return html`<b>${name}</b> ${rest} · ${ms((to - from) / 1000)}, from ${ms1(from / 1000)} to ${ms1(to / 1000, MS)}`;
}

function Drawing({ trace, targetMs, boxes, lanes, heads, axis, spans, picked, setPicked, width, height, isNarrow }) {
	const onPointerMove = (event) => {
		const { left, top } = event.currentTarget.getBoundingClientRect();
		const [x, y] = [event.clientX - left, event.clientY - top];
		const isAt = (each) => Math.abs(x - each.x - each.width / 2) <= each.width / 2 + 2 && y >= each.y && y <= each.y + each.height;
		const found = spans.findIndex(isAt);
		if (found >= 0) setPicked(found);
	};
	const marks = flags(trace, targetMs, axis, height, isNarrow);
	const ticks = [];
	for (let v = 0; v * 1000 <= axis.end; v += axis.step) ticks.push(v);
	return html`<svg
		width=${width}
		height=${height}
		role="img"
		tabindex="0"
		aria-label="Waterfall of ${trace.request_id}. Arrow keys step through its ${count(spans.length, "span")}."
		onKeyDown=${stepping((step) => setPicked(clamped(picked + step, 0, spans.length - 1)))}
		onPointerMove=${onPointerMove}
	>
		${lanes.map(
			(lane) => html`<rect class="lane" x=${axis.left} y=${lane.y} width=${axis.right - axis.left} height=${lane.height} rx="3" />`,
		)}
		${ticks.map((v) => vline("grid-l", axis.x(v * 1000), axis.top - 6, height))} ${boxes.map(bar)} ${marks.lines}
		${ticks.map((v) => tickName(v, axis))} ${lanes.map((lane) => laneName(lane, isNarrow))}
		${heads.map(({ y, text, isFailed }) => html`<text class=${isFailed ? "lab failed" : "lab"} y=${y}>${text}</text>`)}
		${boxes.map((box) => words(box, marks.xs))} ${marks.names}
		${spans[picked] && frame(spans[picked])}
	</svg>`;
}

const frame = ({ x, y, width, height }) =>
	html`<rect class="sel" rx="2" x=${x - 1} y=${y - 1} width=${width + 2} height=${height + 2} />`;

function tickName(v, axis) {
	const x = axis.x(v * 1000);
	if (!v) return label(x, axis.top - 10, "0 ms", "start");
	return x < axis.right - 26 && label(x, axis.top - 10, int(v));
}

function laneName({ y, height, name, sub }, isNarrow) {
	if (isNarrow) return html`<text class="lab" y=${y - 7}>${name} ${name.length < 40 && html`<tspan class="lab2">${sub}</tspan>`}</text>`;
	const middle = y + height / 2;
	return html`<text class="lab" y=${sub ? middle - 2 : middle + 4}>${name}</text>
		<text class="lab2" y=${middle + 13}>${sub}</text>`;
}

function bar({ x, y, width, height, fill }) {
	const paint = PATTERNS.includes(fill) ? `url(#h-${fill})` : `var(--${fill})`;
	return html`<rect x=${px(x)} y=${y} width=${px(width)} height=${height} rx=${width > 5 ? 2 : 0} fill=${paint} />`;
}

/** What stands in a bar, if there is room and no mark runs through it; a plate hides marks. */
function words({ x, y, width, height, text, plate }, marks) {
	const found = [plate ?? text].flat().find((each) => width > each.length * CHARACTER_PX + 10);
	const end = found && x + found.length * CHARACTER_PX + 8;
	const middle = y + height / 2;
	if (!found || (!plate && marks.some((mark) => mark > x && mark < end))) return null;
	return html`${plate && html`<rect x=${x + 4} y=${middle - 9} width=${end - x} height="18" rx="3" fill="var(--surface)" />`}
		<text class=${plate ? "ink" : "in"} x=${x + (plate ? 8 : 6)} y=${middle + 4.3}>${found}</text>`;
}

/** The target and the first token as lines through all lanes, with words that do not overlap. */
function flags(trace, targetMs, axis, height, isNarrow) {
	const [first, target] = [trace.first_token_us - trace.received_us, targetMs * 1000];
	const isSeen = (us) => us > 0 && us <= axis.end;
	const isNear = isSeen(first) && isSeen(target) && Math.abs(axis.x(first) - axis.x(target)) < 250;
	const targetIsLeft = axis.x(target) > axis.right - 120 || (isNear && first > target);
	const firstIsLeft = axis.x(first) > axis.right - 150 || (isNear && first < target);
	const shown = [
		[target, !(isNarrow && isNear) && `target ${ms(targetMs)}`, "flag dashed", targetIsLeft],
		[first, `first token ${ms(first / 1000)}`, "flag", firstIsLeft],
	].filter(([us]) => isSeen(us));
	return {
		xs: shown.map(([us]) => axis.x(us)),
		lines: shown.map(([us, , kind]) => vline(kind, axis.x(us), 16, height)),
		names: shown.map(([us, text, , isLeft]) => label(axis.x(us) + (isLeft ? -5 : 5), 14, text, isLeft ? "end" : "start", "ink")),
	};
}
