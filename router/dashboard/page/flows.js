// Transfers between the pools: flows beside the workers' cards, and the same as a table.

import { DASH, known, linkRate } from "./numbers.js";
import { html, Table, useWidth } from "./parts.js";

export const CARD_PX = 94;
const MAX_FLOWS = 12;
const MAX_MATRIX = 12;
const SHOWN_PATHS = { "shared memory": "shm" };

/** Whether a pair's KV takes another way than the best one of the pair. */
export const isOffPath = (pair) =>
	Boolean(pair.path && pair.expected_path && pair.path !== "unknown" && pair.path !== pair.expected_path);

/** The largest flows and every flagged one; widths share one scale, at most 9 px. */
export function shownFlows(pairs) {
	const flowing = pairs.filter((pair) => pair.bytes_per_s > 0);
	flowing.sort((a, b) => b.bytes_per_s - a.bytes_per_s);
	const shown = flowing.filter((pair, i) => i < MAX_FLOWS || isOffPath(pair));
	const most = Math.max(1, ...shown.map((pair) => pair.bytes_per_s));
	return shown.map((pair) => ({ ...pair, width: Math.max(2, (pair.bytes_per_s / most) * 9) }));
}

/** Flows between two columns of cards; `prefill` and `decode` are worker ids from top to bottom. */
export function Flows({ pairs, prefill, decode, rowPx }) {
	const [ref, width] = useWidth();
	const height = Math.max(prefill.length, decode.length) * rowPx;
	const flows = shownFlows(pairs);
	return html`<div class="flows" ref=${ref}>
		${width
			? html`<svg
					width=${width}
					height=${height}
					viewBox="0 0 ${width} ${height}"
					role="img"
					aria-label="KV flows from prefill to decode workers; the table below has the numbers"
				>
					<defs>
						<linearGradient id="flow" gradientUnits="userSpaceOnUse" x1="0" x2=${width} y1="0" y2="0">
							<stop class="flow-from" /><stop class="flow-to" offset="1" />
						</linearGradient>
					</defs>
					${flows.map((flow) => curve(flow, width, prefill, decode, rowPx))}
					${flows
						.filter((flow, i) => isOffPath(flow) && flows.findLastIndex((each) => isOffPath(each) && each.decode === flow.decode) === i)
						.map((flow) => label(flow, width, decode, rowPx))}
				</svg>`
			: null}
	</div>`;
}

function curve(flow, width, prefill, decode, rowPx) {
	const [from, to] = [prefill.indexOf(flow.prefill), decode.indexOf(flow.decode)];
	if (from < 0 || to < 0) return null;
	const middle = rowPx / 2 - 5;
	const fan = (i, n, most) => (i - (n - 1) / 2) * Math.min(12, most / Math.max(1, n));
	const a = from * rowPx + middle + fan(to, decode.length, rowPx * 0.6);
	const b = to * rowPx + middle + fan(from, prefill.length, rowPx * 0.6);
	const off = isOffPath(flow);
	const title = `${flow.prefill} to ${flow.decode}: ${linkRate(flow.bytes_per_s)} over ${flow.path}`;
	return html`<path
		class=${off ? "flow off" : "flow"}
		d="M0 ${a}C${width / 2} ${a} ${width / 2} ${b} ${width} ${b}"
		stroke-width=${off ? 2.5 : flow.width}
		><title>${title}</title></path
	>`;
}

/** The path that blocks for a decode worker take, where it is not the expected one. */
function label(flow, width, decode, rowPx) {
	const text = `▲ ${flow.path}`;
	const half = text.length * 3.8 + 6;
	const y = decode.indexOf(flow.decode) * rowPx + rowPx / 2 - 5;
	return html`<g class="off-label" transform="translate(${width - half - 12} ${y})"
		><rect x=${-half} y="-11" width=${2 * half} height="22" rx="4" /><text text-anchor="middle" y="4.3">${text}</text></g
	>`;
}

const sum = (pairs) => {
	const rates = pairs.map((pair) => pair.bytes_per_s).filter(known);
	return rates.length ? rates.reduce((all, each) => all + each, 0) : null;
};

/** `prefill` and `decode` are workers that take part; each cell is one pair. */
export function PairTable({ pairs, prefill, decode }) {
	if (!prefill.length || !decode.length) return null;
	const isLarge = prefill.length > MAX_MATRIX || decode.length > MAX_MATRIX;
	return html`<div class="matrix">
		<div class="head">
			<h3>KV transfers by pair</h3>
			<span class="small dim"
				>load now, and the path of the blocks; ▲ marks a path that is not the best one of the pair</span
			>
		</div>
		${isLarge ? flagged(pairs) : matrix(pairs, prefill, decode)}
	</div>`;
}

function matrix(pairs, prefill, decode) {
	const find = (p, d) => pairs.find((each) => each.prefill === p.worker_id && each.decode === d.worker_id);
	const to = (d) => pairs.filter((each) => each.decode === d.worker_id);
	const from = (p) => pairs.filter((each) => each.prefill === p.worker_id);
	const columns = ["from \\ to", ...decode.map((d) => d.worker_id), "sum"];
	const style = { minWidth: `${90 + 96 * (decode.length + 1)}px` };
	return html`<${Table} label="KV transfers by pair" columns=${columns} style=${style}>
		${prefill.map(
			(p) =>
				html`<tr>
					<th scope="row">${p.worker_id}</th>
					${decode.map((d) => html`<td>${cell(find(p, d), d)}</td>`)}
					<td>${total(from(p), "out")}</td>
				</tr>`,
		)}
		<tr>
			<th scope="row">sum</th>
			${decode.map((d) => html`<td>${total(to(d), "in")}</td>`)}
			<td>${total(pairs, "all pairs")}</td>
		</tr>
	<//>`;
}

function cell(pair, decode) {
	if (decode.state === "draining" && !(pair?.bytes_per_s > 0)) {
		return html`<div class="cell none"><b>${DASH}</b><span>draining</span></div>`;
	}
	if (!pair) return html`<div class="cell none"><b>${DASH}</b><span>no transfer yet</span></div>`;
	const off = isOffPath(pair);
	const path = SHOWN_PATHS[pair.path] ?? pair.path ?? "path unknown";
	const title = `not hidden, p95: ${known(pair.exposed_p95_ms) ? pair.exposed_p95_ms.toFixed(1) : DASH} ms; failures: ${pair.failures ?? DASH}`;
	return html`<div class="cell ${off ? "flag" : ""}" title=${title}>
		<b>${linkRate(pair.bytes_per_s)}</b><span>${off ? "▲ " : ""}${path}</span>
	</div>`;
}

const total = (pairs, word) =>
	html`<div class="cell sum"><b>${linkRate(sum(pairs))}</b><span>${word}</span></div>`;

/** Of a large fleet: the flagged pairs, and one row for the rest. */
function flagged(pairs) {
	const off = pairs.filter(isOffPath);
	const rest = pairs.filter((pair) => !isOffPath(pair));
	return html`<${Table} label="KV transfers by pair" columns=${["pair", ["load", "num"], "path"]}>
		${off.map(
			(pair) =>
				html`<tr>
					<th scope="row">${pair.prefill} → ${pair.decode}</th>
					<td class="num">${linkRate(pair.bytes_per_s)}</td>
					<td>▲ ${pair.path}, not ${pair.expected_path}</td>
				</tr>`,
		)}
		<tr>
			<th scope="row">${rest.length} other pairs</th>
			<td class="num">${linkRate(sum(rest))}</td>
			<td>as expected</td>
		</tr>
	<//>`;
}
