// Charts as SVG in the pixels of their container. Colours come from CSS, so a theme needs no redraw.

import { clock, known } from "./numbers.js";
import { html, stepping, useWidth } from "./parts.js";

const MIN_WIDTH = 220;
const LETTER_PX = 20;

/** An SVG path through known values; a value that is not known leaves a gap. */
export function linePath(values, x, y) {
	let path = "";
	let isDown = false;
	values.forEach((value, i) => {
		if (!known(value)) {
			isDown = false;
			return;
		}
		path += `${isDown ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
		isDown = true;
	});
	return path;
}

/** Areas between the line and its target where the target is missed, as one path. */
export function missedPath(values, target, isBelow, x, y) {
	let path = "";
	let run = [];
	const close = () => {
		if (run.length > 1) {
			const line = run.map(([i, v]) => `${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("L");
			const base = y(target).toFixed(1);
			path += `M${line}L${x(run.at(-1)[0]).toFixed(1)} ${base}L${x(run[0][0]).toFixed(1)} ${base}Z`;
		}
		run = [];
	};
	values.forEach((value, i) => {
		if (!known(value)) close();
		else run.push([i, isBelow ? Math.min(value, target) : Math.max(value, target)]);
	});
	close();
	return path;
}

/** Places for the letters of events, moved apart where they would overlap; `xs` grow. */
export function spread(xs, last, gap = LETTER_PX) {
	const placed = [...xs];
	let limit = last;
	for (let i = placed.length - 1; i >= 0; i -= 1) {
		placed[i] = Math.min(placed[i], limit);
		limit = placed[i] - gap;
	}
	return placed;
}

const LABEL_S = [60, 120, 300, 600, 1200]; // between two labels of the time axis

/**
 * Lines over time, one point per `stepMs` from `startUs`.
 * @param {{series: {values: (number|null)[], kind: string, isThin?: boolean}[],
 *   startUs: number, stepMs: number, height: number, ticks: number[], write: (v: number) => string,
 *   target?: number|null, isBelow?: boolean, marks?: {at_us: number, kind: string, letter: string,
 *   text: string}[], hasAxis?: boolean, hasLetters?: boolean, left?: number, label: string,
 *   index?: number|null, onIndex?: (i: number|null) => void}} o
 */
export function LineChart(o) {
	const [ref, measured] = useWidth();
	const width = Math.max(MIN_WIDTH, measured);
	return html`<div ref=${ref} class="chart">${measured ? plot(o, width) : null}</div>`;
}

function plot(o, width) {
	const foot = o.hasLetters ? 44 : o.hasAxis ? 22 : 6;
	const [x0, x1, top, y0] = [o.left ?? 46, width - 8, 8, o.height - foot];
	const points = Math.max(2, ...o.series.map((each) => each.values.length));
	const [low, high] = [o.ticks[0], o.ticks.at(-1)];
	const x = (i) => x0 + ((x1 - x0) * i) / (points - 1);
	const y = (v) => y0 - (y0 - top) * Math.min(1, Math.max(0, (v - low) / (high - low)));
	const at = (us) => x(Math.min(points - 1, Math.max(0, (us - o.startUs) / 1000 / o.stepMs)));
	const marks = o.marks ?? [];
	const first = o.series[0].values;
	const hasTarget = known(o.target);
	const hasData = o.series.some((each) => each.values.some(known));
	const events = o.onIndex ? reading(o, points, x0, x1) : {};
	return html`<svg
		class="plot"
		width=${width}
		height=${o.height}
		viewBox="0 0 ${width} ${o.height}"
		role="img"
		tabindex=${o.onIndex ? 0 : null}
		aria-label=${o.label}
		...${events}
	>
		${o.ticks.map(
			(tick) =>
				html`<line class="grid-l" x1=${x0} x2=${x1} y1=${y(tick)} y2=${y(tick)} /><text
						x=${x0 - 8}
						y=${y(tick) + 4}
						text-anchor="end"
						>${o.write(tick)}</text
					>`,
		)}
		${hasTarget
			? html`<path class="missed" d=${missedPath(first, o.target, o.isBelow, x, y)} />`
			: null}
		${marks.map(
			(mark) =>
				html`<line class="mark-l" x1=${at(mark.at_us)} x2=${at(mark.at_us)} y1=${top} y2=${y0} />`,
		)}
		${hasTarget
			? html`<line class="target" x1=${x0} x2=${x1} y1=${y(o.target)} y2=${y(o.target)} />`
			: null}
		${[...o.series].reverse().map((each) => line(each, x, y))}
		${o.hasAxis || o.hasLetters ? axis(o, width, points, x0, x1, y0, at) : null}
		${o.hasLetters ? letters(marks, at, x1, y0) : null}
		${hasData ? null : html`<text x=${(x0 + x1) / 2} y=${(top + y0) / 2} text-anchor="middle">no point yet</text>`}
		${known(o.index) ? html`<line class="cross" x1=${x(o.index)} x2=${x(o.index)} y1=${top} y2=${y0} />` : null}
	</svg>`;
}

function line({ values, kind, isThin }, x, y) {
	const end = values.length - 1;
	const last = values[end];
	return html`<path class="line ${kind}" d=${linePath(values, x, y)} stroke-width=${isThin ? 1.25 : 2} />
		${known(last) ? html`<circle class="end ${kind}" cx=${x(end)} cy=${y(last)} r=${isThin ? 2.5 : 3.5} />` : null}`;
}

function axis(o, width, points, x0, x1, y0, at) {
	const endUs = o.startUs + (points - 1) * o.stepMs * 1000;
	const most = width < 460 ? 4 : 8;
	const stepUs = 1e6 * (LABEL_S.find((s) => (endUs - o.startUs) / 1e6 / s <= most) ?? LABEL_S.at(-1));
	const labels = [];
	for (let us = Math.ceil(o.startUs / stepUs) * stepUs; us <= endUs; us += stepUs) {
		if (at(us) > x0 + 14 && at(us) < x1 - 14) labels.push(us);
	}
	return html`<line class="grid-l" x1=${x0} x2=${x1} y1=${y0} y2=${y0} />${labels.map(
		(us) =>
			html`<text x=${at(us)} y=${y0 + 17} text-anchor="middle">${clock(us).slice(0, 5)}</text
				><line class="grid-l" x1=${at(us)} x2=${at(us)} y1=${y0} y2=${y0 + 4} />`,
	)}`;
}

function letters(marks, at, x1, y0) {
	const places = spread(marks.map((mark) => at(mark.at_us)), x1 + 4);
	return marks.map(
		(mark, i) =>
			html`<g class="ev ${mark.kind}" transform="translate(${places[i]} ${y0 + 32})"
				><circle r="8.5" /><text y="4.3">${mark.letter}</text
				><title>${clock(mark.at_us)} ${mark.text}</title></g
			>`,
	);
}

/** Handlers of the crosshair, by pointer and by keyboard. */
function reading(o, points, x0, x1) {
	return {
		onPointerMove: (event) => {
			const box = event.currentTarget.getBoundingClientRect();
			const part = (event.clientX - box.left - x0) / (x1 - x0);
			o.onIndex(Math.round(Math.min(1, Math.max(0, part)) * (points - 1)));
		},
		onPointerLeave: () => o.onIndex(null),
		onBlur: () => o.onIndex(null),
		onKeyDown: stepping((step) => o.onIndex(Math.min(points - 1, Math.max(0, (o.index ?? points) + step)))),
	};
}

/** A small line without axes. */
export function Spark({ values, kind }) {
	const numbers = values.filter(known);
	if (numbers.length < 2) return html`<span class="faint">–</span>`;
	const [width, height] = [120, 24];
	const [low, high] = [Math.min(...numbers) - 0.04, Math.max(...numbers) + 0.04];
	const x = (i) => 2 + (i * (width - 6)) / (values.length - 1);
	const y = (v) => height - 2 - ((v - low) / (high - low)) * (height - 4);
	return html`<svg class="spark" viewBox="0 0 ${width} ${height}" aria-hidden="true">
		${line({ values, kind, isThin: true }, x, y)}
	</svg>`;
}
