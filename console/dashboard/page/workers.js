// One worker as a card, or as a row where a pool is large.

import { age, clock, count, DASH, int, kilo, known, share, sig3 } from "./numbers.js";
import { Bar, Columns, html, State, useState } from "./parts.js";

export const MAX_CARDS = 12;
const MAX_ROWS = 40;
const SHOWN_ROWS = 20;
const ROW_PX = 28;
const WINDOW_ROWS = 24;

/** Whether a worker's numbers are worth showing: it is neither loading nor lost. */
export const hasNumbers = ({ state }) => state === "ready" || state === "draining";

export function shownState(worker, now) {
	const { state, connected, reported_us } = worker;
	if (!hasNumbers(worker)) return { state, text: state };
	if (connected === false) return { state: "stale", text: "not connected" };
	if (reported_us) return { state: "stale", text: `${state}, report ${age(now - reported_us / 1000)} old` };
	return { state, text: state };
}

function noteOf({ state, lost_us, lost_reason, requests_moved, loading_since_us, last_load_ms }, now) {
	const since = (us) => age(now - us / 1000);
	if (state === "lost") {
		const at = known(lost_us) ? ` ${since(lost_us)} ago, at ${clock(lost_us)}` : "";
		const moved = known(requests_moved) ? ` ${count(requests_moved, "request")} moved.` : "";
		return `Lost${at}: ${lost_reason ?? "no reason is known"}.${moved}`;
	}
	const so = known(loading_since_us) ? `, ${since(loading_since_us)} so far` : "";
	const last = known(last_load_ms) ? ` The last start in this pool took ${age(last_load_ms)}.` : "";
	return `Loads its weights${so}.${last}`;
}

/** How long the phases of a worker's start took, longest first. */
function startOf({ start_ms }) {
	const phases = Object.entries(start_ms ?? {}).sort((a, b) => b[1] - a[1]);
	if (!phases.length) return undefined;
	const whole = phases.reduce((sum, [, ms]) => sum + ms, 0);
	const each = phases.map(([phase, ms]) => `${phase.replace("_", " ")} ${age(ms)}`);
	return `Started in ${age(whole)}: ${each.join(", ")}`;
}

export const requestsOf = (worker) => (worker.num_waiting ?? 0) + (worker.num_running ?? 0);

export function WorkerCard({ worker, now }) {
	const shown = shownState(worker, now);
	const { role, worker_id: id, blocks_used: used, blocks_cached: cached, blocks_total: total } = worker;
	const head = html`<div class="l1">
		<b title=${startOf(worker)}>${id}</b><${State} ...${shown} />
	</div>`;
	if (!hasNumbers(worker)) {
		return html`<li class="w off" data-worker=${id}>${head}<div>${noteOf(worker, now)}</div></li>`;
	}
	const parts = [
		[`fill-${role[0]}`, used / total],
		[`soft-${role[0]}`, cached / total],
	];
	return html`<li class="w ${shown.state === "stale" ? "old" : ""}" data-worker=${id}>
		${head}
		<div class="kv" title="KV blocks: ${int(used)} in use, ${int(cached)} cached, ${int(total)} in all">
			<span>KV</span><${Bar} parts=${parts} /><span class="num">${share(used / total)}</span>
		</div>
		<div class="l3">${worker.state === "draining" ? draining(worker, now) : load(worker)}</div>
	</li>`;
}

function load(worker) {
	const rate = html`<span><b>${kilo(worker.tokens_per_s)}</b> tok/s</span>`;
	if (worker.role === "prefill") {
		const queue = worker.num_waiting
			? html`queue <b>${int(worker.num_waiting)}</b>, <b>${kilo(worker.queued_tokens)}</b> tokens`
			: "queue empty";
		return html`<span>${queue}</span>${rate}`;
	}
	const most = known(worker.max_batch_size) ? ` of ${int(worker.max_batch_size)}` : "";
	return html`<span>batch <b>${int(worker.num_running)}</b>${most}</span>
		<span>step <b>${sig3(worker.step_ms)}</b> ms</span>${rate}`;
}

function draining(worker, now) {
	const left = requestsOf(worker);
	const waits = worker.drain_deadline_us / 1000 - now;
	return html`<span><b>${int(left)}</b> ${left === 1 ? "request" : "requests"} left</span>
		${waits > 0 && html`<span>hands over after <b>${age(waits)}</b></span>`}`;
}

/** Workers of a large pool as rows of a table: above 40, those that matter, until all are wanted. */
export function WorkerRows({ workers, now, role }) {
	const [isWhole, setWhole] = useState(false);
	const [top, setTop] = useState(0);
	const isCut = workers.length > MAX_ROWS && !isWhole;
	const rows = isCut ? notable(workers) : workers;
	const first = isWhole ? Math.max(0, Math.floor(top / ROW_PX) - 2) : 0;
	const seen = isWhole ? rows.slice(first, first + WINDOW_ROWS) : rows;
	const busy = role === "prefill" ? "queue" : "batch";
	const columns = ["worker", "state", ["KV", "num"], [busy, "num"], ["tok/s", "num wide-col"]];
	const room = (count) => count > 0 && html`<tr class="room" style=${{ height: `${count * ROW_PX}px` }} />`;
	return html`<div
			class="rows ${isWhole ? "whole" : ""}"
			tabindex="0"
			role="region"
			aria-label="${role} workers"
			onScroll=${(event) => setTop(event.currentTarget.scrollTop)}
		>
			<table>
				<${Columns} names=${columns} />
				<tbody>
					${room(first)} ${seen.map((each) => row(each, now))} ${room(rows.length - first - seen.length)}
				</tbody>
			</table>
		</div>
		${workers.length > MAX_ROWS &&
		html`<button class="btn" onClick=${() => setWhole(!isWhole)}>
			${isWhole ? `Show ${SHOWN_ROWS}` : `Show all ${workers.length}`}
		</button>`}`;
}

function row(worker, now) {
	const busy = worker.role === "prefill" ? worker.num_waiting : worker.num_running;
	const has = hasNumbers(worker);
	return html`<tr key=${worker.worker_id} data-worker=${worker.worker_id}>
		<th scope="row" title=${startOf(worker)}>${worker.worker_id}</th>
		<td><${State} ...${shownState(worker, now)} /></td>
		<td class="num">${has ? share(worker.blocks_used / worker.blocks_total) : DASH}</td>
		<td class="num">${has ? int(busy) : DASH}</td>
		<td class="num wide-col">${has ? kilo(worker.tokens_per_s) : DASH}</td>
	</tr>`;
}

/** Workers that are not ready, then those furthest from the pool's median load, in their order. */
function notable(workers) {
	const load = (each) => (each.blocks_total ? each.blocks_used / each.blocks_total : 0);
	const loads = workers.map(load).sort((a, b) => a - b);
	const median = loads[Math.floor(loads.length / 2)];
	const rank = (each) => (each.state === "ready" ? Math.abs(load(each) - median) : 2);
	const chosen = workers.toSorted((a, b) => rank(b) - rank(a)).slice(0, SHOWN_ROWS);
	return workers.filter((each) => chosen.includes(each));
}
