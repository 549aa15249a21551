// Transfers between the pools: flows beside the workers' cards, and the same as a table.

import { DASH, known, linkRate } from "./numbers.js";
import { html, Table, useWidth } from "./parts.js";

const CARD_PX = 94;
const MAX_FLOWS = 12;
const MAX_MATRIX = 12;
const SHOWN_PATHS = { "shared memory": "shm" };

/** Whether a pair's KV takes another way than the best one of the pair. */
const isOffPath = ({ path, expected_path: expected }) =>
	Boolean(path && expected && path !== "unknown" && path !== expected);

/** The largest flows and every flagged one; widths share one scale, at most 9 px. */
function shownFlows(pairs) {
	const flowing = pairs.filter((pair) => pair.bytes_per_s > 0).sort((a, b) => b.bytes_per_s - a.bytes_per_s);
	const shown = flowing.filter((pair, i) => i < MAX_FLOWS || isOffPath(pair));
	return shown.map((pair) => ({ ...pair, width: Math.max(2, (pair.bytes_per_s / shown[0].bytes_per_s) * 9) }));
}

/** `prefill` and `decode` are worker ids from top to bottom. */
export function Flows({ pairs, prefill, decode }) {
	const [ref, width] = useWidth();
	const height = Math.max(prefill.length, decode.length) * CARD_PX;
	const flows = shownFlows(pairs);
	const labels = new Map(flows.filter(isOffPath).map((flow) => [flow.decode, flow]));
	return html`<div class="flows" ref=${ref}>
		${width > 0 &&
		html`<svg
			width=${width}
			height=${height}
			role="img"
			aria-label="KV flows from prefill to decode workers; the table below has the numbers"
		>
			<linearGradient id="flow" gradientUnits="userSpaceOnUse" x2=${width}>
				<stop stop-color="var(--prefill)" /><stop stop-color="var(--decode)" offset="1" />
			</linearGradient>
			${flows.map((flow) => curve(flow, width, prefill, decode))}
			${[...labels.values()].map((flow) => label(flow, width, decode))}
		</svg>`}
	</div>`;
}

function curve(flow, width, prefill, decode) {
	const [from, to] = [prefill.indexOf(flow.prefill), decode.indexOf(flow.decode)];
	if (from < 0 || to < 0) return null;
	const fan = (i, n) => (i - (n - 1) / 2) * Math.min(12, (CARD_PX * 0.6) / n);
	const a = middleOf(from) + fan(to, decode.length);
	const b = middleOf(to) + fan(from, prefill.length);
	const off = isOffPath(flow);
	return html`<path
		class=${off ? "flow off" : "flow"}
		d="M0 ${a}C${width / 2} ${a} ${width / 2} ${b} ${width} ${b}"
		stroke-width=${off ? 2.5 : flow.width}
	>
		<title>${flow.prefill} to ${flow.decode}: ${linkRate(flow.bytes_per_s)} over ${flow.path}</title>
	</path>`;
}

const middleOf = (row) => (row + 0.5) * CARD_PX - 5;

/** The path that blocks for a decode worker take, where it is not the expected one. */
function label(flow, width, decode) {
	const text = `▲ ${flow.path}`;
	const half = text.length * 3.8 + 6;
	return html`<g class="off-label" transform="translate(${width - half - 12} ${middleOf(decode.indexOf(flow.decode))})">
		<rect x=${-half} y="-11" width=${2 * half} height="22" rx="4" /><text text-anchor="middle" y="4.3">${text}</text>
	</g>`;
}

export function PairTable({ pairs, prefill, decode }) {
	if (!prefill.length || !decode.length) return null;
	const isLarge = Math.max(prefill.length, decode.length) > MAX_MATRIX;
	return html`<div class="matrix">
		<header>
			<h3>KV transfers by pair</h3>
			<span class="small dim">load now, and the path of the blocks; ▲ marks a path that is not the best one of the pair</span>
		</header>
		<${Table} label="KV transfers by pair" ...${isLarge ? flagged(pairs) : matrix(pairs, prefill, decode)} />
	</div>`;
}

function matrix(pairs, prefill, decode) {
	const sends = (p) => (pair) => pair.prefill === p.worker_id;
	const takes = (d) => (pair) => pair.decode === d.worker_id;
	const rows = prefill.map((p) => {
		const own = pairs.filter(sends(p));
		return [p.worker_id, ...decode.map((d) => cell(own.find(takes(d)), d)), total(own, "out")];
	});
	const sums = decode.map((d) => total(pairs.filter(takes(d)), "in"));
	return {
		columns: ["from \\ to", ...decode.map((d) => d.worker_id), "sum"],
		rows: [...rows, ["sum", ...sums, total(pairs, "all pairs")]],
		style: { minWidth: `${90 + 96 * (decode.length + 1)}px` },
	};
}

function cell(pair, decode) {
	if (!pair || (decode.state === "draining" && !(pair.bytes_per_s > 0))) {
		const reason = decode.state === "draining" ? "draining" : "no transfer yet";
		return html`<div class="cell none"><b>${DASH}</b><span>${reason}</span></div>`;
	}
	const off = isOffPath(pair);
	const path = SHOWN_PATHS[pair.path] ?? pair.path ?? "path unknown";
	const exposed = known(pair.exposed_p95_ms) ? pair.exposed_p95_ms.toFixed(1) : DASH;
	const title = `not hidden, p95: ${exposed} ms; failures: ${pair.failures}`;
	return html`<div class="cell ${off ? "flag" : ""}" title=${title}>
		<b>${linkRate(pair.bytes_per_s)}</b><span>${off ? "▲ " : ""}${path}</span>
	</div>`;
}

const total = (pairs, word) => html`<div class="cell sum"><b>${linkRate(sum(pairs))}</b><span>${word}</span></div>`;

const sum = (pairs) => (pairs.length ? pairs.reduce((all, pair) => all + pair.bytes_per_s, 0) : null);

/** Of a large fleet: the flagged pairs, and one row for the rest. */
function flagged(pairs) {
	const rest = pairs.filter((pair) => !isOffPath(pair));
	const rows = pairs
		.filter(isOffPath)
		.map((pair) => [`${pair.prefill} → ${pair.decode}`, linkRate(pair.bytes_per_s), `▲ ${pair.path}, not ${pair.expected_path}`]);
	return {
		columns: ["pair", ["load", "num"], "path"],
		rows: [...rows, [`${rest.length} other pairs`, linkRate(sum(rest)), "as expected"]],
	};
}
