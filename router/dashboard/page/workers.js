// One worker as a card, or as a row where a pool is large.

import { age, clock, count, DASH, int, kilo, known, share, sig3 } from "./numbers.js";
import { Bar, Columns, html, State, useState } from "./parts.js";

export const MAX_CARDS = 12;
const MAX_ROWS = 40;
const SHOWN_ROWS = 20;
const ROW_PX = 28;
const WINDOW_ROWS = 24;
export const OLD_AFTER_MS = 3500; // three idle reports and a half

/** Whether a worker's numbers are worth showing: it is neither loading nor lost. */
export const hasNumbers = (worker) => worker.state === "ready" || worker.state === "draining";

/** The age of a worker's last report in ms, if it is too old; else 0. */
export function reportAge(worker, now) {
	if (!worker.reported_us) return 0;
	const old = now - worker.reported_us / 1000;
	return old > OLD_AFTER_MS ? old : 0;
}

/** The state to show and its words. */
export function shownState(worker, now) {
	if (!hasNumbers(worker)) return { state: worker.state, text: worker.state };
	if (worker.connected === false) return { state: "stale", text: "not connected" };
	const old = reportAge(worker, now);
	if (old) return { state: "stale", text: `${worker.state}, report ${age(old)} old` };
	return { state: worker.state, text: worker.state };
}

/** The sentence about a worker that has no numbers. */
export function noteOf(worker, now) {
	if (worker.state === "lost") {
		const at = known(worker.lost_us) ? ` ${age(now - worker.lost_us / 1000)} ago, at ${clock(worker.lost_us)}` : "";
		const moved = known(worker.requests_moved) ? ` ${count(worker.requests_moved, "request")} moved.` : "";
		return `Lost${at}: ${worker.lost_reason ?? "no reason is known"}.${moved}`;
	}
	const since = known(worker.loading_since_us)
		? `, ${age(now - worker.loading_since_us / 1000)} so far`
		: "";
	const last = known(worker.last_load_ms)
		? ` The last start in this pool took ${age(worker.last_load_ms)}.`
		: "";
	return `Loads its weights${since}.${last}`;
}

const parts = (worker) => {
	const r = worker.role[0];
	return [
		[`fill-${r}`, worker.blocks_used / worker.blocks_total],
		[`soft-${r}`, worker.blocks_cached / worker.blocks_total],
	];
};
const kvTitle = (worker) =>
	`KV blocks: ${int(worker.blocks_used)} in use, ${int(worker.blocks_cached)} cached, ${int(worker.blocks_total)} in all`;

/** How long the phases of a worker's start took, longest first. */
export function startOf(worker) {
	const phases = Object.entries(worker.start_ms ?? {}).sort((a, b) => b[1] - a[1]);
	if (!phases.length) return undefined;
	const whole = phases.reduce((sum, [, ms]) => sum + ms, 0);
	const each = phases.map(([phase, ms]) => `${phase.replace("_", " ")} ${age(ms)}`);
	return `Started in ${age(whole)}: ${each.join(", ")}`;
}

const requestsOf = (worker) => (worker.num_waiting ?? 0) + (worker.num_running ?? 0);

export function WorkerCard({ worker, now }) {
	const { state, text } = shownState(worker, now);
	const head = html`<div class="l1">
		<b title=${startOf(worker)}>${worker.worker_id}</b><${State} state=${state} text=${text} />
	</div>`;
	if (!hasNumbers(worker)) {
		return html`<li class="w off" data-worker=${worker.worker_id}>${head}<div>${noteOf(worker, now)}</div></li>`;
	}
	const isOld = state === "stale";
	return html`<li class="w ${isOld ? "old" : ""}" data-worker=${worker.worker_id}>
		${head}
		<div class="kv" title=${kvTitle(worker)}>
			<span>KV</span><${Bar} parts=${parts(worker)} />
			<span class="num">${share(worker.blocks_used / worker.blocks_total)}</span>
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
	return html`<span>batch <b>${int(worker.num_running)}</b>${most}</span
		><span>step <b>${sig3(worker.step_ms)}</b> ms</span>${rate}`;
}

function draining(worker, now) {
	const left = requestsOf(worker);
	const hand =
		known(worker.drain_deadline_us) && worker.drain_deadline_us / 1000 > now
			? html`<span>hands over after <b>${age(worker.drain_deadline_us / 1000 - now)}</b></span>`
			: null;
	return html`<span><b>${int(left)}</b> ${left === 1 ? "request" : "requests"} left</span>${hand}`;
}

/** Workers of a large pool as rows of a table: above 40, those that matter, until all are wanted. */
export function WorkerRows({ workers, now, role }) {
	const [isWhole, setWhole] = useState(false);
	const [top, setTop] = useState(0);
	const isCut = workers.length > MAX_ROWS && !isWhole;
	const rows = isCut ? notable(workers) : workers;
	const first = isWhole ? Math.max(0, Math.floor(top / ROW_PX) - 2) : 0;
	const seen = isWhole ? rows.slice(first, first + WINDOW_ROWS) : rows;
	const after = isWhole ? rows.length - first - seen.length : 0;
	const busy = role === "prefill" ? "queue" : "batch";
	const columns = ["worker", "state", ["KV", "num"], [busy, "num"], ["tok/s", "num wide-col"]];
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
					${first ? html`<tr class="room" style=${{ height: `${first * ROW_PX}px` }} />` : null}
					${seen.map((each) => row(each, now))}
					${after > 0 ? html`<tr class="room" style=${{ height: `${after * ROW_PX}px` }} />` : null}
				</tbody>
			</table>
		</div>
		${workers.length > MAX_ROWS
			? html`<button class="btn" type="button" onClick=${() => setWhole(!isWhole)}>
					${isWhole ? `Show ${SHOWN_ROWS}` : `Show all ${workers.length}`}
				</button>`
			: null}`;
}

function row(worker, now) {
	const { state, text } = shownState(worker, now);
	const has = hasNumbers(worker);
	const busy = worker.role === "prefill" ? worker.num_waiting : worker.num_running;
	return html`<tr key=${worker.worker_id} data-worker=${worker.worker_id}>
		<th scope="row" title=${startOf(worker)}>${worker.worker_id}</th>
		<td><${State} state=${state} text=${text} /></td>
		<td class="num">${has ? share(worker.blocks_used / worker.blocks_total) : DASH}</td>
		<td class="num">${has ? int(busy) : DASH}</td>
		<td class="num wide-col">${has ? kilo(worker.tokens_per_s) : DASH}</td>
	</tr>`;
}

/** Workers that are not ready, then those furthest from the pool's median load, in their order. */
export function notable(workers, most = SHOWN_ROWS) {
	const load = (each) => (each.blocks_total ? each.blocks_used / each.blocks_total : 0);
	const loads = workers.map(load).sort((a, b) => a - b);
	const median = loads[Math.floor(loads.length / 2)];
	const rank = (each) => (each.state === "ready" ? Math.abs(load(each) - median) : 2);
	const chosen = new Set([...workers].sort((a, b) => rank(b) - rank(a)).slice(0, most));
	return workers.filter((each) => chosen.has(each));
}
