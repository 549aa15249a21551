// Transfers between the pools: flows beside the workers' cards, and the same as a table.

import { count, DASH, int, linkRate, ms } from "./numbers.js";
import { html, Table, useLayoutEffect, useState, useWidth } from "./parts.js";

const MAX_FLOWS = 12;
const SHOWN_PATHS = { "shared memory": "shm" };

/** The path of a pair in few words; of one whose KV does not take the best path, what is wrong. */
function wayOf({ path, expected_path: expected, is_off_way: isOff }) {
	const shown = SHOWN_PATHS[path] ?? path;
	return !isOff ? shown : `▲ ${path === expected || path === "unknown" ? "slow" : shown}`;
}

/** The largest flows and every flagged one; widths share one scale, at most 9 px. */
function shownFlows(pairs) {
	const flowing = pairs.filter((pair) => pair.bytes_per_s > 0).sort((a, b) => b.bytes_per_s - a.bytes_per_s);
	const shown = flowing.filter((pair, i) => i < MAX_FLOWS || pair.is_off_way);
	return shown.map((pair) => ({ ...pair, width: Math.max(2, (pair.bytes_per_s / shown[0].bytes_per_s) * 9) }));
}

/** Drawn between the workers' cards, where these are. */
export function Flows({ pairs }) {
	const [ref, width] = useWidth();
	const [middles, setMiddles] = useState({});
	useLayoutEffect(() => {
		const cards = [...ref.current.parentNode.querySelectorAll("[data-worker]")];
		const found = cards.map((each) => [each.dataset.worker, each.offsetTop + each.offsetHeight / 2 - ref.current.offsetTop]);
		if (String(found) !== String(Object.entries(middles))) setMiddles(Object.fromEntries(found));
	});
	const flows = shownFlows(pairs.filter((pair) => middles[pair.prefill] && middles[pair.decode]));
	const labels = new Map(flows.filter((flow) => flow.is_off_way).map((flow) => [flow.decode, flow]));
	return html`<div class="flows" ref=${ref}>
		${width > 0 &&
		html`<svg width=${width} role="img" aria-label="KV flows from prefill to decode workers; the table below has the numbers">
			<linearGradient id="flow" gradientUnits="userSpaceOnUse" x2=${width}>
				<stop stop-color="var(--prefill)" /><stop stop-color="var(--decode)" offset="1" />
			</linearGradient>
			${flows.map((flow) => curve(flow, width, flows, middles))}
			${[...labels.values()].map((flow) => label(flow, width, middles[flow.decode]))}
		</svg>`}
	</div>`;
}

/** Flows of one card leave it beside each other. */
function curve(flow, width, flows, middles) {
	const fan = (own, other) => {
		const beside = flows.filter((each) => each[own] === flow[own]).sort((a, b) => middles[a[other]] - middles[b[other]]);
		return (beside.indexOf(flow) - (beside.length - 1) / 2) * Math.min(12, 56 / beside.length);
	};
	const a = middles[flow.prefill] + fan("prefill", "decode");
	const b = middles[flow.decode] + fan("decode", "prefill");
	const off = flow.is_off_way;
	return html`<path
		class=${off ? "flow off" : "flow"}
		d="M0 ${a}C${width / 2} ${a} ${width / 2} ${b} ${width} ${b}"
		stroke-width=${off ? 2.5 : flow.width}
	>
		<title>${flow.prefill} to ${flow.decode}: ${linkRate(flow.bytes_per_s)} over ${flow.path}</title>
	</path>`;
}

/** The path that blocks for a decode worker take, where it is not the expected one. */
function label(flow, width, y) {
	const text = wayOf(flow);
	const half = text.length * 3.8 + 6;
	return html`<g class="off-label" transform="translate(${width - half - 12} ${y})">
		<rect x=${-half} y="-11" width=${2 * half} height="22" rx="4" /><text text-anchor="middle" y="4.3">${text}</text>
	</g>`;
}

/** `all` is the rate of all pairs, `others` the sum of those that are not shown in a large fleet. */
export function PairTable({ pairs, others, all, prefill, decode }) {
	if (!prefill.length || !decode.length) return null;
	return html`<div class="matrix">
		<header>
			<h3>KV transfers by pair</h3>
			<span class="small dim">load now, and the path of the blocks; ▲ marks a path that is not the best one of the pair</span>
		</header>
		<${Table} label="KV transfers by pair" ...${others ? flagged(pairs, others, all) : matrix(pairs, all, prefill, decode)} />
	</div>`;
}

function matrix(pairs, all, prefill, decode) {
	const sum = (key, id, word) => total(pairs.filter((pair) => pair[key] === id).reduce((sum, pair) => sum + pair.bytes_per_s, 0), word);
	const of = (p, d) => pairs.find((pair) => pair.prefill === p.worker_id && pair.decode === d.worker_id);
	const rows = prefill.map((p) => [p.worker_id, ...decode.map((d) => cell(of(p, d), d)), sum("prefill", p.worker_id, "out")]);
	const sums = decode.map((d) => sum("decode", d.worker_id, "in"));
	return {
		columns: ["from \\ to", ...decode.map((d) => d.worker_id), "sum"],
		rows: [...rows, ["sum", ...sums, total(all, "all pairs")]],
		style: { minWidth: `${90 + 96 * (decode.length + 1)}px` },
	};
}

function cell(pair, decode) {
	if (!pair || (decode.state === "draining" && !(pair.bytes_per_s > 0))) {
		const reason = decode.state === "draining" ? "draining" : "no transfer yet";
		return html`<div class="cell none"><b>${DASH}</b><span>${reason}</span></div>`;
	}
	const title = `not hidden, p95: ${ms(pair.exposed_p95_ms)}; failures: ${int(pair.failures)}`;
	return html`<div class="cell ${pair.is_off_way ? "flag" : ""}" title=${title}>
		<b>${linkRate(pair.bytes_per_s)}</b><span>${wayOf(pair)}</span>
	</div>`;
}

const total = (rate, word) => html`<div class="cell sum"><b>${linkRate(rate)}</b><span>${word}</span></div>`;

/** Of a large fleet: the flagged pairs, one row for the rest, and one for all. */
function flagged(pairs, others, all) {
	const row = (pair) => [html`${pair.prefill} →<br />${pair.decode}`, linkRate(pair.bytes_per_s), `${wayOf(pair)}; ${pair.expected_path} is possible`];
	const more = others.off_way ? `${int(others.off_way)} of them ▲` : "as expected";
	return {
		columns: [["pair", "many"], ["load", "num"], "path"],
		rows: [...pairs.map(row), [count(others.count, "other pair"), linkRate(others.bytes_per_s), more], ["all pairs", linkRate(all), ""]],
	};
}
