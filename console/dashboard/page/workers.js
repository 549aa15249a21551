// One worker as a card, or as a row where a pool is large.

import { age, clock, count, DASH, int, kilo, known, ms, plural, share } from "./numbers.js";
import { Bar, Columns, html, Scroll, State, useState } from "./parts.js";

export const MAX_CARDS = 12;
const COLUMNS = ["worker", "state", ["KV", "num"], ["runs", "num"], ["waits", "num"], ["tok/s", "num wide-col"]];
const MAX_ROWS = 40;
const SHOWN_ROWS = 20;
const ROW_PX = 28;
const WINDOW_ROWS = 24;

/** A worker's state in one word: its condition as the router sees it, where it is not simply usable. */
export const stateOf = ({ state, condition }) => (condition.state === "usable" ? state : condition.state);

/** Whether a worker's numbers are worth showing: requests go there, or did until it drained. */
export const hasNumbers = (worker) => ["ready", "draining"].includes(stateOf(worker));

export function shownState(worker, now) {
	const text = stateOf(worker);
	if (worker.condition.cause) return { state: "lost", text };
	if (hasNumbers(worker) && worker.reported_us) {
		return { state: "stale", text: `${text}, report ${age(now - worker.reported_us / 1000)} old` };
	}
	return { state: text, text };
}

/** Why a worker gets no requests, and since when. */
function noteOf({ state, condition: { reason, since_us }, requests_moved, last_load_ms }, now) {
	const moved = requests_moved > 0 && ` ${count(requests_moved, "request")} moved.`;
	const last = state === "loading" && last_load_ms > 0 && ` The last start in this pool took ${age(last_load_ms)}.`;
	return html`Since ${clock(since_us)} (${age(now - since_us / 1000)}): ${reason ?? "no reason is known"}.${moved}${last}`;
}

export const requestsOf = (worker) => (worker.num_waiting ?? 0) + (worker.num_running ?? 0);

export function WorkerCard({ worker, now }) {
	const shown = shownState(worker, now);
	const { role, worker_id: id, blocks_used: used, blocks_cached: cached, blocks_total: total, tiers } = worker;
	const head = html`<div class="l1">
		<b title=${worker.started}>${id}</b><${State} ...${shown} />
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
		<div class="kv" title="KV blocks: ${int(used)} in use, ${int(cached)} cached, ${int(total)} in all${tiers ? `; below: ${tiers}` : ""}">
			<span>KV</span><${Bar} parts=${parts} /><span class="num">${share(used / total)}</span>
		</div>
		${worker.ranks && html`<div>${worker.ranks}</div>`}
		<div class="l3">${worker.state === "draining" ? draining(worker, now) : load(worker)}</div>
	</li>`;
}

function load(worker) {
	const { num_running: running, num_waiting: waiting } = worker;
	const rate = html`<span><b>${kilo(worker.tokens_per_s)}</b> tok/s</span>`;
	if (worker.role === "prefill") {
		const runs = running > 0 && html`runs <b>${int(running)}</b>, `;
		const tokens = worker.queued_tokens > 0 && html`: <b>${kilo(worker.queued_tokens)}</b> tok`;
		return html`<span>${runs}queue ${waiting ? html`<b>${int(waiting)}</b>` : "empty"}${tokens}</span>${rate}`;
	}
	const most = known(worker.max_batch_size) ? `/${int(worker.max_batch_size)}` : "";
	return html`<span>batch <b>${int(running)}</b>${most}</span>
		<span>step <b>${ms(worker.step_ms)}</b></span>${waiting ? html`<span><b>${int(waiting)}</b> wait</span>` : rate}`;
}

function draining(worker, now) {
	const left = requestsOf(worker);
	const waits = worker.drain_deadline_us / 1000 - now;
	return html`<span><b>${int(left)}</b> ${plural(left, "request")} left</span>
		${waits > 0 && html`<span>hands over after <b>${age(waits)}</b></span>`}`;
}

/** Workers of a large pool as rows of a table: above 40, those that matter, until all are wanted. */
export function WorkerRows({ workers, now, role }) {
	const [isWhole, setWhole] = useState(false);
	const [top, setTop] = useState(0);
	const isCut = workers.length > MAX_ROWS && !isWhole;
	const rows = isCut ? notable(workers) : workers;
	const rowPx = innerWidth > 760 ? ROW_PX : 2 * ROW_PX; // a phone's rows have two lines
	const first = isWhole ? Math.max(0, Math.floor(top / rowPx) - 2) : 0;
	const seen = isWhole ? rows.slice(first, first + WINDOW_ROWS) : rows;
	const room = (count) => count > 0 && html`<tr class="room" style=${{ height: `${count * rowPx}px` }} />`;
	const onScroll = (event) => setTop(event.currentTarget.scrollTop);
	return html`<${Scroll} label="${role} workers" extra="rows ${isWhole ? "whole" : ""}" onScroll=${onScroll}>
			<table>
				<${Columns} names=${COLUMNS} />
				<tbody>
					${room(first)} ${seen.map((each) => row(each, now))} ${room(rows.length - first - seen.length)}
				</tbody>
			</table>
		<//>
		${workers.length > MAX_ROWS &&
		html`<button class="btn" onClick=${() => setWhole(!isWhole)}>
			${isWhole ? `Show ${SHOWN_ROWS}` : `Show all ${workers.length}`}
		</button>`}`;
}

function row(worker, now) {
	const has = hasNumbers(worker);
	const { cause, reason } = worker.condition;
	const kv = share(worker.blocks_used / worker.blocks_total);
	const numbers = [kv, int(worker.num_running), int(worker.num_waiting), kilo(worker.tokens_per_s)];
	return html`<tr key=${worker.worker_id} data-worker=${worker.worker_id}>
		<th scope="row" title=${worker.started}>${worker.worker_id}</th>
		<td><${State} ...${shownState(worker, now)} />${cause && html`<span class="at">${reason}</span>`}</td>
		${numbers.map((each, i) => html`<td class=${COLUMNS[i + 2][1]}>${has ? each : DASH}</td>`)}
	</tr>`;
}

/** Workers that are not ready, then those furthest from the pool's median load, in their order. */
function notable(workers) {
	const load = (each) => (each.blocks_total ? each.blocks_used / each.blocks_total : 0);
	const loads = workers.map(load).sort((a, b) => a - b);
	const median = loads[Math.floor(loads.length / 2)];
	const rank = (each) => (stateOf(each) === "ready" ? Math.abs(load(each) - median) : 2);
	const chosen = workers.toSorted((a, b) => rank(b) - rank(a)).slice(0, SHOWN_ROWS);
	return workers.filter((each) => chosen.includes(each));
}
