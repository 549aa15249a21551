// Where a request lost its time: a list on the left, one request on the right.

import { getJson } from "./live.js";
import { bytes, clock, count, int, known, ms, over, plural, shortId } from "./numbers.js";
import { Choice, clamped, copy, Empty, Facts, html, Tag, told, useEffect, useLoaded, useShortcuts, useState } from "./parts.js";
import { hasLongNames } from "./lanes.js";
import { largest, largestNamed, StageBar, StageTable } from "./stages.js";
import { Patterns, Waterfall } from "./waterfall.js";
import { Explains, Why } from "./why.js";

const LIST_EVERY_MS = 3000;
const TRACE_EVERY_MS = 2000;
const REPORTS_AFTER_MS = 10_000; // of the end of the stream
const NOTABLE_MS = 20;
const SLOW = "order=slow";
const FILTERS = [
	[SLOW, "Slow"],
	["", "Recent"],
	["outcome=troubled", "Failed"],
	["outcome=closed", "Left"],
	["outcome=running", "Running"],
];
const OUTCOMES = { finished: "ok", closed: "warn", failed: "bad" };

export const linkTo = (id) => `#/requests/${encodeURIComponent(id)}`;
const byId = (rows) => new Map(rows.map((row) => [row.request_id, row]));

const loadRows = async (query, prefix, signal) =>
	(await getJson(`requests?${query}&limit=50&prefix=${encodeURIComponent(prefix.trim())}`, signal)).rows;

export function Requests({ live, fleet, id }) {
	const [filter, setFilter] = useState(SLOW);
	const [prefix, setPrefix] = useState(decodeURIComponent(location.hash.split("?")[1] ?? ""));
	const [shown, setShown] = useState([]);
	const { value, error } = useLoaded((signal) => loadRows(filter, prefix, signal), [filter, prefix], () => LIST_EVERY_MS);
	useEffect(() => setShown([]), [filter, prefix]);
	useEffect(() => {
		if (value && !shown.length) setShown(value);
	}, [value]);
	// rows on the page keep their order; what is new waits
	const loaded = byId(value ?? []);
	const rows = shown.map((row) => loaded.get(row.request_id) ?? row);
	const numNew = loaded.size - rows.filter((row) => loaded.has(row.request_id)).length;
	const chosen = id || rows[0]?.request_id;
	const onStep = (step) => {
		const at = rows.findIndex((row) => row.request_id === chosen);
		const next = rows[clamped(at + step, 0, rows.length - 1)];
		if (next) location.hash = linkTo(next.request_id);
	};
	useShortcuts({ j: () => onStep(1), k: () => onStep(-1) });
	if (!id && !prefix && value?.length === 0 && filter === SLOW) {
		return html`<${Empty} title="No request yet">
			Send one from <a href="#/controls">Controls</a>, or with any OpenAI client. The last finished
			requests are kept here.
		<//>`;
	}
	return html`<div class="grid req ${id ? "one" : "many"}">
		<${Patterns} />
		<section class="card req-list" aria-label="Requests">
			${!id && html`<h1 class="sr">Requests</h1>`}
			<div class="tools">
				<label class="sr" for="q">Search by request id or key</label>
				<input
					id="q"
					type="search"
					placeholder="Search by request id or key   /"
					value=${prefix}
					autocomplete="off"
					spellcheck="false"
					onInput=${(event) => setPrefix(event.target.value)}
				/>
				<${Choice} label="Which requests" options=${FILTERS} value=${filter} onChoose=${setFilter} />
				${numNew > 0 && html`<button class="btn" onClick=${() => setShown(value)}>${numNew} new</button>`}
			</div>
			<${List} ...${{ rows, value, error, prefix, chosen, targets: fleet.targets }} />
		</section>
		${chosen ? html`<${Detail} key=${chosen} id=${chosen} live=${live} fleet=${fleet} />` : html`<div />`}
	</div>`;
}

function List({ rows, value, error, prefix, chosen, targets }) {
	if (rows.length) {
		return html`<ol>
			${rows.map((row) => html`<${Row} key=${row.request_id} row=${row} isChosen=${row.request_id === chosen} targets=${targets} />`)}
		</ol>`;
	}
	const nothing = prefix ? `No request that is kept begins with “${prefix}” or has this key.` : "None of the requests that are kept.";
	const text = error ? `The list cannot be read: ${error.message}.` : value ? nothing : "Reading the list.";
	return html`<${Nothing} title=${value ? "No request matches" : "Requests"}>${text}<//>`;
}

const Nothing = ({ title, children }) => html`<div class="empty"><h2>${title}</h2><p>${children}</p></div>`;

function Row({ row, isChosen, targets }) {
	const stages = row.stages.map(([stage, each]) => ({ stage, ms: each }));
	const worst = largestNamed(stages);
	const part = worst && `${worst.name} ${worst.percent}`;
	const way = row.prefill ? `${row.prefill} → ${row.decode}` : row.decode;
	const hasSlowSteps = over(row.tpot_ms, targets.tpot_target_ms);
	const isSlow = hasSlowSteps || over(row.ttft_ms, targets.ttft_target_ms);
	return html`<li>
		<a class="row" href=${linkTo(row.request_id)} aria-current=${isChosen || null}>
			<span class="l">
				<span class="mono">${shortId(row.request_id)}</span>
				${row.num_attempts > 1 && html`<${Tag} kind="warn">${count(row.num_attempts, "attempt")}<//>`}
				<span class="end">
					${isSlow && html`<${Tag} kind="bad">slow<//> `}<b>${known(row.ttft_ms) ? ms(row.ttft_ms) : "no token"}</b>
				</span>
			</span>
			<span class="l sub">
				<span>${[part, way, row.key].filter(Boolean).join(", ")}</span>
				<span class="end">
					${hasSlowSteps ? html`<b>${ms(row.tpot_ms)}/tok</b> · ` : row.outcome !== "finished" && `${row.outcome} · `}
					${clock(row.received_us)}
				</span>
			</span>
			<${StageBar} stages=${stages} isLocal=${!row.prefill} />
		</a>
	</li>`;
}

/** Whether the workers' last reports on a request are in. */
export const isOver = ({ finished_us }, nowMs) => finished_us && nowMs - finished_us / 1000 > REPORTS_AFTER_MS;

function Detail({ id, live, fleet }) {
	const load = (signal) => getJson(`requests/${encodeURIComponent(id)}/trace`, signal);
	const { value: trace, error } = useLoaded(load, [id], (loaded) => loaded && !isOver(loaded, live.now()) && TRACE_EVERY_MS);
	const back = html`<a class="btn back" href="#/requests">← Requests</a>`;
	if (!trace) {
		return html`<section class="card req-detail">
			${back}
			<${Nothing} title=${error ? `No trace of ${id}` : "Reading the trace"}>
				${error &&
				html`${error.message}. A router keeps the traces of its last finished requests (<code>trace_history</code>); an
					older one may be in your trace store, if OTLP export is on.`}
			<//>
		</section>`;
	}
	const nowUs = live.now() * 1000;
	const target = fleet.targets.ttft_target_ms;
	return html`<div class="grid req-detail">
		<section class="card" aria-label="Request">
			${back}
			<div class="title">
				<h1>${trace.request_id}</h1>
				<${Tag} kind=${OUTCOMES[trace.outcome]}>${trace.outcome}<//>
				<span class="right"><${Actions} id=${trace.request_id} /></span>
			</div>
			<p class="lead"><${Lead} trace=${trace} target=${target} /></p>
			<${Facts} rows=${facts(trace)} />
		</section>
		<${Waterfall} trace=${trace} nowUs=${nowUs} targetMs=${target} />
		<div class="grid ${hasLongNames(trace) ? "" : "two"}">
			<${StageTable} trace=${trace} />
			<div class="grid"><${Why} trace=${trace} /><${Explains} trace=${trace} fleet=${fleet} /></div>
		</div>
	</div>`;
}

function facts(trace) {
	const { prefill } = trace.attempts.at(-1) ?? {};
	const whole = trace.finished_us ? (trace.finished_us - trace.received_us) / 1000 : null;
	const moved = trace.blocks_moved
		? [bytes(trace.bytes_moved), `${count(trace.blocks_moved, "block")}, ${prefill?.path || trace.transport}`]
		: ["none"];
	return [
		["Prompt", int(trace.num_prompt_tokens), `${plural(trace.num_prompt_tokens, "token")}, ${int(trace.num_cached_tokens)} cached`],
		["Output", int(trace.num_output_tokens), plural(trace.num_output_tokens, "token")],
		["TTFT", ms(trace.ttft_ms)],
		["TPOT", ms(trace.tpot_ms)],
		["Total", ms(whole)],
		["KV moved", ...moved],
		["Received", clock(trace.received_us), "UTC"],
		...(trace.key ? [["Key", trace.key]] : []),
		...(trace.error ? [["Error", trace.error]] : []),
	];
}

/** The request in words: how late the first token was, and what took most of that time. */
function Lead({ trace, target }) {
	const { ttft_ms: ttft, stages, attempts } = trace;
	const worst = largestNamed(stages.filter((each) => each.part === "first_token"));
	const where = worst?.where && (worst.where.includes("→") ? `, ${worst.where}` : ` on ${worst.where}`);
	const what = worst?.stage === "lost_attempt" ? `lost with ${worst.where}` : `${worst?.name}${where ?? ""}`;
	const most = worst && `${worst.percent} of it was ${what}.`;
	if (!trace.first_token_us) {
		const failed = attempts.findLast((each) => each.failed)?.failed;
		const state = trace.outcome === "running" ? "No token yet." : "No token was sent.";
		return html`<b>${state}</b> ${most} ${failed && `An attempt failed: ${failed}.`}`;
	}
	const against = known(target) && `, ${over(ttft, target) ? "over" : "within"} the target of ${ms(target)}`;
	const later = largest(stages.filter((each) => ["transfer", "stall"].includes(each.stage)));
	const then =
		later?.stage === "transfer"
			? `Then the second token waited ${ms(later.ms)} for KV blocks; no chunk hid that transfer.`
			: `Then decode stood still for ${ms(later?.ms)}: ${later?.text}.`;
	return html`<b>${ms(ttft)} to the first token</b>${against}. ${most} ${later?.ms > NOTABLE_MS && then}`;
}

function Actions({ id }) {
	const link = location.href.split("#")[0] + linkTo(id);
	const onSave = (path, kind) => () => told(getJson(path), (content) => save(`${id}.${kind}.json`, content));
	const path = `requests/${encodeURIComponent(id)}`;
	return html`<button class="btn" onClick=${() => copy(link, "Link copied")}>Copy link</button>
		<button class="btn" onClick=${onSave(`${path}/perfetto`, "trace")}>Perfetto</button>
		<button class="btn" onClick=${onSave(`v1/${path}/receipt`, "receipt")}>Receipt</button>`;
}

function save(name, content) {
	const url = URL.createObjectURL(new Blob([JSON.stringify(content)], { type: "application/json" }));
	Object.assign(document.createElement("a"), { href: url, download: name }).click();
	URL.revokeObjectURL(url);
	return `Saved ${name}`;
}
