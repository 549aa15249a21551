// Charts as SVG in the pixels of their container. Colours come from CSS, so a theme needs no redraw.

import { clock, known, px } from "./numbers.js";
import { clamped, html, Sized, stepping } from "./parts.js";

const MIN_WIDTH = 220;
const LABEL_S = [60, 120, 300, 600, 1200]; // between two labels of the time axis

export const hline = (kind, y, x0, x1) => html`<line class=${kind} x1=${x0} x2=${x1} y1=${y} y2=${y} />`;
export const label = (x, y, text, anchor = "middle", kind = "") =>
	html`<text class=${kind} x=${x} y=${y} text-anchor=${anchor}>${text}</text>`;
export const vline = (kind, x, y0, y1) => html`<line class=${kind} x1=${x} x2=${x} y1=${y0} y2=${y1} />`;

/** An SVG path through known values; a value that is not known leaves a gap. */
export function linePath(values, x, y) {
	const point = (v, i) => `${known(values[i - 1]) ? "L" : "M"}${px(x(i))} ${px(y(v))}`;
	return values.map((v, i) => (known(v) ? point(v, i) : "")).join("");
}

/** Areas between the line and its target where the target is missed, as one path. */
function missedPath(values, target, isBelow, x, y) {
	const bound = isBelow ? Math.min : Math.max;
	const line = linePath(values.map((v) => known(v) && bound(v, target)), x, y);
	const [, ...runs] = line.split("M");
	return runs.map((run) => `M${run}V${px(y(target))}H${parseFloat(run)}Z`).join("");
}

/** Places for the letters of events, moved apart where they would overlap; `xs` grow. */
export function spread(xs, last, gap = 20) {
	let limit = last + gap;
	return xs.toReversed().map((x) => (limit = Math.min(x, limit - gap))).reverse();
}

/** Lines over time, one point per `stepMs` from `startUs`. `isBelow`: what is below the target misses it.
 * `onIndex` gets the point that the reader looks at. */
export const LineChart = (props) =>
	html`<${Sized} extra="chart" draw=${(width) => plot(props, Math.max(MIN_WIDTH, width))} />`;

function plot({ marks = [], left = 46, ...o }, width) {
	const [x0, x1, top, y0] = [left, width - 8, 8, o.height - (o.hasLetters ? 44 : o.hasAxis ? 22 : 6)];
	const end = Math.max(2, ...o.series.map((each) => each.values.length)) - 1;
	const [low, high] = [o.ticks[0], o.ticks.at(-1)];
	const x = (i) => x0 + ((x1 - x0) * i) / end;
	const y = (v) => y0 - (y0 - top) * clamped((v - low) / (high - low), 0, 1);
	const at = (us) => x(clamped((us - o.startUs) / 1000 / o.stepMs, 0, end));
	const hasData = o.series.some((each) => each.values.some(known));
	const hasTarget = hasData && known(o.target);
	return html`<svg
		class="plot"
		width=${width}
		height=${o.height}
		viewBox="0 0 ${width} ${o.height}"
		role="img"
		aria-label=${o.label}
		...${o.onIndex && reading(o, end, x0, x1)}
	>
		${o.ticks.map((v) => [
			hline("grid-l", y(v), x0, x1),
			label(x0 - 8, y(v) + 4, o.write(v), "end"),
		])}
		${hasTarget && html`<path class="missed" d=${missedPath(o.series[0].values, o.target, o.isBelow, x, y)} />`}
		${marks.map((mark) => vline("mark-l", at(mark.at_us), top, y0))}
		${hasTarget && hline("target", y(o.target), x0, x1)}
		${o.series.toReversed().map((each) => line(each, x, y))}
		${o.hasAxis && axis(o, width, end, x0, x1, y0, at)} ${o.hasLetters && letters(marks, at, x1, y0)}
		${!hasData && label((x0 + x1) / 2, (top + y0) / 2 - 6, "no point yet")}
		${known(o.index) && vline("cross", x(o.index), top, y0)}
	</svg>`;
}

function line({ values, kind, isThin }, x, y) {
	const last = values.at(-1);
	return html`<path class="line ${kind}" d=${linePath(values, x, y)} stroke-width=${isThin ? 1.25 : 2} />
		${known(last) && html`<circle class="end ${kind}" cx=${x(values.length - 1)} cy=${y(last)} r=${isThin ? 2.5 : 3.5} />`}`;
}

function axis({ startUs, stepMs }, width, end, x0, x1, y0, at) {
	const endUs = startUs + end * stepMs * 1000;
	const most = width < 460 ? 4 : 8;
	const stepUs = 1e6 * (LABEL_S.find((s) => (endUs - startUs) / 1e6 / s <= most) ?? LABEL_S.at(-1));
	const labels = [];
	for (let us = Math.ceil(startUs / stepUs) * stepUs; us <= endUs; us += stepUs) {
		if (at(us) > x0 + 14 && at(us) < x1 - 14) labels.push(us);
	}
	return html`${hline("grid-l", y0, x0, x1)}
		${labels.map((us) => [label(at(us), y0 + 17, clock(us).slice(0, 5)), vline("grid-l", at(us), y0, y0 + 4)])}`;
}

function letters(marks, at, x1, y0) {
	const places = spread(marks.map((mark) => at(mark.at_us)), x1 + 4);
	return marks.map((mark, i) => letter(mark, places[i], y0 + 32));
}

/** The letter of an event in a circle. */
export const letter = ({ kind, letter, at_us, text }, x, y) =>
	html`<g class="ev ${kind}" transform="translate(${x} ${y})">
		<circle r="8.5" /><text y="4.3">${letter}</text><title>${clock(at_us)} ${text}</title>
	</g>`;

/** Handlers of the crosshair, by pointer and by keyboard. */
function reading({ index, onIndex }, end, x0, x1) {
	return {
		tabindex: 0,
		onPointerMove: (event) => {
			const { left } = event.currentTarget.getBoundingClientRect();
			onIndex(Math.round(clamped((event.clientX - left - x0) / (x1 - x0), 0, 1) * end));
		},
		onPointerLeave: () => onIndex(null),
		onBlur: () => onIndex(null),
		onKeyDown: stepping((step) => onIndex(clamped((index ?? end + 1) + step, 0, end))),
	};
}

export function Spark({ values, kind }) {
	const numbers = values.filter(known);
	if (numbers.length < 2) return html`<span class="faint">–</span>`;
	const [low, high] = [Math.min(...numbers) - 0.04, Math.max(...numbers) + 0.04];
	const x = (i) => 2 + (i * 114) / (values.length - 1);
	const y = (v) => 22 - ((v - low) / (high - low)) * 20;
	return html`<svg class="spark" viewBox="0 0 120 24" aria-hidden="true">
		${line({ values, kind, isThin: true }, x, y)}
	</svg>`;
}
