// Where a request lost its time: a list on the left, one request on the right.

import { isDialogOpen } from "./dialog.js";
import { getJson } from "./live.js";
import { layOut, perfetto, relative } from "./lanes.js";
import { bytes, clock, DASH, int, known, ms, shortId } from "./numbers.js";
import { Choice, copy, Empty, Facts, html, isTyping, Tag, toast, useEffect, useLoaded, useRef, useState } from "./parts.js";
import { largest, StageBar, stageName, StageTable, total } from "./stages.js";
import { Patterns, Waterfall } from "./waterfall.js";
import { Explains, Why } from "./why.js";

const LIMIT = 50;
const LIST_EVERY_MS = 3000;
const TRACE_EVERY_MS = 2000;
const REPORTS_AFTER_MS = 10_000; // workers' last reports arrive after the end of the stream
const NOTABLE_MS = 20;
const FILTERS = [
	["slow", "Slow"],
	["recent", "Recent"],
	["failed", "Failed"],
	["running", "Running"],
];
const QUERIES = {
	slow: ["order=slow"],
	recent: ["order=recent"],
	failed: ["order=recent&outcome=failed", "order=recent&outcome=retried"],
	running: ["order=recent&outcome=running"],
};
const OUTCOMES = { finished: "ok", running: "", closed: "warn", failed: "bad" };

async function loadRows(filter, prefix, signal) {
	const end = `&limit=${LIMIT}&prefix=${encodeURIComponent(prefix.trim())}`;
	const lists = await Promise.all(QUERIES[filter].map((each) => getJson(`requests?${each}${end}`, signal)));
	const rows = new Map(lists.flatMap(({ rows: some }) => some).map((row) => [row.request_id, row]));
	return [...rows.values()];
}

/** The rows to show: those on the page keep their order; what is new waits. */
export function kept(shown, loaded) {
	const byId = new Map(loaded.map((row) => [row.request_id, row]));
	const known = new Set(shown.map((row) => row.request_id));
	return {
		rows: shown.map((row) => byId.get(row.request_id) ?? row),
		numNew: loaded.filter((row) => !known.has(row.request_id)).length,
	};
}

const over = (v, target) => known(v) && known(target) && v > target;
const isSlow = (row, targets) =>
	over(row.ttft_ms, targets.ttft_target_ms) || over(row.tpot_ms, targets.tpot_target_ms);

export function Requests({ live, fleet, id }) {
	const [filter, setFilter] = useState("slow");
	const [prefix, setPrefix] = useState("");
	const [shown, setShown] = useState(null);
	const { value, error } = useLoaded((signal) => loadRows(filter, prefix, signal), [filter, prefix], LIST_EVERY_MS);
	useEffect(() => setShown(null), [filter, prefix]);
	useEffect(() => {
		if (value && (shown === null || !shown.length)) setShown(value);
	}, [value]);
	const { rows, numNew } = kept(shown ?? [], value ?? []);
	const chosen = id || rows[0]?.request_id || "";
	useKeys(rows, chosen);
	if (!id && !prefix && value && !value.length && filter === "slow") return html`<${NoRequest} />`;
	return html`<div class="grid req ${id ? "one" : "many"}">
		<${Patterns} />
		<section class="card req-list" aria-label="Requests">
			${id ? null : html`<h1 class="sr">Requests</h1>`}
			<div class="tools">
				<label class="sr" for="q">Search by request id</label>
				<input
					id="q"
					type="search"
					placeholder="Search by request id   /"
					autocomplete="off"
					spellcheck="false"
					onInput=${(event) => setPrefix(event.target.value)}
				/>
				<${Choice} label="Which requests" options=${FILTERS} value=${filter} onChoose=${setFilter} />
				${numNew
					? html`<button class="btn" type="button" onClick=${() => setShown(value)}>${numNew} new</button>`
					: null}
			</div>
			<${List} ...${{ rows, value, error, prefix, chosen, targets: fleet.targets ?? {} }} />
		</section>
		${chosen
			? html`<${Detail} key=${chosen} id=${chosen} live=${live} fleet=${fleet} />`
			: html`<div></div>`}
	</div>`;
}

const NoRequest = () =>
	html`<${Empty} title="No request yet">
		Send one from <a href="#/controls">Controls</a>, or with any OpenAI client. The last finished
		requests are kept here.
	<//>`;

function useKeys(rows, chosen) {
	useEffect(() => {
		const onKey = (event) => {
			if (!["j", "k"].includes(event.key) || event.ctrlKey || event.metaKey) return;
			if (isTyping(event) || isDialogOpen()) return;
			const at = rows.findIndex((row) => row.request_id === chosen);
			const next = rows[Math.min(rows.length - 1, Math.max(0, at + (event.key === "j" ? 1 : -1)))];
			if (next) location.hash = `#/requests/${encodeURIComponent(next.request_id)}`;
		};
		addEventListener("keydown", onKey);
		return () => removeEventListener("keydown", onKey);
	}, [rows, chosen]);
}

function List({ rows, value, error, prefix, chosen, targets }) {
	if (rows.length) {
		return html`<ol>
			${rows.map((row) => html`<${Row} key=${row.request_id} row=${row} isChosen=${row.request_id === chosen} targets=${targets} />`)}
		</ol>`;
	}
	const text = error
		? `The list cannot be read: ${error.message}.`
		: value
			? prefix
				? `No request that is kept begins with “${prefix}”.`
				: "None of the requests that are kept."
			: "Reading the list.";
	return html`<div class="empty"><h2>${value ? "No request matches" : "Requests"}</h2><p>${text}</p></div>`;
}

function Row({ row, isChosen, targets }) {
	const stages = (row.stages ?? []).map(([stage, each]) => ({ stage, ms: each }));
	const worst = largest(stages);
	const all = total(stages);
	const part = worst && all ? `${stageName(worst.stage).toLowerCase()} ${Math.round((worst.ms / all) * 100)} %` : "";
	const way = row.prefill ? `${row.prefill} → ${row.decode}` : row.decode ?? "";
	const slowSteps = over(row.tpot_ms, targets.tpot_target_ms);
	return html`<li>
		<a class="row" href="#/requests/${encodeURIComponent(row.request_id)}" aria-current=${isChosen ? "true" : null}>
			<span class="l">
				<span class="mono">${shortId(row.request_id)}</span>
				${row.num_attempts > 1 ? html`<${Tag} kind="warn">${row.num_attempts} attempts<//>` : null}
				<span class="end"
					>${isSlow(row, targets) ? html`<${Tag} kind="bad">slow<//> ` : null}
					<b>${known(row.ttft_ms) ? ms(row.ttft_ms) : "no token"}</b></span
				>
			</span>
			<span class="l sub">
				<span>${[part, way, row.key].filter(Boolean).join(", ")}</span>
				<span class="end"
					>${slowSteps ? html`<b>${ms(row.tpot_ms)}/tok</b> · ` : row.outcome === "finished" ? "" : `${row.outcome} · `}
					${clock(row.received_us)}</span
				>
			</span>
			<${StageBar} stages=${stages} isLocal=${!row.prefill} />
		</a>
	</li>`;
}

/** A trace, loaded again while it runs and until the workers' last reports are in. */
function useTrace(id) {
	const done = useRef(false);
	const load = async (signal) => {
		const trace = await getJson(`requests/${encodeURIComponent(id)}/trace`, signal);
		const isOver = trace.finished_us && Date.now() - trace.finished_us / 1000 > REPORTS_AFTER_MS;
		done.current = Boolean(isOver);
		return trace;
	};
	const [count, setCount] = useState(0);
	const { value, error } = useLoaded(load, [id, count]);
	const last = useRef(null);
	if (value) last.current = value;
	useEffect(() => {
		if (!value || done.current) return undefined;
		const timer = setTimeout(() => setCount(count + 1), TRACE_EVERY_MS);
		return () => clearTimeout(timer);
	}, [value]);
	return { trace: last.current, error };
}

function Detail({ id, live, fleet }) {
	const { trace, error } = useTrace(id);
	const back = html`<a class="btn back" href="#/requests">← Requests</a>`;
	if (!trace) {
		return html`<section class="card req-detail">
			${back}
			<div class="empty">
				<h2>${error ? `No trace of ${id}` : "Reading the trace"}</h2>
				<p>
					${error
						? html`${error.message}. A router keeps the traces of its last finished requests
								(<code>trace_history</code>); an older one may be in your trace store, if OTLP export is on.`
						: ""}
				</p>
			</div>
		</section>`;
	}
	const times = relative(trace, live.now() * 1000);
	const target = fleet.targets?.ttft_target_ms;
	return html`<div class="grid req-detail">
		<section class="card" aria-label="Request">
			${back}
			<div class="title">
				<h1>${trace.request_id}</h1>
				<${Tag} kind=${OUTCOMES[trace.outcome]}>${trace.outcome}<//>
				<span class="right"><${Actions} trace=${trace} times=${times} /></span>
			</div>
			<p class="lead"><${Lead} trace=${trace} target=${target} /></p>
			<${Facts} rows=${facts(trace)} />
		</section>
		<${Waterfall} id=${trace.request_id} trace=${times} targetMs=${target} />
		<div class="grid two">
			<${StageTable} trace=${trace} />
			<div class="grid"><${Why} trace=${trace} /><${Explains} trace=${trace} fleet=${fleet} /></div>
		</div>
	</div>`;
}

function facts(trace) {
	const attempt = trace.attempts.at(-1);
	const side = attempt?.prefill ?? attempt?.decode;
	const way = attempt?.prefill?.path || trace.transport;
	const whole = trace.finished_us ? (trace.finished_us - trace.received_us) / 1000 : null;
	return [
		["Prompt", int(trace.num_prompt_tokens), `tokens, ${int(side?.cached_tokens)} cached`],
		["Output", int(trace.num_output_tokens), "tokens"],
		["TTFT", ms(trace.ttft_ms)],
		["TPOT", ms(trace.tpot_ms)],
		["Total", ms(whole)],
		[
			"KV moved",
			trace.blocks_moved ? bytes(trace.bytes_moved) : "none",
			trace.blocks_moved ? `${int(trace.blocks_moved)} blocks, ${way}` : "",
		],
		["Received", clock(trace.received_us), "UTC"],
		...(trace.key ? [["Key", trace.key]] : []),
	];
}

/** The request in words: how late the first token was, and what took most of that time. */
function Lead({ trace, target }) {
	const first = trace.stages.filter((each) => each.part === "first_token");
	const worst = largest(first);
	const part = worst ? Math.round((worst.ms / total(first)) * 100) : 0;
	const where = worst?.where ? (worst.where.includes("→") ? `, ${worst.where}` : ` on ${worst.where}`) : "";
	const most = worst
		? worst.stage === "lost_attempt"
			? `${part} % of it was lost with ${worst.where}.`
			: `${part} % of it was ${stageName(worst.stage).toLowerCase()}${where}.`
		: "";
	if (!trace.first_token_us) {
		const failed = trace.attempts.findLast((each) => each.failed)?.failed;
		const state = trace.outcome === "running" ? "No token yet." : "No token was sent.";
		return html`<b>${state}</b> ${most} ${failed ? `An attempt failed: ${failed}.` : ""}`;
	}
	const against = known(target)
		? trace.ttft_ms > target
			? `, over the target of ${ms(target)}`
			: `, within the target of ${ms(target)}`
		: "";
	const later = trace.stages
		.filter((each) => ["transfer", "stall"].includes(each.stage))
		.reduce((best, each) => (best && best.ms >= each.ms ? best : each), null);
	const then =
		later && later.ms > NOTABLE_MS
			? later.stage === "transfer"
				? `Then the second token waited ${ms(later.ms)} for KV blocks; no chunk hid that transfer.`
				: `Then decode stood still for ${ms(later.ms)}: ${later.text}.`
			: "";
	return html`<b>${ms(trace.ttft_ms)} to the first token</b>${against}. ${most} ${then}`;
}

function Actions({ trace, times }) {
	const id = encodeURIComponent(trace.request_id);
	const link = `${location.href.split("#")[0]}#/requests/${id}`;
	const onPerfetto = () => {
		const shape = { width: 1000, gutter: 0, isWhole: true, isNarrow: false };
		const { boxes, lanes } = layOut(times, shape);
		save(`${trace.request_id}.perfetto.json`, perfetto(trace.request_id, boxes, lanes));
	};
	const onReceipt = async () => {
		try {
			save(`${trace.request_id}.receipt.json`, await getJson(`v1/requests/${id}/receipt`));
		} catch (error) {
			toast(error.message);
		}
	};
	return html`<button class="btn" type="button" onClick=${() => copy(link, "Link copied")}>Copy link</button>
		<button class="btn" type="button" onClick=${onPerfetto}>Perfetto</button>
		<button class="btn" type="button" onClick=${onReceipt}>Receipt</button>`;
}

function save(name, document_) {
	const url = URL.createObjectURL(new Blob([JSON.stringify(document_)], { type: "application/json" }));
	const link = Object.assign(document.createElement("a"), { href: url, download: name });
	link.click();
	URL.revokeObjectURL(url);
	toast(`Saved ${name}`);
}
