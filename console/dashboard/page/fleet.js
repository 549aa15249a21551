// Which side is short, and since when: verdict, pools with their flows, the last hour.

import { Door, Outages } from "./door.js";
import { LastHour } from "./hour.js";
import { Flows, PairTable } from "./flows.js";
import { clock, int, kilo, known, linkRate, ms, share1, sig3, times } from "./numbers.js";
import { Card, Empty, Facts, html, Legend, Pool, Tag } from "./parts.js";
import { hasNumbers, MAX_CARDS, stateOf, WorkerCard, WorkerRows } from "./workers.js";

const LEGEND = [["fill-n", "KV in use"], ["soft-n", "cached, reusable"]];
const TAGS = { short: "bad", tight: "warn", "has room": "ok" };

const PoolName = ({ role }) => html`<${Pool} role=${role} /><span>${role === "prefill" ? "Prefill" : "Decode"}</span>`;

export function Fleet({ live, fleet }) {
	if (!fleet.workers.length) return html`<${NoWorker} cluster=${fleet.cluster} />`;
	const [prefill, decode] = ["prefill", "decode"].map((role) => fleet.workers.filter((each) => each.role === role));
	const pools = { pairs: fleet.pairs, prefill, decode };
	return html`<${Outages} list=${fleet.outages} now=${live.now()} />
		<${Verdict} fleet=${fleet} /><${Door} rows=${fleet.door} />
		<div class="grid fleet">
			<${Card} title="Pools and flows" head=${html`<${Legend} entries=${LEGEND} />`}>
				<${Pools} ...${pools} now=${live.now()} />
				<${PairTable} pairs=${fleet.pairs} others=${fleet.other_pairs} all=${fleet.totals.bytes_moved_per_s} prefill=${prefill.filter(hasNumbers)} decode=${decode.filter(hasNumbers)} />
			<//>
			<${LastHour} fleet=${fleet} />
		</div>`;
}

const NoWorker = ({ cluster }) =>
	html`<${Empty}
		title="No worker has joined"
		more=${html`<pre>${"baton prefill --model ... --host 10.0.0.2\nbaton decode  --model ... --host 10.0.0.3"}</pre>`}
	>
		This router${cluster && html` of cluster <b>${cluster}</b>`} sees no worker under its Redis. Start one of each role
		with the same cluster name and secret:
	<//>`;

function Verdict({ fleet }) {
	const { pressure, targets } = fleet;
	const { prefill, decode, verdict } = pressure;
	const notes = {
		prefill: `next first token ${ms(pressure.predicted_ttft_ms)}, target ${ms(targets.ttft_target_ms)}`,
		decode: `next token ${ms(pressure.predicted_step_ms)}, target ${ms(targets.tpot_target_ms)}`,
	};
	const role = /^(prefill|decode)/i.exec(verdict)?.[0].toLowerCase();
	return html`<h2 class="sr">Pressure</h2>
		<section class="card verdict" aria-label="Verdict">
			<div aria-live="polite">
				<h1>${role && html`<${Pool} role=${role} />`}${verdict}</h1>
				<p>
					${pressure.cause}
					${pressure.rule && html` Since ${clock(pressure.since_us)}. <a href="#/doctor">What to change</a>`}
				</p>
			</div>
			<div
				class="pd"
				role="img"
				aria-label="Pressure: prefill ${times(prefill)} its target, decode ${times(decode)} its target"
			>
				${Object.entries(notes).map(
					([role, note]) =>
						html`<${Side} role=${role} value=${pressure[role]} state=${pressure[`${role}_state`]} note=${note} />`,
				)}
			</div>
			<${Facts} kind="strip" rows=${strip(fleet.totals, targets)} />
		</section>`;
}

/** One half of the pressure bar; the scale ends at twice the target. */
function Side({ role, value, state, note }) {
	const width = known(value) ? Math.min(value, 2) * 50 : 0;
	const wide = (percent) => ({ width: `${percent}%` });
	return html`<div class="pd-side ${role[0]}">
		<div class="pd-name">
			<${PoolName} role=${role} /><b>${times(value)}</b>
			${state && html`<${Tag} kind=${TAGS[state]}>${state}<//>`}
		</div>
		<div class="bar pd-track">
			<i class="fill-${role[0]}" style=${wide(Math.min(width, 50))} />
			${width > 50 && html`<i class="over" style=${wide(width - 50)} />`}
			<i class="tick" />
		</div>
		<div class="pd-scale"><span>target</span></div>
		<div class="pd-note">${note}</div>
	</div>`;
}

const strip = (totals, targets) => [
	["Goodput", share1(totals.goodput), `${sig3(totals.good_requests_per_s)} of ${sig3(totals.requests_per_s)} req/s`],
	["TTFT p95", ms(totals.ttft_p95_ms), `target ${ms(targets.ttft_target_ms)}`],
	["TPOT p95", ms(totals.tpot_p95_ms), `target ${ms(targets.tpot_target_ms)}`],
	["In flight", int(totals.num_inflight), "requests"],
	["Output", kilo(totals.output_tokens_per_s), "tokens/s"],
	["KV moved", linkRate(totals.bytes_moved_per_s)],
];

function Pools({ prefill, decode, pairs, now }) {
	const isSmall = prefill.length <= MAX_CARDS && decode.length <= MAX_CARDS;
	const head = (role, workers) =>
		html`<h3 class=${role[0]}>
			<${PoolName} role=${role} />
			<span class="faint">${int(workers.filter((each) => stateOf(each) === "ready").length)} of ${int(workers.length)} ready</span>
		</h3>`;
	const pool = (role, workers) =>
		isSmall
			? html`<ul class="wk ${role[0]}">
					${workers.map((each) => html`<${WorkerCard} worker=${each} now=${now} key=${each.worker_id} />`)}
					${!workers.length && html`<li class="w off">No ${role} worker has joined.</li>`}
				</ul>`
			: html`<div class="wk ${role[0]}"><${WorkerRows} workers=${workers} now=${now} role=${role} /></div>`;
	return html`<div class="pools ${isSmall ? "" : "tall"}">
		${head("prefill", prefill)} ${isSmall && html`<h3 class="mid">KV blocks →</h3>`} ${head("decode", decode)}
		${pool("prefill", prefill)}
		${isSmall && html`<${Flows} pairs=${pairs} />`} ${pool("decode", decode)}
	</div>`;
}
